"""The commands that the quickstart ends with."""

import re
import shlex
from pathlib import Path

import pytest

from common.command_line import parse_arguments
from common.config.load import load_config
from common.resolve.derive import resolve_mode

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_that_the_quickstart_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They use the quickstart's run and data, and what continues a prompt samples: greedily so
    small a model prints empty lines.
    """
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    variables = {
        "PYTHON": "python",
        **dict(re.findall(r"^(CONFIG|RUN|DATA)=(\S+)$", script, flags=re.M)),
    }
    text = script.partition("Next:")[2]
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    found = [
        shlex.split(line[line.index("python ") :])[1:]
        for line in text.splitlines()
        if "python " in line
    ]
    assert [words[0] for words in found].count("run_gpt2.py") == 4 and "$" not in text
    data = load_config(ROOT / variables["CONFIG"]).data
    monkeypatch.chdir(ROOT)
    for words in (words[1:] for words in found if words[0] == "run_gpt2.py"):
        arguments = parse_arguments(words)
        # the file that the run writes holds the values of this one
        file = (
            variables["CONFIG"]
            if arguments.config == f"{variables['RUN']}/config.yaml"
            else arguments.config
        )
        config = resolve_mode(
            load_config(file, arguments.overrides), arguments.run_mode, world_size=1
        )
        assert config.data.tokenizer == data.tokenizer
        assert config.data.train in (data.train, ["data/own_text_document"])
        if arguments.run_mode == "predict":
            assert config.predict.strategy == "sampling" and config.predict.top_k

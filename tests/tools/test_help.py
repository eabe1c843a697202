"""--help of every script and tool prints help and starts nothing."""

import importlib
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "run_slurm.sh"])
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["train.max_steps=5", "--help"]])
def test_a_script_that_needs_nothing_to_say_what_it_does(script: str, words: list[str]) -> None:
    """Without a Python, a pip or an srun in reach."""
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / script), *words],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python", "VIRTUAL_ENV": "/nowhere"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.startswith("usage: ")
        and f"scripts/{script}" in done.stdout
        and "exit codes: 0" in done.stdout
    )
    assert "Done." not in done.stdout


@pytest.mark.parametrize(
    ("tool", "words", "said"),
    [
        ("launch", ["--help"], "run_distribute.sh"),
        ("launch", ["standalone", "--help"], "usage: run_standalone.sh"),
        ("launch", ["distribute", "--help"], "usage: run_distribute.sh"),
        ("config_schema", ["--help"], "configs/schema.json"),
        ("allreduce_check", ["--help"], "tools/doctor.py"),
        ("preprocess_data", ["--help"], "kind of tokenizer: GPT2BPETokenizer"),
        ("preprocess_data", ["--help"], "library that does the work"),
        ("convert_weight", ["--help"], "usage: "),
        ("check_wheels", ["--help"], "aarch64"),
        ("doctor", ["--help"], "usage: "),
        ("fetch_quickstart_data", ["--help"], "usage: "),
        ("hccl_tools", ["--help"], "usage: "),
        ("inference", ["--help"], "Keys of the section predict follow"),
        ("merge_hccl", ["--help"], "usage: "),
        ("plot", ["--help"], "usage: "),
    ],
)
def test_a_tool(
    tool: str,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [f"tools/{tool}.py", *words])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"tools.{tool}").main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert said in " ".join(out.split()) and "usage: " in out and len(out) < 10_000


def test_standalone_shows_its_own_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tools/launch.py", "standalone", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module("tools.launch").main()
    out = capsys.readouterr().out
    assert (
        "run_standalone.sh CONFIG DEVICE_ID train" in out
        and "run_distribute.sh" not in out
        and "RANK_TABLE" not in out
    )


def test_one_rank_of_the_doctor_is_not_started_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK_SIZE", raising=False)
    monkeypatch.setattr("sys.argv", ["tools/allreduce_check.py", "torch", "cpu", "10"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("tools.allreduce_check").main()
    assert stop.value.code == 2 and "tools/doctor.py" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["run_gpt2.py", "run_mindformer.py"])
def test_both_front_doors_name_themselves_and_explain_the_modes(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert (
        ("--load_checkpoint" in out)
        == ("--predict_data" in out)
        == (program == "run_mindformer.py")
    )

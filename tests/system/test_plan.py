"""--run_mode plan as a user starts it: no framework is loaded."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from run_gpt2 import main

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import runpy, sys
for name in ("torch", "mindspore", "deepspeed", "torch_npu", "transformers"):
    sys.modules[name] = None
sys.argv = ["run_gpt2.py", *sys.argv[1:]]
runpy.run_path("run_gpt2.py", run_name="__main__")
"""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Give a function that plans a preset."""
    monkeypatch.chdir(ROOT)

    def plan(preset: str, *words: str) -> str:
        capsys.readouterr()
        assert main(["--config", f"configs/gpt2/{preset}.yaml", "--run_mode", "plan", *words]) == 0
        return capsys.readouterr().out

    return plan


def test_no_framework_is_loaded() -> None:
    words = ["--config", "configs/gpt2/run_gpt2_124m.yaml", "--run_mode", "plan"]
    command = [sys.executable, "-c", BLOCKED, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("world: 1 rank = data 1 x tensor 1 x pipeline 1\n")


@pytest.mark.parametrize(
    ("preset", "words", "variables", "world"),
    [
        ("124m", ["parallel.model_parallel=2", "parallel.pipeline_stage=3"], {},
            "6 ranks = data 1 x tensor 2 x pipeline 3"),
        ("124m", ["parallel.model_parallel=2"], {"WORLD_SIZE": "8"},
            "8 ranks = data 4 x tensor 2 x pipeline 1"),
        ("13b", [], {}, "32 ranks = data 4 x tensor 2 x pipeline 4"),
        ("13b", [], {"RANK_SIZE": "32"}, "32 ranks = data 4 x tensor 2 x pipeline 4"),
        ("175b", [], {}, "128 ranks = data 1 x tensor 8 x pipeline 16"),
    ],
)  # fmt: skip
def test_the_world_is_the_launchers_else_the_layouts(
    plan: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    words: list[str],
    variables: dict[str, str],
    world: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert plan(f"run_gpt2_{preset}", *words).startswith(f"world: {world}\n")


def test_all_ranks(plan: Callable[..., str]) -> None:
    assert "\n ...\n" in plan("run_gpt2_175b")
    assert "\n ...\n" not in plan("run_gpt2_175b", "--all_ranks")


def test_a_device_and_devices(plan: Callable[..., str]) -> None:
    text = plan("run_gpt2_13b", "--accelerator", "Ascend 910A")
    assert "\nA step may take " in text and " s on Ascend 910A, " in text
    text = plan("run_gpt2_13b", "--accelerator=Ascend 910A", "--devices=32")
    assert text.startswith("Layouts for 32 x Ascend 910A (32 GiB), best first")
    assert "\nThe first: parallel.data_parallel=" in text and "\nNot possible:\n" in text

"""--run_mode plan as a user starts it: no framework is loaded, contradictions exit with 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import runpy, sys
for name in ("torch", "mindspore", "deepspeed", "torch_npu", "transformers"):
    sys.modules[name] = None
sys.argv = ["run_gpt2.py", *sys.argv[1:]]
runpy.run_path("run_gpt2.py", run_name="__main__")
"""


def plan(preset: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK_SIZE")
    }
    command = [
        sys.executable,
        "-c",
        BLOCKED,
        "--config",
        f"configs/gpt2/{preset}.yaml",
        "--run_mode",
        "plan",
        *words,
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("preset", "words", "variables", "world"),
    [
        ("run_gpt2_124m", [], {}, "1 rank = data 1 x tensor 1 x pipeline 1"),
        (
            "run_gpt2_124m",
            ["parallel.model_parallel=2", "parallel.pipeline_stage=3"],
            {},
            "6 ranks = data 1 x tensor 2 x pipeline 3",
        ),
        (
            "run_gpt2_124m",
            ["parallel.model_parallel=2"],
            {"WORLD_SIZE": "8"},
            "8 ranks = data 4 x tensor 2 x pipeline 1",
        ),
        ("run_gpt2_13b", [], {}, "32 ranks = data 4 x tensor 2 x pipeline 4"),
        ("run_gpt2_13b", [], {"RANK_SIZE": "32"}, "32 ranks = data 4 x tensor 2 x pipeline 4"),
        ("run_gpt2_175b", [], {}, "128 ranks = data 1 x tensor 8 x pipeline 16"),
    ],
)
def test_the_world_is_the_launchers_else_the_layouts(
    preset: str, words: list[str], variables: dict[str, str], world: str
) -> None:
    done = plan(preset, *words, **variables)
    assert done.returncode == 0 and done.stderr == ""
    assert f"\nworld: {world}\n" in done.stdout


def test_all_ranks() -> None:
    told = plan("run_gpt2_175b").stdout
    assert "\nranks: stage x 8 + tensor (--all lists them)\n" in told and len(told) < 3000
    done = plan("run_gpt2_175b", "--all")
    assert done.returncode == 0 and "\n 127     15     0       7 " in done.stdout


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (
            ["parallel.model_parallel=3"],
            {},
            "parallel.model_parallel=3 does not divide model.num_heads=40; choose 1, 2, 4, 5, 8,"
            " 10, 20 or 40",
        ),
        (
            ["parallel.pipeline_stage=3"],
            {},
            "parallel.pipeline_stage=3 does not divide model.num_layers=40; choose",
        ),
        (
            ["train.global_batch_size=100"],
            {},
            "train.global_batch_size=100 is not micro batch 2 x data parallel 4 x accumulation 24 ="
            " 192",
        ),
        ([], {"WORLD_SIZE": "16"}, "= 32 processes, but 16 are running"),
        ([], {"WORLD_SIZE": "many"}, "WORLD_SIZE=many: expected the number of processes"),
    ],
)
def test_contradictions_are_one_message_and_exit_code_2(
    words: list[str], variables: dict[str, str], message: str
) -> None:
    done = plan("run_gpt2_13b", *words, **variables)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        message in done.stderr
        and done.stderr.startswith("error: ")
        and len(done.stderr.splitlines()) == 1
    )


def test_a_device_and_devices() -> None:
    done = plan("run_gpt2_13b", "--accelerator", "Ascend 910A")
    assert (
        done.returncode == 0
        and done.stdout.startswith("fits: ")
        and re.search(r"\ntime: .* s a step .*, on Ascend 910A\n", done.stdout)
        and re.search(r"\nthe best other layouts are faster by up to \d+%:\n", done.stdout)
    )
    done = plan("run_gpt2_13b", "--accelerator=Ascend 910A", "--devices=32")
    assert done.returncode == 0 and done.stdout.startswith(
        "Layouts for 32 x Ascend 910A (32 GiB), by the time of a step"
    )
    done_before = done.stdout
    assert (
        "\nThe first: parallel.data_parallel=" in done.stdout and "\nNot possible:\n" in done.stdout
    )
    done = plan("run_gpt2_13b", "--accelerator", "abacus")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: --accelerator abacus: no figures are known for it; choose H200, "
    )
    assert (
        "--devices needs to know of what kind the devices are; add --accelerator NAME"
        in plan("run_gpt2_13b", "--devices", "8").stderr
    )
    both = [("--devices", "32xAscend 910A"), ("--accelerator", "32xAscend 910A")]
    assert [plan("run_gpt2_13b", *words).stdout for words in both] == [done_before] * 2
    assert "differ: 16 and 32" in plan("run_gpt2_13b", *both[0], "--accelerator", "16xH100").stderr


def test_another_network() -> None:
    """Eight devices share one adapter of 100 Gb/s, or each has a faster one."""
    told = "run_gpt2_13b", "--accelerator=V100 32GB", "context.max_device_memory=null"
    slow, plain, fast = (
        float(re.search(r"\ntime: ([\d.]+) s a step", plan(*told, *words).stdout)[1])
        for words in (["--network=1.5625"], [], ["--network=50", "--link=450"])
    )
    assert slow > plain > fast
    wide = plan(*told, "--server_devices=1").stdout
    assert "warning: tensor parallel over 2 devices leaves a server of 1" in wide


@pytest.mark.parametrize("words", [["--all"], ["--accelerator", "H100"], ["--devices", "8"]])
def test_options_of_plans_only(words: list[str]) -> None:
    command = [
        sys.executable,
        "run_gpt2.py",
        "--config",
        "configs/gpt2/run_gpt2_124m.yaml",
        "--run_mode",
        "train",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"{words[0]} is for --run_mode plan, not train" in done.stderr


def test_like_a_run_that_measured_a_step(tmp_path: Path) -> None:
    """The run took twice what its plan says, so everything else does."""
    words = ["model.num_layers=4", "--accelerator=H100"]
    command = f"run_gpt2.py --config configs/gpt2/run_gpt2_124m.yaml --run_mode train {words[0]}"
    shown = subprocess.run(
        [sys.executable, *command.split(), "--show_config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (tmp_path / "config.yaml").write_text(shown.stdout)

    def seconds(*more: str) -> float:
        found = re.search(r"\ntime: ([\d.]+) s a step", plan("run_gpt2_124m", *words, *more).stdout)
        assert found is not None
        return float(found[1])

    like, measured = f"--like={tmp_path}", 2 * seconds()
    memory = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3", "ranks": []}
    (tmp_path / "memory.json").write_text(json.dumps(memory | {"step_seconds": measured}))
    assert seconds(like) == pytest.approx(measured, rel=0.01)
    assert seconds(like, "parallel.data_parallel=2") < measured
    text = plan("run_gpt2_124m", *words, like).stdout
    assert f"(scaled by 2.00: {tmp_path} took " in text and "published" not in text
    (tmp_path / "memory.json").write_text(json.dumps(memory | {"step_seconds": None}))
    done = plan("run_gpt2_124m", *words, like)
    assert done.returncode == 2 and "expected a run that ended and measured steps" in done.stderr

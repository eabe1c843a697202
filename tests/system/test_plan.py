"""--run_mode plan as a user starts it: no framework is loaded."""

import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from run_gpt2 import main
from tests.cluster_tables import write_tutorial_table

ROOT = Path(__file__).resolve().parents[2]
RUN = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3", "ranks": []}


def plan(preset: str, *words: str, code: int = 0) -> str:
    """Plan a preset. Return what is printed."""
    file = f"{ROOT}/configs/gpt2/run_gpt2_{preset}.yaml"
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        assert main(["--config", file, "--run_mode", "plan", *words]) == code
    return printed.getvalue()


def like(folder: Path, *words: str, preset: str = "124m", **memory: Any) -> str:
    """Write a run's folder, and return the flag for it."""
    (folder / "config.yaml").write_text(plan(preset, "--show_config", *words))
    (folder / "memory.json").write_text(json.dumps(RUN | memory))
    return f"--like={folder}"


def _seconds(text: str) -> float:
    found = re.search(r"\ntime: ([\d.]+) s a step", text)
    assert found is not None
    return float(found[1])


PROGRAM = """
import sys
import run_gpt2, tools.launch
words = ["--config=configs/gpt2/run_gpt2_124m.yaml", "--run_mode=plan", "--train.micro_batch_size=3"]
code = run_gpt2.main([*words, "--train.global_batch_size", "15"])
words = [sys.argv[1], "configs/gpt2/run_gpt2_13b.yaml", "[0,8]", "plan", "32", "--accelerator=Ascend 910A"]
code = code or tools.launch.main(["distribute", *words])
loaded = {"torch", "mindspore", "deepspeed", "torch_npu", "transformers"} & sys.modules.keys()
sys.exit(code or " ".join(loaded) or 0)
"""


def test_no_framework_is_loaded(tmp_path: Path) -> None:
    """Keys may be flags too, as platforms that start jobs by a form write them."""
    table = write_tutorial_table(tmp_path / "table.json", servers=4)
    command = [sys.executable, "-c", PROGRAM, str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "global batch 15 =" in done.stdout and ", on Ascend 910A\n" in done.stdout


@pytest.mark.parametrize(
    ("preset", "words", "variables", "world"),
    [
        ("124m", "parallel.model_parallel=2 parallel.pipeline_stage=3", "", "6 ranks = data 1 x tensor 2 x pipeline 3"),
        ("124m", "parallel.model_parallel=2", "WORLD_SIZE=8", "8 ranks = data 4 x tensor 2 x pipeline 1"),
        ("13b", "", "RANK_SIZE=32", "32 ranks = data 4 x tensor 2 x pipeline 4"),
    ],
)
def test_the_world_is_the_launchers_else_the_layouts(monkeypatch, preset, words, variables, world) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert f"\nworld: {world}\n" in plan(preset, *words.split())


def test_all_ranks() -> None:
    told = plan("175b")
    assert "\nworld: 128 ranks = data 1 x tensor 8 x pipeline 16\n" in told
    assert "\nranks: stage x 8 + tensor (--all lists them)\n" in told and len(told) < 3000
    assert "\n 127     15     0       7 " in plan("175b", "--all")


def test_a_device_and_devices() -> None:
    text = plan("13b", "--accelerator", "Ascend 910A")
    assert text.startswith("fits: ")
    assert re.search(r"\ntime: .* s a step .*, on Ascend 910A\n", text)
    assert re.search(r"\nthe best other layouts are faster by up to \d+%:\n", text)
    text = plan("13b", "--accelerator=Ascend 910A", "--devices=32")
    assert text.startswith("Layouts for 32 x Ascend 910A (32 GiB), by the time of a step")
    assert "\nThe first: parallel.data_parallel=" in text and "\nNot possible:\n" in text
    both = [("--devices", "32xAscend 910A"), ("--accelerator", "32xAscend 910A")]
    assert [plan("13b", *words) for words in both] == [text] * 2


def test_another_network() -> None:
    """Eight devices share one adapter of 100 Gb/s, or each has a faster one."""
    told = "13b", "--accelerator=V100 32GB", "context.max_device_memory=null"
    networks = ("--network=1.5625", "", "--network=50 --link=450")
    slow, plain, fast = (_seconds(plan(*told, *words.split())) for words in networks)
    assert slow > plain > fast
    wide = plan(*told, "--server_devices=1")
    assert "warning: tensor parallel over 2 devices leaves a server of 1" in wide


def test_like_a_run_that_measured_a_step(tmp_path: Path) -> None:
    """The run took twice what its plan says, so everything else does."""
    words = ["model.num_layers=4", "--accelerator=H100"]
    measured = 2 * _seconds(plan("124m", *words))
    flag = like(tmp_path, words[0], step_seconds=measured)
    text = plan("124m", *words, flag)
    assert _seconds(text) == pytest.approx(measured, rel=0.01)
    assert f"(scaled by 2.00: {tmp_path} took " in text and "published" not in text
    assert _seconds(plan("124m", *words, flag, "parallel.data_parallel=2")) < measured
    assert _seconds(plan("124m", *words, like(tmp_path, words[0], step_seconds=3))) == 3


def test_the_machine_of_a_run_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run measured is what its own plan says, whatever the links; on the servers of a table, too."""
    preset, limit = "13b", "context.max_device_memory=null"
    flag = like(tmp_path, limit, preset=preset, name="Tesla V100-SXM2-32GB", step_seconds=12.5)
    for words in ([], ["--network=1.5625", "--accelerator=V100 32GB"], ["--link=20", "--server_devices=4"]):
        assert _seconds(plan(preset, limit, flag, *words)) == 12.5
    flag = like(tmp_path, preset=preset, name="Ascend 910A", step_seconds=12.5)
    monkeypatch.setenv("RANK_TABLE_FILE", str(write_tutorial_table(tmp_path / "table.json", servers=4)))
    text = plan(preset, flag)
    assert _seconds(text) == 12.5 and "\nChecks of the cluster:\n" in text


def test_a_run_that_measured_nothing_of_use_is_refused(tmp_path: Path) -> None:
    cpu = {"step_seconds": 1.0, "name": "EPYC", "device": "cpu"}
    for memory, words, says in (
        ({"step_seconds": None}, (), "found None s a step on NVIDIA H100 80GB HBM3 (cuda)"),
        ({"step_seconds": 1.0, "name": "TPU"}, (), "(cuda); name another run, or --accelerator\n"),
        (cpu, ("--accelerator=A100",), "found 1.0 s a step on EPYC (cpu); name another run\n"),
    ):
        assert says in plan("124m", like(tmp_path, **memory), *words, code=2)

"""Rows of training steps, the studies behind them, and the arguments of benchmarks/run.py."""

import time
from pathlib import Path

import pytest

from benchmarks.data import make_source, measure
from benchmarks.measure import take_turns
from benchmarks.run import main
from benchmarks.training import PREDICTED, rows_of
from common.errors import RunError
from gpt2_study.cells import expand
from gpt2_study.loading import load_definition
from gpt2_study.results import Machine, State
from tests.gpt2_study.synthetic import cell, measured, study

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CPU, CUDA = FOLDER / "training_step.yaml", FOLDER / "training_step_cuda.yaml"
H100 = Machine(host="a", cpu="b", cores=8, memory=2**36, accelerators=["NVIDIA H100 80GB HBM3"])


@pytest.mark.parametrize(("path", "small"), [(CPU, False), (CPU, True), (CUDA, False)])
def test_every_cell_of_the_study_can_start(path: Path, small: bool) -> None:
    cells = expand(load_definition(path, small=small), path)
    assert [each.refusal for each in cells if each.refusal] == []
    programs = {each.cell.axes["program"] for each in cells}
    assert programs >= {"transformers", "nanogpt_style", "torch"}
    assert ("mindspore" in programs) is (path == CPU)
    for each in cells:
        baseline = next(other for other in cells if other.cell.id == each.cell.baseline)
        mine, theirs = each.cell.axes, baseline.cell.axes
        assert theirs == mine | {"program": "transformers"}, "eager beside eager"
        assert each.config is not None and each.config.train.recompute == "none"
    assert path != CUDA or {each.cell.id for each in cells} > set(PREDICTED)


def test_a_row_compares_a_cell_with_transformers() -> None:
    """A cell that failed says why, and one with other losses has no ratio."""
    runs = {
        "transformers": [measured(10_000.0), measured(10_200.0)],
        "torch": [measured(20_000.0), measured(20_400.0)],
        "nanogpt_style": [State.FAILED],
        "scaled": [measured(speed, gradient_norm=[9.0] * 10) for speed in (30_000.0, 30_600.0)],
    }
    axes = [{"size": "a", "program": name} for name in runs]
    cells = [cell(of["program"], runs[of["program"]], axes=of, baseline="transformers") for of in axes]
    ours, failed, scaled = rows_of(study(cells))
    what, own, peer, ratio, memory = ours
    assert (what, own[:40]) == ("training step, a", "torch 20,200 tokens/s (20,000 to 20,400)")
    assert peer.startswith("transformers 10,100 tokens/s (10,000 to 10,200)")
    assert ratio.startswith("2.00 (2.00 to 2.00 in 2)") and memory == "300 MiB and 300 MiB"
    assert failed[1] == "nanogpt_style: failed: failed of nanogpt_style <here>"
    assert (failed[3], scaled[3]) == ("", "other losses")


def test_a_machine_without_a_gpu_is_refused(tmp_path, capsys) -> None:
    if pytest.importorskip("torch", reason="torch is not installed").cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--device", "cuda", "--output_dir", str(tmp_path / "none")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: --device cuda: torch ") and said.err.count("\n") == 1
    assert said.out == "" and not (tmp_path / "none").exists()


def test_the_plan_names_every_part_and_starts_nothing(tmp_path, capsys) -> None:
    words = ["--data", str(tmp_path), "--output_dir", str(tmp_path / "none")]
    assert main(["--plan", "--device", "cuda", "--only", "model=124m_b64", *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"left out: preprocessing: {tmp_path} has no corpus.txt, vocab.json")
    assert said[1:] == ["training", "generation", "loader", "conversion"]
    assert not (tmp_path / "none").exists()
    assert main(["--parts", "loader,wheels"]) == 2
    assert "--parts wheels: expected some of training, generation," in capsys.readouterr().err


def test_a_system_that_ends_before_its_turn_is_named_and_no_other_stays() -> None:
    """What it does not read must not fail a second time when its input is closed."""
    slow = ["-c", "import time; input(); time.sleep(2); print(1, flush=True); time.sleep(99)"]
    began = time.monotonic()
    with pytest.raises(RunError, match="b ended; its message is above"):
        take_turns({"a": slow, "b": ["-c", ""]}, 1)
    assert time.monotonic() - began < 60


@pytest.mark.campaign
def test_memory_of_a_conversion_of_1558m(tmp_path: Path) -> None:
    """1,000 MB beyond the imports, for weights of 6.2 GB."""
    make_source(FOLDER.parent / "configs/gpt2/run_gpt2_1558m.yaml", tmp_path / "source")
    for wanted in ("mindspore", "mindformers", "megatron:5x2"):  # 25 heads
        found = measure(tmp_path / "source", tmp_path, wanted, repeats=1)
        size, peak = (float(found[place].split()[0]) for place in (0, 4))
        assert size > 6 and peak < 1000, found

"""Every layout of the runner with hand-written communication against one process: the rows of
tests/layouts.py; against torch, and across changes of layout and framework.
"""

import tests.needs_both  # noqa: F401

# isort: split
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config.load import build_config
from common.parallel.topology import Topology
from common.resolve.derive import resolve_config
from common.systems.mindformers.read import open_mindformers
from mindformers_gpt2.layers import dropout_keys
from mindformers_gpt2.parallel.layout import own_dropout_keys
from mindformers_gpt2.parallel.world import World
from tests.layouts import (
    BETWEEN_FRAMEWORKS,
    MINDSPORE,
    MINDSPORE_CLIP,
    MINDSPORE_HALF as HALF,
    MINDSPORE_STEPS as STEPS,
    PIPELINE,
    TENSOR,
    ZERO,
    chosen_rows,
    require_seen_faults,
    weights_of,
)
from tests.packed_corpus import write_packed_corpus
from tests.ranks import run_ranks
from tests.tiny import manifest_of, params_of, require_equal, rows_of, some_but_not_all

pytestmark = pytest.mark.long

HALF_WEIGHTS: dict[str, Any] = {
    "precision": {"parameters": "float16", "compute": "float16"},
    "loss_scale": {"initial": 2.0**24, "factor": 2.0**4, "window": 2},
}
RESUMED: dict[str, tuple[str, int, dict[str, Any], float]] = {
    "zero1, same": ("zero1/dropout", 2, ZERO | MINDSPORE.numerics["dropout"], 0.0),
    "dp2 tp2, torch": ("dp2 tp2/plain", 1, {"backend": "torch"}, BETWEEN_FRAMEWORKS),
    # tests/system/test_moving_runs.py takes runs across frameworks and layouts too
    "torch, one": ("torch/plain", 1, {}, BETWEEN_FRAMEWORKS),
    "torch, tp2": ("torch/plain", 2, TENSOR, BETWEEN_FRAMEWORKS),
}
"""The run that one resumes in its middle, as which it ends; ranks, settings, tolerance."""


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest
) -> Path:
    """folder / layout / numerics; "one" is one process; torch/plain; the names of RESUMED."""
    folder = tmp_path_factory.mktemp("layouts")
    write_packed_corpus(folder)

    def job(name: str, **changes: Any) -> dict[str, Any]:
        return MINDSPORE.job(folder / name, corpus_prefix, **changes)

    run_ranks(4, [job("torch/plain", backend="torch", **TENSOR)])
    jobs = MINDSPORE.jobs(folder, corpus_prefix, chosen_rows(request))
    if ("half",) in params_of(request, "weights"):
        jobs += [job("one/half", ranks=1, **HALF_WEIGHTS)]
        jobs += [job("zero1/half", ranks=2, **ZERO, **HALF_WEIGHTS)]
    for (name,) in params_of(request, "resumed"):
        whole, ranks, settings, _ = RESUMED[name]
        begun = folder / whole / "checkpoints" / f"step_{HALF:08d}"
        jobs.append(job(name, ranks=ranks, **settings, checkpoint__resume=str(begun)))
    for backend in ("mindspore", "torch"):
        for ranks in (1, 2, 4):
            chosen = [each for each in jobs if (each["backend"], each["ranks"]) == (backend, ranks)]
            if chosen:
                run_ranks(ranks, chosen)
    return folder


@pytest.mark.parametrize(("layout", "numerics"), MINDSPORE.cases())
def test_a_layout_trains_as_one_process(runs: Path, layout: str, numerics: str) -> None:
    MINDSPORE.hold(runs, layout, numerics)


@pytest.mark.parametrize("layout", ["one"])
@pytest.mark.parametrize("numerics", ["plain", "dropout"])
def test_the_bounds_show_what_is_wrong(runs: Path, layout: str, numerics: str) -> None:
    """The clip acts on some steps."""
    run = runs / layout / numerics
    assert len(rows_of(run)) == STEPS
    if numerics == "dropout":
        assert some_but_not_all([row["grad_norm"] > MINDSPORE_CLIP for row in rows_of(run)])
    else:
        require_seen_faults(run)


@pytest.mark.parametrize(("layout", "numerics"), [("dp2 tp2", "plain")])
def test_samples_come_in_the_same_order_as_on_torch(runs: Path, layout: str, numerics: str) -> None:
    require_equal(runs / layout / numerics, runs / "torch" / "plain", BETWEEN_FRAMEWORKS)


@pytest.mark.campaign
@pytest.mark.parametrize(("layout", "numerics"), [("one", "packed")])
def test_documents_are_kept_apart_as_on_torch(
    runs: Path, corpus_prefix: Path, layout: str, numerics: str
) -> None:
    job = MINDSPORE.case(runs, corpus_prefix, layout, numerics)
    run_ranks(1, [job | {"backend": "torch", "output_dir": str(runs / "torch" / "packed")}])
    require_equal(runs / layout / numerics, runs / "torch" / "packed", BETWEEN_FRAMEWORKS)


@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param(name, marks=pytest.mark.campaign if name.startswith("torch") else ())
        for name in RESUMED
    ],
)
def test_a_run_resumes_under_the_same_or_another_layout_or_framework(
    runs: Path, resumed: str
) -> None:
    """An unchanged layout resumes bit for bit, dropout masks too."""
    whole, _, _, tolerance = RESUMED[resumed]
    later, expected = rows_of(runs / resumed), rows_of(runs / whole)[-HALF:]
    assert [row["step"] for row in later] == list(range(HALF + 1, STEPS + 1))
    assert [row["sample_hash"] for row in later] == [row["sample_hash"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in later] == [
            pytest.approx(row[key], rel=tolerance, abs=0.0) for row in expected
        ], key


@pytest.mark.parametrize(("layout", "numerics"), [("dp2 tp2", "plain"), ("zero1", "dropout")])
def test_each_rank_has_written_its_own_part(runs: Path, layout: str, numerics: str) -> None:
    """Two of two data x two tensor ranks write; with ZeRO each half of the optimizer's state."""
    files = manifest_of(runs / layout / numerics)["files"]
    if layout == "zero1":
        sizes = [each["bytes"] for name, each in files.items() if name.startswith("optimizer")]
        assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
        return
    pieces = [bool(files[f"model.rank_{rank:05d}.safetensors"]["pieces"]) for rank in range(4)]
    assert pieces == [True, True, False, False]


@pytest.mark.parametrize(("layout", "numerics"), [("tp2", "dropout")])
def test_parts_in_mindspores_own_format(runs: Path, layout: str, numerics: str) -> None:
    run = runs / layout / numerics
    for rank in range(2):
        folder = run / "checkpoints" / f"rank_{rank}"
        assert [path.name for path in sorted(folder.iterdir())] == [
            f"gpt2_rank_{rank}-1_{step}.ckpt" for step in (HALF, STEPS)
        ]
    whole = weights_of(run)
    with open_mindformers(folder / f"gpt2_rank_1-1_{STEPS}.ckpt") as joined:
        assert len(joined.moments) == len(whole)
        for name, weight in joined.tensors.items():
            assert np.array_equal(weight.load(), whole[name]), name


@pytest.mark.campaign
@pytest.mark.parametrize("weights", ["half"])
def test_all_ranks_agree_on_the_loss_scale(runs: Path, weights: str) -> None:
    """Weights in float16 under ZeRO: the same steps skipped, and the same results but for the
    rounding of sums to float16.
    """
    one, many = (rows_of(runs / name / weights) for name in ("one", "zero1"))
    for key in ("loss_scale", "skipped"):
        assert [row[key] for row in many] == [row[key] for row in one]
    assert some_but_not_all([row["skipped"] for row in one])
    assert [row["loss"] for row in many] == [pytest.approx(row["loss"], rel=2e-3) for row in one]


def test_dropout_keys_of_a_rank_are_those_of_one_process() -> None:
    """But for the heads of another tensor-parallel rank."""
    topology = Topology(data=2, tensor=2, pipeline=2)
    settings = TENSOR | PIPELINE | {"parallel__data_parallel": 2, "model__dropout": 0.1}
    config = resolve_config(
        build_config(MINDSPORE.job(Path("run"), Path("data"), **settings)),
        world_size=8,
        samples_per_epoch=100,
    )
    for rank in range(8):
        world = World(rank=rank, size=8, topology=topology)
        for number in range(3):
            whole = dropout_keys(config, 5, 3 * world.at.data + number)
            expected = np.concatenate(
                [whole[:1], whole[1 + 3 * world.at.pipeline : 4 + 3 * world.at.pipeline]]
            )
            found = own_dropout_keys(config, world, 5, number, 3)
            equal = (found == expected).all(1)
            assert equal.tolist() == [True, world.at.tensor == 0, True, True]

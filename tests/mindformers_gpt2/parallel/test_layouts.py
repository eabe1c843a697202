"""Every layout of the runner with hand-written communication against one process: the rows of
tests/layouts.py. That one process equals torch is in tests/parity.
"""

import tests.needs_both  # noqa: F401

# isort: split
from pathlib import Path

import numpy as np
import pytest

from common.config.load import build_config
from common.parallel.topology import Topology
from common.resolve.derive import resolve_config
from common.systems.mindformers.read import open_mindformers
from mindformers_gpt2.layers import dropout_keys
from mindformers_gpt2.parallel.layout import own_dropout_keys
from mindformers_gpt2.parallel.world import World
from tests import layouts
from tests.packed_corpus import write_packed_corpus
from tests.ranks import run_ranks
from tests.tiny import manifest_of, results_of, rows_of, some_but_not_all

pytestmark = pytest.mark.long

RESUMED = "zero1/one layer"
"""The run that another one resumes in its middle."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest) -> Path:
    """folder / layout / numerics; "one" is one process; "resumed"."""
    folder = tmp_path_factory.mktemp("layouts")
    write_packed_corpus(folder)
    jobs = layouts.MINDSPORE.jobs(folder, corpus_prefix, layouts.chosen_rows(request))
    begun = folder / RESUMED / "checkpoints" / f"step_{layouts.MINDSPORE_HALF:08d}"
    for job in [job for job in jobs if job["output_dir"] == str(folder / RESUMED)]:
        checkpoint = job["checkpoint"] | {"resume": str(begun)}
        jobs.append(job | {"output_dir": str(folder / "resumed"), "checkpoint": checkpoint})
    for ranks in {job["ranks"] for job in jobs}:
        run_ranks(ranks, [job for job in jobs if job["ranks"] == ranks])
    return folder


@pytest.mark.parametrize(("layout", "numerics"), layouts.MINDSPORE.cases())
def test_a_layout_trains_as_one_process(runs: Path, layout: str, numerics: str) -> None:
    layouts.MINDSPORE.hold(runs, layout, numerics)


@pytest.mark.parametrize("layout", ["one"])
@pytest.mark.parametrize("numerics", ["plain", "one layer", pytest.param("half", marks=pytest.mark.campaign)])
def test_the_numerics_do_what_their_names_say(runs: Path, layout: str, numerics: str) -> None:
    """The clip acts on some steps, and some overflow in float16."""
    rows = rows_of(runs / layout / numerics)
    assert len(rows) == layouts.MINDSPORE_STEPS
    if numerics == "plain":
        layouts.require_seen_faults(runs / layout / numerics)
        return
    clips = numerics != "half"
    assert some_but_not_all([row["grad_norm"] > layouts.MINDSPORE_CLIP if clips else row["skipped"] for row in rows])


@pytest.mark.parametrize(("layout", "numerics"), [("zero1", "one layer")])
def test_a_run_resumes_bit_for_bit(runs: Path, layout: str, numerics: str) -> None:
    """Dropout masks too. tests/system/test_moving_runs.py resumes with other layouts and frameworks."""
    assert f"{layout}/{numerics}" == RESUMED
    expected = results_of(runs / RESUMED)[-layouts.MINDSPORE_HALF :]
    assert results_of(runs / "resumed") == expected and expected[0][0] == layouts.MINDSPORE_HALF + 1


@pytest.mark.parametrize(("layout", "numerics"), [("dp2 tp2", "one layer"), ("zero1", "one layer")])
def test_each_rank_has_written_its_own_part(runs: Path, layout: str, numerics: str) -> None:
    """Two of two data x two tensor ranks write; with ZeRO each half of the optimizer's state."""
    files = manifest_of(runs / layout / numerics)["files"]
    if layout == "zero1":
        sizes = [each["bytes"] for name, each in files.items() if name.startswith("optimizer")]
        assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
        return
    pieces = [bool(files[f"model.rank_{rank:05d}.safetensors"]["pieces"]) for rank in range(4)]
    assert pieces == [True, True, False, False]


@pytest.mark.parametrize(("layout", "numerics"), [("tp2", "one layer")])
def test_parts_in_mindspores_own_format(runs: Path, layout: str, numerics: str) -> None:
    run = runs / layout / numerics
    for rank in range(2):
        folder = run / "checkpoints" / f"rank_{rank}"
        names = [f"gpt2_rank_{rank}-1_{step}.ckpt" for step in (layouts.MINDSPORE_HALF, layouts.MINDSPORE_STEPS)]
        assert [path.name for path in sorted(folder.iterdir())] == names
    whole = layouts.weights_of(run)
    joined = open_mindformers(folder / f"gpt2_rank_1-1_{layouts.MINDSPORE_STEPS}.ckpt")
    assert len(joined.moments) == len(whole)
    for name, weight in joined.tensors.items():
        assert np.array_equal(weight.load(), whole[name]), name


def test_dropout_keys_of_a_rank_are_those_of_one_process() -> None:
    """But for the heads of another tensor-parallel rank."""
    topology = Topology(data=2, tensor=2, pipeline=2)
    settings = layouts.TENSOR | layouts.PIPELINE | {"parallel__data_parallel": 2, "model__dropout": 0.1}
    config = resolve_config(
        build_config(layouts.MINDSPORE.job(Path("run"), Path("data"), **settings)), world_size=8, samples_per_epoch=100
    )
    for rank in range(8):
        world = World(rank=rank, size=8, topology=topology)
        for number in range(3):
            whole = dropout_keys(config, 5, 3 * world.at.data + number)
            expected = np.concatenate([whole[:1], whole[1 + 3 * world.at.pipeline : 4 + 3 * world.at.pipeline]])
            found = own_dropout_keys(config, world, 5, number, 3)
            equal = (found == expected).all(1)
            assert equal.tolist() == [True, world.at.tensor == 0, True, True]

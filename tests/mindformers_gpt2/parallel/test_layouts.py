"""Every layout of the runner with hand-written communication against one process, against torch,
and across changes of layout.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest
from common.config.load import build_config
from common.config.schema import RunConfig
from common.parallel.sharding import slice_of
from common.parallel.topology import Topology
from common.resolve.derive import resolve_config
from common.systems.mindformers.read import open_mindformers
from common.training.metrics import read_metrics
from common.weights.names import parameter_shapes
from common.weights.pieces import open_stored
from mindformers_gpt2.layers import dropout_keys
from mindformers_gpt2.parallel.layout import own_dropout_keys
from mindformers_gpt2.parallel.world import World
from tests.closeness import rounding_scales, with_gradients_wrong_by
from tests.config_overrides import blended, changed
from tests.ranks import Job, run_ranks

pytestmark = pytest.mark.long

# float32 sums of the same terms in another order: losses and norms of six steps differed by 4.7e-7
# at most; weights: tests/closeness.py
TOLERANCE = 1e-6
# the two frameworks add up products in another order; see tests/parity
BETWEEN_FRAMEWORKS = 1e-4
STEPS, HALF = 6, 3
CLIP = 2.75

TENSOR: dict[str, Any] = {"parallel__model_parallel": 2}
PIPELINE: dict[str, Any] = {"parallel__pipeline_stage": 2}
ZERO: dict[str, Any] = {"parallel__zero_stage": 1}
FOUR_LAYERS: dict[str, Any] = {"model__num_layers": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, TENSOR | {"checkpoint__ckpt_prefix": "gpt2"}),
    "zero1": (2, ZERO),
    "pp2": (2, PIPELINE),
    "dp2 tp2": (4, TENSOR),
    "zero1 pp2": (4, ZERO | PIPELINE),
    "tp2 pp2": (4, TENSOR | PIPELINE),
    "pp4": (
        4,
        {"parallel__pipeline_stage": 4, "parallel__pipeline_schedule": "gpipe"} | FOUR_LAYERS,
    ),
}
# masks of all but the split heads follow from the sample's place in the global batch, whatever the
# layout
VARIANTS: dict[str, dict[str, Any]] = {
    "no clip": {"optimizer__clip_grad": 0.0},
    "clip": {
        "optimizer__clip_grad": CLIP,
        "model__dropout": 0.1,
        "model__attention_dropout": 0.0,
        "data__split": "100,0,0",
        "validation__interval": 0,
    },
}
# each rank compiles its graphs in every run, so the campaign has what others cover: a clip that
# acts on some steps does not act on others
IN_CAMPAIGN = [
    *itertools.product(("dp2",), VARIANTS),  # dp2 tp2 sums the same gradients, zero1 in parts
    ("tp2", "no clip"),
    ("zero1", "no clip"),
    ("pp2", "clip"),
    ("dp2 tp2", "clip"),
    *itertools.product(("zero1 pp2", "tp2 pp2", "pp4"), VARIANTS),
]
CASES = [
    pytest.param(*case, marks=pytest.mark.campaign if case in IN_CAMPAIGN else ())
    for case in itertools.product(LAYOUTS, VARIANTS)
]
HALF_WEIGHTS: dict[str, Any] = {
    "precision": {"parameters": "float16", "compute": "float16"},
    "loss_scale": {"initial": 2.0**24, "factor": 2.0**4, "window": 2},
}


def tree(folder: Path, corpus: Path, **changes: Any) -> Job:
    """101 tokens, padded to 104; three micro batches on each of two data ranks. A wide deviation,
    since gradients of biases would only be rounding otherwise.
    """
    return changed(
        {
            "output_dir": str(folder),
            "backend": "mindspore",
            "device": "cpu",
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 101,
                "vocab_multiple": 4,
                "initializer_range": 0.1,
            },
            "train": {"max_steps": STEPS, "micro_batch_size": 2, "global_batch_size": 12},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.1,
                "momentum": 0.9,
                "schedule": "constant",
                "clip_grad": 0.0,
            },
            "data": {"train": blended(corpus), "split": "90,10,0"},
            "validation": {"max_samples": 6, "interval": HALF},
            "checkpoint": {"interval": HALF},
            "logging": {"tensorboard": False, "plot": False},
        },
        changes,
    )


def resume(run: Path) -> dict[str, Any]:
    return {"checkpoint__resume": str(run / "checkpoints" / f"step_{HALF:08d}")}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest
) -> Path:
    """folder / layout / variant: six steps; "A, B": from step three of A to step six under layout
    B.
    """
    folder = tmp_path_factory.mktemp("layouts")
    campaign = any(
        item.path == request.path and item.get_closest_marker("campaign")
        for item in request.session.items
    )

    def wanted(layout: str, variant: str) -> bool:
        return campaign or (layout, variant) not in IN_CAMPAIGN

    def job(name: str, **changes: Any) -> Job:
        return tree(folder / name, corpus_prefix, **changes)

    torch_job = {"backend": "torch", **TENSOR}
    run_ranks(4, [job("torch", **torch_job)])
    from_torch = resume(folder / "torch")
    alone = [job(f"one/{variant}", **changes) for variant, changes in VARIANTS.items()]
    alone += [
        job(f"one of four layers/{variant}", **FOUR_LAYERS, **changes)
        for variant, changes in VARIANTS.items()
        if wanted("pp4", variant)
    ]
    if campaign:
        alone += [job("one/half", **HALF_WEIGHTS), job("torch, one", **from_torch)]
    run_ranks(1, alone)
    for ranks in (2, 4):
        jobs = [
            job(f"{layout}/{variant}", **settings, **changes)
            for layout, (number, settings) in LAYOUTS.items()
            for variant, changes in VARIANTS.items()
            if number == ranks and wanted(layout, variant)
        ]
        if ranks == 2 and campaign:
            jobs += [
                job("zero1/half", **ZERO, **HALF_WEIGHTS),
                job("torch, tp2", **TENSOR, **from_torch),
            ]
        if ranks == 2:
            jobs += [
                job("zero1, same", **ZERO, **VARIANTS["clip"], **resume(folder / "zero1" / "clip"))
            ]
        run_ranks(ranks, jobs)
    run_ranks(1, [job("dp2 tp2, torch", backend="torch", **resume(folder / "dp2 tp2" / "no clip"))])
    return folder


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def weights_of(run: Path, **changes: Any) -> dict[str, np.ndarray]:
    """All tensors of the newest checkpoint, whole."""
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    with open_stored(checkpoint, "model.safetensors", read_manifest(checkpoint)) as stored:
        shapes = parameter_shapes(config_of(run, **changes).model)
        return {name: stored.read(name, slice_of(name, shape)) for name, shape in shapes.items()}


def config_of(run: Path, **changes: Any) -> RunConfig:
    return resolve_config(build_config(tree(run, run, **changes)))


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_a_layout_trains_as_one_process(runs: Path, layout: str, variant: str) -> None:
    four = LAYOUTS[layout][1].items() >= FOUR_LAYERS.items()
    reference = runs / ("one of four layers" if four else "one") / variant
    one, many = (
        read_metrics(run / "metrics.jsonl") for run in (reference, runs / layout / variant)
    )
    assert len(one) == (STEPS if variant == "clip" else STEPS + 2), (
        "one of them validates, which is one graph more"
    )
    for key in (
        "step",
        "sample_hash",
        "consumed_samples",
        "validation_tokens",
        "validation_tokens/other",
    ):
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    for key in ("loss", "grad_norm", "validation_loss", "validation_loss/other"):
        assert [row.get(key) for row in many] == [
            value and pytest.approx(value, rel=TOLERANCE) for value in (row.get(key) for row in one)
        ]
    layers = FOUR_LAYERS if four else {}
    expected = weights_of(reference, **layers)
    scales = rounding_scales(config_of(reference, **layers), expected)
    for name, found in weights_of(runs / layout / variant, **layers).items():
        np.testing.assert_allclose(
            found, expected[name], rtol=0, atol=TOLERANCE * scales[name], err_msg=name
        )


def test_the_bounds_of_weights_show_gradients_that_are_wrong_by_one_percent(runs: Path) -> None:
    """A lost micro batch would be one sixth. The key bias moves only by rounding."""
    config, weights = config_of(runs), weights_of(runs / "one" / "no clip")
    scales = rounding_scales(config, weights)
    for name, wrong in with_gradients_wrong_by(0.01, config, weights).items():
        seen = np.abs(wrong - weights[name]).max() > TOLERANCE * scales[name]
        assert seen != name.endswith("k_proj.bias"), name


def test_the_clip_acts_on_some_steps(runs: Path) -> None:
    references = [runs / "one", *runs.glob("one of four layers")]  # which only the campaign runs
    for reference in references:
        norms = [row["grad_norm"] for row in steps_of(reference / "clip")]
        assert any(norm > CLIP for norm in norms) and any(norm < CLIP for norm in norms), norms


def test_samples_come_in_the_same_order_as_on_torch(runs: Path) -> None:
    found, expected = steps_of(runs / "dp2 tp2" / "no clip"), steps_of(runs / "torch")
    assert [row["sample_hash"] for row in found] == [row["sample_hash"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == [
            pytest.approx(row[key], rel=BETWEEN_FRAMEWORKS) for row in expected
        ]


@pytest.mark.parametrize(
    ("resumed", "whole", "tolerance"),
    [
        ("zero1, same", "zero1/clip", 0.0),
        # tests/system/test_moving_runs.py takes runs across frameworks and layouts too
        pytest.param("torch, one", "torch", BETWEEN_FRAMEWORKS, marks=pytest.mark.campaign),
        pytest.param("torch, tp2", "torch, one", TOLERANCE, marks=pytest.mark.campaign),
        ("dp2 tp2, torch", "dp2 tp2/no clip", BETWEEN_FRAMEWORKS),
    ],
)
def test_a_run_resumes_under_the_same_or_another_layout_or_framework(
    runs: Path, resumed: str, whole: str, tolerance: float
) -> None:
    """An unchanged layout resumes bit for bit, dropout masks too."""
    later, expected = steps_of(runs / resumed), steps_of(runs / whole)[-HALF:]
    assert [row["step"] for row in later] == list(range(HALF + 1, STEPS + 1))
    assert [row["sample_hash"] for row in later] == [row["sample_hash"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in later] == [
            pytest.approx(row[key], rel=tolerance, abs=0.0) for row in expected
        ], key


def test_each_rank_has_written_its_own_part(runs: Path) -> None:
    """Two of two data x two tensor ranks write. With ZeRO each has its share of the optimizer's
    state, about half. So it is in MindSpore's own format.
    """
    checkpoint = find_checkpoint(runs / "dp2 tp2" / "no clip")
    assert checkpoint is not None
    pieces = {
        name: record["pieces"]
        for name, record in read_manifest(checkpoint)["files"].items()
        if name.startswith("model")
    }
    assert [bool(pieces[f"model.rank_{rank:05d}.safetensors"]) for rank in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    checkpoint = find_checkpoint(runs / "zero1" / "clip")
    assert checkpoint is not None
    sizes = [
        record["bytes"]
        for name, record in read_manifest(checkpoint)["files"].items()
        if name.startswith("optimizer")
    ]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)

    for rank in range(2):
        folder = runs / "tp2" / "clip" / "checkpoints" / f"rank_{rank}"
        assert [path.name for path in sorted(folder.iterdir())] == [
            f"gpt2_rank_{rank}-1_{step}.ckpt" for step in (HALF, STEPS)
        ]
    whole = weights_of(runs / "tp2" / "clip")
    with open_mindformers(folder / f"gpt2_rank_1-1_{STEPS}.ckpt") as joined:
        assert len(joined.moments) == len(whole)
        for name, weight in joined.tensors.items():
            assert np.array_equal(weight.load(), whole[name]), name


@pytest.mark.campaign
def test_all_ranks_agree_on_the_loss_scale(runs: Path) -> None:
    """Weights in float16 under ZeRO: the same steps skipped, and the same results but for the
    rounding of sums to float16.
    """
    one, many = (steps_of(runs / name / "half") for name in ("one", "zero1"))
    assert [(row["loss_scale"], row["skipped"]) for row in many] == [
        (row["loss_scale"], row["skipped"]) for row in one
    ]
    assert 0 < sum(row["skipped"] for row in one) < STEPS
    assert [row["loss"] for row in many] == [pytest.approx(row["loss"], rel=2e-3) for row in one]


def test_dropout_keys_of_a_rank_are_those_of_one_process() -> None:
    """But for the heads of another tensor-parallel rank."""
    topology = Topology(data=2, tensor=2, pipeline=2)
    settings = TENSOR | PIPELINE | {"parallel__data_parallel": 2, "model__dropout": 0.1}
    config = resolve_config(
        build_config(tree(Path("run"), Path("data"), **settings)),
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

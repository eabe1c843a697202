"""Every layout against one process: losses, gradient norms before clipping, samples and final
weights; and runs that change layout.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest
from common.config.load import build_config
from common.config.schema import RunConfig
from common.parallel.sharding import slice_of
from common.resolve.derive import resolve_config
from common.training.metrics import read_metrics
from common.weights.names import parameter_shapes
from common.weights.pieces import open_stored
from tests.closeness import rounding_scales, with_gradients_wrong_by
from tests.config_overrides import blended, changed
from tests.ranks import run_ranks

pytestmark = pytest.mark.long

# float32 sums of the same terms in another order: losses and norms over ten steps differed by
# 2.3e-7 at most; weights: tests/closeness.py
TOLERANCE = 1e-6
STEPS = 10

CLIP = 4.0
VARIANTS: dict[str, dict[str, Any]] = {
    "no clip": {"optimizer__clip_grad": 0.0},
    "clip": {"optimizer__clip_grad": CLIP},
}

TENSOR: dict[str, Any] = {"parallel__model_parallel": 2}
SEQUENCE = {**TENSOR, "parallel__sequence_parallel": True}
PIPELINE: dict[str, Any] = {"parallel__pipeline_stage": 2}
SPLIT: dict[str, Any] = {"parallel__zero_stage": 3}
RECOMPUTE: dict[str, Any] = {"train__recompute": "full"}
# micro batches a step where six would only be more messages
THREE: dict[str, Any] = {"train__micro_batch_size": 4}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2": TENSOR | THREE,
        "tp2 sp": SEQUENCE,
        "tp2 sp recomputed": SEQUENCE | RECOMPUTE,
        "zero1": {"parallel__zero_stage": 1},
        "zero2 recomputed": {"parallel__zero_stage": 2} | RECOMPUTE,
        "zero3": SPLIT | {"train__recompute": "selective"},
        "gpipe": PIPELINE | {"parallel__pipeline_schedule": "gpipe"},
        "1f1b": PIPELINE | RECOMPUTE | {"train__recompute_layers": 1},
        "interleaved": PIPELINE | {"parallel__pipeline_schedule": "interleaved_1f1b"},
        "zero bubble": PIPELINE | {"parallel__pipeline_schedule": "interleaved_zero_bubble"},
        "zbv": PIPELINE | {"parallel__pipeline_schedule": "zbv_zero_bubble"},
        "uneven": PIPELINE | {"parallel__stage_layers": [3, 1]},
    },
    4: {
        "tp4": {"parallel__model_parallel": 4} | THREE,
        "pp4": {"parallel__pipeline_stage": 4},
        "dp2 tp2": TENSOR,
        "dp2 pp2": PIPELINE,
        "tp2 pp2": SEQUENCE | PIPELINE | THREE,
        "zero3 tp2": SEQUENCE | SPLIT,
        "zero1 pp2": PIPELINE | {"parallel__zero_stage": 1},
        "zero3 pp2": PIPELINE | SPLIT,
        "hybrid": SPLIT | {"parallel__shard_size": 2, "train__micro_batch_size": 1},
    },
    8: {"dp2 tp2 pp2": TENSOR | PIPELINE, "zero3 tp2 pp2": SEQUENCE | PIPELINE | SPLIT},
}

# A clip that acts on some steps does not act on others, so one variant of a layout shows both. The
# campaign has the other one.
BOTH = ("tp2 sp", "zero3", "1f1b", "dp2 tp2", "zero3 pp2")
UNCLIPPED = ("gpipe", "interleaved", "zero bubble", "zbv", "pp4")
CASES = [
    pytest.param(
        layout,
        variant,
        marks=()
        if layout in BOTH or (variant == "no clip") == (layout in UNCLIPPED)
        else pytest.mark.campaign,
    )
    for layouts in LAYOUTS.values()
    for layout in layouts
    for variant in VARIANTS
]

EVALUATED = ("uneven", "dp2 tp2", "zero3 tp2", "dp2 pp2")


def tree(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    """101 tokens, which no vocabulary is padded to; three micro batches on each of two data ranks,
    six on one. With a deviation of 0.02 a model this narrow would have gradients of biases that are
    only rounding.
    """
    return changed(
        {
            "output_dir": str(folder),
            "device": "cpu",
            "model": {
                "num_layers": 4,
                "hidden_size": 32,
                "num_heads": 4,
                "seq_length": 16,
                "vocab_size": 101,
                "initializer_range": 0.1,
            },
            "train": {"max_steps": STEPS, "micro_batch_size": 2, "global_batch_size": 12},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.05,
                "momentum": 0.9,
                "schedule": "constant",
            },
            "data": {"train": blended(corpus), "split": "90,10,0"},
            "validation": {"max_samples": 10, "interval": 5},
            "logging": {"tensorboard": False, "plot": False},
        },
        changes,
    )


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16 weights": {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}},
    "fp16 that overflows": {"precision": "fp16", "loss_scale": {"initial": 2.0**20, "window": 3}},
}
# these compute each micro batch as one process does, so that only float32 sums differ
SAME_PRODUCTS = {
    "one": (1, {}),
    "zero1": (2, {"parallel__zero_stage": 1}),
    "zero3": (2, SPLIT),
    "1f1b": (2, PIPELINE),
    "zero bubble": (2, LAYOUTS[2]["zero bubble"]),
}

DROPOUT = TENSOR | {
    "model__dropout": 0.1,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 2,
}
WITH_DROPOUT: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("recomputed", RECOMPUTE),
    ("begun", {"train__max_steps": 4}),
    ("begun", {}),  # to step 10
]

# one layer and no validation, since each graph takes its compiler ten seconds
SMALL: dict[str, Any] = {
    "model__num_layers": 1,
    "data__split": "100,0,0",
    "validation": {},
    "train__max_steps": 5,
}
COMPILED = {"tp2 sp": SEQUENCE, "zero3": SPLIT}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest
) -> Path:
    """folder / layout / variant or precision, and folder / dropout / run; "one" is one process."""
    folder = tmp_path_factory.mktemp("layouts")
    campaign = any(
        item.path == request.path and item.get_closest_marker("campaign")
        for item in request.session.items
    )
    left_out = {case.values for case in CASES if case.marks and not campaign}
    for ranks, layouts in {1: {"one": {}}, **LAYOUTS}.items():
        jobs = [
            tree(folder / layout / variant, corpus_prefix, **settings, **changes)
            for layout, settings in layouts.items()
            for variant, changes in VARIANTS.items()
            if (layout, variant) not in left_out
        ]
        jobs += [
            tree(
                folder / layout / name,
                corpus_prefix,
                **settings,
                **precision,
                optimizer__clip_grad=0.0,
                train__max_steps=6,
            )
            for layout, (wanted, settings) in SAME_PRODUCTS.items()
            for name, precision in PRECISIONS.items()
            if wanted == ranks
        ]
        if ranks == 1:
            jobs += [tree(folder / "compiled" / "one", corpus_prefix, **SMALL)]
        if ranks == 2:
            jobs += [
                tree(folder / "dropout" / name, corpus_prefix, **DROPOUT, **changes)
                for name, changes in WITH_DROPOUT
            ]
        whole = {"run_mode": "eval", "checkpoint__load": str(folder / "one" / "clip")}
        jobs += [
            tree(folder / name / "eval", corpus_prefix, **layouts[name], **whole)
            for name in EVALUATED
            if name in layouts
        ]
        run_ranks(ranks, jobs, watched="message_counters")
    return folder


def weights_of(run: Path, corpus: Path) -> dict[str, np.ndarray]:
    """All tensors of the newest checkpoint, whole."""
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    with open_stored(checkpoint, "model.safetensors", read_manifest(checkpoint)) as stored:
        return {
            name: stored.read(name, slice_of(name, shape))
            for name, shape in parameter_shapes(config_of(run, corpus).model).items()
        }


def config_of(run: Path, corpus: Path) -> RunConfig:
    return resolve_config(build_config(tree(run, corpus)))


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_a_layout_trains_as_one_process(
    runs: Path, corpus_prefix: Path, layout: str, variant: str
) -> None:
    one, many = (read_metrics(runs / name / variant / "metrics.jsonl") for name in ("one", layout))
    assert len(one) == STEPS + 2
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
    expected = weights_of(runs / "one" / variant, corpus_prefix)
    scales = rounding_scales(config_of(runs, corpus_prefix), expected)
    for name, found in weights_of(runs / layout / variant, corpus_prefix).items():
        assert np.abs(found - expected[name]).max() <= TOLERANCE * scales[name], name


def test_the_bounds_of_weights_show_gradients_that_are_wrong_by_one_percent(
    runs: Path, corpus_prefix: Path
) -> None:
    """A lost micro batch would be one sixth. The key bias moves only by rounding."""
    config, weights = (
        config_of(runs, corpus_prefix),
        weights_of(runs / "one" / "no clip", corpus_prefix),
    )
    scales = rounding_scales(config, weights)
    for name, wrong in with_gradients_wrong_by(0.01, config, weights).items():
        seen = np.abs(wrong - weights[name]).max() > TOLERANCE * scales[name]
        assert seen != name.endswith("k_proj.bias"), name


@pytest.mark.parametrize("layout", EVALUATED)
def test_ranks_evaluate_a_checkpoint_together(runs: Path, layout: str) -> None:
    *_, expected = read_metrics(runs / "one" / "clip" / "metrics.jsonl")
    found = json.loads((runs / layout / "eval" / "evaluation.json").read_text())
    assert found["tokens"] == expected["validation_tokens"]
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=TOLERANCE)


def test_the_clip_acts_on_some_steps(runs: Path) -> None:
    norms = [
        row["grad_norm"]
        for row in read_metrics(runs / "one" / "clip" / "metrics.jsonl")
        if "loss" in row
    ]
    assert any(norm > CLIP for norm in norms) and any(norm < CLIP for norm in norms)


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("layout", [name for name in SAME_PRODUCTS if name != "one"])
def test_half_precision(runs: Path, layout: str, precision: str) -> None:
    one, many = (
        read_metrics(runs / name / precision / "metrics.jsonl") for name in ("one", layout)
    )
    for key in ("step", "loss_scale", "skipped", "sample_hash"):
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    if precision.startswith("fp16"):
        skipped = [row["skipped"] for row in one if "loss" in row]
        assert any(skipped) and not all(skipped)
    # until the first update the weights are the same bits; afterwards a last bit of a gradient may
    # round a weight to its neighbour
    first = next(row["step"] for row in one if not row["skipped"])
    for row, other in zip(one, many, strict=True):
        bound = TOLERANCE if row["step"] <= first else 2.0**-9
        for key in ("loss", "grad_norm", "validation_loss", "validation_loss/other"):
            assert other.get(key) == (row.get(key) and pytest.approx(row[key], rel=bound)), (
                row["step"],
                key,
            )


def test_dropout_is_repeated_by_recomputation_and_resume(runs: Path) -> None:
    """Recomputed blocks must draw the masks of the forward pass, which the loss curve tells; so
    must a resumed run.
    """
    losses = {
        name: [
            (row["step"], row["loss"], row["grad_norm"])
            for row in read_metrics(runs / "dropout" / name / "metrics.jsonl")
            if "loss" in row
        ]
        for name, _ in WITH_DROPOUT
    }
    assert losses["begun"] == losses["plain"], "four steps and six more are ten, bit for bit"
    assert losses["recomputed"] == [
        tuple(map(lambda value: pytest.approx(value, rel=TOLERANCE), row))
        for row in losses["plain"]
    ]


@pytest.fixture(scope="module")
def compiled(runs: Path, corpus_prefix: Path) -> Path:
    """folder / layout, compiled; "one" is one process, not compiled."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip(
            "no C++ compiler, which torch.compile needs on a CPU: g++ is not on PATH, and CXX names"
            " none"
        )
    compiled = {"train__compile": True, "train__micro_batch_size": 6}
    jobs = [
        tree(runs / "compiled" / name, corpus_prefix, **SMALL, **layout, **compiled)
        for name, layout in COMPILED.items()
    ]
    # in the ranks, without processes of its own
    run_ranks(2, jobs, variables={"TORCHINDUCTOR_COMPILE_THREADS": "1"}, seconds=90.0)
    return runs / "compiled"


@pytest.mark.parametrize("layout", list(COMPILED))
def test_a_compiled_layout_trains_as_one_process(compiled: Path, layout: str) -> None:
    one, many = (read_metrics(compiled / name / "metrics.jsonl") for name in ("one", layout))
    assert len(one) == 5
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in many] == pytest.approx(
            [row[key] for row in one], rel=TOLERANCE
        ), key


def watched(run: Path, what: str) -> list[int]:
    """By rank."""
    return [
        json.loads((run / f"watched_{rank}.json").read_text())[what]
        for rank in range(len(list(run.glob("watched_*"))))
    ]


@pytest.mark.parametrize(
    ("layout", "units"), [("zero1", 5), ("zero2 recomputed", 5), ("zero1 pp2", 3), ("zero3 pp2", 3)]
)
def test_parameters_are_gathered_once_a_step(runs: Path, layout: str, units: int) -> None:
    """Gathers of each block and all others, for ten steps of three micro batches and two
    validations,
    of which the sixth step uses what the first gathered; a pipeline tries its stages once before.
    """
    assert set(watched(runs / layout / "clip", "gathers")) == {
        units * (STEPS + 2 - 1 + layout.endswith("pp2"))
    }


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ("gpipe", [1, 6]),
        ("1f1b", [1, 1]),
        ("pp4", [1, 3 + 1, 2 + 1, 1]),
        ("interleaved", [2 + 1, 4 + 2]),
        ("zero bubble", [2 + 1, 4 + 2]),
        ("zbv", [2, 3 + 1]),
    ],
)
def test_buffers_are_those_of_micro_batches_under_way(
    runs: Path, layout: str, most: list[int]
) -> None:
    """Inputs of stages until their backward passes, and gradients, where torch has one of each for
    all six micro batches.
    """
    assert watched(runs / layout / "no clip", "received") == most

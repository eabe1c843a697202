"""The matrix of layouts: engine x device x layout x numerics, and the one body that holds a row
against one process. Modules of tests start the ranks: one start for each device and backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.snapshot import MODEL_FILE
from common.config.load import build_config
from common.training.metrics import read_metrics
from common.weights.names import initial_rows
from tests.config_overrides import blended
from tests.packed_corpus import FLAGS
from tests.tiny import SGD, manifest_of, params_of, require_equal, tensors_of, tiny_run

Settings = dict[str, Any]

# float32 sums of the same terms in another order: losses and norms over ten steps differed by
# 4.7e-7 at most; weights: rounding_scales
TOLERANCE = 1e-6
# sums in another order round one activation in 10^5 to the next of its levels. With 4 bits and
# weights that hardly move there are few such: 1.4e-6 in three steps; without quantization 1e-2
QUANTIZED = 1e-5
STEPS = 10
CLIP = 3.0

TENSOR: Settings = {"parallel__model_parallel": 2}
SEQUENCE: Settings = {**TENSOR, "parallel__sequence_parallel": True}
PIPELINE: Settings = {"parallel__pipeline_stage": 2}
ZERO: Settings = {"parallel__zero_stage": 1}
SPLIT: Settings = {"parallel__zero_stage": 3}
RECOMPUTE: Settings = {"train__recompute": "full"}
# micro batches a step where six would only be more messages
THREE: Settings = {"train__micro_batch_size": 4}
FEWER_BITS = {"quantized": QUANTIZED, "quantized by token": QUANTIZED, "float8 head": 1e-5}
FEWER_BITS["half"] = 2e-3  # MindSpore adds up gradients in float16
# each part of a split layer's product is rounded to float16
FEWER_BITS["O2 split"] = 2.0**-11
BF16_WEIGHTS = {"parameters": "bfloat16", "compute": "bfloat16"}
FP16_WEIGHTS = {"parameters": "float16", "compute": "float16"}


def schedule(name: str) -> Settings:
    return PIPELINE | {"parallel__pipeline_schedule": name}


@dataclass(frozen=True)
class Layout:
    """numerics: names that the suite trains it with. campaign: more of them, seen elsewhere."""

    ranks: int
    settings: Settings
    numerics: tuple[str, ...] = ()
    campaign: tuple[str, ...] = ()
    tolerances: dict[str, float] = field(default_factory=dict)
    """After the first update, of numerics that round weights or results."""


@dataclass(frozen=True)
class Matrix:
    layouts: dict[str, Layout]
    numerics: dict[str, Settings]
    base: Settings
    blends: bool = True
    compares_tensors: bool = True

    def job(self, folder: Path, corpus: Path, **changes: Any) -> Settings:
        """Return the tree of a run. 101 tokens, which no vocabulary is padded to. With the usual
        deviation of 0.02 gradients of biases would only be rounding at this width.
        """
        data = {"data__train": blended(corpus) if self.blends else str(corpus)}
        return tiny_run(folder, **(data | self.base | changes))

    def case(self, runs: Path, corpus: Path, layout: str, numerics: str) -> Settings:
        """Return the job of a row; "one" is one process."""
        here = self.layouts.get(layout, Layout(1, {}))
        changes: Settings = dict(self.numerics[numerics])
        if numerics.startswith("packed"):
            changes["data__train"] = str(runs / "packed_text_document")
        changes |= here.settings
        if here.settings.get("engine") == "deepspeed":
            file = "ds_zero.json" if "parallel__zero_stage" in changes else "ds_whole.json"
            changes["deepspeed__config_file"] = str(runs / file)
        return self.job(runs / layout / numerics, corpus, ranks=here.ranks, **changes)

    def cases(self) -> list[Any]:
        return [
            pytest.param(name, numerics, marks=marks, id=f"{name}-{numerics}")
            for name, layout in self.layouts.items()
            for names, marks in ((layout.numerics, ()), (layout.campaign, pytest.mark.campaign))
            for numerics in names
        ]

    def jobs(self, runs: Path, corpus: Path, chosen: Iterable[tuple[str, str]]) -> list[Settings]:
        """Return the rows and the runs of one process that they are compared with."""
        rows = dict.fromkeys(chosen)
        alone = dict.fromkeys(("one", numerics) for _, numerics in rows)
        return [self.case(runs, corpus, *row) for row in {**alone, **rows}]

    def hold(self, runs: Path, layout: str, numerics: str) -> None:
        """Compare a row with one process: all metrics, and weights and momentum in float32."""
        found, wanted = runs / layout / numerics, runs / "one" / numerics
        tolerances = self.layouts[layout].tolerances
        usual = FEWER_BITS.get(numerics, TOLERANCE)
        require_equal(found, wanted, usual, updated=tolerances.get(numerics))
        if numerics.startswith("quantized"):
            require_equal_movement(found, wanted)
        elif self.compares_tensors and "precision" not in self.numerics[numerics]:
            require_equal_tensors(found, wanted)


def chosen_rows(request: pytest.FixtureRequest) -> list[tuple[Any, ...]]:
    """Return layout and numerics of the module's tests in this session: others need no runs."""
    return params_of(request, "layout", "numerics")


def config_of(run: Path) -> Any:
    return build_config(manifest_of(run)["config"])


def weights_of(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    tensors = tensors_of(run).items()
    return {key.partition("/")[2]: each for key, each in tensors if key.startswith(MODEL_FILE)}


def rounding_scales(config: Any, weights: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, float]:
    """Scale of the float32 error of each weight between two runs that differ only in the order of their sums.

    A weight: its largest entry, to which each update is rounded. A bias: its largest entry, or the farthest that
    its weight has moved from its initial values, if this is more.

    Both gradients are sums over the tokens t: of d_t x_t for a weight and of d_t for a bias, where the inputs x_t are
    of size one. In a bias the terms may cancel: nearly for queries, and wholly for keys, which the softmax does not
    see. The error of a sum is relative to its terms, whatever is left of them. n terms of random signs add up to about
    sqrt(n) |d|. One rounding of such a partial sum is at most u = 2^-24 of that, and n of them, of random signs too,
    add up to sqrt(n) u of that: 8.3e-7 for 192 tokens a step.
    """
    scales = {name: float(np.abs(values).max()) for name, values in weights.items()}
    for name in [name for name in weights if name.endswith(".bias")]:
        weight = name.removesuffix("bias") + "weight"
        values = weights[weight]
        moved = np.abs(values - initial_rows(config.model, config.seed, weight, values.shape)).max()
        scales[name] = max(scales[name], float(moved))
    return scales


def require_equal_tensors(found: Path, wanted: Path) -> None:
    """Compare weights entry by entry, and weights and momentum by their norms."""
    one, many = tensors_of(wanted), tensors_of(found)
    assert many.keys() == one.keys()
    scales = rounding_scales(config_of(wanted), weights_of(wanted))
    for key, expected in one.items():
        file, _, name = key.partition("/")
        # the true gradient of the key bias is zero: what it holds is noise
        size = 1.0 if "k_proj.bias" in key else np.linalg.norm(expected)
        if file == MODEL_FILE:
            assert np.abs(many[key] - expected).max() <= TOLERANCE * scales[name], key
            if "q_proj.bias" in key:  # its terms nearly cancel too
                size = max(size, scales[name] * np.sqrt(expected.size))
        elif "q_proj.bias" in key:  # the same terms, times inputs of size one, are the weight's
            terms = one[key.replace("bias", "weight")]
            size = max(size, np.linalg.norm(terms) / np.sqrt(terms.shape[1]))
        assert np.linalg.norm(many[key] - expected) <= TOLERANCE * size, key


def require_seen_faults(run: Path) -> None:
    """Require that gradients wrong by 1 % would be seen, where a lost micro batch would be one
    sixth. The key bias moves only by rounding.
    """
    config, weights = config_of(run), weights_of(run)
    scales = rounding_scales(config, weights)
    for name, values in weights.items():
        moved = values - initial_rows(config.model, config.seed, name, values.shape)
        seen = np.abs(0.01 * moved).max() > TOLERANCE * scales[name]
        assert seen != name.endswith("k_proj.bias"), name


def averages(run: Path) -> dict[str, float]:
    """Return the averages of largest activations, by layer."""
    state = manifest_of(run)["engine"].get("quantization", {})
    return {name: value / state["weight"] for name, value in state.get("accumulated", {}).items()}


def figures(run: Path) -> list[float]:
    rows = read_metrics(run / "metrics.jsonl")
    return [row[key] for row in rows for key in ("loss", "grad_norm", "validation_loss") if row.get(key)]


def require_equal_movement(found: Path, wanted: Path) -> None:
    """Compare how far quantization-aware training has moved each weight, and its averages."""
    assert averages(found) == pytest.approx(averages(wanted), rel=QUANTIZED)
    layers = config_of(wanted).model.num_layers
    assert len(averages(found)) == (0 if wanted.name.endswith("by token") else 6 * layers)
    config, many = config_of(wanted), weights_of(found)
    for name, values in weights_of(wanted).items():
        start = initial_rows(config.model, config.seed, name, values.shape)
        moved, other = values - start, many[name] - start
        assert np.abs(other - moved).max() <= 1e-3 * np.abs(moved).max() + 1e-7, name


SCALE = {"initial": 2.0**20, "window": 3}
MODELZOO = {"initial": 2.0**19, "window": 4, "hysteresis": 2}
RAMP = [4, 4, 24]
EMULATED = {"train__max_steps": 6, "watched": "emulated_float8"}
FEW_BITS = {"train__max_steps": 3, "optimizer__learning_rate": 1e-3, "validation__interval": 3}
TORCH_NUMERICS: dict[str, Settings] = {
    "plain": {},
    "clip": {"optimizer__clip_grad": CLIP},
    "bf16": {"precision": "bf16", "train__max_steps": 6},
    "bf16 weights": {"precision": BF16_WEIGHTS},
    "adamw in bf16": {"precision": "bf16", "optimizer": {"learning_rate": 0.01, "decay_steps": 12}},
    # a warm-up of three from 0, then down to step ten
    "fp16": {"precision": "fp16", "loss_scale": SCALE}
    | {"optimizer__schedule": "linear", "optimizer__warmup_steps": 3},
    "fp16 weights": {"precision": FP16_WEIGHTS, "loss_scale": SCALE},
    # of the Ascend ModelZoo, whose first scale overflows; and one that stays
    **{key: {"precision": FP16_WEIGHTS, "loss_scale": MODELZOO} for key in ("O2", "O2 split")},
    "O2 static": {"precision": FP16_WEIGHTS, "loss_scale": {"mode": "static", "initial": 65536.0}},
    # losses that hardly fall, so that some rise above the mean
    "outliers": {"train__on_outlier": "skip", "train__max_steps": 12}
    | {"optimizer__learning_rate": 0.005}
    | {"logging__outlier_deviations": 0.3, "logging__outlier_window": 8},
    "recomputed": RECOMPUTE,
    "packed": FLAGS | {"train__max_steps": 3, "validation__interval": 0},
    "ramp": {"train__max_steps": 8, "train__rampup_batch_size": RAMP, "validation__interval": 0}
    | {"optimizer": SGD | {"schedule": "cosine", "warmup_samples": 16, "decay_samples": 64}},
    "quantized": FEW_BITS | {"quantization": {"weights": "abs_max", "weight_bits": 4, "activation_bits": 4}},
    "quantized by token": FEW_BITS
    | {"quantization": {"activations": "dynamic", "weight_bits": 4, "activation_bits": 4}},
    "fp8": EMULATED | {"precision": "fp8"},
    "float8 head": EMULATED | {"precision": {"compute": "bfloat16", "float8_head": True}},
}
# Half precision rounds the float32 weights before each use. Until the first update they are the
# same bits on all ranks. Afterwards a weight that differs in its last bit may round to the
# neighbour, two units of roundoff away. Few weights do, with random signs, so the bounds are half
# a unit in bfloat16 and one in float16. A missing micro batch or a scale wrong by 1 % is beyond.
HALF = {"bf16": 2.0**-9, "bf16 weights": 2.0**-9, "adamw in bf16": 2.0**-9, "fp16": 2.0**-11}
# DeepSpeed: a unit of each. Seen in bfloat16, in ten steps of three seeds, with AVX-512 and with
# ATEN_CPU_CAPABILITY=default: 2.3e-3 in the norm; one process differs from itself under the other
# of the two by as much. In float16: 2.6e-4 with AVX512-BF16, one process from itself 1.4e-4.
UNIT = dict.fromkeys(("fp16", "fp16 weights", "O2", "O2 split", "O2 static"), 2.0**-11)
UNIT["bf16 weights"] = 2.0**-8
REPLICAS = {"bf16": 2.0**-9}
DATA_MORE = ("plain", "adamw in bf16", "bf16 weights", "outliers")
DATA = (*DATA_MORE, "clip", "fp16")


def native(ranks: int, settings: Settings, numerics: Iterable[str], campaign: Iterable[str] = ()) -> Layout:
    return Layout(ranks, settings, tuple(numerics), tuple(campaign), HALF)


def deepspeed(ranks: int, settings: Settings, suite: tuple[str, ...], *campaign: str) -> Layout:
    return Layout(ranks, {"engine": "deepspeed"} | settings, suite, campaign, UNIT)


def replicas(strategy: str, suite: tuple[str, ...], *campaign: str) -> Layout:
    return Layout(2, {"parallel__strategy": strategy}, suite, campaign, REPLICAS)


# A clip that acts on some steps does not act on others, so one variant of a layout shows both
OFFLOADED = {"deepspeed__offload_optimizer": True}
ZERO2: Settings = {"parallel__zero_stage": 2}
KEPT = RECOMPUTE | {"train__recompute_layers": 1}
SELECTIVE = {"train__recompute": "selective"}
HYBRID = SPLIT | {"parallel__shard_size": 2, "train__micro_batch_size": 1}
OFFLOADED3 = SPLIT | OFFLOADED | {"deepspeed__offload_parameters": True}
TORCH = Matrix(
    {
        "dp2": native(2, {}, (*DATA, "packed", "ramp", "fp8", "float8 head")),
        "pp2": native(2, PIPELINE, ("float8 head",), ("fp8",)),
        "dp3": native(3, {}, ("clip",), ("fp16", *DATA_MORE)),
        "tp2": native(2, TENSOR | THREE, ("clip",), ("packed", "ramp")),
        "tp2 sp": native(2, SEQUENCE, ("clip", "quantized by token"), ("packed",)),
        "tp2 sp recomputed": native(2, SEQUENCE | RECOMPUTE, ("clip", "packed", "quantized")),
        "zero1": native(2, ZERO, ("clip", "bf16 weights"), ("packed", "bf16", "fp16")),
        "zero2 recomputed": native(2, ZERO2 | RECOMPUTE, ("clip",), ("packed",)),
        "zero3": native(
            2, SPLIT | SELECTIVE, ("clip", "bf16 weights", "fp16", "quantized"), ("packed", "ramp", "bf16")
        ),
        "gpipe": native(2, schedule("gpipe"), ("plain",), ("packed", "ramp")),
        "1f1b": native(2, PIPELINE | KEPT, ("plain", "bf16 weights", "ramp"), ("packed", "bf16", "fp16")),
        "interleaved": native(2, schedule("interleaved_1f1b"), ("plain",), ("packed", "ramp")),
        "zero bubble": native(2, schedule("interleaved_zero_bubble"), ("plain", "fp16", "packed"), ("ramp", "bf16")),
        "zbv": native(2, schedule("zbv_zero_bubble"), ("plain", "quantized"), ("packed", "ramp")),
        "uneven": native(2, PIPELINE | {"parallel__stage_layers": [3, 1]}, ("clip",), ("packed",)),
        # parallel/test_change_of_layout.py has runs that go on under it
        "tp4": native(4, {"parallel__model_parallel": 4} | THREE, (), ("clip",)),
        "dp2 tp2 pp2": native(8, TENSOR | PIPELINE, ("clip",)),
        "pp4": native(4, {"parallel__pipeline_stage": 4}, ("plain",)),
        "dp2 tp2": native(4, TENSOR, ("clip", "quantized")),
        "dp2 pp2": native(4, PIPELINE, ("clip",)),
        "tp2 pp2": native(4, SEQUENCE | PIPELINE | THREE, ("clip",)),
        "zero3 tp2": native(4, SEQUENCE | SPLIT, ("clip",)),
        "zero1 pp2": native(4, PIPELINE | ZERO, ("clip",)),
        "zero3 pp2": native(4, PIPELINE | SPLIT, ("clip",)),
        "hybrid": native(4, HYBRID, ("clip",)),
        "zero3 tp2 pp2": native(8, SEQUENCE | PIPELINE | SPLIT, ("clip",)),
        "recomputed": native(1, SELECTIVE, (), ("packed",)),
        "zero3 kept": native(2, SPLIT, (), ("float8 head",)),
        "parameter server": replicas("parameter_server", ("clip", "bf16", "fp16"), "float8 head"),
        "horovod": replicas("horovod", ("clip", "fp16"), "bf16"),
        "deepspeed": deepspeed(2, {}, ("plain", "O2 static"), "fp16"),
        "deepspeed dp2 pp2": deepspeed(4, PIPELINE | RECOMPUTE, ("O2",)),
        "deepspeed tp2 pp2": deepspeed(4, TENSOR | PIPELINE | RECOMPUTE, ("O2 split",)),
        "deepspeed zero1": deepspeed(2, ZERO, ("clip", "fp16 weights"), "bf16 weights"),
        "deepspeed zero2": deepspeed(2, ZERO2, ("plain",), "packed"),
        "deepspeed zero3": deepspeed(2, SPLIT, ("clip", "fp16", "bf16 weights"), "recomputed", "packed"),
        "deepspeed zero1 offloaded": deepspeed(2, ZERO | OFFLOADED, (), "fp16 weights"),
        "deepspeed zero2 offloaded": deepspeed(2, ZERO2 | OFFLOADED, ("plain",)),
        "deepspeed zero3 offloaded": deepspeed(2, OFFLOADED3, ("clip",)),
        "deepspeed tp2": deepspeed(2, TENSOR, ("plain",)),
        "deepspeed pp2": deepspeed(2, PIPELINE, ("plain",)),
        "deepspeed zero1 pp2": deepspeed(2, PIPELINE | ZERO, ("clip", "fp16", "recomputed"), "bf16 weights", "packed"),
        "deepspeed zero1 dp2 tp2 pp2": deepspeed(8, TENSOR | PIPELINE | ZERO, ("clip",)),
        # the last one, since it leaves a group of its own
        "deepspeed alone": deepspeed(1, ZERO, ("plain",)),
    },
    TORCH_NUMERICS,
    {"model__num_layers": 4, "model__initializer_range": 0.1, "train__max_steps": STEPS}
    | {"train__global_batch_size": 12, "optimizer__learning_rate": 0.05}
    | {"validation": {"max_samples": 10, "interval": 5}},
)

NPU_CLIP = 2.0  # the norms lie between 2.3 and 1.4
NPU = Matrix(
    {
        name: Layout(2, settings, numerics, (), {})
        for name, settings, numerics in (
            ("data", {}, ("clip", "bf16 weights", "fp16")),
            ("tensor", TENSOR, ("plain",)),
            ("sequence", SEQUENCE, ("clip",)),
            ("pipeline", PIPELINE | RECOMPUTE | {"train__offload_activations": True}, ("clip",)),
            ("pipeline, documents apart", PIPELINE, ("documents apart",)),
            ("zero1", ZERO, ("clip",)),
            ("zero2", ZERO2, ("adamw",)),
            ("zero3", SPLIT | {"train__offload_activations": True}, ("clip",)),
            # its ZeRO-3 does not end its first step on this device
            ("deepspeed", {"engine": "deepspeed"}, ("clip",)),
            ("deepspeed zero2", {"engine": "deepspeed"} | ZERO2, ("clip",)),
            ("deepspeed pipeline", {"engine": "deepspeed"} | PIPELINE | ZERO, ("plain",)),
        )
    },
    {
        "plain": {},
        "clip": {"optimizer__clip_grad": NPU_CLIP},
        "bf16 weights": {"precision": BF16_WEIGHTS},
        "fp16": {"precision": "fp16", "loss_scale": SCALE},
        # the end of a document occurs among the random tokens
        "documents apart": FLAGS | {"data__eod_id": 3, "optimizer__clip_grad": NPU_CLIP},
        "adamw": {"optimizer": {"learning_rate": 0.005, "schedule": "constant", "clip_grad": NPU_CLIP}},
    },
    {"device": "npu", "model__num_heads": 2, "train__max_steps": 8, "train__global_batch_size": 8}
    | {"validation": {"max_samples": 8, "interval": 4}},
    blends=False,
    compares_tensors=False,
)

MINDSPORE_CLIP = 2.0  # of one layer, whose norms lie between 2.2 and 1.7
MINDSPORE_STEPS, MINDSPORE_HALF = 6, 3
# masks of all but the split heads follow from the sample's place in the global batch, whatever the
# layout; no validation, which is one graph more
MASKS: Settings = {"model__dropout": 0.1, "model__attention_dropout": 0.0, "optimizer__clip_grad": 2.75}
MASKS |= {"data__split": "100,0,0", "validation__interval": 0}
SHORT = FLAGS | {"train__max_steps": 2, "validation__interval": 0, "checkpoint__interval": 0}
OWN_FILES = TENSOR | {"checkpoint__ckpt_prefix": "gpt2"}
# each rank compiles its graphs in every run, so the campaign has what others cover
GROWS = {"ramp": 1e-5}
MINDSPORE = Matrix(
    {
        "dp2": Layout(2, {}, (), ("plain", "dropout", "packed", "ramp", "quantized"), GROWS),
        "tp2": Layout(2, OWN_FILES, ("one layer",), ("plain", "dropout", "packed", "ramp", "quantized"), GROWS),
        "zero1": Layout(2, ZERO, ("one layer",), ("plain", "dropout", "packed", "ramp", "half"), GROWS),
        "pp2": Layout(2, PIPELINE, ("plain",), ("dropout", "packed", "packed dropout", "ramp", "quantized"), GROWS),
        "gpipe": Layout(2, schedule("gpipe"), (), ("ramp",), GROWS),
        "dp2 tp2": Layout(4, TENSOR, ("one layer",), ("plain", "dropout")),
        "dp2 pp2": Layout(4, PIPELINE | RECOMPUTE, (), ("packed",)),
        "zero1 pp2": Layout(4, ZERO | PIPELINE, (), ("plain", "dropout")),
        "tp2 pp2": Layout(4, TENSOR | PIPELINE, (), ("plain", "dropout", "packed")),
        "pp4": Layout(4, {"parallel__pipeline_stage": 4, "parallel__pipeline_schedule": "gpipe"}, (), ("four layers",)),
    },
    {
        "plain": {},
        "dropout": MASKS,
        # half of what its compiler has to do
        "one layer": MASKS | {"model__num_layers": 1, "optimizer__clip_grad": MINDSPORE_CLIP},
        "four layers": {"model__num_layers": 4},
        "half": {"precision": FP16_WEIGHTS} | {"loss_scale": {"initial": 2.0**24, "factor": 2.0**4, "window": 2}},
        "packed": SHORT,
        "packed dropout": SHORT | {"model__hidden_dropout": 0.1},
        "ramp": TORCH_NUMERICS["ramp"] | {"model__hidden_dropout": 0.1},
        "quantized": TORCH_NUMERICS["quantized"],
    },
    {"backend": "mindspore", "train__max_steps": MINDSPORE_STEPS, "train__global_batch_size": 12}
    | {"model__num_heads": 2, "model__vocab_multiple": 4, "model__initializer_range": 0.1}
    | {"validation": {"max_samples": 6, "interval": MINDSPORE_HALF}, "checkpoint": {"interval": MINDSPORE_HALF}},
)

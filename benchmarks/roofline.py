"""Count what a training step moves and multiplies, and give it the time of a roofline.

    python benchmarks/roofline.py [--accelerator H100] [--config CONFIG] [KEY=VALUE ...]

Without --config the four sizes of GPT-2 are counted, in bfloat16 or with precision=fp8. The graphs
are those that torch compiles for an H100, of forward and backward pass
(benchmarks/gpu_lowering.py). Nothing is run and no accelerator is needed, but Triton is. Two and
three layers are compiled; the others cost what the third does. Attention goes over whole windows.
Not counted: messages between ranks, data, and the gaps that a slow host leaves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_lowering import lower_training, lowering
from common.accelerators import Accelerator, require_accelerator
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.flags import make_parser
from common.parallel.loss_rows import loss_rows
from common.parallel.packing import KEYS
from common.parallel.run import Run
from common.planner.fitting import resolve_on
from common.planner.plan import table
from common.program import command
from common.run_config import load_config
from common.weights.names import count_parameters
from tests.fake_cuda.build import with_cuda

SIZES = {
    "124M": ("run_gpt2_124m", 64, 512),
    "345M": ("run_gpt2_345m", 64, 512),
    "774M": ("run_gpt2_774m", 32, 512),
    "1558M": ("run_gpt2_1558m", 16, 960),
}
"""Preset, micro batch and windows a step of each size."""
FEW, MORE = 2, 3
"""Numbers of layers that are compiled."""
PRODUCTS, BYTES = 0.60, 0.90
"""Parts of the peak rates that large products and fused kernels reach."""
ATTENTION = (0.283, 0.232)
"""Part of the peak rate that fused attention reaches forward and backward: 280 and 230 of an H100's
989 TFLOP/s, for heads of 64.
"""
LAUNCH = 2e-6
"""Seconds between two kernels."""
UPDATE = 32
"""Bytes for each parameter: AdamW reads four and writes three float32 numbers; the norm reads
one.
"""
ACCUMULATE = 12
"""Bytes for each parameter and micro batch after the first: two float32 numbers read, one
written.
"""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Kernels of one micro batch, bytes that fused kernels move, and FLOPs of the others."""

    fused: float = 0
    products: float = 0
    bytes: float = 0
    product_flops: float = 0
    float8_flops: float = 0
    attention_forward: float = 0
    attention_backward: float = 0

    def plus(self, times: int, other: Counts) -> Counts:
        return self._with(other, times)

    def minus(self, other: Counts) -> Counts:
        return self._with(other, -1)

    def _with(self, other: Counts, times: int) -> Counts:
        return Counts(
            **{
                field.name: getattr(self, field.name) + times * getattr(other, field.name)
                for field in fields(self)
            }
        )

    def seconds(self, device: Accelerator, *, half: bool) -> float:
        peak = device.half_flops if half else device.single_flops
        float8 = self.float8_flops and self.float8_flops / (PRODUCTS * device.float8_peak())
        return (
            float8
            + self.product_flops / (PRODUCTS * peak)
            + self.attention_forward / (ATTENTION[0] * peak)
            + self.attention_backward / (ATTENTION[1] * peak)
            + self.bytes / (BYTES * device.bandwidth)
            + (self.fused + self.products) * LAUNCH
        )


def count_micro_batch(config: Run, memory: int) -> Counts:
    """Return the counts of one micro batch. memory: of the device, for the rows of the loss."""
    rows = {"loss_rows": loss_rows(config, memory)}
    config = as_run(Run, config, data=dict.fromkeys(KEYS, False), train=rows)
    few, more = (_count_layers(config, layers) for layers in (FEW, MORE))
    return few.plus(config.model.num_layers - FEW, more.minus(few))


def step_seconds(config: Run, counts: Counts, device: Accelerator) -> float:
    """Return the seconds of a step on one device."""
    accumulation = config.train.accumulation_steps
    half = config.precision.compute != "float32"
    bytes_ = count_parameters(config.model) * (UPDATE + ACCUMULATE * (accumulation - 1))
    return accumulation * counts.seconds(device, half=half) + bytes_ / (BYTES * device.bandwidth)


def _count_layers(config: Run, layers: int) -> Counts:
    with lowering(binaries=False) as graphs:
        lower_training(config, layers, validates=False)
    total = Counts()
    for graph in graphs:
        for node, moved in graph.nodes:
            total = total.plus(graph.calls, _count_kernel(node, moved))
    return total


def _count_kernel(node: Any, moved: int) -> Counts:
    if type(node).__name__ == "NopKernelSchedulerNode":
        return Counts()
    if "Extern" not in type(node).__name__:
        origins = {
            str(origin.target) for each in node.get_nodes() for origin in each.node.get_origins()
        }
        # one number a row, though torch counts the whole table
        return Counts(fused=1, bytes=0 if any("gather" in name for name in origins) else moved)
    kernel = node.node
    name = getattr(kernel, "python_kernel_name", None)
    if name is None:  # one of several results of a kernel
        return Counts()
    shapes = [shape for each in kernel.inputs if (shape := _shape(each)) is not None]
    if "scaled_mm" in name:  # its scales come behind
        left, right = shapes[:2]
        return Counts(products=1, float8_flops=2 * math.prod(left) * right[-1])
    if "mm" in name:
        left, right = [shape for shape in shapes if len(shape) > 1][-2:]
        return Counts(products=1, product_flops=2 * math.prod(left) * right[-1])
    if "attention" in name or "flash" in name:
        batch, heads, length, size = next(shape for shape in shapes if len(shape) == 4)
        product = batch * heads * length * length * size  # 2 FLOPs, of which a mask saves half
        if "backward" in name:
            return Counts(products=1, attention_backward=5 * product)
        return Counts(products=1, attention_forward=2 * product)
    return Counts(fused=1, bytes=moved)


def _shape(value: Any) -> list[int] | None:
    try:
        return [int(size) for size in value.get_size()]
    except (AttributeError, NotImplementedError, TypeError):
        return None


@command()
def main(words: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--accelerator", default="H100", help="name of the device; default H100")
    parser.add_argument("--config", type=Path, help="a config instead of the four sizes")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings")
    arguments = parser.parse_args(words)
    device = require_accelerator(arguments.accelerator)
    rows = []
    for name, written in _configs(arguments.config, arguments.overrides):
        config = resolve_on(written, device, world_size=1)
        counts = count_micro_batch(config, device.memory)
        seconds = step_seconds(config, counts, device)
        batch = config.train.global_batch_size
        rows.append(
            (
                name,
                str(config.train.micro_batch_size),
                f"{counts.fused:.0f} + {counts.products:.0f}",
                f"{counts.bytes / 1e9:.1f}",
                f"{(counts.product_flops + counts.float8_flops) / 1e12:.2f}",
                f"{batch * config.model.seq_length / seconds:,.0f}",
            )
        )
    head = ("model", "micro batch", "kernels", "fused GB", "product TFLOP", "tokens/s")
    print("\n".join(table(head, rows)))
    return 0


def _configs(path: Path | None, overrides: Sequence[str]) -> Iterator[tuple[str, RunConfig]]:
    if path is not None:
        yield path.stem, load_config(path, overrides)
        return
    for name, (preset, micro, batch) in SIZES.items():
        settings = (
            "precision=bf16",
            "train.recompute=none",
            "model.dropout=0.0",
            f"train.micro_batch_size={micro}",
            f"train.global_batch_size={batch}",
            *overrides,
        )
        yield name, load_config(ROOT / f"configs/gpt2/{preset}.yaml", settings)


if __name__ == "__main__":
    sys.exit(with_cuda(main))

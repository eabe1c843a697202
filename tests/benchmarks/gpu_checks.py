"""Graphs that torch compiles for an H100: binaries, and bytes and products beside closed forms.

test_gpu.py starts pytest on this file, in a process that has the device of tests/fake_cuda.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import roofline
from benchmarks.gpu_lowering import lower_training, lowering
from benchmarks.roofline import FEW, Counts, count_micro_batch, step_seconds
from common.accelerators import GIB, require_accelerator
from common.config.load import build_config
from common.parallel.run import Run
from common.planner.timing import float8_bytes
from common.resolve.derive import resolve_config

LAYERS, WIDTH, WINDOW, WINDOWS, ROWS = 4, 64, 1024, 4, 50_304


def run(precision: Any = "bf16", **sections: Any) -> Run:
    return resolve_config(
        build_config(
            {
                "output_dir": "out",
                "precision": precision,
                "model": {
                    "num_layers": LAYERS,
                    "hidden_size": WIDTH,
                    "num_heads": 1,
                    "seq_length": WINDOW,
                    "vocab_size": 50257,
                },
                "train": {"max_steps": 1, "micro_batch_size": WINDOWS, "global_batch_size": 8},
                "optimizer": {"learning_rate": 1e-3},
                **sections,
            }
        )
    )


def test_every_kernel_of_a_block_has_a_binary() -> None:
    with lowering(binaries=True) as graphs:
        lower_training(run())
    assert [graph.calls for graph in graphs] == [1, 1, 1], "forward, backward and validation"
    kernels = [kernel for graph in graphs for kernel in graph.kernels]
    assert len(kernels) > 20 and all(kernel.size > 1000 for kernel in kernels)


def test_documents_are_kept_apart_within_the_graphs() -> None:
    """flex_attention's kernel takes a result of its graph, but not a formula of results."""
    with lowering(binaries=False) as graphs:
        lower_training(run(data={"eod_id": 50256, "reset_attention_mask": True}))
    assert [graph.calls for graph in graphs] == [1, 1, 1]


@pytest.fixture(scope="module")
def plain() -> Counts:
    """Counts of the run in bfloat16."""
    return count_micro_batch(run(), 80 * GIB)


@pytest.mark.campaign
def test_the_compiled_loss_reads_each_logit_once_and_writes_its_slope(plain: Counts) -> None:
    config, counts = run(), plain
    tokens = WINDOW * WINDOWS
    # one kernel reads a row of logits, sums its exponentials and writes the slope: 2 x 2 bytes;
    # table and its gradient in float32, and activations, are a fourth of it
    logits = tokens * ROWS * 2
    assert 2 * logits < counts.bytes < 2.7 * logits
    # forward, and two products for each backward
    head, matrices = ROWS * WIDTH, 12 * WIDTH * WIDTH
    assert counts.product_flops == 3 * 2 * tokens * (head + LAYERS * matrices)
    attention = WINDOWS * WINDOW * WINDOW * WIDTH * LAYERS
    assert (counts.attention_forward, counts.attention_backward) == (2 * attention, 5 * attention)

    device = require_accelerator("H100")
    step = step_seconds(config, counts, device)
    assert step > 2 * counts.seconds(device, half=True) > 0, "two micro batches and the update"
    assert step_seconds(config, counts, replace(device, bandwidth=1e30)) < step
    assert FEW < LAYERS


@pytest.mark.campaign
def test_float8_of_the_head_moves_what_bf16_does(
    plain: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel reads the logits and writes the slope in both orders: a byte each, where bfloat16
    has one order of two.
    """
    slopes, products = [], []

    def watch(node: Any, moved: int) -> Counts:
        counts = count_kernel(node, moved)
        if counts.float8_flops:
            products.append([list(map(int, each.get_stride())) for each in node.node.inputs[:2]])
        elif counts.fused and "Extern" not in type(node).__name__:
            outputs = [each.node for each in node.get_nodes()]
            strides = [
                list(map(int, each.get_stride()))
                for each in outputs
                if each.get_dtype() == torch.float8_e5m2
            ]
            if strides:
                slopes.append((moved, sorted(strides)))
        return counts

    count_kernel = roofline._count_kernel
    monkeypatch.setattr(roofline, "_count_kernel", watch)
    config = run({"compute": "bfloat16", "float8_head": True})
    found = count_micro_batch(config, 80 * GIB)
    tokens = WINDOW * WINDOWS
    assert found.float8_flops == 3 * 2 * tokens * ROWS * WIDTH
    assert found.product_flops == 3 * 2 * tokens * LAYERS * 12 * WIDTH * WIDTH
    assert found.products == plain.products

    # two layers are compiled, then three; of each the forward pass has the slope
    logits = tokens * ROWS
    assert len(slopes) == 2
    for moved, strides in slopes:
        assert moved == pytest.approx(4 * logits, rel=1e-3)
        assert strides == [[1, tokens], [ROWS, 1]]
    # tensor cores take rows of the left operand and columns of the right one
    assert products == 2 * [
        [[WIDTH, 1], [1, WIDTH]],
        [[tokens, 1], [1, tokens]],
        [[ROWS, 1], [1, ROWS]],
    ]
    # table and hidden states are rounded, in two orders
    assert 0 < found.bytes - plain.bytes < 0.03 * plain.bytes


@pytest.mark.campaign
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_moves_what_the_plan_adds(plain: Counts, scaling: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")
    config = run({"compute": "bfloat16", "float8": scaling})
    found = count_micro_batch(config, 80 * GIB)
    tokens = WINDOW * WINDOWS
    assert found.float8_flops == 3 * 2 * tokens * LAYERS * 12 * WIDTH * WIDTH
    assert found.product_flops == 3 * 2 * tokens * ROWS * WIDTH
    assert found.bytes - plain.bytes == pytest.approx(LAYERS * float8_bytes(config), rel=0.02)
    device = require_accelerator("H100")
    slower = replace(device, float8_flops=device.half_flops)
    assert found.seconds(device, half=True) < found.seconds(slower, half=True)

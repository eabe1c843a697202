"""Graphs that torch compiles for an H100: binaries, and bytes beside closed forms.

test_gpu.py starts pytest on this file, in a process that has the device of tests/fake_cuda.
"""

from typing import Any

import pytest

from common.config.load import build_config
from common.parallel.run import Run
from common.planner.timing import float8_bytes
from common.resolve.derive import resolve_config
from tests.common.resolve.test_refusals import small_tree
from tests.fake_cuda.lowering import fused_bytes, lower_training, lowering

LAYERS, WIDTH, WINDOW, WINDOWS, ROWS = 4, 64, 1024, 4, 50_304
DOCUMENTS: dict[str, Any] = {"data": {"eod_id": 50256, "reset_attention_mask": True}}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "fp16": {"precision": "fp16"},
    "dropout": {"model__dropout": 0.1},
    "float8_head": {"precision": {"compute": "bfloat16", "float8_head": True}},
    "fp8": {"precision": "fp8"},
    "fp8 rowwise": {"precision": {"compute": "bfloat16", "float8": "rowwise"}},
    "documents": DOCUMENTS,
    "documents, dropout": {**DOCUMENTS, "model__dropout": 0.1},
    "recompute selective": {"train__recompute": "selective", "model__dropout": 0.1},
    "recompute full": {"train__recompute": "full", "model__dropout": 0.1},
    "graphs by region": {"model__num_layers": 36},
    "attention written out": {"train__fused_attention": False},
}


def run(**changes: Any) -> Run:
    usual: dict[str, Any] = {
        "precision": "bf16", "train__micro_batch_size": WINDOWS, "train__global_batch_size": 8,
        "model__num_layers": LAYERS, "model__hidden_size": WIDTH, "model__num_heads": 1,
        "model__seq_length": WINDOW, "model__vocab_size": 50257,
    }  # fmt: skip
    return resolve_config(build_config(small_tree(**{**usual, **changes})))


def test_every_kernel_of_a_block_has_a_binary() -> None:
    with lowering(binaries=True) as graphs:
        lower_training(run())
    assert [graph.calls for graph in graphs] == [1, 1, 1], "forward, backward and validation"
    kernels = [kernel for graph in graphs for kernel in graph.kernels]
    assert len(kernels) > 20 and all(kernel.size > 1000 for kernel in kernels)


def test_documents_are_kept_apart_within_the_graphs() -> None:
    """flex_attention's kernel takes a result of its graph, but not a formula of results."""
    with lowering(binaries=False) as graphs:
        lower_training(run(**DOCUMENTS))
    assert [graph.calls for graph in graphs] == [1, 1, 1]


@pytest.mark.campaign
@pytest.mark.parametrize("name", OPTIONS)
def test_every_kernel_of_an_option_has_a_binary(name: str) -> None:
    if "fp8" in name:
        pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")
    with lowering(binaries=True) as graphs:
        lower_training(run(**OPTIONS[name]))
    kernels = [kernel for graph in graphs for kernel in graph.kernels]
    assert kernels and [kernel.name for kernel in kernels if not kernel.size] == []


def moved(**sections: Any) -> tuple[int, int]:
    with lowering(binaries=False) as graphs:
        lower_training(run(**sections), LAYERS, validates=False)
    return fused_bytes(graphs)


@pytest.mark.campaign
def test_the_compiled_loss_reads_each_logit_once_and_writes_its_slope() -> None:
    """One kernel reads a row of logits, sums its exponentials and writes the slope: 2 x 2 bytes.

    The table and its gradient in float32, and activations, are a fourth of it. float8 of the head
    has one byte in each of two orders, where bfloat16 has one order of two.
    """
    plain, _ = moved()
    logits = WINDOW * WINDOWS * ROWS * 2
    assert 2 * logits < plain < 2.7 * logits
    head, products = moved(**OPTIONS["float8_head"])
    assert products == 3 and 0 < head - plain < 0.03 * plain


@pytest.mark.campaign
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_moves_what_the_plan_adds(scaling: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")
    sections = {"precision": {"compute": "bfloat16", "float8": scaling}}
    plain, found = moved()[0], moved(**sections)
    assert found[1] == 3 * 6 * LAYERS, "three products for each linear layer"
    planned = LAYERS * float8_bytes(run(**sections))
    assert found[0] - plain == pytest.approx(planned, rel=0.02)

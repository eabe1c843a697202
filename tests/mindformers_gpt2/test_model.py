"""Dropout against the same arithmetic in numpy and against its statistics; recomputation against
none; attention by one kernel of an Ascend, with the kernel as its documentation describes it.
"""

import tests.needs_mindspore  # noqa: F401

# isort: split
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from common.parallel.run import Run
from common.parallel.sharding import initial_values
from mindformers_gpt2 import model as modeling
from mindformers_gpt2.checkpoint import fill_weights
from mindformers_gpt2.device import MindSporeDevice, open_device
from mindformers_gpt2.layers import GELU, Dropout, dropout_keys
from mindformers_gpt2.model import CoreAttention, FusedAttention, build_model, takes_fused_attention
from tests.tiny import SGD, tiny_config

ROOT = Path(__file__).resolve().parents[2]


def make_config(**changes: Any) -> Run:
    usual: dict[str, Any] = {"backend": "mindspore", "optimizer": SGD | {"learning_rate": 0.3, "momentum": 0.0}}
    return tiny_config(**(usual | changes))


def keep_by_numpy(count: int, key: np.ndarray, rate: float) -> np.ndarray:
    """The formula in the docstring of Dropout, in numpy's wrapping arithmetic."""
    bits = np.arange(count, dtype=np.uint32) * key[1] + key[0]
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    bits = (bits ^ (bits >> np.uint32(12))) * np.uint32(0x297A2D39)
    return bits >= np.uint32(rate * 2**32)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_follows_from_key_and_place(rate: float) -> None:
    open_device(make_config())
    dropout = ms.jit(Dropout(rate, native=False))
    x = np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    keys = dropout_keys(make_config(), 7, 1)
    found = dropout(ms.Tensor(x), ms.Tensor(keys[2])).asnumpy()
    np.testing.assert_allclose(found, x * keep_by_numpy(x.size, keys[2], rate).reshape(x.shape) / (1 - rate), rtol=1e-6)
    assert np.array_equal(found, dropout(ms.Tensor(x), ms.Tensor(keys[2])).asnumpy())
    np.testing.assert_array_equal(dropout(ms.Tensor(x), None).asnumpy(), x)


def test_dropout_masks_look_independent() -> None:
    """Share, neighbours, far places, other steps, micro batches and layers: correlations of 2^18
    bits stay within five deviations.
    """
    rate, count = 0.1, 2**18
    keys = [dropout_keys(make_config(), step, micro) for step in (1, 2, 3) for micro in (0, 1)]
    masks = [keep_by_numpy(count, key[place], rate) for key in keys for place in range(4)]
    limit = 5 / np.sqrt(count)
    for number, kept in enumerate(masks):
        assert abs(kept.mean() - (1 - rate)) < limit * np.sqrt(rate * (1 - rate))
        for distance in (1, 2, 16, 64, 1024, 4096):
            assert abs(np.corrcoef(kept[distance:], kept[:-distance])[0, 1]) < limit * 1.1
        for other in masks[:number]:
            assert abs(np.corrcoef(kept, other)[0, 1]) < limit
    assert len({key.tobytes() for key in keys}) == len(keys)


def test_dropout_reaches_every_place_and_evaluation_none() -> None:
    """A model that drops at one place only differs from one that drops nothing, for each of the
    three rates.
    """
    ids = ms.Tensor(np.random.default_rng(0).integers(0, 101, (2, 16)).astype(np.int32))
    outputs = {}
    for name in (None, "embedding_dropout", "attention_dropout", "hidden_dropout"):
        config = make_config(model__num_layers=1, context__mode=1, **({f"model__{name}": 0.3} if name else {}))
        model = build_model(config, open_device(config))
        tensors = {parameter.name: parameter for parameter in model.get_parameters()}
        fill_weights(tensors, initial_values(config))
        keys = ms.Tensor(dropout_keys(config, 1, 0))
        outputs[name] = model(ids, keys).asnumpy()
    for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
        assert np.abs(outputs[name] - outputs[None]).max() > 0.01
    np.testing.assert_array_equal(model(ids).asnumpy(), outputs[None])  # no keys, no dropout


def test_gelu_written_out_is_the_kernel() -> None:
    x = ms.Tensor(np.linspace(-12, 12, 4001, dtype=np.float32))
    np.testing.assert_allclose(GELU(native=False)(x).asnumpy(), GELU(native=True)(x).asnumpy(), atol=1e-6)


def test_recomputation_changes_no_gradient() -> None:
    """With dropout: the recomputed mask must be the same mask."""
    tokens = np.random.default_rng(0).integers(0, 101, (2, 17)).astype(np.int32)
    found = {}
    for recompute in ("none", "selective", "full"):
        config = make_config(train__recompute=recompute, model__dropout=0.1, model__num_layers=1)
        model = build_model(config, open_device(config))
        tensors = {parameter.name: parameter for parameter in model.get_parameters()}
        fill_weights(tensors, initial_values(config))
        function = ms.jit(ms.value_and_grad(model.loss_sum, None, list(tensors.values())))
        loss, gradients = function(
            ms.Tensor(tokens[:, :-1]), ms.Tensor(tokens[:, 1:]), ms.Tensor(dropout_keys(config, 1, 0))
        )
        found[recompute] = [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    for one, selective, full in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(selective, one)
        np.testing.assert_array_equal(full, one)


def test_attention_of_a_cpu_has_the_gradients_of_the_general_form() -> None:
    """Both in float32 beside float64, with weights near 0 and 1: 3e-6 of the largest entry."""
    config = make_config()
    open_device(config)
    core = CoreAttention(config.model, config.precision, native=False)
    general = CoreAttention(config.model, config.precision, native=False)
    general.written = None
    random = np.random.default_rng(0)
    q, k, v, slope = random.standard_normal((4, 2, 3, 24, 8)) * 3.0
    mask = np.triu(np.full((24, 24), -np.inf, np.float32), 1)
    core.scale = general.scale = ms.Tensor(0.25, ms.float32)
    tensors = [ms.Tensor(array.astype(np.float32)) for array in (q, k, v)]

    def found(cell: ms.nn.Cell) -> list[np.ndarray]:
        def total(q: ms.Tensor, k: ms.Tensor, v: ms.Tensor) -> ms.Tensor:
            y = cell(q, k, v, ms.Tensor(mask), None)
            return (y * ms.Tensor(slope.astype(np.float32))).sum()

        value, gradients = ms.jit(ms.value_and_grad(total, (0, 1, 2)))(*tensors)
        return [value.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]

    scores = q @ k.swapaxes(-1, -2) * 0.25 + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    by_weights = slope @ v.swapaxes(-1, -2)
    by_scores = weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)) * 0.25
    wanted = [
        (weights @ v * slope).sum(),
        by_scores @ k,
        by_scores.swapaxes(-1, -2) @ q,
        weights.swapaxes(-1, -2) @ slope,
    ]
    for cell in (core, general):
        for one, exact in zip(found(cell), wanted, strict=True):
            np.testing.assert_allclose(one, exact, rtol=0, atol=3e-6 * np.abs(exact).max())


COUNT = """
import sys
import numpy as np, mindspore as ms
from mindformers_gpt2.device import open_device
from mindformers_gpt2.model import build_model
from tests.mindformers_gpt2.test_model import make_config
for mode, again in (("none", None), ("selective", None), ("full", 1)):
    config = make_config(
        train__recompute=mode,
        train__recompute_layers=again,
        context__save_graphs=True,
        context__save_graphs_path=f"{sys.argv[1]}/{mode}",
    )
    model = build_model(config, open_device(config))
    tokens = ms.Tensor(np.zeros((2, 16), np.int32))
    ms.jit(ms.value_and_grad(model.loss_sum, None, list(model.get_parameters())))(tokens, tokens)
"""


def test_recomputation_repeats_operators_in_the_compiled_graph(tmp_path: Path) -> None:
    """In MindSpore's own dump of the graph it runs: attention's softmax and gelu once more in each
    of two blocks, with full also five of a block's six matrix products, here of the first block.
    The loss has a softmax of its own.
    """
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MS_DEV_DUMP_IR_PASSES": "execute"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300, env=environ)
    counts = {}
    for mode, blocks in (("none", 0), ("selective", 2), ("full", 1)):
        graph = next(
            path for path in (tmp_path / mode).rglob("*.ir") if re.fullmatch(r"\d+_execute_\d+\.ir", path.name)
        ).read_text()
        counts[mode] = {name: graph.count(f"= PrimFunc_{name}(") for name in ("Softmax", "Sigmoid", "MatMul")}
        # a block that keeps its activations has no general gradient of a softmax
        written = [graph.count(f"= PrimFunc_{name}(") for name in ("SoftmaxBackward", "BiasAdd")]
        assert written == [blocks, 2 - blocks], mode
    assert counts["none"]["Softmax"] == 2 + 1 and counts["none"]["Sigmoid"] == 2
    assert counts["selective"] == counts["none"] | {"Softmax": 5, "Sigmoid": 4}
    assert counts["full"] == {"Softmax": 4, "Sigmoid": 3, "MatMul": counts["none"]["MatMul"] + 5}


class DocumentedKernel(nn.Cell):
    """FlashAttentionScore by the formula and the arguments of its documentation."""

    def __init__(self, *, head_num: int, scale_value: float, input_layout: str, sparse_mode: int) -> None:
        super().__init__()
        assert input_layout == "BNSD"
        self.heads, self.scale, self.mode = head_num, scale_value, sparse_mode

    def construct(self, q: Any, k: Any, v: Any, shift: Any, drop: Any, pad: Any, attn_mask: Any) -> Any:
        length = q.shape[2]
        assert q.shape[1] == self.heads
        assert attn_mask.dtype == ms.uint8
        if self.mode == 2:  # causal: the mask has this size whatever the length
            assert attn_mask.shape == (2048, 2048)
            hidden = attn_mask[:length, :length]
        else:
            assert self.mode == 1
            assert attn_mask.shape == (q.shape[0], 1, length, length)
            hidden = attn_mask
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * self.scale
        weights = ops.softmax(ops.masked_fill(scores, ops.cast(hidden, ms.bool_), -3e38))
        return 0, 0, 0, ops.matmul(weights, v)


@pytest.mark.parametrize("apart", [False, True], ids=["one document", "documents apart"])
def test_it_computes_what_attention_written_out_does(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "FlashAttentionScore", DocumentedKernel)
    changes = {"reset_attention_mask": True, "eod_id": 7} if apart else {}
    config = make_config(data=changes, model__initializer_range=0.3)
    device = open_device(config)
    tokens = np.random.default_rng(0).integers(0, 101, (2, 17)).astype(np.int32)
    tokens[:, [4, 9]] = 7
    ids, targets = ms.Tensor(tokens[:, :-1]), ms.Tensor(tokens[:, 1:])
    results = []
    for fused in (False, True):
        model = build_model(config, device)
        assert all(block.attn.core.fused is None for block in model.h), "a CPU has no kernel"
        if fused:
            for block in model.h:
                block.attn.core.fused = FusedAttention(config.model.num_heads, 8)
        parameters = list(model.get_parameters())
        fill_weights({each.name: each for each in parameters}, initial_values(config))
        step = ms.jit(ms.value_and_grad(model.loss_sum, None, parameters))
        loss, gradients = step(ids, targets)
        results.append([float(loss), *(each.asnumpy() for each in gradients)])
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    largest = max(np.abs(each).max() for each in results[0][1:])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({}, "Ascend910B2", True),
        ({}, "Ascend910A", False),
        ({"precision__compute": "float32"}, "Ascend910B2", False),
        ({"precision__softmax": "float16"}, "Ascend910B2", False),
        ({"model__num_heads": 4}, "Ascend910B2", False),
        ({"model__dropout": 0.1}, "Ascend910B2", False),
        ({"train__fused_attention": False}, "Ascend910B2", False),
    ],
)
def test_where_it_is_taken(changes: dict[str, Any], name: str, expected: bool) -> None:
    usual = {"precision": {"compute": "float16"}, "model__num_heads": 2, "model__dropout": 0.0}
    config = make_config(**(usual | changes))
    npu = MindSporeDevice(kind="npu", index=0, name=name)
    assert takes_fused_attention(config, npu) is expected
    assert not takes_fused_attention(config, MindSporeDevice(kind="cpu", index=0, name="a CPU"))

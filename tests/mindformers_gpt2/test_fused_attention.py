"""Attention by one kernel of an Ascend, with the kernel as its documentation describes it."""

import tests.needs_mindspore  # noqa: F401

# isort: split
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from common.parallel.sharding import initial_values
from mindformers_gpt2 import model as modeling
from mindformers_gpt2.checkpoint import fill_weights
from mindformers_gpt2.device import MindSporeDevice, open_device
from mindformers_gpt2.model import FusedAttention, build_model, takes_fused_attention
from tests.mindformers_gpt2.test_model import make_config


class DocumentedKernel(nn.Cell):
    """FlashAttentionScore by the formula and the arguments of its documentation."""

    def __init__(
        self, *, head_num: int, scale_value: float, input_layout: str, sparse_mode: int
    ) -> None:
        super().__init__()
        assert input_layout == "BNSD"
        self.heads, self.scale, self.mode = head_num, scale_value, sparse_mode

    def construct(
        self, q: Any, k: Any, v: Any, shift: Any, drop: Any, pad: Any, attn_mask: Any
    ) -> Any:
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
def test_it_computes_what_attention_written_out_does(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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

"""Dropout against the same arithmetic in numpy and against its statistics; recomputation against
none; attention by one kernel of an Ascend, with the kernel as its documentation describes it; the loss against torch's.
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
from mindformers_gpt2.loss import ROWS_AT_ONCE, CrossEntropySum, VocabularyShard
from mindformers_gpt2.model import CoreAttention, FusedAttention, build_model, takes_fused_attention
from tests.tiny import tiny_config

ROOT, VOCABULARY = Path(__file__).resolve().parents[2], 101


def make_config(**changes: Any) -> Run:
    return tiny_config(**({"backend": "mindspore"} | changes))


def make_model(config: Run) -> tuple[Any, list[Any]]:
    """A model with the shared initial weights, and its parameters."""
    model = build_model(config, open_device(config))
    parameters = list(model.get_parameters())
    fill_weights({each.name: each for each in parameters}, initial_values(config))
    return model, parameters


def run_with_dumps(program: str, folder: Path, compiler_pass: str) -> None:
    """Run it in a process of its own, which leaves MindSpore's own dumps of graphs after a pass."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MS_DEV_DUMP_IR_PASSES": compiler_pass}
    command = [sys.executable, "-c", program, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300, env=environ)


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
    """Share, neighbours, far places, other steps and layers: correlations of 2^18 bits stay within five deviations."""
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
    """A model that drops at one place only differs from one that drops nothing, for each of the three rates."""
    ids = ms.Tensor(np.random.default_rng(0).integers(0, 101, (2, 16)).astype(np.int32))
    plain, _ = make_model(make_config(model__num_layers=1, context__mode=1))
    for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
        config = make_config(model__num_layers=1, context__mode=1, **{f"model__{name}": 0.3})
        model, _ = make_model(config)
        dropped = model(ids, ms.Tensor(dropout_keys(config, 1, 0))).asnumpy()
        assert np.abs(dropped - plain(ids).asnumpy()).max() > 0.01
        np.testing.assert_array_equal(model(ids).asnumpy(), plain(ids).asnumpy())  # no keys, no dropout


@pytest.mark.parametrize("kind", ["gelu_new", "quick_gelu"])
def test_gelu_written_out_is_the_kernel(kind: str) -> None:
    x = ms.Tensor(np.linspace(-12, 12, 4001, dtype=np.float32))
    written, kernel = (GELU(kind, native=native) for native in (False, True))
    assert written.native is None and kernel.native is not None
    np.testing.assert_allclose(written(x).asnumpy(), kernel(x).asnumpy(), atol=1e-6)


@pytest.mark.long
def test_recomputation_changes_no_gradient() -> None:
    """With dropout: the recomputed mask must be the same mask."""
    tokens = np.random.default_rng(0).integers(0, 101, (2, 17)).astype(np.int32)
    found = {}
    for recompute in ("none", "selective", "full"):
        config = make_config(train__recompute=recompute, model__dropout=0.1, model__num_layers=1)
        model, parameters = make_model(config)
        function = ms.jit(ms.value_and_grad(model.loss_sum, None, parameters))
        loss, gradients = function(*map(ms.Tensor, (tokens[:, :-1], tokens[:, 1:], dropout_keys(config, 1, 0))))
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

    torch = pytest.importorskip("torch")
    exact = [torch.from_numpy(each).requires_grad_() for each in (q, k, v)]
    attended = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, scale=0.25)
    value = (attended * torch.from_numpy(slope)).sum()
    wanted = [each.detach().numpy() for each in (value, *torch.autograd.grad(value, exact))]
    for cell in (core, general):
        for one, other in zip(found(cell), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * np.abs(other).max())


COUNT = """
import sys
import numpy as np, mindspore as ms
from mindformers_gpt2.device import open_device
from mindformers_gpt2.model import build_model
from tests.mindformers_gpt2.test_model import make_config
for mode, again in (("none", None), ("selective", None), ("full", 1)):
    graphs = {"save_graphs": True, "save_graphs_path": f"{sys.argv[1]}/{mode}"}
    config = make_config(train__recompute=mode, train__recompute_layers=again, context=graphs)
    model = build_model(config, open_device(config))
    tokens = ms.Tensor(np.zeros((2, 16), np.int32))
    ms.jit(ms.value_and_grad(model.loss_sum, None, list(model.get_parameters())))(tokens, tokens)
"""


@pytest.mark.long
def test_recomputation_repeats_operators_in_the_compiled_graph(tmp_path: Path) -> None:
    """In MindSpore's own dump of the graph it runs: attention's softmax and gelu once more in each of two blocks, with
    full also five of a block's six matrix products, here of the first block. The loss has a softmax of its own.
    """
    run_with_dumps(COUNT, tmp_path, "execute")
    counts = {}
    for mode, blocks in (("none", 0), ("selective", 2), ("full", 1)):
        path = next(each for each in (tmp_path / mode).rglob("*.ir") if re.fullmatch(r"\d+_execute_\d+", each.stem))
        graph = path.read_text()
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
    tokens = np.random.default_rng(0).integers(0, 101, (2, 17)).astype(np.int32)
    tokens[:, [4, 9]] = 7
    results = []
    for fused in (False, True):
        model, parameters = make_model(config)
        assert all(block.attn.core.fused is None for block in model.h), "a CPU has no kernel"
        for block in model.h if fused else ():
            block.attn.core.fused = FusedAttention(config.model.num_heads, 8)
        step = ms.jit(ms.value_and_grad(model.loss_sum, None, parameters))
        loss, gradients = step(ms.Tensor(tokens[:, :-1]), ms.Tensor(tokens[:, 1:]))
        results.append([float(loss), *(each.asnumpy() for each in gradients)])
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    largest = max(np.abs(each).max() for each in results[0][1:])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6 * largest)


def test_where_it_is_taken() -> None:
    usual = {"precision": {"compute": "float16"}, "model__num_heads": 2, "model__dropout": 0.0}
    others: list[dict[str, Any]] = [{"precision": {}}, {"precision__softmax": "float16"}, {"model__num_heads": 4}]
    others += [{"model__dropout": 0.1}, {"train__fused_attention": False}]
    atlas = MindSporeDevice(kind="npu", index=0, name="Ascend910B2")
    assert takes_fused_attention(make_config(**usual), atlas)
    assert not any(takes_fused_attention(make_config(**(usual | each)), atlas) for each in others)
    for kind, name in (("npu", "Ascend910A"), ("cpu", "a CPU")):
        assert not takes_fused_attention(make_config(**usual), MindSporeDevice(kind=kind, index=0, name=name))


def inputs(rows: int, width: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    # rows from 101 on must not count, whatever they hold
    weight = random.standard_normal((128, 16)).astype(np.float32)
    hidden = random.standard_normal((rows, 16)).astype(np.float32) * width
    return hidden, weight, random.integers(0, VOCABULARY, rows).astype(np.int32)


def ours(*arrays: np.ndarray, factor: float = 1.0, shard: VocabularyShard | None = None) -> tuple[np.ndarray, ...]:
    open_device(make_config())
    cross_entropy_sum = CrossEntropySum(VOCABULARY, shard)
    cross_entropy_sum.masked = bool((arrays[2] < 0).any())

    def loss(hidden: ms.Tensor, weight: ms.Tensor, targets: ms.Tensor) -> ms.Tensor:
        return cross_entropy_sum(hidden, weight, targets)[0] * factor

    value, gradients = ms.jit(ms.value_and_grad(loss, (0, 1)))(*map(ms.Tensor, arrays))
    return value.asnumpy(), *(gradient.asnumpy() for gradient in gradients)


def reference(hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """In float64."""
    torch = pytest.importorskip("torch")
    h, w = (torch.from_numpy(array).double().requires_grad_() for array in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(
        h @ w[:VOCABULARY].t(), torch.from_numpy(targets).long(), ignore_index=-1, reduction="sum"
    )
    loss.backward()
    return loss.detach().numpy(), h.grad.numpy(), w.grad.numpy()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(7, 1.0), (ROWS_AT_ONCE, 1.0), (2 * ROWS_AT_ONCE + 60, 1.0), (50, 60.0)])
def test_loss_and_gradients(rows: int, width: float, masked: bool) -> None:
    """The last case has losses of hundreds of nats, where a softmax has no logarithm. masked: -1 adds nothing."""
    hidden, weight, targets = inputs(rows, width)
    if masked:
        targets[::3] = -1
    expected, own = reference(hidden, weight, targets), ours(hidden, weight, targets)
    assert width == 1.0 or expected[0] / (targets >= 0).sum() > 200
    for found, wanted in zip(own, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert not own[2][VOCABULARY:].any() and not (masked and own[1][::3].any())


def test_float16_keeps_small_gradients() -> None:
    """Slopes are cast to float16 before the loss is divided: 2^-20 of them would round most to nothing."""
    hidden, weight, targets = inputs(40, 1.0)
    _, _, by_weight = ours(hidden.astype(np.float16), weight, targets, factor=2.0**-20)
    _, _, wanted = reference(hidden, weight, targets)
    np.testing.assert_allclose(by_weight * 2.0**20, wanted, atol=2e-2)


@pytest.mark.parametrize("uncounted", [0, 10])
def test_shards_of_the_vocabulary_add_up(monkeypatch: pytest.MonkeyPatch, uncounted: int) -> None:
    """Three ranks one after the other, the last with nothing but padding; what the others would
    send comes from numpy in float64. uncounted: targets that add nothing.
    """
    rows, width = 40, 64
    hidden, weight, targets = inputs(rows, 1.0)
    weight = np.concatenate([weight, weight[:64]])  # (192, 16)
    targets[:uncounted] = -1
    expected = reference(hidden, weight, targets)
    logits = hidden.astype(np.float64) @ weight.T.astype(np.float64)
    logits[:, VOCABULARY:] = -1e30
    sent = []
    for first in range(0, 192, width):
        own, here = logits[:, first : first + width], (targets >= first) & (targets < first + width)
        largest = own.max(1)
        picked = np.where(here, logits[np.arange(rows), targets], 0.0)
        sent.append(np.stack([largest, np.exp(own - largest[:, None]).sum(1), picked]))

    class Gather(ms.nn.Cell):
        def __init__(self, group: None) -> None:
            super().__init__()
            self.others = ms.Tensor(np.stack(sent).astype(np.float32))

        def construct(self, own: ms.Tensor) -> ms.Tensor:
            return self.others + 0.0 * own

    monkeypatch.setattr("mindformers_gpt2.loss.AllGather", Gather)
    by_hidden = np.zeros_like(hidden)
    for first in range(0, 192, width):
        shard = VocabularyShard(group=None, first=first)  # type: ignore[arg-type]
        loss, part, by_weight = ours(hidden, weight[first : first + width], targets, shard=shard)
        by_hidden += part
        np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
        np.testing.assert_allclose(by_weight, expected[2][first : first + width], atol=1e-5 * np.abs(expected[2]).max())
    np.testing.assert_allclose(by_hidden, expected[1], atol=1e-5 * np.abs(expected[1]).max())

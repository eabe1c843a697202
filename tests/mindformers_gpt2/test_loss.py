"""The loss and its gradients against torch's cross-entropy, over several chunks, with padding, and
far from zero.
"""

import tests.needs_both  # noqa: F401

# isort: split
import mindspore as ms
import numpy as np
import pytest
import torch

from mindformers_gpt2.device import select_device
from mindformers_gpt2.loss import ROWS_AT_ONCE, CrossEntropySum, VocabularyShard

VOCABULARY = 101


def inputs(rows: int, width: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    # rows from 101 on must not count, whatever they hold
    weight = random.standard_normal((128, 16)).astype(np.float32)
    return (
        random.standard_normal((rows, 16)).astype(np.float32) * width,
        weight,
        random.integers(0, VOCABULARY, rows).astype(np.int32),
    )


def ours(
    hidden: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    factor: float = 1.0,
    shard: VocabularyShard | None = None,
) -> tuple[np.ndarray, ...]:
    select_device("cpu")
    cross_entropy_sum = CrossEntropySum(VOCABULARY, shard)
    cross_entropy_sum.masked = bool((targets < 0).any())

    def loss(hidden: ms.Tensor, weight: ms.Tensor, targets: ms.Tensor) -> ms.Tensor:
        return cross_entropy_sum(hidden, weight, targets)[0] * factor

    value, gradients = ms.jit(ms.value_and_grad(loss, (0, 1)))(ms.Tensor(hidden), ms.Tensor(weight), ms.Tensor(targets))
    return value.asnumpy(), *(gradient.asnumpy() for gradient in gradients)


def reference(hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """In float64."""
    h, w = (torch.from_numpy(array).double().requires_grad_() for array in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(
        h @ w[:VOCABULARY].t(), torch.from_numpy(targets).long(), ignore_index=-1, reduction="sum"
    )
    loss.backward()
    return loss.detach().numpy(), h.grad.numpy(), w.grad.numpy()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(7, 1.0), (ROWS_AT_ONCE, 1.0), (2 * ROWS_AT_ONCE + 60, 1.0), (50, 60.0)])
def test_loss_and_gradients(rows: int, width: float, masked: bool) -> None:
    """The last case has losses of hundreds of nats, where the logarithm of a softmax would be
    infinite. masked: targets of -1 add nothing.
    """
    hidden, weight, targets = inputs(rows, width)
    if masked:
        targets[::3] = -1
    expected, own = reference(hidden, weight, targets), ours(hidden, weight, targets)
    assert width == 1.0 or expected[0] / (targets >= 0).sum() > 200
    for found, wanted in zip(own, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert not own[2][VOCABULARY:].any() and not (masked and own[1][::3].any())


def test_float16_keeps_small_gradients() -> None:
    """Slopes are cast to float16 before the loss is divided: the other way round 2^-20 would leave
    nothing of most of them.
    """
    hidden, weight, targets = inputs(40, 1.0)
    _, _, by_weight = ours(hidden.astype(np.float16), weight, targets, factor=2.0**-20)
    _, _, wanted = reference(hidden, weight, targets)
    np.testing.assert_allclose(by_weight * 2.0**20, wanted, atol=2e-2)


@pytest.mark.parametrize("uncounted", [0, 10])
def test_shards_of_the_vocabulary_add_up(monkeypatch: pytest.MonkeyPatch, uncounted: int) -> None:
    """Three ranks one after the other, the last with nothing but padding; what the others would
    send comes from numpy in float64. uncounted: targets that add nothing.
    """
    import mindformers_gpt2.loss as module

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

    monkeypatch.setattr(module, "AllGather", Gather)
    by_hidden = np.zeros_like(hidden)
    for first in range(0, 192, width):
        shard = VocabularyShard(group=None, first=first)  # type: ignore[arg-type]
        loss, part, by_weight = ours(hidden, weight[first : first + width], targets, shard=shard)
        by_hidden += part
        np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
        np.testing.assert_allclose(by_weight, expected[2][first : first + width], atol=1e-5 * np.abs(expected[2]).max())
    np.testing.assert_allclose(by_hidden, expected[1], atol=1e-5 * np.abs(expected[1]).max())

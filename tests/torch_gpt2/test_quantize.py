"""Fake quantization against torch's own, and training with it against a plain loop over transformers' model."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from common import quantization as scheme
from common.config.schema import QuantizationConfig
from common.weights.names import EMBEDDING
from tests.reference import hugging_face_model
from tests.torch_gpt2.test_engine import make_config, make_engine, run, token_batches
from torch_gpt2.quantize import FakeQuantize

KINDS: dict[str, dict[str, Any]] = {
    "averages": {},
    "by token": {"activations": "dynamic", "weight_bits": 4},
    "by tensor": {"activations": "abs_max", "weights": "abs_max"},
    "weights only": {"activations": "none", "weight_bits": 3, "skip": ["h.0", "mlp.c_fc"]},
}


@pytest.mark.parametrize("bits", [8, 2])
def test_equals_torch_and_numpy(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(32, 64, generator=generator) * 2
    levels = scheme.activation_levels(bits)
    scale = torch.tensor(1.7 / levels.high)  # many are clipped
    slope = torch.randn(32, 64, generator=generator)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = FakeQuantize.apply(found, scale, levels)
    theirs = torch.fake_quantize_per_tensor_affine(expected, scale.item(), 0, *levels)
    assert torch.equal(ours, theirs)
    numbers = scheme.quantize(x.numpy(), scale.numpy(), levels) * scale.numpy()
    assert np.array_equal(numbers, ours.detach())
    ours.backward(slope)
    theirs.backward(slope)
    assert found.grad is not None and expected.grad is not None
    assert torch.equal(found.grad, expected.grad) and bool((found.grad == 0).any())
    nothing = torch.from_numpy(scheme.scale_of(np.zeros((32, 1), np.float32), levels.high))
    assert not FakeQuantize.apply(torch.zeros_like(x), nothing, levels).any(), "a channel keeps its zeros"


class PlainQuantizer:
    """The scheme in another form, over transformers' layers and torch's own kernels."""

    def __init__(self, config: QuantizationConfig, model: torch.nn.Module) -> None:
        self.config, self.weight = config, 0.0
        self.sums, self.maxima = dict[str, float](), dict[str, float]()
        skip = tuple(config.skip)
        for name, module in model.named_modules():
            short = name.removeprefix("transformer.")
            if isinstance(module, Conv1D) and not (short.startswith(skip) or short.endswith(skip)):
                module.forward = partial(self.forward, module, short)  # type: ignore[method-assign]

    def forward(self, module: Any, name: str, x: Tensor) -> Tensor:
        high = 2 ** (self.config.weight_bits - 1) - 1
        scales = module.weight.detach().abs().amax(0) / high
        if self.config.weights == "abs_max":
            parts = scales.chunk(3 if name.endswith("c_attn") else 1)
            scales = torch.cat([part.max().expand_as(part) for part in parts])
        weight = by_channel(module.weight, scales, 1, -high, high)
        return self.input(x.flatten(0, 1), name).view_as(x) @ weight + module.bias

    def input(self, x: Tensor, name: str) -> Tensor:
        kind, high = self.config.activations, 2 ** (self.config.activation_bits - 1) - 1
        if kind == "none":
            return x
        if kind == "dynamic":
            return by_channel(x, x.detach().abs().amax(1) / high, 0, -high - 1, high)
        maximum = float(x.detach().abs().max())
        if kind == "moving_average_abs_max":
            self.maxima[name] = max(maximum, self.maxima.get(name, 0.0))
            if not self.weight:
                return x
            maximum = self.sums[name] / self.weight
        scale = float(np.float32(maximum) / np.float32(high))
        return torch.fake_quantize_per_tensor_affine(x, scale, 0, -high - 1, high)

    def end_step(self) -> None:
        self.weight = 0.9 * self.weight + 1
        self.sums = {name: 0.9 * self.sums.get(name, 0.0) + m for name, m in self.maxima.items()}
        self.maxima = {}


def by_channel(x: Tensor, scales: Tensor, axis: int, low: int, high: int) -> Tensor:
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scales, zeros, axis, low, high)


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_a_plain_loop(kind: str) -> None:
    """Plain SGD of whole batches; by tensor a micro batch is the whole batch."""
    batch = {"train__micro_batch_size": 6} if kind == "by tensor" else {}
    config = make_config(quantization=KINDS[kind], optimizer__momentum=0.0, model__initializer_range=0.2, **batch)
    engine = make_engine(config)
    # a sum in another order rounds a few activations to the next step, which each update amplifies:
    # seen 2e-5 after two updates, and 1e-4 after four where other kernels are faster
    batches = token_batches(config)[:3]
    start = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    losses, norms = run(engine, batches)

    model = hugging_face_model(config.model, start)
    assert config.quantization is not None
    plain = PlainQuantizer(config.quantization, model)
    unrounded = hugging_face_model(config.model, start)
    expected, without = [], []
    for index, tokens in enumerate(batches):
        ids = torch.from_numpy(tokens.astype(np.int64))

        def loss_of(model: Any, ids: Tensor = ids) -> Tensor:
            logits = model(ids[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

        if index == 0:  # the first batch is measured before it is trained on
            with torch.no_grad():
                loss_of(model)
            plain.end_step()
        loss, parameters = loss_of(model), [*model.parameters()]
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.nn.utils.get_total_norm(gradients)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= config.optimizer.learning_rate * gradient
        plain.end_step()
        expected.append((loss.item(), norm.item()))
        without.append(loss_of(unrounded).item())
    assert np.allclose([*zip(losses, norms, strict=True)], expected, rtol=1e-4)
    assert abs(losses[0] - without[0]) > 1e-4


def test_frozen_embeddings_keep_their_values() -> None:
    config = make_config(quantization={"freeze_embedding": True}, optimizer__weight_decay=0.1)
    engine = make_engine(config)
    before = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    run(engine, token_batches(config)[:2])
    after = dict(engine.model.named_parameters())
    same = {name for name, value in before.items() if torch.equal(after[name], value)}
    assert same == {EMBEDDING, "wpe.weight"}


def test_a_skipped_step_and_infinite_activations_set_no_scale() -> None:
    config = make_config(quantization={})
    engine, batches = make_engine(config), token_batches(config)
    assert engine.quantization is not None
    bias: Any = engine.model.h[0].attn.c_proj.bias  # type: ignore[union-attr]
    bias.data.fill_(float("inf"))
    run(engine, batches[:1])
    assert not engine.quantization.scales.is_known
    bias.data.zero_()
    losses, _ = run(engine, batches[1:3])
    state = engine.quantization.scales.state()
    assert engine.quantization.scales.is_known and np.isfinite(losses).all()
    bias.data.fill_(float("nan"))
    run(engine, batches[3:4])
    assert engine.quantization.scales.state() == state

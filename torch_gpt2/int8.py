"""Model with 8-bit weights and integer products.

``common.weights.pieces`` says how the weights are stored and what a layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.config.resolved import ResolvedModel
from common.config.schema import PrecisionConfig
from common.log import LOG
from common.parallel.run import UNCOUNTED, Run
from common.parallel.sharding import slice_of
from common.quantization import activation_levels
from common.training.opened_checkpoint import Checkpoint
from common.weights.names import EMBEDDING, parameter_shapes
from common.weights.pieces import LayerScheme
from torch_gpt2.checkpoint import fill_weights
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2, Linear, build_model, set_packing
from torch_gpt2.private_api import PackedIntegers, multiplies_integers
from torch_gpt2.products import Multiply, Product, joined

_LEVELS = activation_levels(8)
_MIN_SCALE = torch.finfo(torch.float32).tiny


class Int8Linear(nn.Module):
    """Linear layer with 8-bit weights and inputs, whose products are summed in int32.

    If the CPU has no exact integer product, the integers are held and multiplied as float32.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, input_scale: float | None) -> None:
        """Create a layer. weight: int8 (out, in). scales: float32 (out,). input_scale: see LayerScheme."""
        super().__init__()
        self.weight = weight if multiplies_integers() else weight.float()
        self.scales = scales
        self.bias = bias
        self.input_scale = input_scale
        if input_scale is not None:
            self._inverse = float(np.float32(1) / np.float32(input_scale))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), of the type of x."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.input_scale is None:
            scale = rows.abs().amax(-1, keepdim=True).div_(_LEVELS.high).clamp_min_(_MIN_SCALE)
            integers = (rows * scale.reciprocal()).round_()
            scales = scale * self.scales  # (rows, out)
        else:
            integers = (rows * self._inverse).round_().clamp_(*_LEVELS)
            scales = self.input_scale * self.scales
        held = self.weight.dtype == torch.int8
        y = (self._packed.product(integers) if held else F.linear(integers, self.weight)).mul_(scales)
        if self.bias is not None:
            y += self.bias.float()
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def packed(self) -> Multiply:
        """Return this layer's product, and keep its integers only as that reads them."""
        if self.weight.dtype == torch.int8 and self.weight.numel():
            _ = self._packed
            self.weight = torch.empty(0, dtype=torch.int8)
        return self.forward  # without the overhead of Module.__call__

    @cached_property
    def _packed(self) -> PackedIntegers:
        return PackedIntegers(self.weight)


class Int8Embedding(nn.Module):
    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        """Create an embedding. weight: int8 (tokens, width). scales: float32 (tokens,)."""
        super().__init__()
        self.weight = weight
        self.scales = scales

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows (..., width) in float32 of ids (...)."""
        return self.weight[ids] * self.scales[ids, None]


class Int8GPT2(GPT2):
    """Model for evaluation and generation only. Layers without 8-bit weights stay as they are."""

    def __init__(self, config: ResolvedModel, precision: PrecisionConfig, vocab_rows: int) -> None:
        super().__init__(config, precision, vocab_rows)
        self.head: Int8Linear | None = None
        """The token table as a layer; None if it is float."""

    def replace(self, name: str, integers: Tensor, scheme: LayerScheme) -> None:
        """Replace the layer of the parameter ``name`` by one with 8-bit weights."""
        scales = torch.from_numpy(scheme.scales)
        if name == EMBEDDING:
            self.wte = Int8Embedding(integers, scales)  # type: ignore[assignment]
            self.head = Int8Linear(integers, scales, None, scheme.input_scale)
            return
        layer, _, own = name.removesuffix(".weight").rpartition(".")
        parent = self.get_submodule(layer)
        bias = getattr(parent, own).bias
        setattr(parent, own, Int8Linear(integers, scales, bias, scheme.input_scale))

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self.head is None:
            return super().loss_of(hidden, targets)
        rows, wanted = hidden.flatten(0, 1), targets.flatten()
        total = torch.zeros((), device=hidden.device)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            total += F.cross_entropy(self.logits(rows[part]), wanted[part], ignore_index=UNCOUNTED, reduction="sum")
        return total

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) if self.head is None else self.head(hidden).float()


def load_model(config: Run, device: TorchDevice, checkpoint: Checkpoint) -> GPT2:
    """Return the model with the weights of a checkpoint. Raises CheckpointError.

    It computes with integers if the weights have 8 bits and the device has integer products.
    """
    integer = load_integer_model(config, device, checkpoint)
    if integer is not None:
        return integer
    model = build_model(config, device)
    fill_weights(dict(model.named_parameters()), checkpoint.weights(config.model))
    return model


def load_integer_model(config: Run, device: TorchDevice, checkpoint: Checkpoint) -> GPT2 | None:
    """Return the model of a folder with 8-bit weights. Raises CheckpointError.

    None for float32 weights, and for devices and layouts without integer products, which load the weights as float32.
    """
    if device.kind != "cpu" or config.topology.world_size > 1:
        return None
    model: Int8GPT2 | None = None
    for name, integers, scheme in checkpoint.quantized(config.model):
        if model is None:
            with torch.device("meta"):
                model = Int8GPT2(config.model, config.precision, config.vocab_rows)
            model.to(DTYPES[config.precision.parameters])
        model.replace(name, torch.from_numpy(integers), scheme)
    if model is None:
        return None
    if not multiplies_integers():
        LOG.warning(
            f"{checkpoint}: this processor has no exact product of 8 bits (VNNI); its integers"
            " are multiplied as float32, which is as slow as a model in float32"
        )
    set_packing(model, config, device)
    model.to_empty(device="cpu")
    shapes = parameter_shapes(config.model)
    floats = dict(model.named_parameters())
    pieces = {name: slice_of(name, shapes[name]) for name in floats}
    fill_weights(floats, checkpoint.weights(config.model, pieces))
    return model.eval()


def product_of(layers: Sequence[Linear | Int8Linear], dtype: torch.dtype) -> Multiply:
    """Return the product of layers with a common input, with their outputs side by side."""
    floats = [layer for layer in layers if isinstance(layer, Linear)]
    integers = [layer for layer in layers if isinstance(layer, Int8Linear)]
    if not integers:
        weights, biases = ([getattr(layer, part) for layer in floats] for part in ("weight", "bias"))
        return Product(weights, biases, dtype)
    if len(layers) == 1:
        return integers[0].packed()
    if floats or len({layer.input_scale for layer in integers}) > 1:
        products = [product_of([layer], dtype) for layer in layers]
        return lambda x: torch.cat([product(x) for product in products], -1)
    weight, scales = (joined([getattr(layer, part) for layer in integers]) for part in ("weight", "scales"))
    biases = [layer.bias.detach() for layer in integers if layer.bias is not None]
    bias = joined(biases) if biases else None
    return Int8Linear(weight, scales, bias, integers[0].input_scale).packed()


def head_product(model: GPT2) -> Multiply:
    """Return the product with the token table, cut to the true vocabulary."""
    if isinstance(model, Int8GPT2) and model.head is not None:
        return product_of([model.head], model.compute_dtype)
    table = model.wte.weight[: model.config.vocab_size]
    return Product([table], [], model.compute_dtype)

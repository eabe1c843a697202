"""Tensor and sequence parallel, applied to a model from outside.

Sources: Megatron-LM, arXiv 1909.08053 section 3 and 2205.05198 section 4.2. Between the split regions every rank of the
group has all activations (B, T, C); with sequence parallel it has (B, T / group, C). At the entry of a region its input
is copied or gathered. At the exit its partial results are summed, or summed and scattered.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from common.parallel.sharding import Role, local_shape, role_of
from torch_gpt2.device import TorchDevice
from torch_gpt2.loss import VocabularyShard
from torch_gpt2.model import GPT2, Attention, Block, LayerNorm, Linear
from torch_gpt2.parallel.world import gather_parts
from torch_gpt2.private_api import enable_symmetric_memory

# torch 2.13 has a new name for it
_sum_parts: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Ranks that share every layer, and the index of this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence: bool
    asynchronous: bool = False
    """Whether the compiler joins gathers and scatters with the products beside them."""

    def enter(self, x: Tensor) -> Tensor:
        """Enter a region whose weights are split: return whole activations (B, T, C) on every rank."""
        out: Tensor = (_Gather if self.sequence else _Copy).apply(x, self.group)
        return out

    def leave(self, x: Tensor) -> Tensor:
        """Leave a region: return the sum of the ranks' partial results.

        With sequence parallel it is this rank's part of the sum.
        """
        out: Tensor = (_Scatter if self.sequence else _Sum).apply(x, self.group)
        return out

    def local_shard(self, positions: Tensor) -> Tensor:
        """Return the positions, out of (T,) or (B, T), whose activations this rank has between the regions."""
        return positions.chunk(self.size, -1)[self.rank] if self.sequence else positions


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out.view_as(out)  # a new tensor, or torch 2.11's compiler loses its gradient


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (B, T / group, C) of each rank into (B, T, C)."""
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    gather_parts(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(group.size()), 1)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's (B, T / group, C) of the sum of (B, T, C) over the ranks."""
    parts = torch.cat(x.chunk(group.size(), 1))
    out = parts.new_empty((x.shape[0], *parts.shape[1:]))
    _sum_parts(out, parts, group=group)
    return out.view_as(out)  # as above


def _region(enter: Callable[..., Tensor], leave: Callable[..., Tensor]) -> Any:
    """Return a function of autograd: ``enter`` of activations and group, ``leave`` of the gradient and the group."""

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return enter(x, group)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return leave(grads[0], ctx.group), None

    return Region


_Copy = _region(lambda x, _: x.view_as(x), _all_reduce)
_Sum = _region(_all_reduce, lambda gradient, _: gradient)
_Gather = _region(_all_gather, _reduce_scatter)
_Scatter = _region(_reduce_scatter, _all_gather)


class RowLinear(Linear):
    """Linear layer with weights (out, in / group). Results are summed over the group before the bias is added.

    Every rank has the whole bias.
    """

    tensor: TensorGroup

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return self.tensor.leave(F.linear(*self.operands(x))) + self.bias.to(x.dtype)


class ColumnLinear(Linear):
    """Linear layer with weights (out / group, in) that adds its bias after the product.

    torch's compiler joins a gather only with products without a bias.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return F.linear(*self.operands(x)) + self.bias.to(x.dtype)


class VocabularyEmbedding(nn.Embedding):
    """Embedding with the rows of this rank's tokens.

    Tokens of other ranks give zero, and the sum over the group has all rows.
    """

    tensor: TensorGroup

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.tensor.rank * self.num_embeddings
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tensor.leave(found.masked_fill(elsewhere[..., None], 0.0))


def split_model(model: GPT2, tensor: TensorGroup, device: TorchDevice) -> None:
    """Replace each parameter of a model on the meta device by this rank's part, and connect the regions.

    Modules that compute differently get another class.
    """
    for name, module in model.named_modules():
        for part, parameter in list(module.named_parameters(recurse=False)):
            shape = local_shape(f"{name}.{part}", tuple(parameter.shape), tensor.size)
            setattr(module, part, nn.Parameter(parameter.new_empty(shape)))
        if isinstance(module, nn.Linear):
            layer: Any = module
            layer.out_features, layer.in_features = layer.weight.shape
            if role_of(f"{name}.weight") is Role.ROW:
                layer.__class__, layer.tensor = RowLinear, tensor
            elif tensor.asynchronous:
                layer.__class__ = ColumnLinear
        elif isinstance(module, nn.Embedding) and role_of(f"{name}.weight") is Role.VOCABULARY:
            layer = module
            layer.__class__, layer.tensor = VocabularyEmbedding, tensor
            layer.num_embeddings = len(layer.weight)
    for block in model.h:
        assert isinstance(block, Block)
        for region in (block.attn, block.mlp):
            region.register_forward_pre_hook(lambda _, inputs: (tensor.enter(inputs[0]), *inputs[1:]))
        if tensor.asynchronous:
            block.attn.project = types.MethodType(  # type: ignore[method-assign]
                _project_as_one, block.attn
            )
        if not tensor.sequence and model.config.attention_dropout:
            _draw_own_masks(block.attn, tensor.rank, device)
    if tensor.asynchronous:
        enable_symmetric_memory(tensor.group)
    if hasattr(model, "wpe"):
        model.wpe.register_forward_pre_hook(lambda _, inputs: (tensor.local_shard(inputs[0]),))
    if isinstance(model.ln_f, LayerNorm):
        model.ln_f.register_forward_hook(lambda _, __, output: tensor.enter(output))
    if hasattr(model, "wte"):
        model.shard = VocabularyShard(group=tensor.group, first=tensor.rank * model.wte.num_embeddings)


def _project_as_one(attention: Attention, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values by one product, whose gradient is one product too.

    The compiler joins a scatter with one product, not with a sum of three.
    """
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([layer.weight.to(x.dtype) for layer in layers])
    bias = torch.cat([layer.bias.to(x.dtype) for layer in layers])
    return (F.linear(x, weight) + bias).chunk(3, -1)


def _draw_own_masks(attention: nn.Module, rank: int, device: TorchDevice) -> None:
    """Draw different dropout masks for the heads of each rank, and equal masks elsewhere.

    The heads are split, but the activations between the regions are not. The heads' generator is seeded by a draw from
    the CPU's generator, which is equal on all ranks of the group. Recomputation restores that generator before it runs
    a block again, so it repeats the draw. Compilation leaves this out: it would break the graph at each of these lines.
    """
    attend: Callable[..., Tensor] = attention.attend  # type: ignore[assignment]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend_with_own_masks(*tensors: Any) -> Tensor:
        if not attention.training:
            return attend(*tensors)
        drawn = int(torch.randint(2**62, ()))
        before = device.rng_state()
        device.seed((drawn + rank * 0x9E3779B97F4A7C15) % 2**63)
        out = attend(*tensors)
        device.set_rng_state(before)
        return out

    attention.attend = attend_with_own_masks

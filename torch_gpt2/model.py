"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, gelu (tanh form), head tied to the token embedding.

Shapes: B sequences, T tokens, C hidden_size, nh heads, hs = C / nh. Parallelism is applied from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.accelerators import Hardware
from common.config.resolved import ResolvedModel
from common.config.schema import PrecisionConfig
from common.parallel.kernels import keeps_no_scores
from common.parallel.run import Packing, Run
from torch_gpt2.data import BlockAttention, document_mask, document_numbers, document_positions
from torch_gpt2.device import DTYPES, TorchDevice, attention_mask
from torch_gpt2.loss import ROWS_AT_ONCE, VocabularyShard, cross_entropy_sum
from torch_gpt2.offload import HostMemory


class Linear(nn.Linear):
    """Computes in the type of its input, whatever type the weights are held in."""

    quantizer: Any = None
    """Object with ``input`` and ``weight``, which round these to few bits."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        x, weight = self.operands(x)
        return F.linear(x, weight, self.bias.to(x.dtype))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input and the weight as they are multiplied."""
        weight: Tensor = self.weight
        if self.quantizer is not None:
            x, weight = self.quantizer.input(x), self.quantizer.weight(weight)
        return x, weight.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Computes in ``norm_dtype`` and returns the type of its input."""

    def __init__(self, size: int, epsilon: float, norm_dtype: torch.dtype) -> None:
        super().__init__(size, epsilon)
        self.norm_dtype = norm_dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(self.norm_dtype), self.bias.to(self.norm_dtype)
        return F.layer_norm(x.to(self.norm_dtype), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ResolvedModel, precision: PrecisionConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.dropout = config.attention_dropout or 0.0
        self.softmax_dtype = DTYPES[precision.softmax]
        self.recompute = False
        self.fused = True
        self.blocked: BlockAttention | None = None
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.c_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Attend within a window. mask: None, or what ``attend`` takes."""
        heads = (*x.shape[:2], -1, self.head_size)
        # (B, nh, T, hs)
        q, k, v = (y.view(heads).transpose(1, 2) for y in self.project(x))
        y = _maybe_recompute(self.recompute, self.attend, q, k, v, mask)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, T, C) of an input (B, T, C)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        """Causal attention of queries that are all the positions of the keys, or the last ones.

        mask: (..., T, K), as ``attention_mask`` returns it. Of several queries that are not all the
        positions it hides what comes later. With ``blocked`` it is that one's mask instead.
        """
        if self.blocked is not None and mask is not None:
            return self.blocked.attend(q, k, v, block_mask=mask)
        assert q.shape[2] in (1, k.shape[2]) or mask is not None
        dropout = self.dropout if self.training else 0.0
        causal = q.shape[2] > 1 and mask is None
        if self.fused and self.softmax_dtype == torch.float32:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        # a softmax below float32 has no fused kernel: write it out
        q = q / math.sqrt(self.head_size)  # before the product, which float16 could not hold
        scores = (q @ k.transpose(-2, -1)).to(self.softmax_dtype)  # (B, nh, T, T)
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask.to(self.softmax_dtype)
        return F.dropout(scores.softmax(-1).to(v.dtype), dropout) @ v


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": _quick_gelu,
}


class MLP(nn.Module):
    def __init__(self, config: ResolvedModel) -> None:
        super().__init__()
        self.recompute = False
        self.activation = _ACTIVATIONS[config.activation]
        self.c_fc = Linear(config.hidden_size, config.ffn_hidden_size)
        self.c_proj = Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _maybe_recompute(self.recompute, self.contract, self.c_fc(x))

    def contract(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.activation(x))
        return out


class Block(nn.Module):
    def __init__(self, config: ResolvedModel, precision: PrecisionConfig) -> None:
        super().__init__()
        norm = (config.hidden_size, config.layer_norm_epsilon, DTYPES[precision.layer_norm])
        self.dropout = config.hidden_dropout or 0.0
        self.recompute = False
        self.ln_1 = LayerNorm(*norm)
        self.attn = Attention(config, precision)
        self.ln_2 = LayerNorm(*norm)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        x = x + F.dropout(self.attn(self.ln_1(x), mask), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class GPT2(nn.Module):
    """``vocab_rows`` is the padded vocabulary: the rows of the embedding table."""

    def __init__(self, config: ResolvedModel, precision: PrecisionConfig, vocab_rows: int) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = DTYPES[precision.compute]
        self.dropout = config.embedding_dropout or 0.0
        self.host_memory: HostMemory | None = None
        self.loss_rows = ROWS_AT_ONCE
        self.shard: VocabularyShard | None = None
        self.float8_head = precision.float8_head
        self.packing: Packing | None = None
        self.blocked: BlockAttention | None = None
        self.wte = nn.Embedding(vocab_rows, config.hidden_size)
        self.wpe = nn.Embedding(config.max_positions, config.hidden_size)
        self.h = nn.ModuleList(Block(config, precision) for _ in range(config.num_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon, DTYPES[precision.layer_norm])

    def forward(self, ids: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, C) after the last layer norm of token ids (B, T).

        tokens: the ids again, to keep the documents among them apart as ``packing`` says. A later
        stage of a pipeline has hidden states in the place of the first ids.
        """
        mask: Any = None
        if tokens is not None and self.packing is not None and self.packing.attention:
            documents = document_numbers(tokens, self.packing.eod)
            if self.blocked is not None:
                mask = self.blocked.mask(documents)
            else:
                mask = attention_mask(document_mask(documents), self.compute_dtype)
        hidden: Tensor = self.ln_f(self.blocks(self.begin(ids, tokens), mask))
        return hidden

    def begin(self, ids: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Input of the first block: (B, T) -> (B, T, C)."""
        if tokens is not None and self.packing is not None and self.packing.positions:
            positions = document_positions(tokens, self.packing.eod)
        else:
            positions = torch.arange(ids.shape[1], device=ids.device)
        return F.dropout(self.embed(ids, positions), self.dropout, self.training)

    def blocks(self, x: Tensor, mask: Any = None) -> Tensor:
        memory = self.host_memory if torch.is_grad_enabled() else None
        for block in self.h:
            with nullcontext() if memory is None else memory.of_block(block, (mask,)):
                x = _maybe_recompute(bool(block.recompute), block, x, mask)
        return x

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token and position embeddings (..., T, C) in the type of the computation."""
        x: Tensor = self.wte(ids) + self.wpe(positions)
        return x.to(self.compute_dtype)

    def loss_sum(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Sum over (B, T) of the cross-entropy of the next tokens, float32 scalar, nats.

        Targets that are UNCOUNTED add nothing, if ``packing`` masks the loss.
        """
        separates = self.packing is not None and self.packing.separates
        return self.loss_of(self(ids, ids) if separates else self(ids), targets)

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy computed from the final hidden states (B, T, C)."""
        return cross_entropy_sum(
            hidden.flatten(0, 1),
            self.wte.weight,
            targets.flatten(),
            self.config.vocab_size,
            self.shard,
            rows=self.loss_rows,
            masked=self.packing is not None and bool(self.packing.masks_loss),
            float8=self.float8_head,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the true vocabulary, float32: (..., C) -> (..., vocab_size)."""
        return F.linear(hidden, self.wte.weight[: self.config.vocab_size].to(hidden.dtype)).float()


def build_model(config: Run, device: TorchDevice) -> GPT2:
    """Build the model on its device, with weights not yet filled in."""
    with torch.device("meta"):
        model = GPT2(config.model, config.precision, config.vocab_rows)
    set_fused_attention(model, config)
    set_recompute(model, config.train.recompute, config.train.recompute_layers)
    return model.to(DTYPES[config.precision.parameters]).to_empty(device=device.torch_device)


def attention_kernel(config: Run, device: TorchDevice) -> str:
    """Return what computes attention, for the log."""
    packing = config.packing
    if packing is not None and packing.attention and BlockAttention.suits(config, device):
        return "FlexAttention"
    fused = keeps_no_scores(config, Hardware(kind=device.kind, name=device.name))
    return "scaled_dot_product_attention" if fused else "written out"


def set_fused_attention(model: GPT2, config: Run) -> None:
    """Let attention run as one kernel, which is torch's choice for the device, or written out."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused = config.train.fused_attention


def set_packing(model: GPT2, config: Run, device: TorchDevice) -> None:
    """Let the model keep documents apart as the run's data ask for.

    Attention does so by blocks where torch generates kernels for that, which have no dropout.
    """
    model.packing = config.packing
    if config.packing is None or not config.packing.attention:
        return
    if BlockAttention.suits(config, device):
        model.blocked = BlockAttention(fused=True)
        for module in model.modules():
            if isinstance(module, Attention):
                module.blocked = model.blocked


def set_recompute(model: GPT2, mode: str, layers: int | None = None) -> None:
    """Recompute whole blocks in the backward pass (full), or attention and the MLP's wide part (selective), or nothing
    (none).

    layers: number of blocks of this part of the model that recompute, from its first one; all of them if None.
    """
    for number, block in enumerate(model.h):
        chosen = mode if layers is None or number < layers else "none"
        for module in block.modules():
            if isinstance(module, Block):
                module.recompute = chosen == "full"
            elif isinstance(module, Attention | MLP):
                module.recompute = chosen == "selective"


def set_offload(model: GPT2, config: Run, device: TorchDevice) -> None:
    """Keep the activations of blocks in pinned memory of the host, if the run asks for it."""
    if config.train.offload_activations:
        model.host_memory = HostMemory(pinned=device.kind != "cpu")


def round_linear_layers(model: GPT2) -> None:
    """Hold the weights of linear layers in the type of the computation, which rounds them."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.to(model.compute_dtype)


def _maybe_recompute(recompute: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    if recompute and torch.is_grad_enabled():
        result: Tensor = checkpoint(function, *args, use_reentrant=False)
        return result
    return function(*args)

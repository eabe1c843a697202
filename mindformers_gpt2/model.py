"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, gelu (tanh form), head tied to the token embedding.

Shapes: B sequences, T tokens, C hidden_size, nh heads, hs = C / nh. Parallelism is applied from outside.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import FlashAttentionScore

from common.config.resolved import ResolvedModel
from common.config.schema import PrecisionConfig, TrainConfig
from common.parallel.kernels import has_attention_kernel, suits_attention_kernel
from common.parallel.run import Run
from mindformers_gpt2.data import document_numbers, document_positions
from mindformers_gpt2.device import DTYPES, MindSporeDevice
from mindformers_gpt2.layers import GELU, Dropout, Embedding, empty
from mindformers_gpt2.loss import CrossEntropySum


class Linear(nn.Cell):
    """Computes in the type of its input, whatever type the weights are held in. weight: (out, in)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = empty("weight", (out_features, in_features))
        self.bias = empty("bias", (out_features,))
        self.matmul = ops.MatMul(transpose_b=True)
        self.add = ops.Add()
        self.quantizer: Any = None
        """A Cell with ``input`` and ``weight``, which round these to few bits."""

    def construct(self, x: Tensor) -> Tensor:
        shape = x.shape
        product = self.matmul(*self.operands(x))
        return self.add(product, ops.cast(self.bias, x.dtype)).reshape((*shape[:-1], self.out_features))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input (N, in) and the weight as they are multiplied."""
        weight = self.weight
        if self.quantizer is not None:
            x, weight = self.quantizer.input(x), self.quantizer.weight(weight)
        return x.reshape((-1, self.in_features)), ops.cast(weight, x.dtype)


class LayerNorm(nn.Cell):
    """Computes in ``norm_dtype`` and returns the type of its input."""

    def __init__(self, size: int, epsilon: float, norm_dtype: ms.Type) -> None:
        super().__init__()
        self.norm_dtype = norm_dtype
        self.weight = empty("weight", (size,))
        self.bias = empty("bias", (size,))
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=epsilon)

    def construct(self, x: Tensor) -> Tensor:
        weight, bias = ops.cast(self.weight, self.norm_dtype), ops.cast(self.bias, self.norm_dtype)
        return ops.cast(self.layer_norm(ops.cast(x, self.norm_dtype), weight, bias)[0], x.dtype)


class CoreAttention(nn.Cell):
    """Softmax of the scaled products of queries and keys, applied to the values."""

    def __init__(self, config: ResolvedModel, precision: PrecisionConfig, *, native: bool) -> None:
        super().__init__()
        self.scale = Tensor(1.0 / math.sqrt(config.hidden_size // config.num_heads), DTYPES[precision.compute])
        self.softmax_dtype = DTYPES[precision.softmax]
        self.multiply = ops.Mul()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.add = ops.Add()
        self.softmax = ops.Softmax(-1)
        self.dropout = Dropout(config.attention_dropout or 0.0, native)
        self.mix = ops.BatchMatMul()
        self.fused: FusedAttention | None = None
        # its backward pass has an operand that is not exact in half precision
        self.written: WrittenAttention | None = (
            WrittenAttention() if not native and precision.compute == precision.softmax == "float32" else None
        )

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        if self.fused is not None and q.shape[2] == k.shape[2]:
            return self.fused(q, k, v, mask)
        drops = key is not None and self.dropout.rate > 0.0
        if self.written is not None and mask.ndim == 2 and not drops:
            return self.written(self.multiply(q, self.scale), k, v, mask)[0]
        # scaled before, for float16's sake
        scores = ops.cast(self.scores(self.multiply(q, self.scale), k), self.softmax_dtype)
        weights = ops.cast(self.softmax(self.add(scores, mask)), v.dtype)
        return self.mix(self.dropout(weights, key), v)  # (B, nh, T, hs)


class WrittenAttention(nn.Cell):
    """Float32 attention without dropout, in operators that are fast on a CPU.

    There a BiasAdd takes a seventh of the time of adding a smaller tensor, and sums over the keys
    are slow. The gradient of the scores is P (dY V^T - d), P being the weights and Y the output.
    Its d is the sum of P (dY V^T) over the keys. It equals the sum of Y dY over a head, which is
    shorter, and the product with one more column subtracts it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.mix_back = ops.BatchMatMul(transpose_a=True)
        self.add, self.softmax, self.multiply = ops.BiasAdd(), ops.Softmax(-1), ops.Mul()
        self.sum, self.negate = ops.ReduceSum(keep_dims=True), ops.Neg()
        self.concat, self.reshape, self.ones = ops.Concat(-1), ops.Reshape(), ops.OnesLike()

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attend with scaled queries, (B, nh, T, hs) each. mask: (T, T), added to the scores.
        Returns the output and the weights.
        """
        scores = self.scores(q, k)
        shape = scores.shape
        flat = self.reshape(scores, (shape[0] * shape[1], shape[2] * shape[3]))
        masked = self.add(flat, self.reshape(mask, (shape[2] * shape[3],)))
        weights = self.softmax(self.reshape(masked, shape))
        return self.mix(weights, v), weights

    def bprop(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: tuple[Tensor, Tensor], slope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        y, weights = out
        dy = slope[0]
        d = self.sum(self.multiply(y, dy), -1)
        difference = self.scores(self.concat((dy, self.negate(d))), self.concat((v, self.ones(d))))
        by_scores = self.multiply(weights, difference)
        return (self.mix(by_scores, k), self.mix_back(by_scores, q), self.mix_back(weights, dy), ops.zeros_like(mask))


class FusedAttention(nn.Cell):
    """Attention by one kernel of an Ascend, which never holds the (T, T) scores.

    Its softmax is float32. It takes half precision, heads whose size is a multiple of 16, and no
    dropout. heads: those of one device; all heads where the compiler splits operators.
    """

    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.causal, self.masked = (
            FlashAttentionScore(
                head_num=heads, scale_value=1.0 / math.sqrt(head_size), input_layout="BNSD", sparse_mode=mode
            )
            for mode in (_CAUSAL, _WHOLE_MASK)
        )
        self.later = _later_tokens()

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend within a window, (B, nh, T, hs) each. A mask (B, 1, T, T) hides pairs of tokens;
        a mask (T, T) says nothing but that attention is causal.
        """
        if mask.ndim == 2:
            return self.causal(q, k, v, None, None, None, self.later)[3]
        return self.masked(q, k, v, None, None, None, ops.cast(mask != 0, ms.uint8))[3]


_CAUSAL, _WHOLE_MASK = 2, 1
"""Values of FlashAttentionScore's sparse_mode. A causal kernel skips the blocks of later tokens."""


@functools.cache
def _later_tokens() -> Tensor:
    """Return the mask that a causal kernel wants for any length; 1 hides a pair of tokens."""
    return Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))


class Attention(nn.Cell):
    def __init__(self, config: ResolvedModel, precision: PrecisionConfig, *, native: bool) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.c_proj = Linear(config.hidden_size, config.hidden_size)
        self.core = CoreAttention(config, precision, native=native)
        self.split_heads, self.join_heads = ops.Transpose(), ops.Transpose()

    def construct(
        self, x: Tensor, mask: Tensor, key: Tensor = None, keys: Tensor = None, values: Tensor = None, at: Tensor = None
    ) -> tuple[Tensor, ...]:
        """x: (B, T, C), or (B T, C). mask: (T, K), (B, 1, T, K), or (B, 1, 1, K), of the softmax's
        type, -inf where a query must not see a key, else 0. key: of the dropout.

        With a cache, keys and values (B, nh, K, hs) hold the past, and ``at`` (B, 1, K, 1) bool
        says where each row's token goes. Returns the output and the keys and values in use.
        """
        length = mask.shape[-2]
        q, k, v = (
            self._heads(self.q_proj(x), length),
            self._heads(self.k_proj(x), length),
            self._heads(self.v_proj(x), length),
        )
        if keys is not None:
            k, v = ops.where(at, k, keys), ops.where(at, v, values)
        y = self.core(q, k, v, mask, key)
        return (
            self.c_proj(self.join_heads(y, (0, 2, 1, 3)).reshape((*x.shape[:-1], self.heads * self.head_size))),
            k,
            v,
        )

    def _heads(self, x: Tensor, length: int) -> Tensor:
        return self.split_heads(x.reshape((-1, length, self.heads, self.head_size)), (0, 2, 1, 3))


class MLP(nn.Cell):
    def __init__(self, config: ResolvedModel, native_gelu: bool) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.ffn_hidden_size)
        self.c_proj = Linear(config.ffn_hidden_size, config.hidden_size)
        self.gelu = GELU(config.activation, native_gelu)

    def construct(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Cell):
    def __init__(self, config: ResolvedModel, precision: PrecisionConfig, *, native: bool) -> None:
        super().__init__()
        norm = (config.hidden_size, config.layer_norm_epsilon, DTYPES[precision.layer_norm])
        self.ln_1 = LayerNorm(*norm)
        self.attn = Attention(config, precision, native=native)
        self.ln_2 = LayerNorm(*norm)
        self.mlp = MLP(config, native)
        self.dropout = Dropout(config.hidden_dropout or 0.0, native)
        self.add = ops.Add()

    def construct(
        self, x: Tensor, mask: Tensor, key: Tensor = None, keys: Tensor = None, values: Tensor = None, at: Tensor = None
    ) -> tuple[Tensor, ...]:
        """key: (3, 2), of this block's three dropouts."""
        y, k, v = self.attn(self.ln_1(x), mask, _row(key, 0), keys, values, at)
        x = self.add(x, self.dropout(y, _row(key, 1)))
        return self.add(x, self.dropout(self.mlp(self.ln_2(x)), _row(key, 2))), k, v


class GPT2(nn.Cell):
    """``vocab_rows`` is the padded vocabulary: the rows of the embedding table. ``native``: see
    ``MindSporeDevice.native_kernels``.
    """

    def __init__(self, config: ResolvedModel, precision: PrecisionConfig, vocab_rows: int, *, native: bool) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = DTYPES[precision.compute]
        self.softmax_dtype = DTYPES[precision.softmax]
        self.minus_infinity, self.zero = Tensor(-math.inf, ms.float32), Tensor(0.0, ms.float32)
        self.wte = Embedding(vocab_rows, config.hidden_size)
        self.wpe = Embedding(config.max_positions, config.hidden_size)
        self.dropout = Dropout(config.embedding_dropout or 0.0, native)
        self.h = nn.CellList([Block(config, precision, native=native) for _ in range(config.num_layers)])
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon, DTYPES[precision.layer_norm])
        self.cross_entropy = CrossEntropySum(config.vocab_size)
        self.resets_positions = self.resets_attention = False
        self.eod = -1
        """Token that ends a document, if documents are kept apart."""

    def construct(self, ids: Tensor, keys: Tensor = None, tokens: Tensor = None) -> Tensor:
        """Hidden states (B, T, C) after the last layer norm of token ids (B, T) int32. keys:
        ``dropout_keys``; without, no dropout.

        tokens: the ids again, to keep the documents among them apart. A later stage of a pipeline
        has hidden states in the place of the first ids.
        """
        return self.ln_f(self.blocks(self.begin(ids, keys, tokens), keys, tokens))

    def begin(self, ids: Tensor, keys: Tensor = None, tokens: Tensor = None) -> Tensor:
        """Input of the first block: (B, T) -> (B, T, C)."""
        positions = ops.arange(ids.shape[1], dtype=ms.int32)
        if tokens is not None and self.resets_positions:
            positions = document_positions(tokens, self.eod)
        return self.dropout(ops.cast(self.wte(ids) + self.wpe(positions), self.compute_dtype), _row(keys, 0))

    def blocks(self, x: Tensor, keys: Tensor = None, tokens: Tensor = None) -> Tensor:
        positions = ops.arange(x.shape[1], dtype=ms.int32)
        hidden = positions.reshape((1, -1)) > positions.reshape((-1, 1))
        if tokens is not None and self.resets_attention:
            numbers, shape = document_numbers(tokens, self.eod), tokens.shape
            rows = numbers.reshape((shape[0], 1, shape[1], 1))
            hidden = ops.logical_or(hidden, rows != numbers.reshape((shape[0], 1, 1, shape[1])))
        mask = self._mask(hidden)
        for index, block in enumerate(self.h):
            x, _, _ = block(x, mask, None if keys is None else keys[1 + 3 * index : 4 + 3 * index])
        return x

    def decode(self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """One more token of each row: (B, 1) int32 at ``position`` (B,) int32, with caches (L, B, nh, K, hs).

        Returns its logits (B, vocab_size) float32 and the caches with it. All shapes are fixed: one graph serves every
        length.
        """
        places = ops.arange(keys.shape[3], dtype=ms.int32)
        position = position.reshape((-1, 1))
        at = (places == position).reshape((-1, 1, keys.shape[3], 1))
        mask = self._mask((places > position).reshape((-1, 1, 1, keys.shape[3])))
        x = ops.cast(self.wte(token) + self.wpe(position), self.compute_dtype)
        new_keys, new_values = [], []
        for index, block in enumerate(self.h):
            x, k, v = block(x, mask, None, keys[index], values[index], at)
            new_keys.append(ops.expand_dims(k, 0))
            new_values.append(ops.expand_dims(v, 0))
        # ops.stack of a dynamic batch in an exported graph always returns the shape of its first call (MindSpore 2.10).
        return self.logits(self.ln_f(x)[:, -1]), ops.concat(new_keys), ops.concat(new_values)

    def _mask(self, later: Tensor) -> Tensor:
        return ops.cast(ops.select(later, self.minus_infinity, self.zero), self.softmax_dtype)

    def loss_sum(self, ids: Tensor, targets: Tensor, keys: Tensor = None, tokens: Tensor = None) -> Tensor:
        """Sum over (B, T) of the cross-entropy of the next tokens, float32 scalar, nats.

        Targets that are UNCOUNTED add nothing, if ``cross_entropy`` is masked. tokens: for a later
        stage of a pipeline, whose ids are hidden states.
        """
        if tokens is None and (self.resets_positions or self.resets_attention):
            tokens = ids
        return self.loss_of(self.construct(ids, keys, tokens), targets)

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy computed from the final hidden states (B, T, C)."""
        return self.cross_entropy(
            hidden.reshape((-1, self.config.hidden_size)), self.wte.weight, targets.reshape((-1,))
        )[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the true vocabulary, float32: (N, C) -> (N, vocab_size)."""
        head = ops.cast(self.wte.weight, hidden.dtype)
        return ops.cast(ops.MatMul(transpose_b=True)(hidden, head)[:, : self.config.vocab_size], ms.float32)


def cache_shape(config: ResolvedModel, batch: Any) -> tuple[Any, ...]:
    """Return the shape of the keys of all layers, and of their values: (L, B, nh, positions, hs)."""
    head_size = config.hidden_size // config.num_heads
    return (config.num_layers, batch, config.num_heads, config.max_positions, head_size)


def new_caches(config: ResolvedModel, batch: int, dtype: ms.Type) -> tuple[Tensor, Tensor]:
    shape = cache_shape(config, batch)
    return ops.zeros(shape, dtype), ops.zeros(shape, dtype)


def build_model(config: Run, device: MindSporeDevice) -> GPT2:
    """Build the model, with weights not yet filled in."""
    model = GPT2(config.model, config.precision, config.vocab_rows, native=device.native_kernels)
    for parameter in model.get_parameters():
        parameter.set_dtype(DTYPES[config.precision.parameters])
    set_packing(model, config)
    set_fused_attention(model, config, device)
    set_recompute(model, config.train)
    return model


def set_packing(model: GPT2, config: Run) -> None:
    """Let the model keep documents apart as the run's data ask for."""
    packing = config.packing
    if packing is None:
        return
    model.cross_entropy.masked = bool(packing.masks_loss)
    model.resets_positions, model.resets_attention = packing.positions, packing.attention
    model.eod = packing.eod


def set_fused_attention(model: GPT2, config: Run, device: MindSporeDevice) -> None:
    """Let attention run as one kernel where the device has it and it can compute this model."""
    if takes_fused_attention(config, device):
        head_size = config.model.hidden_size // config.model.num_heads
        for block in model.h:
            block.attn.core.fused = FusedAttention(block.attn.heads, head_size)


def takes_fused_attention(config: Run, device: MindSporeDevice) -> bool:
    """Tell whether attention runs as one kernel. See FusedAttention for what it can compute."""
    return has_attention_kernel(device.kind, device.name) and suits_attention_kernel(config)


def set_recompute(model: GPT2, train: TrainConfig) -> None:
    """Recompute whole blocks in the backward pass (full), or attention and the MLP's inner part
    (selective), or nothing (none). With train.recompute_layers the first blocks of the part do.
    """
    for block in list(model.h)[: train.recompute_layers]:
        if train.recompute != "none":
            block.attn.core.written = None  # its backward pass is its own, so nothing is repeated
        if train.recompute == "full":
            block.recompute()
        elif train.recompute == "selective":
            block.attn.core.recompute()
            block.mlp.gelu.recompute()


def _row(keys: Tensor | None, index: int) -> Tensor | None:
    return None if keys is None else keys[index]

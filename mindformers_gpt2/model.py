"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, gelu (tanh form), head tied to the token embedding.

Shapes: B sequences, T tokens, C hidden_size, nh heads, hs = C / nh. Parallelism is applied from outside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from common.config.resolve import padded_vocabulary
from common.config.schema import ModelConfig, PrecisionConfig, RunConfig
from common.weights.initial import initial_rows
from mindformers_gpt2.device import DTYPES, MindSporeDevice
from mindformers_gpt2.loss import cross_entropy_sum


class Linear(nn.Cell):
    """Computes in the type of its input, whatever type the weights are held in. weight: (out, in)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(Tensor(np.zeros((out_features, in_features), np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.zeros(out_features, np.float32)), name="bias")
        self.matmul = ops.MatMul(transpose_b=True)
        self.add = ops.Add()

    def construct(self, x: Tensor) -> Tensor:
        shape = x.shape
        product = self.matmul(x.reshape((-1, self.in_features)), ops.cast(self.weight, x.dtype))
        return self.add(product, ops.cast(self.bias, x.dtype)).reshape((*shape[:-1], self.out_features))


class LayerNorm(nn.Cell):
    """Computes in ``norm_dtype`` and returns the type of its input."""

    def __init__(self, size: int, epsilon: float, norm_dtype: ms.Type) -> None:
        super().__init__()
        self.norm_dtype = norm_dtype
        self.weight = Parameter(Tensor(np.zeros(size, np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.zeros(size, np.float32)), name="bias")
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=epsilon)

    def construct(self, x: Tensor) -> Tensor:
        weight, bias = ops.cast(self.weight, self.norm_dtype), ops.cast(self.bias, self.norm_dtype)
        return ops.cast(self.layer_norm(ops.cast(x, self.norm_dtype), weight, bias)[0], x.dtype)


class Embedding(nn.Cell):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((rows, size), np.float32)), name="weight")
        self.gather = ops.Gather()

    def construct(self, ids: Tensor) -> Tensor:
        return self.gather(self.weight, ids, 0)


class Attention(nn.Cell):
    def __init__(self, config: ModelConfig, precision: PrecisionConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        self.scale = 1.0 / math.sqrt(self.head_size)
        self.softmax_dtype = DTYPES[precision.softmax]
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.c_proj = Linear(config.hidden_size, config.hidden_size)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.softmax = ops.Softmax(-1)
        self.mix = ops.BatchMatMul()

    def construct(
        self, x: Tensor, hidden_positions: Tensor, keys: Tensor = None, values: Tensor = None, at: Tensor = None
    ) -> tuple[Tensor, ...]:
        """hidden_positions: (T, K) bool, true where a query must not see a key. With a cache, keys and values (B, nh, K, hs) hold
        the past, and ``at`` (1, 1, K, 1) bool says where this one token goes. Returns the output and the keys and values in use."""
        batch, length, size = x.shape
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if keys is not None:
            k, v = ops.where(at, k, keys), ops.where(at, v, values)
        scores = ops.cast(self.scores(q * self.scale, k), self.softmax_dtype)
        scores = ops.masked_fill(scores, hidden_positions, Tensor(float("-inf"), self.softmax_dtype))
        y = self.mix(ops.cast(self.softmax(scores), v.dtype), v)  # (B, nh, T, hs)
        return self.c_proj(y.transpose((0, 2, 1, 3)).reshape((batch, length, size))), k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape((x.shape[0], x.shape[1], self.heads, self.head_size)).transpose((0, 2, 1, 3))


class MLP(nn.Cell):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None
        self.c_fc = Linear(config.hidden_size, config.ffn_hidden_size)
        self.c_proj = Linear(config.ffn_hidden_size, config.hidden_size)
        self.gelu = ops.GeLU()  # the tanh form

    def construct(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Cell):
    def __init__(self, config: ModelConfig, precision: PrecisionConfig) -> None:
        super().__init__()
        norm = (config.hidden_size, config.layer_norm_epsilon, DTYPES[precision.layer_norm])
        self.ln_1 = LayerNorm(*norm)
        self.attn = Attention(config, precision)
        self.ln_2 = LayerNorm(*norm)
        self.mlp = MLP(config)

    def construct(
        self, x: Tensor, hidden_positions: Tensor, keys: Tensor = None, values: Tensor = None, at: Tensor = None
    ) -> tuple[Tensor, ...]:
        y, k, v = self.attn(self.ln_1(x), hidden_positions, keys, values, at)
        x = x + y
        return x + self.mlp(self.ln_2(x)), k, v


class GPT2(nn.Cell):
    """``vocab_rows`` is the padded vocabulary: the rows of the embedding table."""

    def __init__(self, config: ModelConfig, precision: PrecisionConfig, vocab_rows: int) -> None:
        super().__init__()
        assert config.max_positions is not None
        self.config = config
        self.compute_dtype = DTYPES[precision.compute]
        self.wte = Embedding(vocab_rows, config.hidden_size)
        self.wpe = Embedding(config.max_positions, config.hidden_size)
        self.h = nn.CellList([Block(config, precision) for _ in range(config.num_layers)])
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon, DTYPES[precision.layer_norm])

    def construct(self, ids: Tensor) -> Tensor:
        """Hidden states (B, T, C) after the last layer norm of token ids (B, T) int32."""
        length = ids.shape[1]
        positions = ops.arange(length, dtype=ms.int32)
        x = ops.cast(self.wte(ids) + self.wpe(positions), self.compute_dtype)
        later = positions.reshape((1, -1)) > positions.reshape((-1, 1))
        for block in self.h:
            x, _, _ = block(x, later)
        return self.ln_f(x)

    def decode(self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """One more token: (B, 1) int32 at ``position`` (1,) int32, with caches (L, B, nh, K, hs).

        Returns its logits (B, vocab_size) float32 and the caches with it. All shapes are fixed: one graph serves every length.
        """
        places = ops.arange(keys.shape[3], dtype=ms.int32)
        at = (places == position).reshape((1, 1, -1, 1))
        later = (places > position).reshape((1, -1))
        x = ops.cast(self.wte(token) + self.wpe(position), self.compute_dtype)
        new_keys, new_values = [], []
        for index, block in enumerate(self.h):
            x, k, v = block(x, later, keys[index], values[index], at)
            new_keys.append(k)
            new_values.append(v)
        return self.logits(self.ln_f(x)[:, -1]), ops.stack(new_keys), ops.stack(new_values)

    def loss_sum(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Sum over (B, T) of the cross-entropy of the next tokens, float32 scalar, nats."""
        hidden = self.construct(ids).reshape((-1, self.config.hidden_size))
        return cross_entropy_sum(hidden, self.wte.weight, targets.reshape((-1,)), self.config.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the true vocabulary, float32: (N, C) -> (N, vocab_size)."""
        head = ops.cast(self.wte.weight, hidden.dtype)
        return ops.cast(ops.MatMul(transpose_b=True)(hidden, head)[:, : self.config.vocab_size], ms.float32)

    def new_caches(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers for ``length`` positions, (L, B, nh, length, hs) each."""
        head_size = self.config.hidden_size // self.config.num_heads
        shape = (self.config.num_layers, batch, self.config.num_heads, length, head_size)
        return ops.zeros(shape, self.compute_dtype), ops.zeros(shape, self.compute_dtype)


def build_model(config: RunConfig, device: MindSporeDevice) -> GPT2:
    """The model, with weights not yet filled in. The config must be resolved."""
    return GPT2(config.model, config.precision, padded_vocabulary(config))


def initialise(tensors: Mapping[str, Parameter], config: RunConfig) -> None:
    """Fill parameters by name with the initial weights of ``common.weights.initial``."""
    for name, tensor in tensors.items():
        ops.assign(tensor, Tensor(initial_rows(config.model, config.seed, name, tuple(tensor.shape))))

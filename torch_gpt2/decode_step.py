"""One token for each of several rows, in shapes and memory that never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.generation.sampling import Logits
from torch_gpt2.device import TorchDevice, attention_mask
from torch_gpt2.int8 import Int8Linear, head_product, product_of
from torch_gpt2.model import GPT2, Block, Linear
from torch_gpt2.products import Multiply, prepared_norm

_MIN_KEYS = 128


class Layers:
    """The model with its weights in the form that is fastest for a token in each of a few rows."""

    def __init__(self, model: GPT2, device: TorchDevice) -> None:
        config, self.dtype = model.config, model.compute_dtype
        self.device = device
        self.embed = model.eval().embed
        self.blocks = [Layer(block, self.dtype) for block in model.h]  # type: ignore[arg-type]
        self.unread = config.max_positions
        """Column for what is not a token; one more than positions, and not attended to."""
        self._heads = (config.num_heads, config.hidden_size // config.num_heads)
        self._norm = prepared_norm(model.ln_f)
        self._head = head_product(model)

    def allocate(self, rows: int, columns: int) -> None:
        """Let the layers remember as many rows and columns, which hold zeros."""
        heads, size = self._heads
        for layer in self.blocks:
            layer.keys, layer.values = (
                torch.zeros(rows, heads, columns, size, dtype=self.dtype, device=self.device.torch_device)
                for _ in range(2)
            )

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., vocab_size), float32, of hidden states (..., C) after the last block."""
        return self._head(self._norm(x)).float()

    def read_logits(self, x: Tensor) -> Logits:
        """``logits`` on the host, which waits."""
        return self.read(self.logits(x))

    def read(self, logits: Tensor) -> Logits:
        return np.ascontiguousarray(self.device.to_host(logits)().numpy())

    def step(self, rows: Sequence[int], tokens: Sequence[int], columns: Sequence[int]) -> Logits:
        """Put a token into each of these rows, at its column; return their logits (B, vocab_size).

        All rows from the first to the last one are computed. Those in between write into the column ``unread``.
        """
        first, last, end = min(rows), max(rows), max(columns) + 1
        places = torch.tensor(rows) - first
        inputs = torch.zeros(2, last + 1 - first, dtype=torch.long)
        inputs[1] = self.unread
        inputs[:, places] = torch.tensor([tokens, columns])
        masked = len(rows) <= last - first or min(columns) + 1 < end
        return self.read_logits(self.hidden(inputs, end, first=first, masked=masked)[places, -1])

    def hidden(self, inputs: Tensor, keys: int, *, first: int = 0, masked: bool = True) -> Tensor:
        """Put a token into each of some rows, at its column; return the hidden states (R, 1, C).

        inputs: tokens and columns (2, R) of the rows from ``first`` on. Attention covers ``keys``
        columns, of which each row sees those up to its own. If not ``masked``, the last one is that of all rows.
        """
        tokens, columns = inputs
        rows = slice(first, first + len(tokens))
        mask: Tensor | None = None
        at: Any = rows, slice(None), keys - 1
        if masked:
            at = torch.arange(rows.start, rows.stop, device=tokens.device), slice(None), columns
            seen = torch.arange(keys, device=tokens.device) <= columns[:, None]
            mask = attention_mask(seen, self.dtype)[:, None, None]
        x = self.embed(tokens[:, None], columns.clamp(max=self.unread - 1)[:, None])
        for layer in self.blocks:
            q, k, v = layer.heads(x)
            layer.keys[at], layer.values[at] = k[:, :, 0], v[:, :, 0]
            x = layer.finish(x, q, layer.keys[rows, :, :keys], layer.values[rows, :, :keys], mask)
        return x


class DecodeStep:
    """A step of all rows with fixed shapes, which a GPU's graph holds.

    The launch of each kernel costs more than a small model's kernels take. A graph is one launch. It needs no compiler,
    and its first text waits for none. Attention covers a power of two of columns, with a graph for each: transformers'
    StaticCache and gpt-fast always cover all. The host waits once, for the logits.
    """

    def __init__(self, layers: Layers, rows: int) -> None:
        self._layers, self._device = layers, layers.device
        layers.allocate(rows, layers.unread + 1)
        self._inputs = torch.zeros(2, rows, dtype=torch.long, device=self._device.torch_device)  # tokens and columns
        self._steps: dict[int, Callable[[], Tensor]] = {}
        self._memory = self._device.graph_memory()

    def __call__(self, rows: Sequence[int], tokens: Sequence[int], columns: Sequence[int]) -> Logits:
        """Step as ``Layers.step``. Columns from ``unread`` on are that one. Other rows stay as they are."""
        unread = self._layers.unread
        inputs = torch.zeros(self._inputs.shape, dtype=torch.long)
        inputs[1] = unread
        inputs[:, list(rows)] = torch.tensor([tokens, [min(each, unread) for each in columns]])
        self._inputs.copy_(self._device.pin(inputs), non_blocking=True)
        last = max((column for column in columns if column < unread), default=0)
        keys = min(unread, max(_MIN_KEYS, 1 << last.bit_length()))
        if keys not in self._steps:
            layers, own = self._layers, self._inputs  # without a cycle to self
            self._steps[keys] = self._device.capture(
                lambda: layers.logits(layers.hidden(own, keys)[:, 0]), self._memory
            )
        logits = self._layers.read(self._steps[keys]())
        return logits if [*rows] == [*range(len(logits))] else logits[list(rows)]


class Layer:
    """Block with its weights in the form that is fastest for few rows.

    It has one product for q, k and v, and caches (B, nh, K, hs).
    """

    keys: Tensor
    values: Tensor

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        def product(*layers: Linear | Int8Linear) -> Multiply:
            return product_of(layers, dtype)

        attention = block.attn
        self._attend = attention.attend
        self._head_size = attention.head_size
        self._norm_1, self._norm_2 = prepared_norm(block.ln_1), prepared_norm(block.ln_2)
        self._qkv = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._c_proj = product(attention.c_proj)
        self._mlp_c_fc = product(block.mlp.c_fc)
        self._mlp_c_proj = product(block.mlp.c_proj)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v (B, nh, T, hs each) of the block's input (B, T, C)."""
        batch, length, _ = x.shape
        qkv = self._qkv(self._norm_1(x)).view(batch, length, 3, -1, self._head_size)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def finish(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the block's output for its input x (B, T, C), given all keys and values."""
        y = self._attend(q, k, v, mask)
        x = x + self._c_proj(y.transpose(1, 2).flatten(2))
        hidden = F.gelu(self._mlp_c_fc(self._norm_2(x)), approximate="tanh")
        return x + self._mlp_c_proj(hidden)

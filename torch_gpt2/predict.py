"""Continue prompts, serve, score text and compute logits, with a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config.resolved import ResolvedModel
from common.conversion.logits import config_of
from common.generation.sampling import Logits
from common.inference.runner import Runner
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use
from torch_gpt2.checkpoint import fill_weights
from torch_gpt2.device import TorchDevice, attention_mask, select_device
from torch_gpt2.evaluate import make_scorer
from torch_gpt2.int8 import Int8Linear, head_product, load_model, product_of
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2, Block, Linear, build_model
from torch_gpt2.products import Multiply, prepared_norm


def open_runner(config: Run, device: TorchDevice, checkpoint: Checkpoint, tokenizer: dict[str, Any]) -> Runner:
    """Load the weights of a checkpoint onto a device.

    tokenizer: record of the tokenizer to be used. Raises CheckpointError unless it and the model fit.
    """
    weights_to_use(config, checkpoint, tokenizer)
    model = load_model(config, device, checkpoint)
    return Runner(
        decoder=partial(Decoder, model, device),
        scorer=partial(make_scorer, model, device),
        slots=partial(Slots, model, device),
    )


class Decoder:
    """Implementation of ``common.generation.generate.Decoder``.

    Sequences begin at the same column of the caches. A mask hides from a row the columns behind its own.
    """

    def __init__(self, model: GPT2, device: TorchDevice, rows: int) -> None:
        self.rows = rows
        self._layers = Layers(model, device)
        self._device = device
        self._step = DecodeStep(self._layers, rows) if device.runs_ahead else None

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        rows, self._lengths = len(prompts), [len(prompt) for prompt in prompts]
        longest = max(self._lengths)
        if room and not self._step:
            self._layers.allocate(rows, longest + room)
        for layer in self._layers.blocks if room and self._step else ():
            layer.keys.zero_()  # a step multiplies later columns by 0, which leaves a NaN of a text
            layer.values.zero_()
        # Prompts are padded on the right, where a causal mask hides the padding from all tokens that count.
        ids = torch.zeros(rows, longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        x = self._layers.embed(self._device.send(ids), torch.arange(longest, device=self._device.torch_device))
        for layer in self._layers.blocks:
            q, k, v = layer.heads(x)
            if room:
                layer.keys[:rows, :, :longest], layer.values[:rows, :, :longest] = k, v
            x = layer.finish(x, q, k, v, None)
        last = self._device.send(torch.tensor(self._lengths) - 1)
        return self._layers.read_logits(x[torch.arange(rows, device=x.device), last])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        lengths, self._lengths = self._lengths, [length + 1 for length in self._lengths]
        return (self._step or self._layers.step)(range(len(tokens)), tokens, lengths)

    @torch.inference_mode()
    def reorder(self, parents: list[int]) -> None:
        rows = self._device.send(torch.tensor(parents))
        for layer in self._layers.blocks:
            if self._step is None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            else:  # which stay in their place
                layer.keys[: len(rows)], layer.values[: len(rows)] = (layer.keys[rows], layer.values[rows])
        self._lengths = [self._lengths[parent] for parent in parents]


class Slots:
    """Implementation of ``common.serving.engine.Slots``.

    Each row writes at its own column, and a mask hides later columns from it.
    """

    def __init__(self, model: GPT2, device: TorchDevice, count: int) -> None:
        self.count = count
        self._layers = Layers(model, device)
        self._device = device
        self._step = DecodeStep(self._layers, count)
        self._fixed = device.runs_ahead

    @torch.inference_mode()
    def admit(self, slot: int, ids: Sequence[int], reuse: int, observe: Callable[[int, Logits], None] | None) -> Logits:
        end, rows = len(ids), slice(slot, slot + 1)
        places = torch.arange(reuse, end, device=self._device.torch_device)
        x = self._layers.embed(self._device.send(torch.tensor(ids[reuse:]))[None], places)
        mask = None
        if reuse:
            seen = torch.arange(end, device=x.device)[None] <= places[:, None]
            mask = attention_mask(seen, x.dtype)
        for layer in self._layers.blocks:
            q, k, v = layer.heads(x)
            layer.keys[rows, :, reuse:end], layer.values[rows, :, reuse:end] = k, v
            if self._fixed:  # a step multiplies later columns by 0, which leaves a NaN of a text
                layer.keys[rows, :, end:] = layer.values[rows, :, end:] = 0
            x = layer.finish(x, q, layer.keys[rows, :, :end], layer.values[rows, :, :end], mask)
        if observe is not None:
            for first in range(0, end - reuse, ROWS_AT_ONCE):
                observe(reuse + first, self._layers.read_logits(x[0, first : first + ROWS_AT_ONCE]))
        logits: Logits = self._layers.read_logits(x[0, -1:])[0]
        return logits

    @torch.inference_mode()
    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        return (self._step if self._fixed else self._layers.step)(slots, tokens, places)

    @torch.inference_mode()
    def copy(self, source: int, slot: int, length: int) -> None:
        for layer in self._layers.blocks:
            for cache in (layer.keys, layer.values):
                cache[slot, :, :length] = cache[source, :, :length]


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
        self._mlp_c_fc, self._activation = product(block.mlp.c_fc), block.mlp.activation
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
        return x + self._mlp_c_proj(self._activation(self._mlp_c_fc(self._norm_2(x))))


@torch.no_grad()
def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a checkpoint folder in our own format."""
    net = build_model(config_of(model, folder), select_device("cpu")).eval()
    fill_weights(dict(net.named_parameters()), Checkpoint(folder).weights(model))
    found: NDArray[np.float32] = net.logits(net(torch.from_numpy(ids))).numpy()
    return found


@torch.no_grad()
def hugging_face_logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a folder in the format of transformers, computed by transformers."""
    for name in ("torchao", "torch.utils._pytree"):  # warnings of a torchao for another torch
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = folder if folder.is_dir() else folder.parent
    # the config of an old folder has only n_ctx
    net: Any = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True, n_positions=model.max_positions)
    net = net.float().eval()
    found: NDArray[np.float32] = net(torch.from_numpy(ids)).logits.numpy()
    return found

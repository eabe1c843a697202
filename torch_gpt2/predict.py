"""Continue prompts, and score text, with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.cluster.environment import ALONE, Process
from common.evaluation import Scorer
from common.generation.sampling import Logits
from common.inference.run_modes import continue_prompts
from common.parallel.resolved_run import ResolvedRun
from common.planner.room import check_memory
from common.training.start import weights_to_use
from torch_gpt2.device import TorchDevice, attention_mask, open_device
from torch_gpt2.evaluate import make_scorer
from torch_gpt2.int8 import Int8Linear, head_product, load_model, product_of
from torch_gpt2.model import GPT2, Block, Linear
from torch_gpt2.products import AnyProduct, Norm


def predict(config: ResolvedRun, process: Process = ALONE) -> None:
    continue_prompts(config, partial(open_runner, process=process))


def open_runner(
    config: ResolvedRun, tokenizer: dict[str, Any] | None, process: Process = ALONE
) -> Runner:
    """Load the weights that the config names onto its device.

    tokenizer: record of the tokenizer to be used. Raises CheckpointError unless both fit, and
    DeviceError.
    """
    device = open_device(config, process, lengths_vary=True)
    check_memory(config, process, device)
    checkpoint = weights_to_use(config, tokenizer)
    return Runner(load_model(config, device, checkpoint), device)


class Runner:
    """Implementation of ``common.inference.runner.Runner``."""

    has_fixed_shapes = False

    def __init__(self, model: GPT2, device: TorchDevice) -> None:
        self.model = model
        self.device = device

    def decoder(self, rows: int) -> Decoder:
        return Decoder(self.model, self.device, rows)

    def scorer(self) -> Scorer:
        return make_scorer(self.model, self.device)


class Decoder:
    """Implementation of ``common.generation.generate.Decoder``.

    The weights of ``model`` are in the form that is fastest for one token a row. Sequences end at
    the same column of the caches. Sequences of shorter prompts begin later, and a mask hides the
    columns before. So a step writes one column, and prompts of equal length need no mask.
    """

    def __init__(self, model: GPT2, device: TorchDevice, rows: int) -> None:
        self.rows = rows
        self._model = model.eval()
        self._device = device.torch_device
        dtype = model.compute_dtype
        self._layers = [Layer(block, dtype, rows) for block in model.h]  # type: ignore[arg-type]
        self._norm = Norm(model.ln_f)
        self._head = head_product(model, rows)

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        lengths, config = [len(prompt) for prompt in prompts], self._model.config
        longest = max(lengths)
        self._begins = [longest - length for length in lengths]
        self._column = 0
        shape = (
            len(prompts),
            config.num_heads,
            longest + room,
            config.hidden_size // config.num_heads,
        )
        self._remembers = room > 0
        for layer in self._layers if room else ():
            layer.keys, layer.values = (
                torch.zeros(shape, dtype=self._model.compute_dtype, device=self._device)
                for _ in range(2)
            )
        self._mask = None
        if any(self._begins):
            seen = torch.arange(shape[2])[None] >= torch.tensor(self._begins)[:, None]
            mask = attention_mask(seen.to(self._device), self._model.compute_dtype)
            self._mask = mask[:, None, None]  # (B, 1, 1, K)
        # Prompts are padded on the right, where a causal mask hides the padding from all tokens
        # that count.
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        x = self._forward(ids.to(self._device), torch.arange(longest, device=self._device))
        return self._logits(x[torch.arange(len(prompts)), torch.tensor(lengths) - 1])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        last = self._model.wpe.num_embeddings - 1
        positions = [[min(self._column - begin, last)] for begin in self._begins]
        ids = torch.tensor(tokens, device=self._device)[:, None]
        return self._logits(self._forward(ids, torch.tensor(positions, device=self._device))[:, -1])

    @torch.inference_mode()
    def reorder(self, parents: Sequence[int]) -> None:
        if list(parents) == list(range(len(parents))):
            return
        rows = torch.tensor(parents, device=self._device)
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self._begins = [self._begins[parent] for parent in parents]
        self._mask = None if self._mask is None else self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states (B, T, C) before the last layer norm. The caches grow by T
        columns.
        """
        x = self._model.embed(ids, positions)
        end = self._column + ids.shape[1]
        mask = self._mask[..., :end] if self._column and self._mask is not None else None
        for layer in self._layers:
            q, k, v = layer.heads(x)
            if self._column:
                k, v = layer.remember(k, v, self._column)
            elif self._remembers:
                self._keep_prompts(layer, k, v)
            x = layer.finish(x, q, k, v, mask)
        self._column = end
        return x

    def _keep_prompts(self, layer: Layer, k: Tensor, v: Tensor) -> None:
        longest = k.shape[2]
        for row, begin in enumerate(self._begins):
            layer.keys[row, :, begin:longest] = k[row, :, : longest - begin]
            layer.values[row, :, begin:longest] = v[row, :, : longest - begin]

    def _logits(self, x: Tensor) -> Logits:
        logits: Logits = self._head(self._norm(x)).float().cpu().numpy()
        return np.ascontiguousarray(logits)


class Layer:
    """Block with its weights in the form that is fastest for few rows.

    It has one product for q, k and v, and caches (B, nh, K, hs).
    """

    keys: Tensor
    values: Tensor

    def __init__(self, block: Block, dtype: torch.dtype, rows: int) -> None:
        def product(*layers: Linear | Int8Linear) -> AnyProduct:
            return product_of(layers, dtype, rows)

        attention = block.attn
        self._attend = attention.attend
        self._head_size = attention.head_size
        self._norm_1, self._norm_2 = Norm(block.ln_1), Norm(block.ln_2)
        self._qkv = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._c_proj = product(attention.c_proj)
        self._mlp_c_fc = product(block.mlp.c_fc)
        self._mlp_c_proj = product(block.mlp.c_proj)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v (B, nh, T, hs each) of the block's input (B, T, C)."""
        batch, length, _ = x.shape
        qkv = self._qkv(self._norm_1(x)).view(batch, length, 3, -1, self._head_size)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def remember(self, k: Tensor, v: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Put keys and values (B, nh, T, hs) into the caches from ``column`` on.

        Returns all keys and values up to the last column.
        """
        keys, values = (
            cache.narrow(2, 0, column + k.shape[2]) for cache in (self.keys, self.values)
        )
        keys[:, :, column:] = k
        values[:, :, column:] = v
        return keys, values

    def finish(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the block's output for its input x (B, T, C), given all keys and values."""
        y = self._attend(q, k, v, mask)
        x = self._c_proj.add(y.transpose(1, 2).flatten(2), x)
        return self._mlp_c_proj.add(self._mlp_c_fc.gelu(self._norm_2(x)), x)

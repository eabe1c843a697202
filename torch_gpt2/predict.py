"""Continue prompts, and score text, with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.cluster.environment import ALONE, Process
from common.evaluation import Scorer
from common.generation.sampling import Logits
from common.inference.run_modes import continue_prompts
from common.parallel.resolved_run import ResolvedRun
from common.planner.room import check_memory
from common.training.start import weights_to_use
from torch_gpt2.device import TorchDevice, open_device
from torch_gpt2.evaluate import make_scorer
from torch_gpt2.int8 import Int8GPT2, Int8Linear, load_model, product_of
from torch_gpt2.model import GPT2, Block, Linear
from torch_gpt2.products import Product


def predict(config: ResolvedRun, process: Process = ALONE) -> None:
    continue_prompts(config, partial(open_runner, process=process))


def open_runner(
    config: ResolvedRun, tokenizer: dict[str, Any] | None, process: Process = ALONE
) -> Runner:
    """Load the weights that the config names onto its device. tokenizer: the record of the one to
    be used. Raises CheckpointError unless both fit, and DeviceError.
    """
    device = open_device(config, process)
    check_memory(config, process, device)
    checkpoint = weights_to_use(config, tokenizer)
    return Runner(load_model(config, device, checkpoint), device)


class Runner:
    """Implements ``common.inference.runner.Runner``."""

    has_fixed_shapes = False

    def __init__(self, model: GPT2, device: TorchDevice) -> None:
        self.model = model
        self.device = device

    def decoder(self, rows: int) -> Decoder:
        return Decoder(self.model, self.device, rows)

    def scorer(self) -> Scorer:
        return make_scorer(self.model, self.device)


class Decoder:
    """Implements ``common.generation.generate.Decoder`` with the weights of ``model`` in the form
    that is fastest for one token a row.

    Sequences end at the same column of the caches; those of shorter prompts begin later, and a mask
    hides what is before. So a step writes one column, and where all prompts are of one length there
    is no mask.
    """

    def __init__(self, model: GPT2, device: TorchDevice, rows: int) -> None:
        self.rows = rows
        self._model = model.eval()
        self._device = device.torch_device
        dtype = model.compute_dtype
        self._layers = [_Layer(block, dtype, rows) for block in model.h]  # type: ignore[arg-type]
        head = model.head if isinstance(model, Int8GPT2) else None
        self._head = head or Product([model.wte.weight[: model.config.vocab_size]], [], dtype, rows)

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
            hidden = torch.arange(shape[2])[None] < torch.tensor(self._begins)[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._model.compute_dtype).masked_fill(
                hidden, float("-inf")
            )
            self._mask = mask[:, None, None].to(self._device)  # (B, 1, 1, K)
        # Prompts are filled up on the right, where a causal mask hides the filling from all that
        # counts.
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
        """Hidden states (B, T, C) before the last layer norm; the caches grow by T columns."""
        x = self._model.embed(ids, positions)
        for layer in self._layers:
            q, k, v = layer.heads(x)
            k, v, mask = self._remember(layer, k, v)
            y = layer.block.attn.attend(q, k, v, mask)
            x = x + layer.c_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp_c_proj(
                F.gelu(layer.mlp_c_fc(layer.block.ln_2(x)), approximate="tanh")
            )
        self._column += ids.shape[1]
        return x

    def _remember(
        self, layer: _Layer, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, nh, T, hs) of what is new -> all there are to attend to, and which of
        them not.
        """
        if self._column:
            end = self._column + 1
            layer.keys[:, :, self._column], layer.values[:, :, self._column] = (
                k[:, :, 0],
                v[:, :, 0],
            )
            return (
                layer.keys[:, :, :end],
                layer.values[:, :, :end],
                None if self._mask is None else self._mask[..., :end],
            )
        longest = k.shape[2]
        for row, begin in enumerate(self._begins) if self._remembers else ():
            layer.keys[row, :, begin:longest] = k[row, :, : longest - begin]
            layer.values[row, :, begin:longest] = v[row, :, : longest - begin]
        return k, v, None

    def _logits(self, x: Tensor) -> Logits:
        logits: Logits = self._head(self._model.ln_f(x)).float().cpu().numpy()
        return np.ascontiguousarray(logits)


class _Layer:
    """A block with its products in the form of ``Product``, q, k and v in one, and its caches (B,
    nh, K, hs).
    """

    keys: Tensor
    values: Tensor

    def __init__(self, block: Block, dtype: torch.dtype, rows: int) -> None:
        def product(*layers: Linear | Int8Linear) -> Callable[[Tensor], Tensor]:
            return product_of(layers, dtype, rows)

        self.block = block
        self.qkv = product(block.attn.q_proj, block.attn.k_proj, block.attn.v_proj)
        self.c_proj = product(block.attn.c_proj)
        self.mlp_c_fc = product(block.mlp.c_fc)
        self.mlp_c_proj = product(block.mlp.c_proj)

    def heads(self, x: Tensor) -> Sequence[Tensor]:
        """q, k and v, (B, nh, T, hs) each."""
        return (
            self.qkv(self.block.ln_1(x))
            .view(*x.shape[:2], 3, -1, self.block.attn.head_size)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )

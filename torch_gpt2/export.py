"""Write a GPT-2 as a program of torch, which ``torch.export.load`` opens without this project, and run one.

program(input_ids, attention_mask, past) -> logits, past

input_ids and attention_mask (batch, length): the new tokens, and 0 for padding. past: a tuple of the mask of earlier
tokens (batch, past), then key and value of each layer, (batch, heads, past, head size). An empty past begins a text. A
program without a cache takes whole texts and returns only the logits, (batch, length, vocabulary).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from common.backends import Inputs
from common.cluster.environment import ALONE, Process
from common.config.resolved import ResolvedModel
from common.config.schema import PrecisionConfig
from common.conversion.export import ProgramFormat, export_program
from common.errors import ConfigError, RunError
from common.inference.runner import Runner, program_runner, require_cpu
from common.inference.source import Source
from common.interrupts import holding_signals
from common.parallel.run import Run
from common.systems.weights import Weights
from torch_gpt2.model import GPT2, Block

FILE = "model.pt2"
_EXAMPLE = (2, 3, 5)
"""Rows, tokens and earlier tokens of the example that is traced. torch.export would fix sizes of 0 and 1."""


class Program(nn.Module):
    """Computation of ``GPT2``, in operators that allow any batch, length and past."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Sequence[Tensor] | None = None
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        begin = 0 if past is None else past[0].shape[1]
        mask = attention_mask if past is None else torch.cat([past[0], attention_mask], 1)
        places = torch.arange(mask.shape[1], device=mask.device)
        visible = (places <= places[begin:, None]) & mask.bool()[:, None, None]  # (B, 1, T, K)
        # Minus infinity would make rows of padding NaN.
        hidden = torch.where(visible, 0.0, torch.finfo(torch.float32).min / 2)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:]
        x, present = self.model.embed(input_ids, positions), [mask]
        for layer, block in enumerate(self.model.h):
            assert isinstance(block, Block)
            attn, y = block.attn, block.ln_1(x)
            q, k, v = (
                proj(y).unflatten(2, (-1, attn.head_size)).transpose(1, 2)
                for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            if past is not None:  # keys and values of earlier tokens
                k, v = torch.cat([past[1 + 2 * layer], k], 2), torch.cat([past[2 + 2 * layer], v], 2)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
            x = x + attn.c_proj(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.ln_2(x))
            present += [k, v]
        logits = self.model.logits(self.model.ln_f(x))
        return logits if past is None else (logits, tuple(present))


@torch.no_grad()
def write_program(folder: Path, weights: Weights, *, cache: bool) -> None:
    """Write FILE with the weights inside, as float32. cache: whether it takes and returns keys and values.

    Raises RunError if torch fails, and OSError.
    """
    config = weights.model
    with torch.device("meta"):
        model = GPT2(config, PrecisionConfig(), config.vocab_size)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.numpy()[:] = weights.tensors[name].load_as("float32")
    traced = _trace(Program(model), config, cache=cache)
    with _Target(io.FileIO(folder / FILE, "wb")) as file, holding_signals() as file.signals:
        try:
            torch.export.save(traced, file)
        except Exception as error:
            if file.error is None:
                raise RunError(f"{FILE}: torch {torch.__version__} cannot write it: {_first_line(error)}") from error
        if file.error is not None:
            raise file.error
        file.flush()
        os.fsync(file.fileno())


def _trace(program: Program, config: ResolvedModel, *, cache: bool) -> torch.export.ExportedProgram:
    rows, tokens, earlier = _EXAMPLE
    batch, length, before = Dim("batch", min=1), Dim("length", min=1), Dim("past", min=0)
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    inputs: tuple[Any, ...] = (ids, torch.ones_like(ids))
    sizes: tuple[Any, ...] = ({0: batch, 1: length},) * 2
    if cache:
        inputs += (_past(config, rows, earlier),)
        caches = ({0: batch, 2: before},) * (2 * config.num_layers)
        sizes += (({0: batch, 1: before}, *caches),)
    return torch.export.export(program, inputs, dynamic_shapes=sizes)


def _past(config: ResolvedModel, rows: int, tokens: int) -> tuple[Tensor, ...]:
    heads = config.num_heads
    shape = (rows, heads, tokens, config.hidden_size // heads)
    return (torch.ones(rows, tokens, dtype=torch.long), *(torch.zeros(shape) for _ in range(2 * config.num_layers)))


class ProgramModel:
    """Implementation of ``common.generation.generate.ExportedModel`` with a program of torch."""

    def __init__(self, file: Path, model: ResolvedModel) -> None:
        """Open a program. Raises ConfigError if this version of torch cannot open the file."""
        try:
            program = torch.export.load(file)
            self.has_cache = len(program.graph_signature.user_inputs) > 2
            self._program = program.module()
        except Exception as error:  # torch raises many types, and documents none
            raise ConfigError(
                f"{file}: torch {torch.__version__} cannot open it ({_first_line(error)}); export.json beside it names"
                " the version that wrote it: export it again with this one"
            ) from None
        self._model = model
        self._kept: tuple[Tensor, ...] = ()

    def reorder(self, rows: list[int]) -> None:
        self._kept = tuple(kept[rows] for kept in self._kept)

    @torch.inference_mode()
    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        # A sequence ends at the last position. Further tokens for it are padding.
        new = (mask * (mask.cumsum(1) <= self._model.max_positions))[:, -ids.shape[1] :]
        inputs = torch.from_numpy(np.ascontiguousarray(ids)), torch.from_numpy(new)
        if self.has_cache:
            if mask.shape == ids.shape:  # new sequences begin
                self._kept = _past(self._model, len(ids), 0)
            logits, self._kept = self._program(*inputs, self._kept)
        else:
            logits = self._program(*inputs)
        found: NDArray[np.float32] = logits.numpy()
        return found


def open_program(source: Source, config: Run) -> Runner:
    """Open the folder of an export. Raises ConfigError."""
    require_cpu(config, "a program of torch.export")
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    model = ProgramModel(source.folder / FILE, source.model)
    return program_runner(model)


def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a folder with a program for ids (B, T)."""
    return ProgramModel(folder / FILE, model).run(ids, np.ones_like(ids))


class _Target(io.BufferedWriter):
    """File that records an error instead of raising it, and then skips further writes.

    An exception could make torch's writer abort the process.
    """

    error: OSError | None = None
    signals: Sequence[int] = ()

    def write(self, content: Any) -> int:
        if self.error is None and not self.signals:
            try:
                return super().write(content)
            except OSError as error:
                self.error = error
        return memoryview(content).nbytes


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def export(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    """Write the folder pt2 in the run folder. Raises the errors of ``export_program``."""
    program = ProgramFormat(
        write=lambda folder, weights, run: write_program(folder, weights, cache=run.export.cache),
        open=lambda folder, model: ProgramModel(folder / FILE, model),
        versions={"torch": torch.__version__},
    )
    assert inputs.checkpoint is not None
    export_program(config, inputs.checkpoint, program)

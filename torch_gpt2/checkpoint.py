"""Conversion by name between torch's tensors and the arrays of checkpoint folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.checkpoint.snapshot import (
    padded_rows,
)
from common.config.resolved import ResolvedModel
from common.training.checkpoint_reader import CheckpointReader
from common.weights.pieces import TensorSlice
from torch_gpt2.optimizer import local_shard

Array = NDArray[np.float32]
Pieces = Mapping[str, TensorSlice]


def weights_on_host(tensors: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Array]:
    """Return ``pieces`` of parameters. On a CPU the arrays share the memory of their tensors."""
    return {name: _cut(tensors[name], piece) for name, piece in pieces.items()}


def moments_on_host(
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    parts: Sequence[str],
    pieces: Pieces,
) -> tuple[dict[str, Array], int]:
    """Return ``pieces`` of the optimizer's state by NAME.PART, and the number of its updates."""
    moments: dict[str, Array] = {}
    steps = 0
    for name, tensor in tensors.items():
        state = optimizer.state.get(tensor, {})
        steps = int(state.get("step", steps))
        if name in pieces:
            moments |= {
                f"{name}.{part}": _cut(state[part], pieces[name])
                for part in parts
                if state.get(part) is not None
            }
    return moments, steps


def load_weights(
    tensors: Mapping[str, Tensor],
    model: ResolvedModel,
    checkpoint: Path,
    pieces: Pieces | None = None,
) -> None:
    """Fill parameters by name from ``checkpoint``.

    pieces: the part that each parameter is, if not whole. Raises CheckpointError unless every
    tensor is there with the model's shape.
    """
    fill_weights(tensors, CheckpointReader(checkpoint).weights(model, pieces))


@torch.no_grad()
def fill_weights(tensors: Mapping[str, Tensor], values: Iterable[tuple[str, Array]]) -> None:
    """Fill this rank's part of parameters by name."""
    for name, array in values:
        tensor = local_shard(tensors[name])
        tensor.copy_(torch.from_numpy(padded_rows(array, len(tensor))))


def fill_moments(
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    values: Iterable[tuple[str, str, Array]],
    *,
    steps: int | None,
    steps_on_device: bool,
) -> None:
    """Fill the optimizer's state. steps: updates made; None for an optimizer without a counter."""
    for name, part, array in values:
        tensor = tensors[name]
        moments = optimizer.state[tensor]
        moments[part] = torch.zeros_like(tensor)
        local_shard(moments[part]).copy_(torch.from_numpy(array))
        if steps is not None:
            on = tensor.device if steps_on_device else "cpu"
            moments["step"] = torch.tensor(float(steps), dtype=torch.float32, device=on)


def _cut(tensor: Tensor, piece: TensorSlice) -> Array:
    """Return this rank's part of a tensor, without the rows that pad the vocabulary."""
    values: Array = local_shard(tensor.detach()).detach().to("cpu", torch.float32).numpy()
    return values[: piece.rows[1] - piece.rows[0]]

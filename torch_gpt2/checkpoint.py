"""Conversion by name between torch's tensors and arrays: of checkpoint folders, and of the record of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from common.checkpoint.snapshot import padded_rows
from common.log import LOG
from common.training.recording import LAST_NORM, RecorderBase
from common.weights.pieces import Array, TensorSlice, shape_of
from torch_gpt2.model import GPT2
from torch_gpt2.optimizer import local_shard

Pieces = Mapping[str, TensorSlice]
Copy = Callable[[str, Tensor], Array]
"""Takes a tensor and its name; returns it as float32 on the host."""

_BLOCK = 2**26
"""Fewest numbers that are pinned at once, 256 MiB."""


def copy_at_once(name: str, tensor: Tensor) -> Array:
    """Wait for a copy."""
    copied: Array = tensor.to("cpu", torch.float32, copy=True).numpy()
    return copied


class Staging:
    """Pinned memory of the host that a device fills without making the host wait.

    It is kept for the next snapshot: to pin memory takes longer than to fill it. torch rounds a
    block up to a power of two (pytorch issue 150517), so all blocks are such.
    """

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self._rest = torch.empty(0)

    def copy(self, name: str, tensor: Tensor) -> Array:
        """Start to copy a tensor to its place: ``Copy`` without the wait."""
        if name not in self._places:
            self._places[name] = self._take(tensor.numel()).view(tensor.shape)
        copied: Array = self._places[name].copy_(tensor, non_blocking=True).numpy()
        return copied

    def _take(self, numbers: int) -> Tensor:
        if numbers > len(self._rest):
            size = max(_BLOCK, 1 << (numbers - 1).bit_length())
            try:
                self._rest = torch.empty(size, dtype=torch.float32, pin_memory=True)
            except RuntimeError as error:
                LOG.warning(f"checkpoints: no more memory can be pinned ({error}); saves wait longer")
                self._rest = torch.empty(size, dtype=torch.float32)
        taken, self._rest = self._rest[:numbers], self._rest[numbers:]
        return taken


def weights_on_host(tensors: Mapping[str, Tensor], pieces: Pieces, copy: Copy = copy_at_once) -> dict[str, Array]:
    """Return ``pieces`` of parameters."""
    return {name: copy(name, _cut(tensors[name], piece)) for name, piece in pieces.items()}


def moments_on_host(
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    parts: Sequence[str],
    pieces: Pieces,
    copy: Copy = copy_at_once,
) -> tuple[dict[str, Array], int]:
    """Return ``pieces`` of the optimizer's state by NAME.PART, and the number of its updates."""
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in tensors.items()}
    counts = (state["step"] for state in states.values() if "step" in state)
    steps = int(next(counts, 0))  # which may wait for a device, and not for the copies
    moments = {
        f"{name}.{part}": copy(f"{name}.{part}", _cut(states[name][part], pieces[name]))
        for name in tensors
        if name in pieces
        for part in parts
        if states[name].get(part) is not None
    }
    return moments, steps


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
    steps: int | None,
) -> None:
    """Fill the optimizer's state. steps: updates made; None for an optimizer without a counter."""
    for name, part, array in values:
        tensor = tensors[name]
        moments = optimizer.state[tensor]
        moments[part] = torch.zeros_like(tensor)
        local_shard(moments[part]).copy_(torch.from_numpy(array))
        if steps is not None:
            moments["step"] = torch.tensor(float(steps), dtype=torch.float32, device=tensor.device)


def _cut(tensor: Tensor, piece: TensorSlice) -> Tensor:
    """Return this rank's part of a tensor, without the rows that pad the vocabulary."""
    return local_shard(tensor.detach()).detach()[: shape_of(piece)[0]]


class Recorder(RecorderBase):
    """Record of a step for tools/compare_runs.py --layers, by hooks on the modules. Outside of the step the
    model is as it was.
    """

    pieces_on_host = staticmethod(weights_on_host)

    def layers(self, part: GPT2) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"h.{name}", block) for name, block in part.h.named_children())
        if not isinstance(part.ln_f, nn.Identity):
            yield LAST_NORM, part.ln_f

    @staticmethod
    def on_host(values: Tensor) -> Array:
        found: Array = values.detach().to("cpu", torch.float32).numpy()
        return found

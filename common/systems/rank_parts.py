"""Tensors that are split over the files of tensor-parallel ranks, and joined when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.parallel.sharding import split_dim
from common.systems.name_map import NameRow
from common.tensor_files.arrays import FileTensor, TensorKind, same_bytes

Ranks: TypeAlias = Sequence[Mapping[str, FileTensor]]
"""Tensors by [tensor rank] and by the format's names in the whole model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined(TensorKind):
    """Tensor in equal parts on the tensor ranks, along ``dim`` of our layout."""

    parts: tuple[FileTensor, ...]
    dim: int = 0


def by_ranks(paths: Iterable[Path], pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Return the files by the ranks in their names. Raises CheckpointError for two of one rank."""
    found: dict[tuple[int, ...], Path] = {}
    for path in sorted(paths):
        if match := pattern.fullmatch(path.name):
            ranks = tuple(int(rank or 0) for rank in match.groups())
            if ranks in found:
                raise CheckpointError(
                    f"{path.parent}: {found[ranks].name} and {path.name} are of one rank: these"
                    " files are of several checkpoints; copy one whole"
                )
            found[ranks] = path
    return found


def require_ranks(folder: Path, found: Iterable[Any], expected: Iterable[Any], name: Callable[[Any], str]) -> None:
    """Require that the files of exactly the expected ranks were found. Raises CheckpointError.

    name: returns the name of a rank's file.
    """
    there, wanted = set(found), set(expected)
    if absent := sorted(wanted - there):
        more = f" and {len(absent) - 4} more" if len(absent) > 4 else ""
        raise CheckpointError(
            f"{folder}: missing {', '.join(map(name, absent[:4]))}{more}; copy the whole folder again"
        )
    if strange := sorted(there - wanted):
        raise CheckpointError(
            f"{folder / name(strange[0])}: training had {len(wanted)} such files, and"
            f" {len(strange)} more are here: they are of several checkpoints; copy one whole"
        )


def require_same(told: Mapping[Path, Mapping[str, Any]], called: Callable[[Path], str]) -> None:
    """Require that the files of all ranks say what the first one says. Raises CheckpointError.

    called: returns the name of a file in a message.
    """
    for path, values in told.items():
        first, known = next(iter(told.items()))
        for name in known:
            if values[name] != known[name]:
                raise CheckpointError(
                    f"{path}: {name} is {values[name]}, and {called(first)} says {known[name]}:"
                    " these files are of several checkpoints; copy one whole"
                )


def join_ranks(where: Path, ranks: Ranks, rows: Mapping[str, NameRow]) -> dict[str, Joined]:
    """Join each tensor of a model. rows: by the format's names.

    Raises CheckpointError where ranks do not fit together.
    """
    joined = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [rank[name] for rank in ranks if name in rank]
        if len(parts) < len(ranks):
            raise CheckpointError(
                f"{where}: {len(ranks) - len(parts)} of {len(ranks)} tensor ranks lack {name}; copy all files again"
            )
        joined[name] = _join(where, name, parts, rows.get(name))
    return joined


def _join(where: Path, name: str, parts: Sequence[FileTensor], row: NameRow | None) -> Joined:
    first = parts[0]
    if row is None:  # refused by its name later
        return Joined(dtype=first.dtype, shape=first.shape, parts=(first,))
    if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in parts):
        shown = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise CheckpointError(
            f"{where}: tensor ranks hold {name} as {shown}; these files are of several checkpoints: copy one whole"
        )
    dim = split_dim(row.ours[0])
    if dim is None or len(first.shape) <= dim:
        if not all(same_bytes(part, first) for part in parts[1:]):
            raise CheckpointError(
                f"{where}: tensor ranks differ in {name}, of which each has a whole copy; use another checkpoint"
            )
        return Joined(dtype=first.dtype, shape=first.shape, parts=(first,))
    theirs = len(first.shape) - 1 - dim if row.transposed else dim
    shape = (*first.shape[:theirs], len(parts) * first.shape[theirs], *first.shape[theirs + 1 :])
    return Joined(dtype=first.dtype, shape=shape, parts=tuple(parts), dim=dim)


def read_joined(tensor: Joined, row: NameRow, part: int, heads: int) -> NDArray[Any]:
    """Return one of the parameters in a tensor, of which each rank holds its own heads. It is a
    view of the file where that is possible.
    """
    arrays = [row.part(shard.read(), heads // len(tensor.parts), part) for shard in tensor.parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, tensor.dim)


def name_in_order(shapes: Mapping[str, tuple[int, ...]], values: Sequence[FileTensor]) -> dict[str, FileTensor]:
    """Name the tensors of an optimizer with one group, or with one of matrices and one of vectors.

    shapes: those of the parameters by name, in the order of the modules. Raises ValueError where
    ``values`` do not fit them.
    """
    found: dict[str, FileTensor] = {}
    for dims in (1, 2):
        named = {name: shape for name, shape in shapes.items() if len(shape) == dims}
        there = [tensor for tensor in values if len(tensor.shape) == dims]
        if [*named.values()] != [tensor.shape for tensor in there]:
            raise ValueError(
                "the state of the optimizer is not of these weights: other shapes, or another number of them"
            )
        found.update(zip(named, there, strict=True))
    return {name: found[name] for name in shapes if name in found}

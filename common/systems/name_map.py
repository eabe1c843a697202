"""Names and layouts of the parameters in another format, as a table for both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.parallel.sharding import split_dim
from common.tensor_files.arrays import FileTensor, TensorKind, copy_array, same_bytes
from common.weights.names import EMBEDDING

LINEAR = ("attn.qkv_proj", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
"""Linear layers of a block that has query, key and value in one tensor."""


class Fusion(StrEnum):
    """Order of the rows of a tensor that holds query, key and value together."""

    BLOCKS = "all of q, all of k, all of v"
    """Order of Hugging Face, OpenAI, and Megatron-LM's checkpoint version 0."""
    OUTPUTS = "q, k and v of each output in turn"
    """Order of Megatron-LM's checkpoint version 1."""
    HEADS = "q, k and v of each head in turn"
    """Order of Megatron-LM's checkpoint versions 2 and 3, Megatron-Core and PaddleFleetX."""


@dataclass(frozen=True, kw_only=True)
class NameRow:
    """Tensor of another format, and the parameters in it: one, or query, key and value."""

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False
    """Whether the tensor is (in, out)."""
    fusion: Fusion = Fusion.BLOCKS

    def in_block(self, ours: int, theirs: int) -> NameRow:
        """Return the row of a block with these numbers here and there."""
        return replace(
            self, ours=tuple(name.format(layer=ours) for name in self.ours), theirs=self.theirs.format(layer=theirs)
        )

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of their tensor. shapes: those of our parameters, whole or of a tensor-parallel rank."""
        first, *rest = shapes[self.ours[0]]
        fused = (len(self.ours) * first, *rest)
        return fused[::-1] if self.transposed else fused

    def pack(self, parts: Sequence[NDArray[Any]], heads: int) -> NDArray[Any]:
        """Return their tensor, made from ours with ``heads`` heads. It is a view where that is possible."""
        if len(parts) == 1:
            return parts[0].T if self.transposed else parts[0]
        fused: NDArray[Any] = np.empty((len(parts) * parts[0].shape[0], *parts[0].shape[1:]), parts[0].dtype)
        for place, part in zip(self._apart(fused, heads), parts, strict=True):
            copy_array(place, part.reshape(place.shape))
        return fused.T if self.transposed else fused

    def pieces(self, parts: Sequence[NDArray[Any]], heads: int) -> Sequence[NDArray[Any]]:
        """Return arrays whose bytes, one after the other, are those of ``pack``. They are views of
        the parts where rows of these stay together.
        """
        if len(parts) == 1 or self.transposed or self.fusion is not Fusion.HEADS:
            return [self.pack(parts, heads)]
        by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
        return [part[head] for head in range(heads) for part in by_head]

    def part(self, theirs: NDArray[Any], heads: int, number: int) -> NDArray[Any]:
        """Return one of our parameters from their tensor: the inverse of ``pack``. It is a view
        where that is possible.
        """
        fused = theirs.T if self.transposed else theirs
        if len(self.ours) == 1:
            return fused
        part: NDArray[Any] = self._apart(fused, heads)[number].reshape(-1, *fused.shape[1:])
        return part

    def _apart(self, fused: NDArray[Any], heads: int) -> NDArray[Any]:
        """Return views of a fused tensor as query, key and value, each (heads, outputs of one, ...)."""
        axis = {Fusion.BLOCKS: 0, Fusion.HEADS: 1, Fusion.OUTPUTS: 2}[self.fusion]
        sizes = [heads, fused.shape[0] // (len(self.ours) * heads)]
        sizes.insert(axis, len(self.ours))
        return np.moveaxis(fused.reshape(*sizes, *fused.shape[1:]), axis, 0)


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Names of the parameters in another format. {layer} is the number of a block."""

    global_rows: tuple[NameRow, ...]
    """Rows of the embeddings and the last norm."""
    layer_rows: tuple[NameRow, ...]
    """Rows of each block."""
    head: str | None = None
    """Name of the head, a copy of the embedding."""
    ignored: str = r"(?!)"
    """Names that hold no parameter, as a regular expression."""

    def rows(self, layers: int) -> list[NameRow]:
        """Return the rows of all their tensors."""
        blocks = (row.in_block(n, n) for n in range(layers) for row in self.layer_rows)
        return [*self.global_rows, *blocks]

    @property
    def table(self) -> str:
        """Name of the embedding."""
        return next(row.theirs for row in self.global_rows if row.ours == (EMBEDDING,))

    def ignores(self, theirs: str) -> bool:
        return re.fullmatch(self.ignored, theirs) is not None


def name_map(
    table: Mapping[str, str],
    *,
    transposed: Collection[str] = (),
    fusion: Fusion = Fusion.BLOCKS,
    **more: str,
) -> NameMap:
    """Return the map of ``table``: our module or tensor -> theirs, in the order of their modules.

    Ours are ``wte.weight``, ``wpe.weight``, ``ln_f``, and in a block ``ln_1``, ``attn.c_proj`` and so on.
    ``attn.qkv_proj`` is query, key and value in one tensor. A module has a weight and a bias. Other names of these two
    stand at its end: ``gamma|beta``. transposed: modules whose weight is (in, out). more: head and ignored of the map.
    """
    rows = [row for ours, theirs in table.items() for row in _rows_of(ours, theirs, ours in transposed, fusion)]
    global_rows, layer_rows = (
        tuple(row for row in rows if ("{layer}" in row.ours[0]) is in_block) for in_block in (False, True)
    )
    return NameMap(global_rows=global_rows, layer_rows=layer_rows, **more)


def _rows_of(ours: str, theirs: str, transposed: bool, fusion: Fusion) -> Iterator[NameRow]:
    if ours.endswith(".weight"):
        yield NameRow(ours=(ours,), theirs=theirs)
        return
    block = "" if ours == "ln_f" else "h.{layer}."
    modules = [block + ours.replace("qkv", part) for part in ("qkv" if "qkv" in ours else " ")]
    weight, bias = (theirs if "|" in theirs else f"{theirs}.weight|bias").split("|")
    yield NameRow(ours=tuple(f"{name}.weight" for name in modules), theirs=weight, transposed=transposed, fusion=fusion)
    yield NameRow(ours=tuple(f"{name}.bias" for name in modules), theirs=re.sub(r"\w+$", bias, weight), fusion=fusion)


def match_name_map(where: object, format: str, name_maps: Sequence[NameMap], names: Collection[str]) -> NameMap:
    """Return the variant of a format that matches most tensor names. Raises CheckpointError if none does."""
    best = max(name_maps, key=lambda name_map: sum(row.theirs in names for row in name_map.rows(1)))
    if not any(row.theirs in names for row in best.rows(1)):
        shown = ", ".join(list(names)[:4]) or "nothing"
        raise CheckpointError(
            f"{where}: holds no names of {format}, but {shown}; say --from FORMAT, or choose another file"
        )
    return best


# ---- tensors that are split over ranks ----


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


def join_ranks(where: Path, ranks: Ranks, name_map: NameMap, layers: int) -> dict[str, Joined]:
    """Join each tensor of a model of ``layers`` blocks. Raises CheckpointError where ranks do not fit together."""
    joined, rows = {}, {row.theirs: row for row in name_map.rows(layers)}
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


def read_part(tensor: Any, row: NameRow, part: int, heads: int) -> NDArray[Any]:
    """Return one of the parameters in a tensor of a file, or of ranks that hold their own heads each. It is a
    view of the file where that is possible.
    """
    shards = tensor.parts if isinstance(tensor, Joined) else (tensor,)
    arrays = [row.part(shard.read(), heads // len(shards), part) for shard in shards]
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

"""Names and layouts of the parameters in another format, as a table for both directions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.tensor_files.arrays import copy_array
from common.weights.names import EMBEDDING, POSITIONS

_GLOBAL = (EMBEDDING, POSITIONS, "ln_f")
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
        """Return the shape of their tensor. shapes: those of our parameters, whole or of a
        tensor-parallel rank.
        """
        first, *rest = shapes[self.ours[0]]
        fused = (len(self.ours) * first, *rest)
        return fused[::-1] if self.transposed else fused

    def pack(self, parts: Sequence[NDArray[Any]], heads: int) -> NDArray[Any]:
        """Return their tensor, made from ours with ``heads`` heads. It is a view where that is
        possible.
        """
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
        if len(parts) == 1 or self.transposed or self.fusion is Fusion.OUTPUTS:
            return [self.pack(parts, heads)]
        if self.fusion is Fusion.BLOCKS:
            return parts
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
        """Return views of a fused tensor as query, key and value, each (heads, outputs of one,
        ...).
        """
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

    def fused(self, fusion: Fusion) -> NameMap:
        """Return the map with another order of query, key and value."""
        return replace(self, layer_rows=tuple(replace(row, fusion=fusion) for row in self.layer_rows))


def name_map(
    table: Mapping[str, str],
    *,
    transposed: Collection[str] = (),
    fusion: Fusion = Fusion.BLOCKS,
    head: str | None = None,
    ignored: str = r"(?!)",
) -> NameMap:
    """Return the map of ``table``: our module or tensor -> theirs, in the order of their modules.

    Ours are ``wte.weight``, ``wpe.weight``, ``ln_f``, and in a block ``ln_1``, ``attn.c_proj`` and
    so on. ``attn.qkv_proj`` is query, key and value in one tensor. A module has a weight and a
    bias. Other names of these two stand at its end: ``gamma|beta``. transposed: modules whose
    weight is (in, out).
    """
    rows = [row for ours, theirs in table.items() for row in _rows_of(ours, theirs, ours in transposed, fusion)]
    global_rows, layer_rows = (
        tuple(row for row in rows if ("{layer}" in row.ours[0]) is in_block) for in_block in (False, True)
    )
    return NameMap(global_rows=global_rows, layer_rows=layer_rows, head=head, ignored=ignored)


def _rows_of(ours: str, theirs: str, transposed: bool, fusion: Fusion) -> Iterator[NameRow]:
    if ours.endswith(".weight"):
        yield NameRow(ours=(ours,), theirs=theirs)
        return
    block = "" if ours in _GLOBAL else "h.{layer}."
    modules = [block + ours.replace("qkv", part) for part in ("qkv" if "qkv" in ours else " ")]
    weight, bias = (theirs if "|" in theirs else f"{theirs}.weight|bias").split("|")
    yield NameRow(ours=tuple(f"{name}.weight" for name in modules), theirs=weight, transposed=transposed, fusion=fusion)
    yield NameRow(ours=tuple(f"{name}.bias" for name in modules), theirs=re.sub(r"\w+$", bias, weight), fusion=fusion)


def match_name_map(where: object, format: str, name_maps: Sequence[NameMap], names: Collection[str]) -> NameMap:
    """Return the variant of a format that matches most tensor names. Raises CheckpointError if none
    does.
    """
    best = max(name_maps, key=lambda name_map: sum(row.theirs in names for row in name_map.rows(1)))
    if not any(row.theirs in names for row in best.rows(1)):
        shown = ", ".join(list(names)[:4]) or "nothing"
        raise CheckpointError(
            f"{where}: holds no names of {format}, but {shown}; say --from FORMAT, or choose another file"
        )
    return best

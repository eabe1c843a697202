"""Parameters cut out of the flat vectors of DeepSpeed's optimizers.

A vector is in equal parts in the files of the data ranks (ZeRO), or whole in one file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Parameters by name, in the order of a vector."""


def cut(vector: Sequence[FileTensor], shapes: Shapes, gaps: Sequence[int] = ()) -> dict[str, Any]:
    """Return the parameters in a vector that is given in parts.

    gaps: elements between each parameter and the next; empty for none. Up to two elements a part
    may fill the end. Raises ValueError where the vector holds other parameters.
    """
    found, first = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps or [0] * len(shapes), strict=True):
        found[name] = _part(name, shape, vector, first)
        first += math.prod(shape) + gap
    there = sum(math.prod(part.shape) for part in vector)
    if there >= first + 2 * len(vector):
        raise ValueError(f"it has {there} elements, and these weights {first}")
    return found


def own_parameters(vectors: Sequence[FileTensor], shapes: Shapes) -> dict[str, FileTensor]:
    """Return the parameters in the vectors of an optimizer without partitions.

    One vector holds all of them, or two hold the matrices and the vectors. The last stage of a
    pipeline has a copy of the embeddings before its own parameters. Raises ValueError.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    rest = {name: shape for name, shape in shapes.items() if name not in matrices}
    groups = [shapes] if len(vectors) == 1 else [matrices, rest]
    if len(vectors) == 2 and math.prod(vectors[0].shape) == _elements(rest):
        groups.reverse()
    found: dict[str, FileTensor] = {}
    for vector, group in zip(vectors, groups, strict=True):
        first = math.prod(vector.shape) - _elements(group)
        if first < 0:
            raise ValueError(f"it has {math.prod(vector.shape)} elements, and these weights more")
        for name, shape in group.items():
            found[name] = _part(name, shape, [vector], first)
            first += math.prod(shape)
    return {name: found[name] for name in shapes}


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _part(
    name: str, shape: tuple[int, ...], vector: Sequence[FileTensor], first: int
) -> FileTensor:
    """Return the tensor whose elements begin at ``first`` of a vector."""
    places = list(_segments(vector, first, math.prod(shape)))
    checks = [check for check in dict.fromkeys(part.check for part, _ in places) if check]

    def check() -> None:
        for one in checks:
            one()

    tensor = FileTensor(
        name=name,
        dtype="float32",
        shape=shape,
        segments=tuple(segment for _, segment in places),
        check=check,
    )
    there = sum(segment.size for segment in tensor.segments)
    if there != tensor.nbytes:
        raise ValueError(f"of {name} {list(shape)} only {there} of {tensor.nbytes} bytes are there")
    return tensor


def _segments(
    vector: Sequence[FileTensor], first: int, count: int
) -> Iterator[tuple[FileTensor, Bytes]]:
    """Yield the bytes of ``count`` elements from ``first`` on, part by part."""
    start, item = 0, NUMPY_TYPES["float32"].itemsize
    for part in vector:
        if part.dtype != "float32" or len(part.shape) != 1 or part.strides is not None:
            raise ValueError(f"a part of it is {part.dtype} {list(part.shape)}")
        low, high = max(first - start, 0), min(first + count - start, part.shape[0])
        if low < high:
            yield part, part.segments[0][low * item : high * item]
        start += part.shape[0]

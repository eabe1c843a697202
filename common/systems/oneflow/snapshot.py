"""Variables of a OneFlow snapshot: a folder each, with the elements in ``out`` and the shape and
type in ``meta``.

Layout: ``FileBackendVariableBlob`` in oneflow/python/framework/check_point_v2.py. meta is a
VariableMetaInfo in protobuf's text form. A folder holds the whole variable, however many ranks had
parts of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from common.errors import CheckpointError
from common.structured_files import read_bytes
from common.tensor_files.arrays import NUMPY_TYPES, FileTensor, map_file

DATA, META = "out", "meta"
_TYPES = {
    "kFloat": "float32", "kDouble": "float64", "kFloat16": "float16", "kBFloat16": "bfloat16",
    "kInt8": "int8", "kInt32": "int32", "kInt64": "int64", "kUInt8": "uint8",
}  # fmt: skip
_META = re.compile(
    r"\s*shape\s*\{(?P<dims>(?:\s*dim\s*:\s*\d{1,18})*)\s*\}\s*data_type\s*:\s*(?P<type>\w+)\s*"
)


def variables(folder: Path) -> list[str]:
    """Return the names of the variables in a snapshot."""
    return sorted(file.parent.name for file in folder.glob(f"*/{DATA}"))


def read_variable(folder: Path, usual: tuple[int, ...] | None) -> FileTensor:
    """Return a variable.

    usual: its shape where ``meta`` is missing, as in OneFlow's first releases; it is float32 then,
    with the rows that the file holds. Raises CheckpointError.
    """
    data = map_file(folder / DATA)
    if (folder / META).is_file():
        text = read_bytes(folder / META, limit=10_000, error=CheckpointError).decode("latin1")
        found = _META.fullmatch(text)
        if found is None or found["type"] not in _TYPES:
            raise CheckpointError(
                f"{folder / META}: no shape and data_type of a variable; expected as"
                " shape { dim: 8 } data_type: kFloat: copy it again"
            )
        dtype = _TYPES[found["type"]]
        shape = tuple(int(size) for size in re.findall(r"\d+", found["dims"]))
    elif usual is None:
        dtype, shape = "uint8", (data.size,)
    else:
        dtype = "float32"
        row = math.prod(usual[1:]) * NUMPY_TYPES[dtype].itemsize
        shape = (data.size // row, *usual[1:])
    expected = math.prod(shape) * NUMPY_TYPES[dtype].itemsize
    if data.size != expected:
        raise CheckpointError(
            f"{folder / DATA}: has {data.size} bytes, and {dtype} {list(shape)} takes {expected};"
            " copy it again"
        )
    try:
        return FileTensor(name=folder.name, dtype=dtype, shape=shape, segments=(data,))
    except ValueError as error:  # a shape that an array cannot have
        raise CheckpointError(f"{folder / META}: {error}; copy it again") from None


def read_all(
    folder: Path, usual: Mapping[str, tuple[int, ...]], ends: tuple[str, ...]
) -> dict[str, FileTensor]:
    """Return all variables by name. usual: shapes by the names without one of ``ends``."""

    def shape(name: str) -> tuple[int, ...] | None:
        stem = next((name.removesuffix(end) for end in ends if name.endswith(end)), name)
        return usual.get(stem)

    return {name: read_variable(folder / name, shape(name)) for name in variables(folder)}

"""Reader of the weights in OneFlow-Benchmark's ``iter{N}_snapshot``, with a model.yaml in it or
beside it. Its shapes show neither the heads nor the vocabulary without padding.

Layout: ``FileBackendVariableBlob`` in oneflow/python/framework/check_point_v2.py. Each variable is
a folder with the elements in ``out``, and the shape and type in ``meta``: a VariableMetaInfo in
protobuf's text form. It holds the whole variable, however many ranks had parts of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import CheckpointError
from common.structured_files import read_bytes
from common.systems.model_yaml import MODEL_YAML, read_model_yaml
from common.systems.name_map import LINEAR, POSITIONS, Fusion, name_map
from common.systems.weights import Weights, weights_from
from common.tensor_files.arrays import NUMPY_TYPES, FileTensor, map_file
from common.weights.names import EMBEDDING, parameter_shapes

_BLOCK = "model-h{layer}-"
NAME_MAP = name_map(
    {
        EMBEDDING: "model-wte",
        POSITIONS: "model-wpe",
        "ln_f": "model-layernorm_f-gamma|beta",
        "ln_1": f"{_BLOCK}layernorm_1-gamma|beta",
        "attn.qkv_proj": f"{_BLOCK}attn-c_attn-weight|bias",
        "attn.c_proj": f"{_BLOCK}attn-c_proj-weight|bias",
        "ln_2": f"{_BLOCK}layernorm_2-gamma|beta",
        "mlp.c_fc": f"{_BLOCK}mlp-c_fc-weight|bias",
        "mlp.c_proj": f"{_BLOCK}mlp-c_proj-weight|bias",
    },
    transposed=LINEAR,
    fusion=Fusion.HEADS,
)
"""Linear weights are (in, out); c_attn holds query, key and value of each head in turn
(GPT/oneflow_gpt/model.py).
"""
_BESIDE = re.compile(r"System-.*|.*(-m|-v|-momentum)")
"""Counters, the loss scale and the state of the optimizer."""
DATA, META = "out", "meta"
_TYPES = {
    "kFloat": "float32", "kDouble": "float64", "kFloat16": "float16", "kBFloat16": "bfloat16",
    "kInt8": "int8", "kInt32": "int32", "kInt64": "int64", "kUInt8": "uint8",
}  # fmt: skip
_META = re.compile(
    r"\s*shape\s*\{(?P<dims>(?:\s*dim\s*:\s*\d{1,18})*)\s*\}\s*data_type\s*:\s*(?P<type>\w+)\s*"
)
_SNAPSHOT = re.compile(r"iter(\d{1,15})_snapshot|last_snapshot")
_TABLE = NAME_MAP.global_rows[0].theirs


def find_snapshot(path: Path) -> Path | None:
    """Return the snapshot: ``path``, or the last one in it. None: ``path`` is not OneFlow's."""
    if (path / _TABLE / DATA).is_file():
        return path
    found = [
        (int(match[1] or -1), folder)
        for folder in path.glob("*_snapshot")
        if (match := _SNAPSHOT.fullmatch(folder.name)) and (folder / _TABLE / DATA).is_file()
    ]
    return max(found)[1] if found else None


def detects(path: Path) -> bool:
    return find_snapshot(path) is not None


@contextmanager
def open_oneflow(path: Path) -> Iterator[Weights]:
    """Open a snapshot.

    path: the snapshot, or the folder of --save, whose last snapshot is taken. Raises
    CheckpointError and ConfigError.
    """
    folder = find_snapshot(path)
    if folder is None:
        raise CheckpointError(
            f"{path}: no {_TABLE}/{DATA} here, nor in a folder like iter100_snapshot; give another"
            " path"
        )
    files = [place / MODEL_YAML for place in (folder, folder.parent)]
    model = read_model_yaml(next((file for file in files if file.is_file()), files[0]))[0]
    ours = parameter_shapes(model)
    usual = {row.theirs: row.shape(ours) for row in NAME_MAP.rows(model.num_layers)}
    names = sorted(file.parent.name for file in folder.glob(f"*/{DATA}"))
    stored = {
        name: _read_variable(folder / name, usual.get(name))
        for name in names
        if not _BESIDE.fullmatch(name)
    }
    notes = {"optimizer": f"only weights are read, here of {folder.name}"}
    yield weights_from(folder, NAME_MAP, stored, model, format="oneflow", path=path, ignored=notes)


def _read_variable(folder: Path, usual: tuple[int, ...] | None) -> FileTensor:
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
    else:
        dtype, usual = "float32", usual or (data.size,)
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

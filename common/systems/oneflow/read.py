"""Reader of OneFlow-Benchmark's ``iter{N}_snapshot``, with a model.yaml in it or beside it. Its
shapes show neither the heads nor the vocabulary without padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.config.values import rule_keeping
from common.errors import CheckpointError
from common.structured_files import read_bytes
from common.systems.name_map import LINEAR, Fusion, name_map
from common.systems.run_state import (
    MODEL_YAML,
    NO_SCALE,
    checked_run,
    new_run,
    read_model_yaml,
    require_moments,
    require_one_run,
)
from common.systems.weights import Weight, Weights, import_names, weights_from
from common.tensor_files.arrays import NUMPY_TYPES, FileTensor, joined, map_file
from common.weights.names import EMBEDDING, POSITIONS, parameter_shapes

DATA, META = "out", "meta"
_TYPES = {
    "kFloat": "float32", "kDouble": "float64", "kFloat16": "float16", "kBFloat16": "bfloat16",
    "kInt8": "int8", "kInt32": "int32", "kInt64": "int64", "kUInt8": "uint8",
}  # fmt: skip
_META = re.compile(r"\s*shape\s*\{(?P<dims>(?:\s*dim\s*:\s*\d{1,18})*)\s*\}\s*data_type\s*:\s*(?P<type>\w+)\s*")


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
            f"{folder / DATA}: has {data.size} bytes, and {dtype} {list(shape)} takes {expected}; copy it again"
        )
    return FileTensor(dtype=dtype, shape=shape, load=partial(joined, dtype, data))


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
"""Linear weights are (in, out); c_attn holds query, key and value of each head in turn (GPT/oneflow_gpt/model.py)."""
MOMENTS = {"exp_avg": "-m", "exp_avg_sq": "-v", "momentum_buffer": "-momentum"}
"""Part of the optimizer's state -> suffix of the variable's name."""
SYSTEM = "System-"
"""Prefixes of the names of OneFlow's own variables."""
STEP = "System-Train-TrainStep-"
SCALE = "System-Train-DynamicLossScale-"
_SNAPSHOT = re.compile(r"iter(\d{1,15})_snapshot|last_snapshot")
_TABLE = NAME_MAP.table


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


def open_oneflow(path: Path) -> Weights:
    """Open a snapshot.

    path: the snapshot, or the folder of --save, whose last snapshot is taken. Raises CheckpointError and ConfigError.
    """
    folder = find_snapshot(path)
    if folder is None:
        raise CheckpointError(
            f"{path}: no {_TABLE}/{DATA} here, nor in a folder like iter100_snapshot; give another path"
        )
    inside, beside = (place / MODEL_YAML for place in (folder, folder.parent))
    model, run = read_model_yaml(beside if beside.is_file() and not inside.is_file() else inside)
    ours = parameter_shapes(model)
    usual = {row.theirs: row.shape(ours) for row in NAME_MAP.rows(model.num_layers)}
    shapes = usual | {f"{name}{end}": shape for end in MOMENTS.values() for name, shape in usual.items()}
    files = sorted(file.parent.name for file in folder.glob(f"*/{DATA}"))
    stored = {name: read_variable(folder / name, shapes.get(name)) for name in files}
    own = {name: stored.pop(name) for name in files if name.startswith(SYSTEM)}
    groups = {
        part: found
        for part, end in MOMENTS.items()
        if (found := {name + end: stored.pop(name + end) for name in usual if name + end in stored})
    }
    weights = weights_from(folder, NAME_MAP, stored, model, format="oneflow", path=path, ignored={})
    moments: dict[str, Weight] = {}
    for part, tensors in groups.items():
        moments |= import_names(folder, NAME_MAP, tensors, model, end=MOMENTS[part], suffix=f".{part}")
    notes: dict[str, str] = {}
    step = _number(own, STEP)
    if run is not None and step is not None:
        require_one_run(folder, "TrainStep", step, run["state"]["step"])
    if run is None and moments and step is not None:
        scale = dict(NO_SCALE)
        if (value := _number(own, SCALE, "-LossScale")) is not None:
            finite = int(_number(own, SCALE, "-GoodStepCounter") or 0)
            scale |= {"mode": "dynamic", "value": value, "finite_steps": finite}
        found = new_run(rule_keeping([*groups]), step=int(step), updates=int(step), scale=scale)
        run = checked_run(folder, found)
        notes["position in the data"] = "not in the snapshot: a resumed run reads from the first sample"
    elif run is None:
        reason = "a number of OneFlow's own, without the whole state of the optimizer"
        notes |= dict.fromkeys([*own, *moments], reason)
    moments = {} if run is None else require_moments(folder, moments, run, model)
    return replace(weights, moments=moments, run=run, ignored={**weights.ignored, **notes})


def _number(own: Mapping[str, FileTensor], start: str, end: str = "") -> float | None:
    """Return the only number in one of OneFlow's own variables. Raises CheckpointError."""
    names = [name for name in own if name.startswith(start) and name.endswith(end)]
    if not names:
        return None
    tensor = own[names[0]]
    data = tensor.load()  # meta may say more dims than an array has
    if tensor.dtype == "uint8" and data.size in (4, 8):  # snapshots without meta
        data = data.view("<f4" if data.size == 4 else "<i8")
    is_scale = end == "-LossScale"
    if data.size != 1 or not 0 <= data[0] < 2**53 or not (is_scale or data[0] % 1 == 0):
        raise CheckpointError(f"{names[0]}/{DATA}: is neither a count nor a scale; copy it again")
    return float(data[0])

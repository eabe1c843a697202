"""Weights of a model under our names, from files of any format. A tensor is read when it is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from common.config.resolved import ResolvedModel, resolve_model
from common.config.schema import ModelConfig
from common.errors import CheckpointError, ConfigError
from common.structured_files import shown
from common.systems.name_map import NameMap, NameRow, read_part
from common.tensor_files.arrays import (
    FileTensor,
    TensorKind,
    TensorSource,
    prefetch_arrays,
    round_to_bfloat16,
    same_bytes,
    widen_bfloat16,
)
from common.weights.names import check_tensors, parameter_shapes
from common.weights.pieces import Scheme, TensorSlice

FLOATS = ("float32", "float16", "bfloat16")
MAX_LAYERS = 10_000
"""Largest number of blocks; beyond it, even the names of the parameters would fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Weight(TensorSource):
    """Whole tensor, with the rows of the true vocabulary. It loads an array, a view of the file where that is
    possible.
    """

    def load_as(self, dtype: str) -> NDArray[Any]:
        """Return the tensor in another type, rounded to the nearest."""
        return to_type(self.load(), self.dtype, dtype)

    def cut(self, piece: TensorSlice, dtype: str) -> NDArray[Any]:
        """Return a rectangle of the tensor in another type."""
        return to_type(self.load()[tuple(slice(*span) for span in piece)], self.dtype, dtype)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights in a folder, and the state of the run if there is one."""

    path: Path
    format: str
    model: ResolvedModel
    tensors: Mapping[str, Weight]
    """Parameters by our names, in the order of ``parameter_shapes``."""
    moments: Mapping[str, Weight] = field(default_factory=dict)
    """Optimizer state: NAME.exp_avg, NAME.exp_avg_sq or NAME.momentum_buffer of all parameters, or empty."""
    run: Mapping[str, Any] | None = None
    """State of the training, as the manifest of our own checkpoints has it: state, engine, config
    (but its model), and what else the format knows. None: only weights.
    """
    tokenizer: Mapping[str, Any] | None = None
    """Record of the run's tokenizer (kind, sha256, vocab_size), with the keys of data.tokenizer that name its files."""
    scheme: Scheme | None = None
    """Quantization that the weights have or were trained for, None without one."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that were left out, and why."""

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def without_run(self) -> Weights:
        """Return the weights without the state of a run."""
        if self.run is None:
            return self
        left_out = dict.fromkeys(self.moments, "state of the optimizer") | {"run": "where training stood"}
        return replace(self, moments={}, run=None, ignored={**self.ignored, **left_out})

    def with_progress(self, add: Callable[[int], object]) -> Weights:
        """Return weights that call ``add`` with the bytes of each tensor that is loaded."""

        def counted(weight: Weight) -> Weight:
            def load() -> NDArray[Any]:
                array: NDArray[Any] = weight.load()
                add(array.nbytes)
                return array

            return replace(weight, load=load)

        return replace(
            self,
            tensors={name: counted(weight) for name, weight in self.tensors.items()},
            moments={name: counted(weight) for name, weight in self.moments.items()},
        )


def checked_model(path: Path, section: Mapping[str, Any]) -> ResolvedModel:
    """Return the model of a section, with every size. Raises ConfigError for a section that does
    not describe a model.
    """
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "section"
        found = "" if first["type"] == "missing" else f"={shown(first['input'])}"
        raise ConfigError(f"{path}: {where}{found} of the model: {first['msg']}; fix the file") from None
    if model.num_layers > MAX_LAYERS:
        raise ConfigError(f"{path}: {model.num_layers} blocks; expected {MAX_LAYERS} at most; fix the file")
    if model.hidden_size % model.num_heads:
        raise ConfigError(f"{path}: {model.num_heads} heads do not divide a width of {model.hidden_size}; fix the file")
    return resolve_model(model)


def require_blocks(model: ResolvedModel, dtype: str, size: int) -> None:
    """Raise ConfigError unless the rows of all matrices divide into blocks that share a scale."""
    if model.hidden_size % size or model.ffn_hidden_size % size:
        raise ConfigError(
            f"{dtype}: weights share a scale in blocks of {size}, which must divide"
            f" model.hidden_size={model.hidden_size} and"
            f" model.ffn_hidden_size={model.ffn_hidden_size}; write float32 or float16"
        )


def check_tied(path: Path, name: str, head: FileTensor, table: FileTensor) -> None:
    """Raise CheckpointError unless the head is the embedding bit for bit; a NaN equals no
    number.
    """
    if not same_bytes(head, table):
        raise CheckpointError(
            f"{path}: {name} differs from the embedding; our head is the embedding, so this model has no place here"
        )


def weights_from(
    file: Path,
    name_map: NameMap,
    stored: Mapping[str, TensorKind],
    model: ResolvedModel,
    *,
    format: str,
    path: Path,
    ignored: Mapping[str, str],
) -> Weights:
    """Return the weights of ``file``, which was found at ``path``. Raises CheckpointError as ``import_names`` does."""
    table = name_map.table
    rows = stored[table].shape[0] if table in stored and stored[table].shape else 0
    padding = {f"{table}[{model.vocab_size}:{rows}]": "rows that pad the vocabulary"} if rows > model.vocab_size else {}
    tensors = import_names(file, name_map, stored, model)
    return Weights(path=path, format=format, model=model, tensors=tensors, ignored={**ignored, **padding})


def import_names(
    path: Path,
    name_map: NameMap,
    stored: Mapping[str, TensorKind],
    model: ResolvedModel,
    *,
    prefix: str = "",
    end: str = "",
    suffix: str = "",
) -> dict[str, Weight]:
    """Return the parameters under our names. Each has ``prefix`` before its name in ``stored`` and ``end`` after it,
    and ``suffix`` after its name here.

    Raises CheckpointError listing all that are missing, unexpected or of another shape. The embedding may have rows
    of padding.
    """
    shapes = parameter_shapes(model)
    rows = [replace(row, theirs=f"{prefix}{row.theirs}{end}") for row in name_map.rows(model.num_layers)]
    expected = {row.theirs: row.shape(shapes) for row in rows}
    found = {name: tensor.shape for name, tensor in stored.items()}
    table = f"{prefix}{name_map.table}{end}"
    if len(found.get(table, ())) == 2 and found[table][0] > model.vocab_size:
        found[table] = (model.vocab_size, *found[table][1:])
    check_tensors(path, found, expected)
    if strange := [name for name in expected if stored[name].dtype not in (*FLOATS, "float64")]:
        raise CheckpointError(
            f"{path}: {strange[0]} and {len(strange) - 1} more are {stored[strange[0]].dtype}, as a quantized model's;"
            f" expected {', '.join(FLOATS)} or float64: convert the model as it was before"
        )

    def weight(row: NameRow, part: int, shape: tuple[int, ...]) -> Weight:
        tensor = stored[row.theirs]
        return Weight(
            dtype=tensor.dtype, shape=shape, load=lambda: read_part(tensor, row, part, model.num_heads)[: shape[0]]
        )

    made = {name: weight(row, part, shapes[name]) for row in rows for part, name in enumerate(row.ours)}
    return {name + suffix: made[name] for name in shapes}


def export_names(
    name_map: NameMap,
    tensors: Mapping[str, Weight],
    model: ResolvedModel,
    dtype: str | None,
    *,
    prefix: str = "",
    suffix: str = "",
) -> dict[str, Weight]:
    """Return the tensors of another format, made from ``tensors`` by our names.

    dtype: type of all tensors, None to keep their own. prefix and suffix: as in ``import_names``.
    """

    def packed(row: NameRow) -> Weight:
        parts = [tensors[name + suffix] for name in row.ours]
        wanted = dtype or parts[0].dtype
        shape = row.shape({name: part.shape for name, part in zip(row.ours, parts, strict=True)})
        return Weight(
            dtype=wanted, shape=shape, load=lambda: row.pack([part.load_as(wanted) for part in parts], model.num_heads)
        )

    return {prefix + row.theirs: packed(row) for row in name_map.rows(model.num_layers)}


def arrays_of(tensors: Mapping[str, Weight]) -> Iterator[NDArray[Any]]:
    """Yield the arrays of ``tensors``. The next one is made while the caller writes this one."""
    return prefetch_arrays(weight.load for weight in tensors.values())


def to_type(array: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """Return an array in another type, with bfloat16 as uint16 words. It is the same array where
    nothing changes. Raises CheckpointError for a number that is too large.
    """
    if dtype == wanted:
        return array
    values: NDArray[Any] = widen_bfloat16(array) if dtype == "bfloat16" else array
    if wanted == "bfloat16":
        return round_to_bfloat16(values.astype(np.float32, copy=False))
    try:
        with np.errstate(over="raise"):
            return values.astype(wanted)
    except FloatingPointError:
        most = float(np.abs(values[np.isfinite(values)]).max())
        raise CheckpointError(
            f"a weight of {most:.4g} would be infinite in {wanted}, which ends at"
            f" {np.finfo(wanted).max:.4g}; say --dtype bfloat16, or none"
        ) from None

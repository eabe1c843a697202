"""A model's weights by our names, wherever they lie and whatever they are called there; nothing is read before it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config.schema import ModelConfig
from common.errors import CheckpointError, ConfigError
from common.structured_files import shown
from common.tensor_files.arrays import FileTensor, TensorKind, round_to_bfloat16, same_bytes, widen_bfloat16
from common.training.snapshot import STATE_NAMES, EngineState
from common.training.state import TrainState
from common.weights.names import EMBEDDING, NAME_MAPS, NameMap, NameRow, check_tensors, parameter_shapes

FLOATS = ("float32", "float16", "bfloat16")
MAX_LAYERS = 10_000
NO_SCALE = {"mode": "none", "value": 1.0, "finite_steps": 0, "overflows": 0}
"""The state of a loss scale that a run does without."""


@dataclass(frozen=True, kw_only=True)
class Weight(TensorKind):
    """One tensor, whole, with the rows of the true vocabulary."""

    load: Callable[[], NDArray[Any]]
    """A view of the file where one will do; bfloat16 as uint16 words."""

    def load_as(self, dtype: str) -> NDArray[Any]:
        """The same in another type, rounded to the nearest."""
        return to_type(self.load(), self.dtype, dtype)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a folder holds of a model."""

    path: Path
    format: str
    model: ModelConfig
    tensors: Mapping[str, Weight]
    """All parameters by our names, in the order of ``parameter_shapes``."""
    moments: Mapping[str, Weight] = field(default_factory=dict)
    """The optimizer's state: NAME.exp_avg, NAME.exp_avg_sq or NAME.momentum_buffer of all parameters, or nothing."""
    run: Mapping[str, Any] | None = None
    """Where training stood, as the manifest of our own checkpoints says it: state, engine, config (but its model), and what else the
    format knows. None: these are weights alone."""
    tokenizer: Mapping[str, Any] | None = None
    """What the run recorded of its tokenizer (kind, sha256, vocab_size), with the keys of data.tokenizer, which say where it was."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """What was left out, and why."""

    def alone(self) -> Weights:
        """The same without what only a run needs."""
        if self.run is None:
            return self
        left_out = dict.fromkeys(self.moments, "state of the optimizer") | {"run": "where training stood"}
        return replace(self, moments={}, run=None, ignored={**self.ignored, **left_out})

    def watched(self, add: Callable[[int], object]) -> Weights:
        """The same; ``add`` is told the bytes of each tensor that is loaded."""

        def watch(weight: Weight) -> Weight:
            def load() -> NDArray[Any]:
                array = weight.load()
                add(array.nbytes)
                return array

            return replace(weight, load=load)

        tensors, moments = ({name: watch(weight) for name, weight in group.items()} for group in (self.tensors, self.moments))
        return replace(self, tensors=tensors, moments=moments)


def checked_model(path: Path, section: Mapping[str, Any]) -> ModelConfig:
    """Raises ConfigError where it describes no model."""
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "section"
        found = "" if first["type"] == "missing" else f"={shown(first['input'])}"
        raise ConfigError(f"{path}: {where}{found} of the model: {first['msg']}; mend the file") from None
    if model.num_layers > MAX_LAYERS:  # of which alone the names would fill the memory
        raise ConfigError(f"{path}: {model.num_layers} blocks; expected {MAX_LAYERS} at most; mend the file")
    if model.hidden_size % model.num_heads:
        raise ConfigError(f"{path}: {model.num_heads} heads do not divide a width of {model.hidden_size}; mend the file")
    inner, positions = model.ffn_hidden_size or 4 * model.hidden_size, model.max_positions or model.seq_length
    unsaid = [name for name in ("embedding_dropout", "attention_dropout", "hidden_dropout") if getattr(model, name) is None]
    return model.model_copy(update={"ffn_hidden_size": inner, "max_positions": positions, **dict.fromkeys(unsaid, model.dropout)})


class _Checked(BaseModel):
    """Keys that are not named here are free."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


_Number = Annotated[int, Field(ge=0, lt=2**53)]


class _State(_Checked):
    step: _Number
    consumed_samples: _Number
    sample_hash: str
    skipped_steps: _Number
    skipped_in_a_row: _Number
    losses: list[float] = []
    grad_norms: list[float] = []


class _LossScale(_Checked):
    mode: str = "none"
    value: float = 1.0
    finite_steps: _Number = 0
    overflows: _Number = 0


class _Engine(_Checked):
    optimizer_steps: _Number
    loss_scale: _LossScale
    rng: dict[str, Any]


class _Optimizer(_Checked):
    name: Literal["adamw", "adam", "sgd"]
    learning_rate: float = 0.0
    min_learning_rate: float | None = None
    schedule: str = ""
    warmup_steps: _Number | None = None
    decay_steps: _Number | None = None
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.0


class _Precision(_Checked):
    compute: Literal["float32", "float16", "bfloat16"] = "float32"


class _Train(_Checked):
    global_batch_size: _Number | None = None


class _Hysteresis(_Checked):
    hysteresis: _Number = 2


class _Config(_Checked):
    optimizer: _Optimizer
    precision: _Precision = _Precision()
    train: _Train = _Train()
    loss_scale: _Hysteresis = _Hysteresis()


class _Run(_Checked):
    """What the formats read of a ``Weights.run``. Keys that older files do not have may be absent."""

    state: _State
    engine: _Engine
    config: _Config


def checked_run(path: Path, words: Any) -> dict[str, Any]:
    """Return a ``Weights.run`` that was read. Raises ConfigError unless a run can go on from it, and every value is of its type."""
    try:
        _Run.model_validate(words)
        TrainState.from_dict(words["state"])
        EngineState(**words["engine"])
        if words["engine"]["loss_scale"].get("mode") == "dynamic" and not words["engine"]["loss_scale"].keys() >= NO_SCALE.keys():
            raise ValueError(f"engine.loss_scale lacks one of {', '.join(NO_SCALE)}")
        json.dumps(words, allow_nan=False)  # as it may be written to a manifest
    except ValidationError as error:
        first = error.errors()[0]
        found = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}: {first['msg']}"
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'} {found}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    else:
        return dict(words)
    raise ConfigError(
        f"{path}: does not say where its run stood: {problem}; expected state, engine and config as in our manifests; copy it again"
    )


def moment_shapes(model: ModelConfig, optimizer: str) -> dict[str, tuple[int, ...]]:
    """Those of ``Weights.moments``."""
    return {f"{name}.{part}": shape for name, shape in parameter_shapes(model).items() for part in STATE_NAMES[optimizer]}


def require_moments(path: Path, moments: Mapping[str, Weight], run: Mapping[str, Any], model: ModelConfig) -> dict[str, Weight]:
    """The moments of a run, in the order of ``moment_shapes``. Raises CheckpointError unless all are there, or none was made yet."""
    optimizer = run["config"]["optimizer"]["name"]
    expected = moment_shapes(model, optimizer)
    if not moments and (optimizer == "sgd" or not run["engine"]["optimizer_steps"]):
        return {}
    check_tensors(path, {name: moment.shape for name, moment in moments.items()}, expected)
    return {name: moments[name] for name in expected}


def match_name_map(path: Path, format: str, names: Mapping[str, Any]) -> NameMap:
    """Of the forms of a format the one whose names these are. Raises CheckpointError if none has any of them."""
    best = max(NAME_MAPS[format], key=lambda name_map: sum(row.theirs in names for row in name_map.rows(1)))
    if not any(row.theirs in names for row in best.rows(1)):
        shown = ", ".join(list(names)[:4]) or "nothing"
        raise CheckpointError(f"{path}: holds no names of {format}, but {shown}; say --from FORMAT, or choose another file")
    return best


def check_tied(path: Path, name: str, head: FileTensor, table: FileTensor) -> None:
    """Bit for bit: a NaN equals no number. Raises CheckpointError."""
    if not same_bytes(head, table):
        raise CheckpointError(f"{path}: {name} differs from the embedding; our head is the embedding, so this model has no place here")


def read_whole(tensor: Any, row: NameRow, part: int, heads: int) -> NDArray[Any]:
    """Of a ``FileTensor``, which is one of ours or holds several."""
    return row.part(tensor.read(), heads, part)


def import_names(
    path: Path,
    name_map: NameMap,
    stored: Mapping[str, TensorKind],
    model: ModelConfig,
    *,
    prefix: str = "",
    suffix: str = "",
    read: Callable[[Any, NameRow, int, int], NDArray[Any]] = read_whole,
) -> dict[str, Weight]:
    """The parameters under their names, each with ``prefix`` before it there and ``suffix`` after it here.

    read: how a tensor of ``stored`` is read, where those are no whole tensors of one file.
    Raises CheckpointError listing all that are missing, unexpected or of another shape. The embedding may have rows of padding.
    """
    shapes = parameter_shapes(model)
    rows = name_map.rows(model.num_layers)
    expected = {prefix + row.theirs: row.shape(shapes) for row in rows}
    found = {name: tensor.shape for name, tensor in stored.items()}
    table = next(prefix + row.theirs for row in rows if row.ours == (EMBEDDING,))
    if len(found.get(table, ())) == 2 and found[table][0] > model.vocab_size:
        found[table] = (model.vocab_size, *found[table][1:])
    check_tensors(path, found, expected)
    if strange := [name for name in expected if stored[name].dtype not in (*FLOATS, "float64")]:
        raise CheckpointError(
            f"{path}: {strange[0]} and {len(strange) - 1} more are {stored[strange[0]].dtype}, as a quantized model's; expected"
            f" {', '.join(FLOATS)} or float64: convert the model as it was before"
        )
    weights = {
        name + suffix: Weight(
            dtype=stored[prefix + row.theirs].dtype,
            shape=shapes[name],
            load=_loader(read, stored[prefix + row.theirs], row, part, model.num_heads, shapes[name]),
        )
        for row in rows
        for part, name in enumerate(row.ours)
    }
    return {name + suffix: weights[name + suffix] for name in shapes}


def padding_of(name_map: NameMap, stored: Mapping[str, TensorKind], model: ModelConfig) -> dict[str, str]:
    """What ``import_names`` leaves out of the embedding, and why."""
    table = next(row.theirs for row in name_map.outside if row.ours == (EMBEDDING,))
    rows = stored[table].shape[0] if table in stored and stored[table].shape else 0
    return {f"{table}[{model.vocab_size}:{rows}]": "rows that pad the vocabulary"} if rows > model.vocab_size else {}


def _loader(
    read: Callable[[Any, NameRow, int, int], NDArray[Any]], tensor: TensorKind, row: NameRow, part: int, heads: int, shape: tuple[int, ...]
) -> Callable[[], NDArray[Any]]:
    return lambda: read(tensor, row, part, heads)[: shape[0]]


def export_names(
    name_map: NameMap, tensors: Mapping[str, Weight], model: ModelConfig, dtype: str | None, *, prefix: str = "", suffix: str = ""
) -> Iterator[tuple[str, TensorKind, Callable[[], NDArray[Any]]]]:
    """Name, kind and how to make it, of each tensor of another format, from ``tensors`` by our names. dtype: of all; as they are when left
    out. prefix and suffix: as in ``import_names``."""
    for row in name_map.rows(model.num_layers):
        parts = [tensors[name + suffix] for name in row.ours]
        wanted = dtype or parts[0].dtype
        kind = TensorKind(dtype=wanted, shape=row.shape({name: part.shape for name, part in zip(row.ours, parts, strict=True)}))
        yield prefix + row.theirs, kind, _packer(row, parts, wanted, model.num_heads)


def _packer(row: NameRow, parts: list[Weight], dtype: str, heads: int) -> Callable[[], NDArray[Any]]:
    return lambda: row.pack([part.load_as(dtype) for part in parts], heads)


def to_type(array: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """bfloat16 as words on either side; the array itself where nothing changes. Raises CheckpointError where a number is too large."""
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
            f"a weight of {most:.4g} would be infinite in {wanted}, which ends at {np.finfo(wanted).max:.4g}; say --dtype bfloat16, or none"
        ) from None

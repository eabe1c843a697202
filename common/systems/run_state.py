"""Where a run stood, as files of any format tell it; checked before a run resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config.schema import ModelConfig
from common.errors import ConfigError
from common.structured_files import shown
from common.systems.weights import Weight
from common.training.snapshot import STATE_NAMES, EngineState
from common.training.state import TrainState
from common.weights.names import check_tensors, parameter_shapes

NO_SCALE = {"mode": "none", "value": 1.0, "finite_steps": 0, "overflows": 0}
"""The state of a loss scale that a run does without."""


class _Checked(BaseModel):
    """Values of their types. Keys that are not named here may hold anything."""

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
    """The parts of a ``Weights.run`` that formats read. Keys that older files do not have may be absent."""

    state: _State
    engine: _Engine
    config: _Config


def new_run(optimizer: str, *, step: int, updates: int, scale: Mapping[str, Any], consumed_samples: int = 0) -> dict[str, Any]:
    """Return a ``Weights.run`` of the numbers that a foreign checkpoint tells. scale: the state of the loss scale."""
    return {
        "state": TrainState(step=step, consumed_samples=consumed_samples).to_dict(),
        "engine": vars(EngineState(optimizer_steps=updates, loss_scale=dict(scale), rng={})),
        "config": {"optimizer": {"name": optimizer}},
    }


def checked_run(path: Path, record: Any) -> dict[str, Any]:
    """Return a ``Weights.run`` that was read. Raises ConfigError unless a run can resume from it and every value is of its type."""
    try:
        _Run.model_validate(record)
        TrainState.from_dict(record["state"])
        EngineState(**record["engine"])
        if record["engine"]["loss_scale"].get("mode") == "dynamic" and not record["engine"]["loss_scale"].keys() >= NO_SCALE.keys():
            raise ValueError(f"engine.loss_scale lacks one of {', '.join(NO_SCALE)}")
        json.dumps(record, allow_nan=False)  # as it may be written to a manifest
    except ValidationError as error:
        first = error.errors()[0]
        found = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}: {first['msg']}"
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'} {found}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    else:
        return dict(record)
    raise ConfigError(
        f"{path}: does not say where its run stood: {problem}; expected state, engine and config as in our manifests; copy it again"
    )


def moment_shapes(model: ModelConfig, optimizer: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``Weights.moments``."""
    return {f"{name}.{part}": shape for name, shape in parameter_shapes(model).items() for part in STATE_NAMES[optimizer]}


def require_moments(path: Path, moments: Mapping[str, Weight], run: Mapping[str, Any], model: ModelConfig) -> dict[str, Weight]:
    """Return the moments of a run, in the order of ``moment_shapes``. Raises CheckpointError unless all are there, or none was made yet."""
    optimizer = run["config"]["optimizer"]["name"]
    expected = moment_shapes(model, optimizer)
    if not moments and (optimizer == "sgd" or not run["engine"]["optimizer_steps"]):
        return {}
    check_tensors(path, {name: moment.shape for name, moment in moments.items()}, expected)
    return {name: moments[name] for name in expected}

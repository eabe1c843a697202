"""State of a run in the files of any format, which is checked before a run resumes from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from common.checkpoint.snapshot import EngineState, TrainState
from common.config.resolved import ResolvedModel
from common.config.schema import TrainConfig
from common.config.values import RULES, RuleName
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write
from common.structured_files import kind_of, shown
from common.systems.weights import Weight, Weights, checked_model
from common.tensor_files.arrays import FileTensor
from common.weights.names import check_tensors, parameter_shapes
from common.yaml_files import dump_yaml, read_yaml_mapping

NO_SCALE = {"mode": "none", "value": 1.0, "finite_steps": 0, "overflows": 0}
"""State of the loss scale of a run without one."""


_COUNT = Annotated[int, Field(ge=0, lt=2**53)]
_TYPES: dict[str, Any] = {
    "state": {
        **dict.fromkeys(("step", "consumed_samples", "updated_samples", "skipped_steps", "skipped_in_a_row"), _COUNT),
        "sample_hash": str, "losses?": list[float], "grad_norms?": list[float],
    },
    "engine": {
        "optimizer_steps": _COUNT,
        "rng": {"torch?": Annotated[list[dict[str, str]], Field(min_length=1)]},
        "loss_scale": {"mode?": Literal["none", "dynamic", "static", "auto"],
        "value?": Annotated[float, Field(gt=0)], "finite_steps?": _COUNT, "overflows?": _COUNT},
    },
    "config": {
        "optimizer": {
            "name": RuleName, "schedule?": str,
            **dict.fromkeys(("learning_rate?", "weight_decay?", "beta1?", "beta2?", "epsilon?", "momentum?"), float),
            **dict.fromkeys(("min_learning_rate?", "warmup_fraction?"), float | None),
            **dict.fromkeys(("warmup_steps?", "decay_steps?", "warmup_samples?", "decay_samples?"), _COUNT | None),
        },
        "precision?": {"compute?": Literal["float32", "float16", "bfloat16"]},
        "train?": {"global_batch_size?": _COUNT | None,
            "rampup_batch_size?": TrainConfig.model_fields["rampup_batch_size"].annotation},
        "loss_scale?": {"hysteresis?": _COUNT},
    },
    "tokenizer?": dict[str, Any] | None,
}  # fmt: skip
"""Types of the values in ``Weights.run`` that formats read. A key with ``?`` may be absent, as in
older files. Other keys may have any value.
"""


def _checker(name: str, types: Mapping[str, Any]) -> type[BaseModel]:
    """Return a pydantic model of a table of types."""
    fields: dict[str, Any] = {
        key.removesuffix("?"): (
            _checker(key.removesuffix("?"), kind) if isinstance(kind, dict) else kind,
            None if key.endswith("?") else ...,
        )
        for key, kind in types.items()
    }
    return create_model(name, __config__=ConfigDict(strict=True, extra="ignore", allow_inf_nan=False), **fields)


_RUN = _checker("run", _TYPES)


def new_run(
    optimizer: RuleName,
    *,
    step: int,
    updates: int,
    scale: Mapping[str, Any],
    consumed_samples: int = 0,
    updated_samples: int | None = None,
) -> dict[str, Any]:
    """Return a ``Weights.run`` of the numbers in a foreign checkpoint. scale: the state of the loss scale.
    updated_samples: those of the updates, estimated if None. Steps beyond ``updates`` were skipped.
    """
    if updated_samples is None:
        updated_samples = consumed_samples * min(updates, step) // max(step, 1)
    state = TrainState(
        step=step,
        consumed_samples=consumed_samples,
        updated_samples=updated_samples,
        skipped_steps=max(step - updates, 0),
    )
    return {
        "state": state.to_dict(),
        "engine": vars(EngineState(optimizer_steps=updates, loss_scale=dict(scale), rng={})),
        "config": {"optimizer": {"name": optimizer}},
    }


def first_number(value: Any) -> Any:
    """Return the first element of a tensor, and any other value as it is."""
    return value.read().reshape(-1)[0].item() if isinstance(value, FileTensor) else value


def checked_run(path: Path, record: Any) -> dict[str, Any]:
    """Return a ``Weights.run`` that was read. Raises ConfigError unless a run can resume from it
    and every value is of its type.
    """
    try:
        _RUN.model_validate(record)
        state = TrainState.from_dict(record["state"])
        EngineState(**record["engine"])
        if not state.skipped_in_a_row <= state.skipped_steps <= state.step:
            raise ValueError(f"{state.skipped_in_a_row} skipped in a row, {state.skipped_steps} of {state.step} steps")
        if len(state.losses) != len(state.grad_norms):
            raise ValueError(f"{len(state.losses)} losses and {len(state.grad_norms)} gradient norms")
        if (
            record["engine"]["loss_scale"].get("mode") == "dynamic"
            and not record["engine"]["loss_scale"].keys() >= NO_SCALE.keys()
        ):
            raise ValueError(f"engine.loss_scale lacks one of {', '.join(NO_SCALE)}")
        json.dumps(record, allow_nan=False)
    except ValidationError as error:
        first = error.errors()[0]
        found = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}: {first['msg']}"
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'} {found}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    else:
        return dict(record)
    raise ConfigError(
        f"{path}: does not say where its run stood: {problem}; expected state, engine and config as"
        " in our manifests; copy it again"
    )


def require_one_run(path: Path, name: str, found: Any, told: Any) -> None:
    """Require that the weights at ``path`` are of the run in the model.yaml beside them. Raises CheckpointError.

    name, found: a count and its value in the weights. told: what the model.yaml says.
    """
    if found != told:
        raise CheckpointError(
            f"{path}: its {name} is {found}, and model.yaml says {told}: they are of two runs; take"
            " the section run out of model.yaml, or copy both again"
        )


def moment_shapes(model: ResolvedModel, optimizer: RuleName) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``Weights.moments``."""
    return {
        f"{name}.{part}": shape for name, shape in parameter_shapes(model).items() for part in RULES[optimizer].parts
    }


def require_moments(
    path: Path, moments: Mapping[str, Weight], run: Mapping[str, Any], model: ResolvedModel
) -> dict[str, Weight]:
    """Return the moments of a run, in the order of ``moment_shapes``. Raises CheckpointError unless
    all exist, or no update was made yet.
    """
    optimizer: RuleName = run["config"]["optimizer"]["name"]
    expected = moment_shapes(model, optimizer)
    updated = run["engine"]["optimizer_steps"] and not RULES[optimizer].takes_momentum
    if not moments and not updated:
        return {}
    check_tensors(path, {name: moment.shape for name, moment in moments.items()}, expected)
    return {name: moments[name] for name in expected}


MODEL_YAML = "model.yaml"


def read_model_yaml(path: Path) -> tuple[ResolvedModel, dict[str, Any] | None]:
    """Return the section model, and the section run where there is one. Raises ConfigError."""
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: no such file; heads and vocabulary cannot be read off shapes: put the section"
            " model of the config beside the weights"
        )
    content = read_yaml_mapping(path)
    section = content.get("model")
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: no section model (found {kind_of(section)}); expected num_layers,"
            " hidden_size, num_heads, seq_length, vocab_size"
        )
    run = content.get("run")
    return checked_model(path, section), None if run is None else checked_run(path, run)


def write_model_yaml(folder: Path, weights: Weights) -> None:
    """Write the file into ``folder``. Raises StorageError."""
    content: dict[str, Any] = {"model": weights.model.model_dump(exclude_none=True)}
    if weights.run is not None:
        content["run"] = dict(weights.run)
    with atomic_write(folder / MODEL_YAML, "w") as file:
        file.write(dump_yaml(content))

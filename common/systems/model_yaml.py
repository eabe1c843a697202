"""Reader and writer of ``model.yaml``, beside weights of other systems: the section model of the
config, and the state of a run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.files import atomic_write
from common.structured_files import kind_of
from common.systems.run_state import checked_run
from common.systems.weights import Weights, checked_model
from common.yaml_files import dump_yaml, read_yaml_mapping

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

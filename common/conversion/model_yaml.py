"""``model.yaml``, beside weights whose own files have no place for it: the section model of the config, and where a run stood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from common.config.schema import ModelConfig
from common.conversion.weights import Weights, checked_model, checked_run
from common.errors import ConfigError
from common.files import atomic_write

MODEL_YAML = "model.yaml"


def read_model_yaml(path: Path) -> tuple[ModelConfig, dict[str, Any] | None]:
    """The sections model, and run where there is one. Raises ConfigError."""
    try:
        words: Any = yaml.safe_load(path.read_bytes())
        section, run = dict(words["model"]), words.get("run")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; heads and vocabulary cannot be read off shapes: put the section model of the config beside the weights"
        ) from None
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: no section model ({error}); expected num_layers, hidden_size, num_heads, seq_length, vocab_size"
        ) from None
    return checked_model(path, section), None if run is None else checked_run(path, run)


def write_model_yaml(folder: Path, weights: Weights) -> None:
    """Raises StorageError."""
    words: dict[str, Any] = {"model": weights.model.model_dump(exclude_none=True)}
    if weights.run is not None:
        words["run"] = dict(weights.run)
    with atomic_write(folder / MODEL_YAML, "w") as file:
        yaml.safe_dump(words, file, sort_keys=False)

"""The configuration of a run: a file of any system, the command line, and the model of the
checkpoint that these name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.config.schema import RunConfig
from common.inference.from_checkpoint import fill_model
from common.systems.config import ConfigFile


def read_config(path: str | Path) -> ConfigFile:
    """Read a configuration file and those that it extends. Raises ConfigError."""
    return ConfigFile.read(Path(path), fill_model)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, and apply words ``section.key=value``. Raises ConfigError."""
    return read_config(path).open(overrides).config

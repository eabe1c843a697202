"""Record of a format of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.systems.weights import FLOATS, Weights


@dataclass(frozen=True)
class WeightFormat:
    title: str
    """Name in messages, such as "a Hugging Face folder"."""
    detects: Callable[[Path], bool]
    """Tells whether a path looks like this format."""
    open: Callable[[Path], AbstractContextManager[Weights]] | None = None
    """Opens weights. Raises CheckpointError and ConfigError. None: the format is written only."""
    write: Callable[[Path, Weights, str | None], dict[str, int]] | None = None
    """Writes weights: (empty folder, weights, dtype) -> the CRC-32 of each file by its name. None:
    the format is read only.
    """
    write_shards: Callable[[Path, Weights, str | None, int, int], dict[str, int]] | None = None
    """Writes as ``write`` does, with a file for each tensor and pipeline rank. None: a model is one
    file for any layout.
    """
    dtypes: tuple[str, ...] = FLOATS
    """Types of weights that ``write`` can write."""
    holds_run: bool = True
    """Whether the format holds the optimizer's state and the position of training."""
    hugging_face_config: bool = False
    """Whether transformers' config.json belongs beside what ``write`` writes."""
    missing_config: Callable[[Path], str | None] | None = None
    """Returns a shell command that writes the missing config of a folder from its shapes, None
    where there is a config.
    """
    open_as: Callable[[Path, ResolvedModel], AbstractContextManager[Weights]] | None = None
    """Opens weights whose files do not describe their model, with a given model."""
    open_to_compute: Callable[[Path], AbstractContextManager[Weights]] | None = None
    """Opens weights to run them, without checksums of large files. None: ``open`` does."""

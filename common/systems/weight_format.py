"""The record that each system's folder has for each of its formats of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.systems.weights import FLOATS, Weights


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    title: str
    """Such as "a Hugging Face folder"."""
    detects: Callable[[Path], bool]
    """Whether a path is of this format, at first sight."""
    open: Callable[[Path], AbstractContextManager[Weights]] | None = None
    """Raises CheckpointError and ConfigError. None: the format is written only."""
    write: Callable[[Path, Weights, str | None], dict[str, int]] | None = None
    """(empty folder, weights, dtype) -> the CRC-32 of each file by its name. None: the format is
    read only.
    """
    write_shards: Callable[[Path, Weights, str | None, int, int], dict[str, int]] | None = None
    """Like ``write``, for so many tensor and pipeline ranks, each with a file of its own. None: a
    model is one, for any layout.
    """
    dtypes: tuple[str, ...] = FLOATS
    """The types that ``write`` has for weights."""
    holds_run: bool = True
    """Whether the optimizer's state and where training stood have a place in it."""
    hugging_face_config: bool = False
    """Whether transformers' config.json belongs beside what ``write`` writes."""
    missing_config: Callable[[Path], str | None] | None = None
    """Returns a shell command that writes the config which a folder lacks, as far as shapes tell
    it; None where there is one.
    """
    open_as: Callable[[Path, ResolvedModel], AbstractContextManager[Weights]] | None = None
    """Opens weights too whose files do not tell their model, which is then the one given."""
    open_to_compute: Callable[[Path], AbstractContextManager[Weights]] | None = None
    """Opens quantized weights too, as the numbers that they stand for: to run them, not to convert
    them. None: ``open`` does.
    """


@dataclass(frozen=True, kw_only=True)
class System:
    """All that is known of one foreign system. What a further part needs of it becomes a further
    field with a default.
    """

    weight_formats: Mapping[str, WeightFormat]
    """Keyed by the names that ``--from`` and ``--to`` of tools/convert_weight.py take."""

"""Checkpoints of other systems, read in place as if they were ours.

``common.systems.direct.accept_foreign_weights`` registers the formats of systems, which are above
this package; the entry scripts call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.training.manifest import MANIFEST, read_manifest
from common.weights.pieces import TensorSlice


class StoredTensors(Protocol):
    """Tensors of one of our files, as ``ShardedReader`` reads them."""

    def __bool__(self) -> bool: ...

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None: ...

    def read(self, name: str, piece: TensorSlice) -> NDArray[np.float32]: ...


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    manifest: Mapping[str, Any]
    """Manifest like that of our checkpoints, without the optimizer's file if it holds only weights.

    ``left_out``: data that was not read, and why.
    """
    files: Mapping[str, StoredTensors]
    """Tensors by the names of our files: MODEL_FILE and OPTIMIZER_FILE."""


class ForeignFormats(Protocol):
    def detects(self, path: Path) -> bool:
        """Tell whether ``path`` has weights that ``open`` reads."""

    def open(self, path: Path, model: ResolvedModel) -> AbstractContextManager[ForeignCheckpoint]:
        """Open a path that was detected. Raises CheckpointError and ConfigError.

        model: the config's, used where the files do not record theirs.
        """


foreign_formats: list[ForeignFormats] = []


def is_foreign(path: Path) -> bool:
    """Tell whether a path that is not our checkpoint holds weights of a known format."""
    return not (path / MANIFEST).is_file() and any(
        formats.detects(path) for formats in foreign_formats
    )


def open_foreign(path: Path, model: ResolvedModel) -> AbstractContextManager[ForeignCheckpoint]:
    """Open a path that ``is_foreign``. Raises CheckpointError and ConfigError."""
    return next(formats for formats in foreign_formats if formats.detects(path)).open(path, model)


def manifest_of(path: Path, model: ResolvedModel, *, checksums: bool = True) -> dict[str, Any]:
    """Return the manifest of our checkpoint or of foreign weights. Raises CheckpointError and
    ConfigError.
    """
    if not is_foreign(path):
        return read_manifest(path, checksums=checksums)
    with open_foreign(path, model) as found:
        return dict(found.manifest)


def fingerprint(path: Path) -> str:
    """Return names and sizes of the files, to compare them between hosts. Raises OSError."""
    if path.parent.name == "snapshots":  # of huggingface_hub, where the name tells the content
        return path.resolve(strict=True).name
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files if file.is_file()}
    return f"{path} {sizes}"

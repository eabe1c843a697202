"""Weights of other systems in place of a checkpoint of ours. Each rank reads its part from their files.

checkpoint.init_from, load and resume take every format of ``FORMATS`` that can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.checkpoint.manifest import MANIFEST
from common.checkpoint.snapshot import MODEL_FILE, OPTIMIZER_FILE
from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, UserError
from common.files import reading
from common.systems import own_folder
from common.systems.table import FORMATS, detect
from common.systems.weights import Weight, Weights
from common.tokenizer.folder import Folder
from common.weights.names import EMBEDDING, check_tensors
from common.weights.pieces import TensorSlice, shape_of

_OF_HUGGING_FACE = (".safetensors", ".bin", ".index.json")
"""Endings of files that may be named in place of their folder."""


def foreign_format(path: Path) -> str | None:
    """Return the format of weights at a path that is not our checkpoint, as a key of FORMATS; None
    where it is unknown, or written only.
    """
    try:
        if (path / MANIFEST).is_file():
            return None
        inside = path.name.endswith(_OF_HUGGING_FACE) and FORMATS["hf"].detects(path.parent)
        format = "hf" if inside else detect(path)
    except (UserError, OSError):
        return None
    return None if format == "torch_gpt2" or FORMATS[format].open is None else format


def open_foreign(path: Path, format: str, model: ResolvedModel) -> tuple[dict[str, Any], dict[str, ForeignTensors]]:
    """Open weights of a ``foreign_format``. Raises CheckpointError and ConfigError.

    Returns a manifest like that of our checkpoints, and the tensors by the names of our files:
    MODEL_FILE, and OPTIMIZER_FILE unless it holds only weights. ``left_out``: data that was not
    read, and why. model: the config's, used where the files do not record theirs.
    """
    system: Any = FORMATS[format]
    with reading(path, CheckpointError):
        opened = system.open(path, model) if system.takes_model else system.open(path)
        weights = _without_padding(opened, model)
    files = {MODEL_FILE: ForeignTensors(path, weights.tensors)}
    if weights.run is not None:
        files[OPTIMIZER_FILE] = ForeignTensors(path, weights.moments)
    listed = {"files": {name: {} for name in files}, "left_out": dict(weights.ignored)}
    return own_folder.manifest_of(weights) | listed, files


_MAX_RANKS = 8
"""Tensor-parallel ranks to whose number of rows a table is expected to be padded at most."""


def _without_padding(weights: Weights, model: ResolvedModel) -> Weights:
    """Return the weights with the rows of the config's vocabulary, if those beyond it only pad the
    table to a multiple. Raises CheckpointError if a file beside them names a token there.
    """
    rows, size, multiple = weights.model.vocab_size, model.vocab_size, model.vocab_multiple
    if rows % multiple or not 0 < rows - size < multiple * _MAX_RANKS:
        return weights
    named = [fields["text"] for fields in Folder(weights.folder).added if fields["id"] >= size]
    if named:
        raise CheckpointError(
            f"{weights.path}: has {rows} rows for tokens, and the tokenizer in use {size} tokens;"
            f" the files there name {', '.join(map(repr, named[:3]))} beyond these; preprocess with"
            f" --vocab-file {weights.folder} and set data.tokenizer={weights.folder}"
        )

    def first_rows(weight: Weight) -> Weight:
        return replace(weight, shape=(size, *weight.shape[1:]), load=lambda: weight.load()[:size])

    def cut(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        return {name: first_rows(each) if name.startswith(EMBEDDING) else each for name, each in tensors.items()}

    return replace(
        weights,
        model=weights.model.model_copy(update={"vocab_size": size}),
        tensors=cut(weights.tensors),
        moments=cut(weights.moments),
        ignored={**weights.ignored, f"{EMBEDDING}[{size}:{rows}]": "rows that pad the vocabulary"},
    )


@dataclass(frozen=True)
class ForeignTensors:
    """Weights or optimizer state in the form of a file of ours: float32, read by rectangles."""

    path: Path
    weights: Mapping[str, Weight]

    def __bool__(self) -> bool:
        return bool(self.weights)

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Require exactly these tensors with these shapes. Raises CheckpointError."""
        check_tensors(self.path, {name: weight.shape for name, weight in self.weights.items()}, expected)

    def read(self, name: str, piece: TensorSlice) -> NDArray[np.float32]:
        """Return a copy of a rectangle of a tensor. Elements beyond its rows are 0."""
        part = self.weights[name].cut(piece, "float32")
        values = np.zeros(shape_of(piece), np.float32)
        values[: len(part)] = part
        return values

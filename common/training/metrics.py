"""Metrics of a run: ``metrics.jsonl`` as the source of truth, TensorBoard and other trackers beside
it, and the arithmetic of FLOPs.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from common.config.resolved import ResolvedModel
from common.errors import ConfigError, StorageError
from common.files import atomic_write
from common.log import LOG
from common.structured_files import MalformedError, parse_json_line
from common.training.tensorboard import EventFile
from common.training.trackers import Trackers
from common.weights.names import count_parameters

METRICS_FILE = "metrics.jsonl"


def flops_per_token(model: ResolvedModel) -> float:
    """Training FLOPs of one token: 6 per parameter that multiplies (the position table does not)
    and 12 L h T of attention, recomputation not counted (PaLM, Chowdhery et al. 2022, appendix B).
    """
    positions = (model.max_positions or model.seq_length) * model.hidden_size
    return (
        6.0 * (count_parameters(model) - positions)
        + 12.0 * model.num_layers * model.hidden_size * model.seq_length
    )


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and, if asked, to TensorBoard. Floats read back exactly;
    NaN and infinity are null.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int = 0,
        tensorboard: bool = True,
        trackers: Trackers | None = None,
        active: bool = True,
    ) -> None:
        """``step``: where the run is taken up; rows beyond it, of steps that will be done again,
        are dropped, when the first row is written or the run has ended well. ``trackers``: what
        follows the file. ``active``: False on ranks whose rows another rank writes.

        Raises ConfigError where an older file cannot be read or appended to.
        """
        self._file: IO[str] | None = None
        self._board: EventFile | None = None
        self._trackers = trackers
        self._step = step
        self._kept: str | None = None
        """What to keep of a file that holds others too, until these are dropped."""
        self._validated: set[int] = set()
        if not active:
            return
        self._path = path = folder / METRICS_FILE
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            self._file = path.open("a", encoding="utf-8")  # closed by close
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read and appended to: {error.strerror}; make it a file that"
                " this user can write, or choose another output_dir"
            ) from None
        rows = [
            (line, row)
            for line in text.splitlines()
            if (row := _parse(line)) is not None and row["step"] <= step
        ]
        self._validated = {row["step"] for _, row in rows if "validation_loss" in row}
        kept = "".join(line + "\n" for line, _ in rows)
        self._kept = kept if kept != text else None
        if not step and any(map(_parse, text.splitlines())):
            LOG.warning(
                f"{path}: holds rows of a run that left no checkpoint; this run begins anew, and"
                " replaces them"
            )
        self._board = EventFile(folder / "tensorboard", step=step) if tensorboard else None

    def lacks_validation(self, step: int) -> bool:
        """Whether this rank writes the rows, and those that were there at the start have no
        validation of this step.
        """
        return self._file is not None and step not in self._validated

    def write(self, row: dict[str, Any]) -> None:
        """Add one row; it must hold ``step``. Raises StorageError when the disk refuses."""
        if self._file is None:
            return
        try:
            self._drop_later_rows()
            self._file.write(
                json.dumps({name: _finite(value) for name, value in row.items()}) + "\n"
            )
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # it holds what could not be written, and would fail again
                self._file.close()
            raise StorageError(
                f"{self._file.name}: could not be written: {error.strerror}; checkpoints are whole"
            ) from error
        if self._board is not None:
            self._board.write(
                row["step"],
                {name: value for name, value in row.items() if isinstance(value, float)},
            )
        if self._trackers is not None:
            self._trackers.follow()

    def _drop_later_rows(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None or self._file is None:
            return
        if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
            raise StorageError(
                f"{self._path}: was replaced by another run; this one stops, and writes nothing"
                " more there"
            )
        with atomic_write(self._path, "w") as file:
            file.write(kept)
        self._file.close()
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is None:
            self._drop_later_rows()
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file. Lines that are none, such as one cut short by a crash, are left
    out.
    """
    rows = map(_parse, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json_line(line)
    except MalformedError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

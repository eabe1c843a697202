"""Metrics of a run: ``metrics.jsonl``, and copies for TensorBoard and other trackers."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from common.errors import ConfigError, StorageError
from common.files import atomic_write
from common.log import LOG
from common.structured_files import MalformedError, parse_json
from common.training.trackers import Trackers

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writer of rows to ``metrics.jsonl`` and, if asked, to TensorBoard.

    Floats read back exactly; NaN and infinity are null.
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
        """Open the metrics of a run.

        step: the step at which the run resumes. Later rows belong to steps that will be repeated. They are dropped when
        the first row is written or the run has ended well. active: False on ranks whose rows another rank writes.
        Raises ConfigError if an older file cannot be read or appended to.
        """
        self._file: IO[str] | None = None
        self._board: EventFile | None = None
        self._trackers = trackers
        self._step = step
        self._kept: str | None = None
        """Text to keep of a file that also holds other rows, until these are dropped."""
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
        rows = [(line, row) for line in text.splitlines() if (row := _parse(line)) is not None and row["step"] <= step]
        self._validated = {row["step"] for _, row in rows if "validation_loss" in row}
        self._earlier = [row for _, row in rows] if trackers else []
        kept = "".join(line + "\n" for line, _ in rows)
        self._kept = kept if kept != text else None
        if not step and any(map(_parse, text.splitlines())):
            LOG.warning(f"{path}: holds rows of a run that left no checkpoint; this run starts over, and replaces them")
        self._board = EventFile(folder / "tensorboard", step=step) if tensorboard else None

    def lacks_validation(self, step: int) -> bool:
        """Return whether the rows found at the start have no validation of this step.

        False on ranks that do not write the rows.
        """
        return self._file is not None and step not in self._validated

    def write(self, row: dict[str, Any]) -> None:
        """Add one row, which must hold ``step``. Raises StorageError if the disk fails."""
        if self._file is None:
            return
        try:
            self._drop_later_rows()
            finite = {  # JSON has neither NaN nor infinity
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in row.items()
            }
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # its buffer holds the unwritten row, and flushing it would fail again
                self._file.close()
            raise StorageError(
                f"{self._file.name}: could not be written: {error.strerror}; checkpoints are whole"
            ) from error
        if self._board is not None:
            self._board.write(row["step"], {name: value for name, value in row.items() if isinstance(value, float)})
        if self._trackers is not None:
            self._trackers.write(row, self._earlier)
            self._earlier = []

    def _drop_later_rows(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None or self._file is None:
            return
        if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
            raise StorageError(
                f"{self._path}: was replaced by another run; this one stops, and writes nothing more there"
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

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._drop_later_rows()
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file. Lines that are not a row, such as one cut by a crash, are left out."""
    rows = map(_parse, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line, strict=False)
    except MalformedError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


SECONDS_BETWEEN_FLUSHES = 10.0


class EventFile:
    """Scalars by step for TensorBoard, without torch. New events replace older ones after ``step``."""

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event_type = Event
        self._flushed = time.monotonic()
        self._writer: Any = None
        with self._warning_only():
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
            if step:
                self._writer.write_event(
                    Event(step=step + 1, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
                )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._writer is None:
            return
        event = self._event_type(step=step, wall_time=time.time())
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        with self._warning_only():
            self._writer.write_event(event)
            if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        if self._writer is not None:
            with self._warning_only():
                self._writer.close()

    @contextmanager
    def _warning_only(self) -> Iterator[None]:
        """End the events with a warning where the disk fails."""
        try:
            yield
        except OSError as error:
            LOG.warning(f"TensorBoard events end here: {error}; metrics.jsonl has every step")
            with suppress(OSError, AttributeError):
                # otherwise it fails again, with a traceback, when it is collected
                self._writer._py_recordio_writer.close()
            self._writer = None


MEMORY_FILE = "memory.json"
"""Bytes of all ranks, one object a rank.

``peak`` is the maximum held by the device, or on a CPU by the process. ``at_start`` is the memory of a process on a CPU
before the model was created, else 0. ``state`` counts the weights and the optimizer's state. ``step_seconds``: median
time of a full step, if one was measured.
"""

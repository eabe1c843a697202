"""TensorBoard event files, written in the training thread. A full disk ends the events, not the
run.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.log import LOG

SECONDS_BETWEEN_FLUSHES = 10.0


class EventFile:
    """Scalars by step for TensorBoard, without torch. New events replace older ones after
    ``step``.
    """

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event_type = Event
        self._flushed = time.monotonic()
        self._writer: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
            if step:
                self._writer.write_event(
                    Event(
                        step=step + 1,
                        wall_time=time.time(),
                        session_log=SessionLog(status=SessionLog.START),
                    )
                )
        except OSError as error:
            self._give_up(error)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._writer is None:
            return
        event = self._event_type(step=step, wall_time=time.time())
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        try:
            self._writer.write_event(event)
            if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        LOG.warning(f"TensorBoard events end here: {error}; metrics.jsonl has every step")
        with suppress(OSError, AttributeError):
            # otherwise it fails again, with a traceback, when it is collected
            self._writer._py_recordio_writer.close()
        self._writer = None

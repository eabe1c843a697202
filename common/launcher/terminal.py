"""Output of a launcher, written by its own thread, so that a blocked terminal cannot stop it."""

from __future__ import annotations

import os
import queue
import sys
import threading
from contextlib import suppress

_CLEAR = "\r\x1b[K"


def tell(text: str, *, error: bool = False) -> None:
    """Print a line to standard output or standard error, below Python's buffers, whose locks a thread may hold."""
    _write(1 + error, f"{text}\n")


def _write(file: int, text: str) -> None:
    rest = text.encode(errors="replace")
    with suppress(OSError):  # full, or its reader has gone
        while rest:
            rest = rest[os.write(file, rest) :]


class Terminal:
    """Lines in the order in which they are said."""

    def __init__(self) -> None:
        self._output, self._errors = sys.stdout.fileno(), sys.stderr.fileno()
        self._live = ""
        self._in_a_line = False
        self._shows_live = os.isatty(self._output) and os.environ.get("TERM") != "dumb"
        self._texts: queue.Queue[tuple[int, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Tell whether text to copy would be written soon."""
        return self._texts.qsize() < 16

    def say(self, text: str, *, error: bool = False) -> None:
        """Print a line of the launcher itself, below what was copied."""
        if self._in_a_line:
            self.copy("\n")
        self._put(self._errors if error else self._output, f"{text}\n")

    def copy(self, text: str) -> None:
        """Copy text to standard output unchanged."""
        self._put(self._output, text)
        self._in_a_line = not text.endswith("\n")

    def live(self, text: str) -> None:
        """Show a short line in place of the one before; only on a terminal that has room."""
        if self._shows_live and self.has_room and text != self._live and not self._in_a_line:
            self._put(self._output, text)
            self._live = text

    def close(self) -> None:
        """Wait a moment until all is written."""
        self._texts.put(None)
        self._thread.join(2.0)

    def _put(self, file: int, text: str) -> None:
        self._texts.put((file, f"{_CLEAR}{text}" if self._live else text))
        self._live = ""

    def _run(self) -> None:
        while item := self._texts.get():
            _write(*item)

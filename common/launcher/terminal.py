"""Output of a launcher, written by its own thread, so that a blocked terminal cannot stop it."""

from __future__ import annotations

import os
import queue
import sys
import threading
from contextlib import suppress
from typing import TextIO

_CLEAR = "\r\x1b[K"
_MOST_WAITING = 16
"""Texts that may wait for a reader before nothing more is copied."""


def tell(text: str, *, error: bool = False) -> None:
    """Print a line before there is a Terminal."""
    _write(sys.stderr if error else sys.stdout, f"{text}\n")


def _write(stream: TextIO, text: str) -> None:
    """Write below Python's buffer, whose lock a stuck thread would hold; a full stream or one that is gone loses it."""
    rest = memoryview(text.encode(errors="replace"))
    with suppress(OSError):
        stream.flush()
        raw = getattr(stream.buffer, "raw", stream.buffer)
        while rest:
            rest = rest[raw.write(rest) or len(rest) :]


class Terminal:
    """Lines in the order in which they are said."""

    def __init__(self) -> None:
        self._live = ""
        """Text of the live line; empty for none."""
        self._in_a_line = False
        """Whether the last copied text has no line end yet."""
        self._has_live_line = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._texts: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Tell whether text to copy would be written soon."""
        return self._texts.qsize() < _MOST_WAITING

    def say(self, text: str, *, error: bool = False) -> None:
        """Print a line of the launcher itself, to standard output or standard error, below what was copied."""
        if self._in_a_line:
            self.copy("\n")
        self._put(sys.stderr if error else sys.stdout, f"{text}\n")

    def copy(self, text: str) -> None:
        """Copy text to standard output unchanged."""
        self._put(sys.stdout, text)
        self._in_a_line = not text.endswith("\n")

    def live(self, text: str) -> None:
        """Show a short line in place of the one before; only on a terminal."""
        if self._has_live_line and text != self._live and not self._in_a_line:
            self._put(sys.stdout, f"{_CLEAR}{text}")
            self._live = text

    def close(self, limit: float = 2.0) -> None:
        """Wait at most ``limit`` seconds until all is written."""
        with suppress(queue.Full):
            self._texts.put(None, timeout=limit)
            self._thread.join(limit)

    def _put(self, stream: TextIO, text: str) -> None:
        text = f"{_CLEAR}{text}" if self._live and not text.startswith(_CLEAR) else text
        self._live = ""
        with suppress(queue.Full):
            self._texts.put_nowait((stream, text))

    def _run(self) -> None:
        while item := self._texts.get():
            _write(*item)

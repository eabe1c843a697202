"""Output of a launcher, written by its own thread, so that a blocked terminal or pipe cannot stop
it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from contextlib import suppress
from typing import TextIO

_CLEAR = "\r\x1b[K"
_MOST_WAITING = 1 << 22
"""Characters that may wait for a reader before copied text is left out."""


class Terminal:
    """Lines in the order in which they are said. Text not read in time is dropped, and its length
    said.
    """

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                if stream is not None:  # closed before Python started
                    stream.flush()
        self._live = ""
        """Text of the live line; empty for none."""
        self._in_a_line = False
        """Whether the last copied text has no line end yet."""
        self._given = self._taken = self._left_out = 0
        """Number of characters put, of those taken by the writing thread, and of those of copied
        text that were left out and are not spoken of yet.
        """
        self._has_live_line = (
            sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        )
        self._texts: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def say(self, text: str, *, error: bool = False) -> None:
        """Print a line of the launcher itself, to standard output or standard error."""
        self._say_left_out()
        self._put(sys.stderr if error else sys.stdout, f"{text}\n")

    def copy(self, text: str) -> None:
        """Copy text to standard output unchanged; dropped while much is waiting for the reader."""
        if not text:
            return
        has_room = self._given - self._taken < _MOST_WAITING and self._say_left_out()
        if has_room and self._put(sys.stdout, text):
            self._in_a_line = not text.endswith("\n")
        else:
            self._left_out += len(text)

    def live(self, text: str) -> None:
        """Show a short line in place of the one before; only on a terminal."""
        if self._has_live_line and text != self._live and not self._in_a_line:
            self._put(sys.stdout, f"{_CLEAR}{text}")
            self._live = text

    def close(self, limit: float = 2.0) -> None:
        """Wait at most ``limit`` seconds until all text is written."""
        self._say_left_out()
        with suppress(queue.Full):
            self._texts.put(None, timeout=limit)
            self._thread.join(limit)

    def _say_left_out(self) -> bool:
        """Say how much copied text is missing here. Returns False if that finds no room."""
        if self._left_out:
            start = "\n" if self._in_a_line else ""
            note = f"{start}[{self._left_out} characters are left out here; the log has them]\n"
            if not self._put(sys.stdout, note):
                return False
            self._left_out, self._in_a_line = 0, False
        return True

    def _put(self, stream: TextIO | None, text: str) -> bool:
        text = f"{_CLEAR}{text}" if self._live and not text.startswith(_CLEAR) else text
        self._live = ""
        with suppress(queue.Full):
            if stream is not None:
                self._texts.put_nowait((stream, text))
                self._given += len(text)
                return True
        return False

    def _write(self) -> None:
        while (item := self._texts.get()) is not None:
            stream, text = item
            with suppress(OSError, ValueError):  # closed, or the terminal is gone
                _write_now(stream, text)
            self._taken += len(text)


def tell(text: str, *, error: bool = False) -> None:
    """Print a line to standard output or standard error, before there is a Terminal.

    A full or closed stream does not prevent the run.
    """
    stream = sys.stderr if error else sys.stdout
    with suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()
            _write_now(stream, f"{text}\n")


def _write_now(stream: TextIO, text: str) -> None:
    """Write below Python's own buffer. Raises OSError.

    A thread stuck in that buffer would hold its lock until the interpreter aborts. Unwritten text
    would then fail again when the interpreter ends.
    """
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if raw is None:
        stream.write(text)
        stream.flush()
        return
    rest = memoryview(text.encode(errors="replace"))
    while rest:
        rest = rest[raw.write(rest) or len(rest) :]


def open_standard_streams() -> None:
    """Open the standard streams that were closed before the start, as by ``>&-``.

    Otherwise the next opened file or socket would take their place.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))

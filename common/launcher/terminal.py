"""What a launcher says, written by a thread of its own: a terminal or a pipe that takes nothing more must not stop the launcher."""

from __future__ import annotations

import os
import queue
import re
import shutil
import sys
import threading
import unicodedata
from contextlib import suppress
from typing import TextIO

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|[\x00-\x08\x0b-\x1f\x7f]")
_CLEAR = "\r\x1b[K"


class Terminal:
    """Lines in the order in which they are said. What the reader has not taken in time is dropped."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        self._live = ""
        self.has_live_line = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._lines: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def say(self, text: str, *, error: bool = False) -> None:
        """A line of the launcher itself, to standard output or standard error."""
        self._put(sys.stderr if error else sys.stdout, f"{_CLEAR if self._live else ''}{text}\n")
        self._live = ""

    def copy(self, text: str) -> None:
        """Text as it is, to standard output."""
        if text:
            self._put(sys.stdout, text)

    def live(self, text: str) -> None:
        """Show the last line of ``text`` in the place of the one before; only on a terminal."""
        lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
        line = cut(_CONTROL.sub("", lines[-1]).strip(), shutil.get_terminal_size().columns - 1) if lines else ""
        if self.has_live_line and line and line != self._live:
            self._live = line
            self._put(sys.stdout, f"{_CLEAR}{line}")

    def close(self, limit: float = 2.0) -> None:
        """Wait for what was said to be written, for ``limit`` seconds at most."""
        if self._live:
            self._put(sys.stdout, _CLEAR)
        with suppress(queue.Full):
            self._lines.put(None, timeout=limit)
            self._thread.join(limit)

    def _put(self, stream: TextIO, text: str) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait((stream, text))

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            stream, text = item
            with suppress(OSError, ValueError):  # closed, or the terminal has gone
                # Below Python's own buffer, whose lock a thread stuck in it would hold until the interpreter ends by an abort.
                raw = getattr(getattr(stream, "buffer", None), "raw", None)
                if raw is None:
                    stream.write(text)
                    stream.flush()
                    continue
                rest = memoryview(text.encode(errors="replace"))
                while rest:
                    rest = rest[raw.write(rest) or len(rest) :]


def cut(text: str, width: int) -> str:
    """The start of ``text`` that takes ``width`` columns at most; Chinese characters take two."""
    taken = 0
    for index, character in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if taken > width:
            return text[:index]
    return text

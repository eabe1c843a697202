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
                if stream is not None:  # it was closed before Python started
                    stream.flush()
        self._live = ""
        self._whole = ""
        """What ``live`` was last given, not cut to the width."""
        self.has_live_line = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._lines: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def say(self, text: str, *, error: bool = False) -> None:
        """A line of the launcher itself, to standard output or standard error."""
        self._put(sys.stderr if error else sys.stdout, f"{_CLEAR if self._live else ''}{text}\n")
        self._live = self._whole = ""

    def copy(self, text: str) -> None:
        """Text as it is, to standard output."""
        if text:
            self._put(sys.stdout, text)

    def live(self, text: str) -> None:
        """Show the last line of ``text`` in the place of the one before; only on a terminal."""
        lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
        whole = _CONTROL.sub("", lines[-1]).strip() if lines else ""
        line = cut(whole, shutil.get_terminal_size().columns - 1)
        if self.has_live_line and line and whole != self._whole:
            self._live, self._whole = line, whole
            self._put(sys.stdout, f"{_CLEAR}{line}")

    def keep_live(self) -> None:
        """Make the live line an ordinary one, in full: at the end it says what came of the run."""
        if self._live:
            self._put(sys.stdout, f"{_CLEAR}{self._whole}\n")
        self._live = self._whole = ""

    def close(self, limit: float = 2.0) -> None:
        """Wait for what was said to be written, for ``limit`` seconds at most."""
        self.keep_live()
        with suppress(queue.Full):
            self._lines.put(None, timeout=limit)
            self._thread.join(limit)

    def _put(self, stream: TextIO | None, text: str) -> None:
        with suppress(queue.Full):
            if stream is not None:
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

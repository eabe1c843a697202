"""Output of a launcher, written by its own thread, so that a blocked terminal cannot stop it."""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_CLEAR = "\r\x1b[K"
_MOST_WAITING = 16
"""Texts that may wait for a reader before nothing more is copied."""


class Terminal:
    """Lines in the order in which they are said."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                if stream is not None:  # closed before Python started
                    stream.flush()
        self.log: Path | None = None
        """File that has all that is copied."""
        self._live = ""
        """Text of the live line; empty for none."""
        self._in_a_line = False
        """Whether the last copied text has no line end yet."""
        self._has_live_line = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._texts: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Tell whether text to copy would be written soon."""
        return self._texts.qsize() < _MOST_WAITING

    def say(self, text: str, *, error: bool = False) -> None:
        """Print a line of the launcher itself, to standard output or standard error."""
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

    @property
    def rest(self) -> str:
        """Words that say where the output is that was not copied."""
        line_end = "\n" if self._in_a_line else ""
        return f"{line_end}the rest of the output is in {self.log}; a restart adds a number to that name"

    def close(self, limit: float = 2.0) -> None:
        """Wait at most ``limit`` seconds until all is written, then write what stderr still takes.

        Where output was not written, that says where it is.
        """
        with suppress(queue.Full):
            self._texts.put(None, timeout=limit)
            self._thread.join(limit)
        if not self._thread.is_alive():
            return
        left = []
        with suppress(queue.Empty):
            while True:
                left.append(self._texts.get_nowait())
        texts = [item[1] for item in left if item and item[0] is sys.stderr]
        texts += [f"{self.rest.lstrip()}\n"] if self.log else []
        rest = memoryview("".join(texts).encode(errors="replace"))
        with suppress(OSError, ValueError):
            while rest and select.select([], [sys.stderr], [], 0)[1]:
                rest = rest[os.write(sys.stderr.fileno(), rest[: select.PIPE_BUF]) :]

    def _put(self, stream: TextIO | None, text: str) -> None:
        text = f"{_CLEAR}{text}" if self._live and not text.startswith(_CLEAR) else text
        self._live = ""
        with suppress(queue.Full):
            if stream is not None:
                self._texts.put_nowait((stream, text))

    def _write(self) -> None:
        while (item := self._texts.get()) is not None:
            with suppress(OSError, ValueError):  # closed, or the terminal is gone
                _write_now(*item)


def tell(text: str, *, error: bool = False) -> None:
    """Print a line before there is a Terminal; a full or closed stream does not matter."""
    stream = sys.stderr if error else sys.stdout
    with suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()
            _write_now(stream, f"{text}\n")


def _write_now(stream: TextIO, text: str) -> None:
    """Write below Python's own buffer, whose lock a stuck thread would hold. Raises OSError."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if raw is None:
        stream.write(text)
        stream.flush()
        return
    rest = memoryview(text.encode(errors="replace"))
    while rest:
        rest = rest[raw.write(rest) or len(rest) :]


def open_standard_streams() -> None:
    """Open the streams closed by ``>&-``, whose place a file or socket would take else."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the lowest free number
            stream = Path(os.devnull).open(mode)  # noqa: SIM115 - never closed
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)

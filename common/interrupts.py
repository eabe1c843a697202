"""Ctrl-C while a program starts, loads its libraries or ends: exit code 130, one line, no traceback.

Python raises KeyboardInterrupt wherever it stands. In the middle of an import that is a traceback, or a library that calls itself
broken. Until there is anything to clean up, the process therefore ends at once. This module loads no library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
_MESSAGE = b"error: interrupted\n"


def end_at_interrupts() -> None:
    """From here on Ctrl-C ends the process at once, until ``raise_interrupts``. No change where SIGINT is ignored."""
    if _is_ours_to_set():
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again, after ``end_at_interrupts``."""
    if _is_ours_to_set() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending_at_interrupts() -> Iterator[None]:
    """A stretch in which Ctrl-C ends the process at once: the import of a framework."""
    before = signal.getsignal(signal.SIGINT)
    end_at_interrupts()
    try:
        yield
    finally:
        if _is_ours_to_set() and signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


def run_script(main: Callable[[], int]) -> NoReturn:
    """Call the ``main`` of a script, and end the process with its exit code; 130 after Ctrl-C."""
    raise_interrupts()
    try:
        code = main()
    except KeyboardInterrupt:
        _say()
        code = EXIT_CODE
    end_at_interrupts()
    sys.exit(code)


def _is_ours_to_set() -> bool:
    """Handlers belong to the main thread; a program in the background of a shell ignores SIGINT, and goes on to."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _say()
    os._exit(EXIT_CODE)


def _say() -> None:
    with suppress(OSError):  # standard error may be closed
        os.write(2, _MESSAGE)

"""Ctrl-C: exit code 130 and one line.

While there is nothing to clean up, and while a framework is imported, the process ends at once.
Later Python raises KeyboardInterrupt. This module loads no library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
_raised: list[int] = []


def end_at_interrupts() -> None:
    """Let Ctrl-C end the process at once, until ``raise_interrupts``.

    If SIGINT is ignored, it stays ignored.
    """
    if _is_ours_to_set():
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after ``end_at_interrupts``."""
    if _is_ours_to_set() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)


@contextmanager
def ending_at_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once within the block: the import of a framework."""
    before = signal.getsignal(signal.SIGINT)
    end_at_interrupts()
    try:
        yield
    finally:
        if _is_ours_to_set() and signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


@contextmanager
def exiting_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM, from a scheduler, into SystemExit within the block, so that partial files can
    be removed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def holding_signals() -> Iterator[list[int]]:
    """Hold back SIGINT and SIGTERM within code that would abort at an exception of a signal
    handler.

    Their numbers are added to the list, and raised at its end.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def _is_ours_to_set() -> bool:
    """Tell whether this code may set handlers: only in the main thread, and if SIGINT is not
    ignored.

    A program in the background of a shell ignores SIGINT, and must continue to.
    """
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) not in (
        signal.SIG_IGN,
        None,
    )


def was_interrupted() -> bool:
    """Tell whether Ctrl-C has raised KeyboardInterrupt, which C++ code may have dropped."""
    return bool(_raised)


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.append(number)
    signal.default_int_handler(number, frame)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # standard error may be closed
        os.write(2, b"stopped by Ctrl-C\n")
    os._exit(EXIT_CODE)

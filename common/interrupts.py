"""Ctrl-C at any moment of a program: exit code 130, one line, no traceback.

Python raises KeyboardInterrupt at any place. In the middle of an import the result is a traceback,
or a library that reports itself broken. While there is nothing to clean up, the process therefore
ends at once. Later, signals wait for the end of an import. This module loads no library.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    _Handler = Callable[[int, FrameType | None], Any]
    _Hook = Callable[[sys.UnraisableHookArgs], Any]

EXIT_CODE = 130
_MESSAGE = b"stopped by Ctrl-C\n"
_IMPORTS = "<frozen importlib._bootstrap>"
"""File name of the frames of an import."""
_RETRY_SECONDS = 0.001
_raised: list[int] = []


def end_at_interrupts() -> None:
    """Let Ctrl-C end the process at once, until ``raise_interrupts``.

    If SIGINT is ignored, it stays ignored.
    """
    if _is_ours_to_set():
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after ``end_at_interrupts``; in an import, once it
    has ended.

    Python prints and drops an exception in a destructor or in the callback of a weak reference. An
    import runs such a callback for every module, so Ctrl-C could be lost there. It is raised again.
    """
    if _is_ours_to_set() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, outside_imports(_raise))
        sys.unraisablehook = _raise_dropped_interrupts(sys.unraisablehook)


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


def outside_imports(handle: _Handler) -> _Handler:
    """Return a signal handler that calls ``handle``, but during an import only after its end."""

    def wait(number: int, frame: FrameType | None) -> None:
        within = frame
        while within is not None and within.f_code.co_filename != _IMPORTS:
            within = within.f_back
        if within is None:
            handle(number, frame)
        else:
            _thread.start_new_thread(_again_soon, (number,))

    return wait


@contextmanager
def exiting_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM, from a scheduler, into SystemExit within the block, so that partial files can
    be removed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = exit_at_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_at_sigterm() -> Any:
    """Turn SIGTERM into SystemExit from now on. Returns the handler of before."""
    return signal.signal(signal.SIGTERM, outside_imports(lambda number, _: sys.exit(128 + number)))


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
    return threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGINT
    ) not in (signal.SIG_IGN, None)


def was_interrupted() -> bool:
    """Tell whether Ctrl-C has raised KeyboardInterrupt, which C++ code may have dropped."""
    return bool(_raised)


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.append(number)
    signal.default_int_handler(number, frame)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _say()
    os._exit(EXIT_CODE)


def _raise_dropped_interrupts(others: _Hook) -> _Hook:
    """Return the hook for dropped exceptions. others: for all but KeyboardInterrupt."""

    def hook(dropped: sys.UnraisableHookArgs, /) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            with suppress(RuntimeError):  # no new threads while Python ends
                _thread.start_new_thread(_again_soon, (signal.SIGINT,))
        else:
            others(dropped)

    return hook


def _again_soon(number: int) -> None:
    """Send a signal to the main thread once it may have left the callback or the import."""
    time.sleep(_RETRY_SECONDS)
    if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):  # a thread waits for it: stop.py
        _thread.interrupt_main(signal.Signals(number))
    else:  # this also ends a wait of the main thread
        os.kill(os.getpid(), number)


def _say() -> None:
    with suppress(OSError):  # standard error may be closed
        os.write(2, _MESSAGE)

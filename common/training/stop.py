"""A clean stop: SIGTERM and SIGINT are noted, and obeyed by the loop at the next step boundary; and a clean end of the process."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn


class StopSignal:
    """Context in which the first SIGTERM or SIGINT sets ``number``; a second one ends the process at once.

    Not in a rank of our launcher, which may get the launcher's SIGTERM beside that of a scheduler; the launcher kills with SIGKILL.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and "GPT2_LAUNCHER_PID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            signal.raise_signal(number)
        self.number = number


def receive_interrupts() -> None:
    """Take SIGINT in a thread that hands it to Python's handler, for a framework that replaces the process's own.

    MindSpore does so at every call of a compiled function, and turns Ctrl-C into SIGTERM. The handler runs when the main thread is
    back in Python; a second SIGINT ends the process at once, wherever that is. Call it before the framework starts threads, which
    must inherit the mask.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def wait() -> None:
        _thread.interrupt_main(signal.Signals(signal.sigwait({signal.SIGINT})))
        os._exit(128 + signal.sigwait({signal.SIGINT}))

    threading.Thread(target=wait, name="interrupts", daemon=True).start()


def end_process(code: int) -> NoReturn:
    """``sys.exit``; but with MindSpore, once all that is registered for the end has run, without destructors of libraries: its own race
    with its threads that talk to other ranks, and two of twelve starts of four ranks ended with signal 11 when all was done."""
    if "mindspore" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # without a reader, or closed
            stream.flush()
    os._exit(code)

"""A clean stop: SIGTERM and SIGINT are noted, and obeyed by the loop at the next step boundary."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


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

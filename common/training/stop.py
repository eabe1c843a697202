"""Clean stop and clean end of a process.

SIGTERM and SIGINT are recorded, and the loop stops at the next step boundary.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from common.interrupts import end_at_interrupts, was_interrupted


class StopSignal:
    """Context in which the first SIGTERM or SIGINT sets ``number``; a second one ends the process
    at once.

    In a rank of our launcher a second signal is ignored: it may be the launcher's SIGTERM beside
    that of a scheduler. The launcher kills with SIGKILL. A shell script starts a background job
    with SIGINT ignored; it stays ignored.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._note)
        if was_interrupted():
            self.number = signal.SIGINT
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and "GPT2_LAUNCHER_PID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            signal.raise_signal(number)
        self.number = number


def receive_interrupts() -> None:
    """Receive SIGINT in a thread that passes it to Python's handler, for a framework that replaces
    this handler.

    MindSpore replaces it at every call of a compiled function, and turns Ctrl-C into SIGTERM. The
    handler runs when the main thread is back in Python. A second SIGINT ends the process at once,
    wherever it is. Call this before the framework starts threads, which must inherit the mask.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def wait() -> None:
        _thread.interrupt_main(signal.Signals(signal.sigwait({signal.SIGINT})))
        os._exit(128 + signal.sigwait({signal.SIGINT}))

    threading.Thread(target=wait, name="interrupts", daemon=True).start()


def end_process(code: int) -> NoReturn:
    """End the process like ``sys.exit``, with two exceptions.

    A MindSpore rank on a CPU that our launcher has started leaves without MindSpore's exit
    handlers. They sign off from its scheduler, and ended three of about twenty starts of four ranks
    with signal 11 after all work was done. Our launcher ends the scheduler after the ranks; msrun's
    scheduler would wait for the ranks to sign off.
    A torch rank that ends after an error, while its group is open, leaves without destructors.
    Those of gloo could abort the process when another rank has gone.
    """
    mindspore = sys.modules.get("mindspore")
    on_cpu = mindspore is not None and mindspore.get_context("device_target") == "CPU"
    _flush()
    end_at_interrupts()
    if on_cpu and os.environ.get("MS_ROLE") == "MS_WORKER" and "GPT2_LAUNCHER_PID" in os.environ:
        leave_now(code)
    distributed = sys.modules.get("torch.distributed")
    is_open = distributed and distributed.is_available() and distributed.is_initialized()
    if code and is_open:
        leave_now(code)
    sys.exit(code)


def leave_now(code: int) -> NoReturn:
    """Flush the output, and end the process without exit handlers and destructors."""
    logging.shutdown()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # the output has no reader, is closed or does not exist
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()

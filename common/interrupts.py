"""Ctrl-C and SIGTERM: an exit, an exception, or a stop at the next step boundary; end of a process.

While modules are imported, an exception could be lost or end as another error; then Ctrl-C ends the process at once.
This module loads no library.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


def end_at_interrupts() -> None:
    """Let Ctrl-C end the process at once, until ``raise_interrupts``."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end_at_once)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after ``end_at_interrupts``."""
    if signal.getsignal(signal.SIGINT) is end_at_once:  # not a handler of who calls us
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def exiting_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM, from a scheduler, into SystemExit within the block, so that partial files can be removed."""
    with handling({signal.SIGTERM: lambda number, _: sys.exit(128 + number)}):
        yield


@contextmanager
def holding_signals() -> Iterator[list[int]]:
    """Hold back SIGINT and SIGTERM within code that would abort at an exception of a signal handler.

    Their numbers are added to the list. The first acts at the end.
    """
    held: list[int] = []
    try:
        with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, _: held.append(number))):
            yield held
    finally:
        if held and callable(handler := signal.getsignal(held[0])):
            handler(held[0], None)  # raised, it would wait for ever after receive_interrupts
        elif held:
            signal.raise_signal(held[0])


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[dict[int, Any]]:
    """Set handlers of signals, which only the main thread may do. Yields those before, which come back.

    SIGINT that is ignored in the background of a shell, and SIGHUP under nohup, stay ignored.
    """
    here = handlers if threading.current_thread() is threading.main_thread() else {}
    kept = {number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN}
    free = [number for number in here if number not in kept]
    before = {number: signal.signal(number, handlers[number]) for number in free}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C while modules are imported."""
    with suppress(OSError):  # standard error may be closed
        os.write(2, b"stopped by Ctrl-C\n")
    os._exit(130)


class StopSignal(ExitStack):
    """Context in which the first SIGTERM or SIGINT sets ``number``; a second one ends the process at once.

    In a rank of our launcher a second signal is ignored: it may be the launcher's SIGTERM beside that of a scheduler.
    The launcher kills with SIGKILL.
    """

    number: int | None = None

    def __enter__(self) -> StopSignal:
        self.enter_context(handling(dict.fromkeys((signal.SIGTERM, signal.SIGINT), self._note)))
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and "GPT2_LAUNCHER_PID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            signal.raise_signal(number)
        self.number = number


def receive_interrupts() -> None:
    """Receive SIGINT in a thread that passes it to Python's handler, for a framework that replaces this handler.

    MindSpore replaces it at every call of a compiled function, and turns Ctrl-C into SIGTERM. The handler runs when the
    main thread is back in Python. A second SIGINT ends the process at once, wherever it is. Call this before the
    framework starts threads, which must inherit the mask. A SIGINT that is ignored from the start stays blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return

    def wait() -> None:
        _thread.interrupt_main(signal.Signals(signal.sigwait({signal.SIGINT})))
        os._exit(128 + signal.sigwait({signal.SIGINT}))

    threading.Thread(target=wait, name="interrupts", daemon=True).start()


def end_process(code: int) -> NoReturn:
    """End the process like ``sys.exit``, with two exceptions.

    A MindSpore rank on a CPU that our launcher has started leaves without MindSpore's exit handlers. They sign off from
    its scheduler, and ended three of about twenty starts of four ranks with signal 11 after all work was done. Our
    launcher ends the scheduler after the ranks; msrun's scheduler would wait for the ranks to sign off. A torch rank
    that ends after an error, while its group is open, leaves without destructors. Those of gloo could abort the process
    when another rank has gone.
    """
    mindspore = sys.modules.get("mindspore")
    on_cpu = mindspore is not None and mindspore.get_context("device_target") == "CPU"
    is_worker = on_cpu and os.environ.get("MS_ROLE") == "MS_WORKER" and "GPT2_LAUNCHER_PID" in os.environ
    distributed = sys.modules.get("torch.distributed")
    is_open = distributed and distributed.is_available() and distributed.is_initialized()
    for stream in (sys.stdout, sys.stderr):
        # the output has no reader, is closed or does not exist
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    end_at_interrupts()
    if is_worker or (code and is_open):
        import logging  # which takes longer to load than the rest here

        logging.shutdown()  # which flushes what is in handlers
        os._exit(code)
    sys.exit(code)

"""A hostile input is refused by one clear error, or gives a result that the test compares."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import GPT2Error

LIMIT_SECONDS = 10.0
"""Of the processor. Six times as long on the clock, for what waits."""
LIMIT_BYTES = 2**30
"""Memory that one input may take beyond what the process holds before."""
LONGEST_MESSAGE = 2000
TIMERS = {signal.SIGPROF: (signal.ITIMER_PROF, 1), signal.SIGALRM: (signal.ITIMER_REAL, 6)}


class Hang(BaseException):
    """Not an Exception, so that no reader takes it for a fault of its file."""


def _raise(*_: object) -> None:
    raise Hang


@contextmanager
def limits(seconds: float) -> Iterator[None]:
    """Private memory counts, mapped files do not: a map of a sparse file costs nothing."""
    handlers = {number: signal.signal(number, _raise) for number in TIMERS}
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * held + LIMIT_BYTES, memory[1]))
    # where no Python code runs, or it catches everything
    faulthandler.dump_traceback_later(7 * seconds + 5, exit=True, file=sys.__stderr__)
    try:
        for timer, times in TIMERS.values():
            signal.setitimer(timer, times * seconds)
        yield
    except Hang as hang:
        raise AssertionError(f"hangs: no end after {seconds} s") from hang
    finally:
        for number, (timer, _) in TIMERS.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, memory)


class Judge:
    """Counts the outcomes of the inputs of one test."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.needed = {"refused", "accepted"}

    @contextmanager
    def __call__(self, *names: str, seconds: float = LIMIT_SECONDS) -> Iterator[None]:
        """Let what happens within end by one refusal, or not at all; a traceback, a bare OSError,
        a hang or more than 1 GiB fails.

        names: a refusal names one of these, the file or the key.
        """
        try:
            with limits(seconds):
                yield
        except GPT2Error as error:
            text = str(error)
            assert error.exit_code == 2, f"exit code {error.exit_code}: {text[:300]}"
            assert text.strip() and len(text) <= LONGEST_MESSAGE, text[:300]
            assert any(name in text for name in names), f"names none of {names[:9]}: {text[:300]}"
            self.outcomes["refused"] += 1
        else:
            self.outcomes["accepted"] += 1

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder in memory where there is one: the inputs are small files, and many."""
        memory = Path("/dev/shm")
        parent = memory if os.access(memory, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder)

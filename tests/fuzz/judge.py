"""A hostile input is refused by one clear error, or gives a result that the test compares."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from common.errors import GPT2Error

LIMIT_SECONDS = 10.0
LIMIT_BYTES = 2**30
"""Memory that one input may take beyond what the process holds before."""
LONGEST_MESSAGE = 2000
_ROUNDS = 6


class Hang(BaseException):
    """Not an Exception, so that no reader takes it for a fault of its file."""


class _Clock:
    """Interrupts an input after ``seconds``: at once where it waits for something, after as much
    processor time where others take it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._used = time.process_time()
        self._rounds = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._rounds += 1
        used = time.process_time() - self._used
        if used >= self._seconds or used < 0.02 * self._seconds or self._rounds == _ROUNDS:
            raise Hang
        signal.setitimer(signal.ITIMER_REAL, self._seconds)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _Clock(seconds))
    # where no Python code runs, or it catches everything
    faulthandler.dump_traceback_later(_ROUNDS * seconds + 5, exit=True, file=sys.__stderr__)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except Hang as hang:
        raise AssertionError(f"hangs: no end after {seconds} s") from hang
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Private memory counts, mapped files do not: a map of a sparse file costs nothing."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * held + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


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
            with memory_limit(), time_limit(seconds):
                yield
        except GPT2Error as error:
            require_clear(error, names)
            self.outcomes["refused"] += 1
        except MemoryError:
            gc.collect()
            raise
        else:
            self.outcomes["accepted"] += 1

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder in memory where there is one: the inputs are small files, and many."""
        memory = Path("/dev/shm")
        parent = memory if os.access(memory, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def require_clear(error: GPT2Error, names: tuple[str, ...]) -> None:
    text = str(error)
    assert error.exit_code == 2, f"exit code {error.exit_code}: {text[:300]}"
    assert text.strip() and len(text) <= LONGEST_MESSAGE, f"{len(text)} characters: {text[:300]}"
    assert any(name in text for name in names), f"names none of {names[:9]}: {text[:300]}"

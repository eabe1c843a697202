"""A hostile input is refused by one clear error, or gives a result that the test compares.

The suite has few inputs, the same each time. ``make campaign`` runs the same tests with many at
random; ``FUZZ_COUNT`` says how many.
"""

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

import pytest
from hypothesis import HealthCheck, Phase, settings

from common.errors import GPT2Error

SUITE = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
CAMPAIGN = settings(SUITE, max_examples=int(os.environ.get("FUZZ_COUNT", "3000")), derandomize=False, print_blob=True)
ENOUGH = 40
"""So many inputs show every outcome that a test needs."""
LIMIT_SECONDS = 10.0
"""Of the processor. What waits for ever ends all tests, with a traceback."""
LIMIT_BYTES = 2**30
"""Memory that one input may take beyond what the process holds before."""
LONGEST_MESSAGE = 2000


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    campaign = config.option.markexpr == "campaign"
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for function in {item.obj for item in ours if hasattr(item.obj, "hypothesis")}:
        (CAMPAIGN if campaign else SUITE)(function)
    for item in ours if campaign else ():
        item.add_marker("campaign")


class Hang(BaseException):
    """Not an Exception, so that no reader takes it for a fault of its file."""


def _raise(*_: object) -> None:
    raise Hang


@contextmanager
def limits() -> Iterator[None]:
    """Private memory counts, mapped files do not: a map of a sparse file costs nothing."""
    handler = signal.signal(signal.SIGPROF, _raise)
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * held + LIMIT_BYTES, memory[1]))
    # where it waits, no Python code runs, or it catches everything
    faulthandler.dump_traceback_later(7 * LIMIT_SECONDS + 5, exit=True, file=sys.__stderr__)
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        yield
    except Hang as hang:
        raise AssertionError(f"hangs: no end after {LIMIT_SECONDS} s") from hang
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, memory)


class Judge:
    """Counts the outcomes of the inputs of one test."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    @contextmanager
    def __call__(self, *names: str) -> Iterator[None]:
        """Let what happens within end by one refusal, or not at all; a traceback, a bare OSError,
        a hang or more than 1 GiB fails.

        names: a refusal names one of these, the file or the key.
        """
        try:
            with limits():
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


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """One for all inputs of a test."""
    judge = Judge()
    yield judge
    print(f"\n{request.node.name}: {dict(judge.outcomes)}")
    if judge.outcomes.total() >= ENOUGH:
        assert len(judge.outcomes) == 2, f"too narrow a fuzzer: {judge.outcomes}"

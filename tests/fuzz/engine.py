"""Run generated inputs, sort the outcomes, and say how to run each again.

Every input is run in a process of its own kind: ``python -m tests.fuzz AREA`` is the worker, and
``run_area`` starts it, reads a line for each input, and starts it again behind an input that has
killed it.

    refused    one GPT2Error with exit code 2, with a message of 1 to 2,000 characters that names
               the file or the key
    accepted   read, and equal to an independent reading of the same bytes, or to the values of the
               whole file
    defect     everything else: traceback, errno, exit code, message, hang, memory, died, silent
               (read as something else)
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from common.errors import GPT2Error
from tests.fuzz.dice import Dice

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("configs", "cluster", "data", "caches", "checkpoints", "manifest_bits", "weights")
LIMIT_SECONDS = 10.0
LIMIT_BYTES = 2**30
"""Memory that one input may take beyond what the area holds before."""
LONGEST_MESSAGE = 2000
DEFECTS = ("traceback", "errno", "exit code", "message", "hang", "memory", "died", "silent")


@dataclass(kw_only=True)
class Case:
    """One input. ``run`` does what the program does with it; ``check`` returns how the result
    differs from what it should be, or None.

    names: a message that refuses the input holds one of these. about: what was done, for people.
    """

    kind: str
    run: Callable[[], Any]
    names: tuple[str, ...]
    check: Callable[[Any], str | None] = lambda result: None
    about: str = ""


class Area(Protocol):
    """A module of this folder."""

    CLASSES: dict[str, str]
    """Inputs that an area generates, and their sources."""

    def prepare(self, folder: Path) -> Any:
        """Make the whole files that inputs are made of."""

    def make(self, dice: Dice, prepared: Any, folder: Path) -> Case:
        """Write one input into an empty folder."""


class Differs(AssertionError):
    """Raised by ``run`` itself where what was read is not what it should be."""


class _Hang(BaseException):
    pass


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
            raise _Hang
        signal.setitimer(signal.ITIMER_REAL, self._seconds)


_ROUNDS = 6


def describe(error: BaseException) -> str:
    """Return the exception and the innermost place in the project."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if str(ROOT) in frame.filename and "/tests/" not in frame.filename
    ]
    place = (
        f" at {Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""
    )
    return f"{type(error).__name__}: {str(error)[:160]}{place}"


def judge(case: Case, seconds: float) -> tuple[str, str]:
    """Run a case and return its outcome and the details of a defect."""
    before = signal.signal(signal.SIGALRM, _Clock(seconds))
    # where no Python code runs, or it catches everything
    faulthandler.dump_traceback_later(_ROUNDS * seconds + 5, exit=True)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            result = case.run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        problem = case.check(result)
    except _Hang as error:
        return "hang", describe(error)
    except Differs as error:
        return "silent", str(error)[:300]
    except GPT2Error as error:
        return _judge_message(error, case)
    except MemoryError as error:
        return "memory", describe(error)
    except OSError as error:
        return "errno", describe(error)
    except BaseException as error:
        return "traceback", describe(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
    return ("accepted", "") if problem is None else ("silent", problem[:300])


def _judge_message(error: GPT2Error, case: Case) -> tuple[str, str]:
    text = str(error)
    if error.exit_code != 2:
        return "exit code", f"{error.exit_code}: {describe(error)}"
    if not text.strip():
        return "message", f"empty: {describe(error)}"
    if len(text) > LONGEST_MESSAGE:
        return "message", f"{len(text)} characters: {describe(error)}"
    if not any(name in text for name in case.names):
        return "message", f"names none of {', '.join(case.names)[:100]}: {describe(error)}"
    return "refused", ""


# ---- the worker ----


def work(
    area_name: str,
    seed: int,
    first: int,
    count: int,
    seconds: float,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Run inputs ``first`` to ``first + count - 1`` and write a record before and after each."""
    area: Area = importlib.import_module(f"tests.fuzz.{area_name}")
    with work_folder() as folder:
        (folder / "whole").mkdir()
        prepared = area.prepare(folder / "whole")
        with memory_limit():
            for number in range(first, first + count):
                write({"start": number})
                work = folder / "input"
                work.mkdir()
                if os.environ.get("FUZZ_DIE_AT") == str(number):  # the engine's own test
                    os.kill(os.getpid(), signal.SIGSEGV)
                case = area.make(Dice(area_name, seed, number), prepared, work)
                outcome, detail = judge(case, seconds)
                write(
                    {
                        "number": number,
                        "kind": case.kind,
                        "about": case.about,
                        "outcome": outcome,
                        "detail": detail,
                    }
                )
                del case
                if outcome == "memory":
                    gc.collect()
                shutil.rmtree(work, ignore_errors=True)


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder in memory where there is one: the inputs are small files, and many."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="fuzz-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Private memory counts, mapped files do not: a map of a sparse file costs nothing."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * held + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def inputs_of(area_name: str) -> int | None:
    """Return the number of inputs of an area that goes through all there are, None where they never
    end.
    """
    area = importlib.import_module(f"tests.fuzz.{area_name}")
    if not hasattr(area, "count"):
        return None
    with work_folder() as folder:
        number: int = area.count(area.prepare(folder))
    return number


# ---- the parent ----


@dataclass
class Defect:
    area: str
    seed: int
    number: int
    outcome: str
    kind: str
    detail: str
    about: str

    def __str__(self) -> str:
        about = f" [{self.about}]" if self.about else ""
        again = f"python -m tests.fuzz {self.area} --seed {self.seed} --only {self.number}"
        return f"{self.outcome} ({self.kind}){about}: {self.detail}\n    {again}"


@dataclass
class Result:
    area: str
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    defects: list[Defect] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(self.counts.values())

    def report(self, most: int = 20) -> str:
        lines = [
            f"{self.area}: {self.inputs} inputs, "
            + ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        ]
        # one of each place first, so that a frequent defect does not hide a rare one
        places: dict[str, list[Defect]] = {}
        for defect in self.defects:
            places.setdefault(f"{defect.outcome} {defect.detail.rpartition(' at ')[2]}", []).append(
                defect
            )
        lines += [
            f"  {len(found)} x {found[0]}"
            for found in sorted(places.values(), key=len, reverse=True)[:most]
        ]
        if len(places) > most:
            lines.append(f"  and {len(places) - most} more places")
        return "\n".join(lines)


def run_area(
    area: str, *, seed: int, count: int, first: int = 0, seconds: float = LIMIT_SECONDS
) -> Result:
    """Run so many inputs in a worker, and in a new one behind each that killed it."""
    result = Result(area)
    end = first + count
    while first < end:
        first = _run_worker(area, seed, first, end - first, seconds, result)
    return result


def _run_worker(
    area: str, seed: int, first: int, count: int, seconds: float, result: Result
) -> int:
    """Return the number of the next input."""
    words = [
        area,
        "--seed",
        str(seed),
        "--first",
        str(first),
        "--count",
        str(count),
        "--seconds",
        str(seconds),
        "--records",
    ]
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz", *words],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert worker.stdout is not None
        started, done = None, first
        for line in worker.stdout:
            record = json.loads(line)
            if "start" in record:
                started = record["start"]
                continue
            done = record["number"] + 1
            result.counts[record["outcome"]] += 1
            result.kinds[record["kind"]] += 1
            if record["outcome"] in DEFECTS:
                outcome, kind, detail = record["outcome"], record["kind"], record["detail"]
                result.defects.append(
                    Defect(area, seed, record["number"], outcome, kind, detail, record["about"])
                )
        code = worker.wait()
        errors.seek(0)
        said = errors.read()
    if code == 0 and done == first + count:
        return done
    if started is None or started < done:
        raise RuntimeError(
            f"the worker of {area} ended with {code} outside of an input: {said[-3000:]}"
        )
    outcome = "hang" if "Timeout (" in said else "died"
    place = next(
        (line.strip() for line in said.splitlines() if str(ROOT) in line and "/tests/" not in line),
        said.strip()[-200:],
    )
    result.counts[outcome] += 1
    result.defects.append(
        Defect(area, seed, started, outcome, "?", f"exit code {code}, {place}", "")
    )
    return started + 1

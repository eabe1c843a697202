"""Plant each fault of faults.txt in a copy of the project, and see which tests find it.

    make mutants                            all of them, compared with found.txt
    python tests/mutants/run.py schedule    those that hold a word
    python tests/mutants/run.py --stale     which of them no longer apply; plants nothing
    python tests/mutants/run.py --record    write found.txt too; with words, only their lines

A test that fails without a fault too is named and left out. exit codes: 0 as recorded, 1 a fault
is no longer found or no longer applies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS, FOUND = (Path(__file__).with_name(name) for name in ("faults.txt", "found.txt"))
LIMIT_SECONDS = 400.0
"""A fault that makes a test hang is found when this time is over."""
LARGE = ("torch", "hypothesis", "pydantic", "tokenizers", "transformers.models.gpt2.modeling_gpt2")
"""Libraries that most tests need, imported once for all faults."""
NOTHING, STALE = "NOTHING", "DOES NOT APPLY"


@dataclass(frozen=True)
class Fault:
    """One edit of one line. old: text that occurs once in the file."""

    meaning: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    def planted(self, root: Path) -> str | None:
        """Return the faulty text of the file, or None where the fault does not apply."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def read_faults(text: str) -> list[Fault]:
    """Read blocks of lines: meaning, file and tests, ``- old``, ``+ new``."""
    faults = []
    for block in re.split(r"\n{2,}", re.sub(r"(?m)^#.*\n", "", text).strip("\n")):
        meaning, places, old, new = block.split("\n")
        file, *tests = places.split()
        faults.append(Fault(meaning, file, tuple(tests), old=old[2:], new=new[2:]))
    return faults


def read_found(text: str) -> dict[str, str]:
    """Return the finder of each fault, by its meaning."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {meaning: finder for finder, _, meaning in (line.partition(" | ") for line in lines)}


def write_found(every: list[Fault], found: dict[str, str]) -> None:
    meanings = [fault.meaning for fault in every if fault.meaning in found]
    lines = [f"{found[meaning]} | {meaning}\n" for meaning in meanings]
    title = "# first test that finds each fault of faults.txt; written by run.py --record\n"
    FOUND.write_text(title + "".join(lines), encoding="utf-8")


def copy_project(folder: Path) -> None:
    """Copy what git tracks or would track, as it lies in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".venv").exists() and not (folder / ".venv").exists():
        (folder / ".venv").symlink_to((ROOT / ".venv").resolve())


def run_tests(root: Path, tests: list[str], *options: str, limit: float) -> list[str]:
    """Return the tests that fail, in a copy of this process, which has the large libraries."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-q", "-rfE", "--tb=no", "--durations=0", "-p", "no:cacheprovider", *options]
        output, began = Path(folder) / "output", time.monotonic()
        process = os.fork()
        if not process:
            os.setsid()
            for stream in (1, 2):
                os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(root)
            os._exit(pytest.main([*words, f"--basetemp={folder}/t", *tests]))
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            time.sleep(0.1)
            if time.monotonic() > began + limit:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return [f"{tests[0]} (no end in {limit:g} s)"]
        text, code = output.read_text(errors="replace"), os.waitstatus_to_exitcode(ended[1])
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.M)
    if code in (4, 5):  # the name of a test that pytest has cut, or no test was left
        return []
    if code not in (0, 1, 2) or (code and not failed):
        raise RuntimeError(f"{' '.join(tests)}: pytest ends with {code}: {text[-2000:]}")
    return failed


class Copy:
    """A copy of the project, in which faults are planted in turn."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = 10**9
        self._sound: dict[str, bool] = {}
        """Whether a test passes without a fault, as far as it was asked."""

    def find(self, fault: Fault) -> str:
        """Return the first test that fails with a fault only, NOTHING, or STALE."""
        text = fault.planted(self._root)
        if text is None:
            return STALE
        while True:
            unsound = [f"--deselect={test}" for test, passes in self._sound.items() if not passes]
            failed = self._run(fault, text, "-x", *unsound)
            if not failed or self._passes(failed[0]):
                return failed[0] if failed else NOTHING
            print(f"fails without a fault, and is left out: {failed[0]}", flush=True)

    def _run(self, fault: Fault, text: str, *options: str) -> list[str]:
        path = self._root / fault.file
        before = path.read_text(encoding="utf-8")
        try:
            self._write(path, text)
            return run_tests(self._root, list(fault.tests), *options, limit=LIMIT_SECONDS)
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """Give it another second, by which Python compiles again."""
        self._turn += 2
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self._turn, self._turn))

    def _passes(self, test: str) -> bool:
        if test not in self._sound:
            asked = test.partition(" ")[0] if test.endswith(" s)") else test
            self._sound[test] = not run_tests(self._root, [asked], limit=LIMIT_SECONDS)
        return self._sound[test]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    for option in ("--stale", "--record"):
        parser.add_argument(option, action="store_true")
    arguments = parser.parse_args()
    every = read_faults(FAULTS.read_text(encoding="utf-8"))
    words = arguments.words or [""]
    chosen = [fault for fault in every if any(word in str(fault) for word in words)]
    recorded = read_found(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    stale = [fault for fault in chosen if fault.planted(ROOT) is None]
    for fault in stale:
        print(f"{STALE}: {fault.file}: {fault.meaning}\n    - {fault.old}")
    if arguments.stale:
        return int(bool(stale))
    found: dict[str, str] = {}
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        copy = Copy(Path(folder))
        for number, fault in enumerate(chosen, 1):
            found[fault.meaning] = copy.find(fault)
            print(f"{number}/{len(chosen)} {found[fault.meaning]} | {fault.meaning}", flush=True)
            if arguments.record:
                write_found(every, recorded | found)
    missed = [meaning for meaning, finder in found.items() if finder in (NOTHING, STALE)]
    lost = [meaning for meaning in missed if recorded.get(meaning) != found[meaning]]
    for meaning in lost:
        print(f"lost: {meaning}; before: {recorded.get(meaning, 'not recorded')}")
    print(f"{len(found) - len(missed)} of {len(found)} faults are found")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())

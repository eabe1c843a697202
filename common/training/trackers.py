"""Experiment trackers beside a run: W&B, MLflow and SwanLab.

Each runs in its own process that reads ``metrics.jsonl`` (``tracker_process.py``). The run only
starts them and waits briefly at its end. A tracker that fails, hangs or is slow costs only a
warning.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.log import LOG
from common.paths import ROOT
from common.processes.process_tree import in_words

SECONDS_TO_FINISH = 30.0
"""Seconds that the end of a run waits for all trackers together."""
PYTHON = "GPT2_TRACKER_PYTHON"
"""Variable with the Python of the environment that holds the trackers' packages.

A package that needs another protobuf than the framework cannot be installed beside it.
"""


class Trackers:
    """Processes of the trackers in ``names``. They begin with the first row, and end within a time
    limit.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, project: str, config: dict[str, Any]
    ) -> None:
        """Create trackers. folder: run folder, which holds metrics.jsonl. config: settings to
        record.
        """
        self._names = tuple(name for name in dict.fromkeys(names) if name != "tensorboard")
        self._folder = folder.absolute()
        self._job = {"folder": str(self._folder), "project": project, "config": config}
        self._running: dict[str, subprocess.Popen[bytes]] | None = None

    def follow(self) -> None:
        """Start the trackers unless they run, and warn of each that has ended. Call it after each
        row.
        """
        if self._running is None:
            self._running = {}
            for name in self._names:
                self._start(name)
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                self._give_up(name, self._why(name, process.returncode))

    def close(self) -> None:
        """Let the trackers read the rest and finish, and kill those that exceed the limit."""
        running, self._running = self._running or {}, {}
        deadline = time.monotonic() + SECONDS_TO_FINISH
        for process in running.values():
            _hang_up(process)
        for name, process in running.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._give_up(name, f"not finished {SECONDS_TO_FINISH:g} s after the run")
                continue
            if code or not (self._folder / "trackers" / f"{name}.json").exists():
                self._give_up(name, self._why(name, code))

    def _start(self, name: str) -> None:
        assert self._running is not None
        try:
            self._log(name).parent.mkdir(exist_ok=True)
            with self._log(name).open("wb") as log:
                process = subprocess.Popen(  # noqa: S603 - no shell
                    [
                        os.environ.get(PYTHON) or sys.executable,
                        "-m",
                        "common.training.tracker_process",
                        name,
                    ],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run
                )
            assert process.stdin is not None
            self._running[name] = process
            process.stdin.write(json.dumps(self._job).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            self._give_up(name, str(error))

    def _give_up(self, name: str, reason: str) -> None:
        LOG.warning(
            f"tracker {name} is off: {reason}; the run continues, metrics.jsonl has every step"
            f" (log: {self._log(name)})"
        )
        process = (self._running or {}).pop(name, None)
        if process is not None:
            _hang_up(process)

    def _log(self, name: str) -> Path:
        return self._folder / "trackers" / f"{name}.log"

    def _why(self, name: str, code: int) -> str:
        """Return the last line of a tracker's log if it reported an error (code 1), else how it
        ended.
        """
        if code == 1:
            with suppress(OSError):
                text = self._log(name).read_text(encoding="utf-8", errors="replace")
                return text.strip().rpartition("\n")[2][:300]
        return f"its process {in_words(code)}"


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe, which tells a tracker that the run has ended."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()

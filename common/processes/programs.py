"""Programs of others, started with a time limit and ended with everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from common.processes.death_signal import tied_to_this_process


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """code: the exit code, -n for signal n.

    None where it outlived its limit or could not be started.
    """

    code: int | None
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_program(command: Sequence[str], limit: float) -> Outcome:
    """Start, wait at most ``limit`` seconds, kill what is left. It dies with this process too."""
    try:
        child = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )
    except OSError as reason:
        return Outcome(code=None, output="", errors=f"{command[0]}: {reason.strerror or reason}")
    try:
        output, errors = child.communicate(timeout=limit)
        return Outcome(code=child.returncode, output=output, errors=errors)
    except subprocess.TimeoutExpired:
        return Outcome(code=None, output="", errors=f"no answer within {limit:g} s")
    finally:
        _kill_session(child)


def _kill_session(child: subprocess.Popen[str]) -> None:
    """End a child that leads a session of its own, with what it started, and collect it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process in state D ends when its device lets go
        child.wait(timeout=5)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()

"""Programs of others, started with a time limit and ended with everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from common.processes.death_signal import tied_to_this_process


def run_program(command: Sequence[str], limit: float) -> tuple[int | None, str, str]:
    """Start, wait at most ``limit`` seconds, kill what is left. It dies with this process too.

    Returns its exit code, what it wrote to standard output, and to standard error. The code is -n
    for signal n, and None where it outlived its limit or could not be started.
    """
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
        return None, "", f"{command[0]}: {reason.strerror or reason}"
    try:
        output, errors = child.communicate(timeout=limit)
        return child.returncode, output, errors
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {limit:g} s"
    finally:
        _kill_session(child)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def _kill_session(child: subprocess.Popen[str]) -> None:
    """End a child that leads a session of its own, with what it started, and collect it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process in state D ends when its device lets go
        child.wait(timeout=5)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()

"""External programs, run with a time limit and ended with all their children."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.processes.heartbeat import die_with_parent


def run_program(command: Sequence[str], limit: float) -> tuple[int | None, str, str]:
    """Run a program for at most ``limit`` seconds, and kill what is left of it.

    It also dies with this process. Returns its exit code, standard output and standard error. The
    code is -n for signal n, and None if it reached its limit or could not be started.
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
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # state D lasts until the device releases it
            child.communicate(timeout=5)


def tied_to_this_process() -> Callable[[], None]:
    """Return a ``preexec_fn`` for a program that is to die with this process.

    Start the program from the main thread.
    """
    parent = os.getpid()

    def prepare() -> None:
        if not die_with_parent(parent):
            os._exit(1)

    return prepare


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()

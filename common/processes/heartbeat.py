"""Heartbeat of a launched rank: it reports progress to its launcher and ends with it.

It writes lines to the pipe GPT2_HEARTBEAT_FD: ``alive`` every two seconds, and ``STEP DOING`` as
the run makes progress. A process that was not launched has no heartbeat.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import stat
import sys
import threading
import time
from contextlib import suppress

from common.whole_numbers import whole_number

ALIVE = "alive"
ALIVE_SECONDS = 2.0
DUMP_SIGNAL = signal.SIGUSR1
"""Signal that makes a launched rank write the stacks of its threads to standard error."""
_pipe: int | None = None
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_library = ctypes.CDLL(None) if sys.platform == "linux" else None


def start_heartbeat() -> None:
    """Start the heartbeat, as the first action of the process.

    Exits with code 1 if the launcher is already gone. The kernel kills this process when its
    launcher dies for any reason. GPT2_HEARTBEAT_FD is removed from the environment and closed in
    children, so that none of them reports for the rank.
    """
    global _pipe
    words = [os.environ.pop("GPT2_HEARTBEAT_FD", ""), os.environ.get("GPT2_LAUNCHER_PID", "")]
    pipe, launcher = (whole_number(word) for word in words)
    if _pipe is not None or pipe is None or launcher is None:
        return
    if not die_with_parent(launcher):
        sys.stderr.write(f"error: the launcher of this rank, process {launcher}, is gone\n")
        sys.stderr.flush()
        os._exit(1)
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return
    except (OSError, OverflowError):
        return
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    _pipe = pipe
    os.register_at_fork(after_in_child=_forget)
    with suppress(AttributeError, OSError, ValueError):  # standard error may not be a file
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    threading.Thread(target=_live, name="heartbeat", daemon=True).start()


def beat(step: int, doing: str) -> None:
    """Report the progress of the rank. doing: such as a word of DOING_ORDER of the launcher."""
    _send(f"{step} {doing}")


def _live() -> None:
    while _pipe is not None:
        _send(ALIVE)
        time.sleep(ALIVE_SECONDS)


def _send(line: str) -> None:
    if _pipe is None:
        return
    with suppress(BlockingIOError, BrokenPipeError):  # the launcher is slow, or gone
        os.write(_pipe, line.encode() + b"\n")  # shorter than PIPE_BUF: whole or not at all


def _forget() -> None:
    global _pipe
    if _pipe is not None:
        with suppress(OSError):
            os.close(_pipe)
        _pipe = None


def die_with_parent(parent: int) -> bool:
    """Ask for SIGKILL at the death of ``parent``, which started this process.

    Returns False if it has already died. The kernel uses the end of the thread that started this
    process as the parent's end. An exec keeps the setting, a fork does not.
    """
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    return os.getppid() == parent


def prctl(option: int, value: int) -> None:
    if _library is not None:  # loaded before a fork
        _library.prctl(option, value, 0, 0, 0)

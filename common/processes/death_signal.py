"""Processes that the kernel kills when their parent dies for any reason (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_library = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> bool:
    """Ask for SIGKILL at the death of ``parent``, which started this process.

    Returns False if it has already died. The kernel uses the end of the thread that started this
    process as the parent's end. An exec keeps the setting, a fork does not.
    """
    if _library is not None:
        _library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def tied_to_this_process() -> Callable[[], None]:
    """Return a ``preexec_fn`` for a program that is to die with this process.

    Start the program from the main thread.
    """
    parent = os.getpid()

    def prepare() -> None:
        if not die_with_parent(parent):
            os._exit(1)

    return prepare

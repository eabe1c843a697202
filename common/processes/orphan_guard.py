"""Outlive a killed launcher, and end the processes that it leaves behind.

``python orphan_guard.py`` reads numbers of process groups from its standard input. It kills the
groups when the other end of the pipe is closed.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    for group in [int(line) for line in sys.stdin]:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Outlive a launcher that is killed, and end what it leaves behind.

``python orphan_guard.py`` reads numbers of process groups from its standard input, and kills the
groups when the other end of that is closed.
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

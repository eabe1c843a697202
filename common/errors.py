"""The exception tree. A message says what was found, where, what was expected and how to fix it.

GPT2Error
├── UserError            exit code 2: the input or the configuration is at fault
│   ├── ConfigError      a key, a value, or two values that contradict each other
│   ├── DataError        a corpus, an .idx/.bin pair, a split
│   ├── TokenizerError   vocabulary files, text that cannot be encoded
│   ├── CheckpointError  a checkpoint or weights that are missing, broken or of another shape
│   └── DeviceError      a device that is not there or cannot do what is asked
└── RunError             exit code 1: the run itself failed
    ├── DivergedError    too many steps in a row without a finite gradient
    └── StorageError     a file could not be written
StopRequested            exit code 128+n: signal n was obeyed at a step boundary
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


class GPT2Error(Exception):
    """Base of every error that this project raises on purpose.

    A message quotes its input, and a hostile value may have any length. As text, each line
    therefore keeps its start and end, and loses the middle if it is too long.
    """

    exit_code = 1

    def __str__(self) -> str:
        return "\n".join(
            line if len(line) <= 1000 else f"{line[:600]}... ({len(line) - 900} characters left out) ...{line[-300:]}"
            for line in super().__str__().split("\n")
        )


class UserError(GPT2Error):
    exit_code = 2


class ConfigError(UserError):
    pass


def refuse_first(*faults: object) -> None:
    """Raise ConfigError with the first fault that is a text. Rows are ``condition and text``."""
    for fault in faults:
        if isinstance(fault, str) and fault:
            raise ConfigError(fault)


class DataError(UserError):
    pass


class TokenizerError(UserError):
    pass


class CheckpointError(UserError):
    pass


class DeviceError(UserError):
    pass


class RunError(GPT2Error):
    exit_code = 1


class DivergedError(RunError):
    pass


class StorageError(RunError):
    pass


class StopRequested(GPT2Error):
    """Raised after all is saved, because signal ``signal_number`` requested a stop.

    more: continues the sentence "stopped by Ctrl-C".
    """

    def __init__(self, signal_number: int, more: str) -> None:
        launched = signal_number == signal.SIGTERM and "GPT2_LAUNCHER_PID" in os.environ
        by = "the launcher" if launched else signal_name(signal_number)
        super().__init__(f"stopped by {by}{more}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def signal_name(number: int) -> str:
    """Return the name that a user knows: Ctrl-C, SIGTERM."""
    try:
        return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(error: Exception) -> int:
    """Print why a program ends on standard error, and return its exit code.

    A stop has no word "error" in front.
    """
    start = "" if isinstance(error, StopRequested) else "error: "
    try:
        sys.stderr.write(f"{start}{error}\n")
    except (OSError, ValueError, AttributeError):  # full, closed, or without a reader
        with suppress(OSError):  # the interpreter's own flush would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return getattr(error, "exit_code", 1)

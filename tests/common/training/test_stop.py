"""Ctrl-C while the main thread is inside a call that does not return to Python; and who leaves
without exit handlers.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import interrupts
from common.interrupts import StopSignal

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import signal, sys, time
from common.interrupts import StopSignal, receive_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
receive_interrupts()
with StopSignal() as stop:
    print("ready", flush=True)
    time.sleep(float(sys.argv[1]))  # the thread holds the signal, so that nothing cuts this short
    end = time.monotonic() + 20
    while stop.number is None and time.monotonic() < end:
        time.sleep(0.05)
    print("number", stop.number, flush=True)
"""


@pytest.mark.parametrize("twice", [False, True])
def test_the_first_waits_and_the_second_ends_at_once(twice: bool) -> None:
    program = [sys.executable, "-c", PROGRAM, "60" if twice else "1"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        if twice:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=0.5)
            child.send_signal(signal.SIGINT)
        rest = child.communicate(timeout=40)[0]
    assert (child.returncode, rest) == ((130, "") if twice else (0, "number 2\n"))


def test_signals_ignored_from_the_start_stay_ignored() -> None:
    """A job in the background of a shell script, which Ctrl-C on the terminal reaches too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.number is None
            signal.raise_signal(signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


LEAVING = """
import atexit, sys, types
from common.interrupts import end_process
if sys.argv[1] == "torch":
    sys.modules["torch.distributed"] = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True
    )
else:
    sys.modules["mindspore"] = types.SimpleNamespace(get_context=lambda key: sys.argv[1])
atexit.register(lambda: print("handlers", flush=True))
print("said")
end_process(3)
"""


@pytest.mark.parametrize(
    ("target", "variables", "handlers"),
    [
        ("CPU", {"MS_ROLE": "MS_WORKER", "GPT2_LAUNCHER_PID": "1"}, False),
        ("CPU", {"MS_ROLE": "MS_WORKER"}, True),  # under msrun, whose scheduler waits for them
        ("Ascend", {"MS_ROLE": "MS_WORKER", "GPT2_LAUNCHER_PID": "1"}, True),
        ("torch", {}, False),  # its group is open, so an error ends it
    ],
)
def test_a_rank_leaves_without_exit_handlers(target: str, variables: dict[str, str], handlers: bool) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("MS_ROLE", "GPT2_LAUNCHER_PID")}
    command = [sys.executable, "-c", LEAVING, target]
    done = subprocess.run(command, env=clean | variables, cwd=ROOT, capture_output=True, text=True)
    said = ["said", "handlers"] if handlers else ["said"]
    assert (done.returncode, done.stdout.split()) == (3, said), done.stderr


def test_an_interrupt_that_a_library_dropped_stops_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ code may clear KeyboardInterrupt as any other error."""
    monkeypatch.setattr(interrupts, "_raised", [])
    with StopSignal() as stop:
        assert stop.number is None
    with pytest.raises(KeyboardInterrupt):
        interrupts._raise(signal.SIGINT, None)
    with StopSignal() as stop:
        assert stop.number == signal.SIGINT

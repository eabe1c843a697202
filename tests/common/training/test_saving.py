"""Saves of the loop when a run diverges, is stopped in a validation, or loses its folder. Ctrl-C while the main thread
is inside a call that does not return to Python; who leaves without exit handlers.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from common import run_folder
from common.checkpoint.folders import whole_checkpoints
from common.checkpoint.snapshot import TrainState
from common.errors import ConfigError, DivergedError, StopRequested, StorageError
from common.interrupts import StopSignal
from common.training.metrics import MetricsWriter, read_metrics
from common.training.saving import Saver
from tests.common.training import scripted
from tests.common.training.scripted import Scripted, falling

NAN = math.nan
ENGINE = {"loss", "skips", "stop_in_validation", "act"}


def test_a_refusal_leaves_only_what_was_there_or_what_the_run_has_written(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    for written, left in (("", []), ("step_1", [".lock", "checkpoints", "checkpoints/step_1"])):
        with pytest.raises(ConfigError), run_folder.owned_folder(folder):
            (folder / "checkpoints" / written).mkdir(parents=True)
            raise ConfigError("refused")
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        assert (found, (tmp_path / "a").exists()) == (left, bool(left))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError), run_folder.owned_folder(tmp_path / "mine"):
        raise ConfigError("refused")
    assert (tmp_path / "mine").is_dir() and not list((tmp_path / "mine").iterdir())


def start(folder: Path, **words: Any) -> dict[str, Any]:
    of_engine = {key: words.pop(key) for key in ENGINE & words.keys()}
    return scripted.start(folder, Scripted(**of_engine), **words).summary


def at(number: int, act: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda step: act() if step == number else None


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def saved(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in whole_checkpoints(folder / "checkpoints")]


# ---- divergence ----


def broken_at(first: int, value: float = NAN) -> Callable[[int], float]:
    return lambda step: falling(step) if step < first else value


def test_a_run_that_diverges_leaves_its_good_checkpoints(tmp_path: Path) -> None:
    """The update of step 11 breaks the weights: from step 12 on the loss is not finite, and nothing learns from it."""
    changes = {"train__max_steps": 90, "train__max_skipped_steps": 20}
    with pytest.raises(DivergedError, match="step 31: 20 steps in a row"):
        start(tmp_path, loss=broken_at(12), **changes)
    assert saved(tmp_path) == [5, 10]
    # with another rate it resumes from there, and has all its patience again
    assert start(tmp_path)["step"] == 20
    assert saved(tmp_path) == [15, 20]


def test_weights_broken_by_the_very_step_that_is_saved(tmp_path: Path) -> None:
    """keep=1: the checkpoint of step 10 is bad, which only step 11 shows, and must not be all that is left."""
    with pytest.raises(DivergedError):
        start(tmp_path / "nan", loss=broken_at(11), checkpoint__keep=1, train__max_steps=90)
    assert saved(tmp_path / "nan") == [5, 10]
    start(tmp_path / "huge", loss=broken_at(12, 1e30), checkpoint__keep=1, train__max_steps=40)
    assert saved(tmp_path / "huge") == [10, 40]


def test_a_save_is_postponed_to_the_next_finite_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loss(step: int) -> float:
        return NAN if step in (9, 10, 11) else falling(step)

    start(tmp_path, loss=loss, checkpoint__keep=0)
    assert saved(tmp_path) == [5, 12, 15, 20]
    said = "step 10: no checkpoint is written: the loss is nan; those that are there stay"
    assert caplog.text.count(said) == caplog.text.count("no checkpoint is written") == 1


def test_steps_that_were_all_skipped_are_not_saved_but_at_the_end(tmp_path: Path) -> None:
    """A finite loss without a finite gradient: the weights are still those of step 5."""
    start(tmp_path, skips=range(6, 18), checkpoint__keep=0)
    assert saved(tmp_path) == [5, 18, 20]
    start(tmp_path, skips=range(21, 24), train__max_steps=23, checkpoint__keep=0)
    assert saved(tmp_path) == [5, 18, 20, 23], "a run that has ended is whole"


def test_a_stop_of_a_diverged_run_saves_nothing(tmp_path: Path) -> None:
    said = "by SIGTERM after step 8; not saved: the loss is nan; the same command resumes"
    with pytest.raises(StopRequested, match=said) as stopped:
        start(tmp_path, loss=broken_at(7), act=at(8, stop))
    assert stopped.value.exit_code == 143 and saved(tmp_path) == [5]


def test_a_last_validation_that_is_not_finite_is_not_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "evaluate", lambda self, batches: (NAN, 1))
    with pytest.raises(DivergedError, match=r"step 20: the loss is nan, so this step is not saved"):
        start(tmp_path)
    assert saved(tmp_path) == [10, 15]


# ---- a stop in a validation ----


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in rows]


@pytest.mark.parametrize(("step", "interval"), [(8, 4), (10, 5), (20, 0)])
def test_a_stop_in_a_validation_is_made_up_for(tmp_path: Path, step: int, interval: int) -> None:
    """In the middle, at a step that was saved before, and at the end. What was validated is not validated again."""
    start(tmp_path / "whole", validation__interval=interval)
    with pytest.raises(StopRequested) as stopped:
        start(tmp_path / "run", validation__interval=interval, stop_in_validation=step)
    assert stopped.value.exit_code == 143 and f"after step {step}; saved in" in str(stopped.value)
    summary = start(tmp_path / "run", validation__interval=interval)
    assert summary["validation_loss"] == falling(20)
    for _ in range(2):
        assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
        start(tmp_path / "run", validation__interval=interval)


def test_a_stop_in_the_last_step_is_not_a_finished_run(tmp_path: Path) -> None:
    with pytest.raises(StopRequested, match="after step 20; saved in"):
        start(tmp_path, act=at(20, stop))
    assert saved(tmp_path) == [15, 20] and rows_of(tmp_path)[-1] == (20, falling(20), None)
    start(tmp_path)
    assert rows_of(tmp_path)[-1] == (20, None, falling(20))


# ---- the run folder ----


@pytest.mark.parametrize(("replaced", "interval"), [(False, 5), (True, 0)])
def test_a_run_notices_that_its_folder_is_gone(tmp_path: Path, replaced: bool, interval: int) -> None:
    """Before it saves, or at its end."""
    folder = tmp_path / "run"

    def remove() -> None:
        shutil.rmtree(folder)
        if replaced:
            with run_folder.owned_folder(folder):
                (folder / "checkpoints").mkdir()

    keys = {"checkpoint__interval": interval, "checkpoint__asynchronous": False}
    said = r"output_dir=.*run: the folder was removed, or replaced by another run's"
    with pytest.raises(StorageError, match=said):
        start(folder, act=at(7, remove), **keys)
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    assert left == ([".lock", "checkpoints"] if replaced else [])
    assert folder.exists() == replaced


def test_a_disk_that_does_not_answer_is_not_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_folder.owned_folder(tmp_path):
        require, lock = run_folder.keeper(tmp_path, [run_folder.holder(tmp_path)], 0), tmp_path / ".lock"
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", Mock(side_effect=OSError(5, "Input/output error")))
            require()
        token = lock.read_text()
        lock.write_text("an export where nothing can be locked")
        require()
        for content, holds in ((token, nullcontext()), ("another run", pytest.raises(StorageError))):
            (tmp_path / "copy").write_text(content)
            (tmp_path / "copy").replace(lock)
            with holds:
                require()
        run_folder.keeper(tmp_path, ["rank 0's", "of another disk"], 1)()


# ---- rows of metrics ----


def test_rows_of_later_steps_stay_until_the_run_has_begun(tmp_path: Path) -> None:
    start(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(RuntimeError), MetricsWriter(tmp_path, step=5, tensorboard=False):
        raise RuntimeError("before the first step")
    assert (tmp_path / "metrics.jsonl").read_text() == before
    with MetricsWriter(tmp_path, step=5, tensorboard=False):
        pass
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be read and appended to: Is a directory"):
        MetricsWriter(tmp_path)


def test_a_last_row_that_is_torn_or_lacks_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in ('{"step": 2, "loss": 1.0}', '{"step": 2, "loss": 1.0}\n{"step": 3, "lo'):
        path.write_text('{"step": 1, "loss": 2.0}\n' + last)
        with MetricsWriter(tmp_path, step=2, tensorboard=False) as metrics:
            metrics.write({"step": 3})
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_a_snapshot_waits_for_the_save_before_it() -> None:
    """Taken earlier, it would copy the arrays that the writer still reads."""
    writer = Mock()
    Saver(writer, writer.take, vocabulary=101, saved_step=None).save_last(TrainState(step=3))
    assert [call[0] for call in writer.method_calls if call[0] != "confirm"] == ["wait", "take", "save"]


# ---- signals ----


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


def test_one_that_was_held_back_acts_afterwards() -> None:
    """A tokenizer is opened so, after MindSpore's run has begun to receive signals in a thread."""
    program = "from common.interrupts import *; import os, time; receive_interrupts()\n"
    program += "with holding_signals() as held:\n os.kill(os.getpid(), 2)\n while not held: time.sleep(0.01)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("KeyboardInterrupt\n")


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


def test_a_framework_does_not_undo_that() -> None:
    """MindSpore sets a handler of its own."""
    program = "from common.interrupts import receive_interrupts; from signal import *; signal(SIGINT, SIG_IGN);"
    program += "receive_interrupts(); signal(SIGINT, SIG_DFL); import os; os.kill(os.getpid(), SIGINT); print('on')"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "on\n"


LEAVING = """
import atexit, sys, types
from common.interrupts import end_process
if sys.argv[1] == "torch":
    sys.modules["torch.distributed"] = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
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

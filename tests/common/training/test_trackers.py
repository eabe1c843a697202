"""Records that a tracker gets of a run. No fault of one reaches the run. A small package in place
of wandb writes down what it is told; ``test_tracker_stores.py`` has the real packages. Event files
are read by the format of TensorBoard: length, checksum, Event message.
"""

import json
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from common.training import trackers
from common.training.metrics import MetricsWriter
from common.training.trackers import Trackers, figures_of

RECORDER = """
import json, os
class Run:
    def __init__(self, **words):
        self.file = open(os.environ["TOLD"], "a")
        self.tell("init", words["id"], words["project"], words["name"], words["config"])
    def tell(self, *words):
        print(json.dumps(words), file=self.file, flush=True)
    def log(self, figures, step):
        self.tell("log", step, figures)
    def finish(self):
        self.tell("finish")
Settings = dict
init = lambda settings, **words: Run(**words)
"""


def install(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    module = ModuleType(name)
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the small package writes."""
    install(monkeypatch, "wandb", RECORDER)
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    (tmp_path / "run").mkdir()
    return tmp_path / "told.jsonl"


def write(run: Path, steps: range, *, names: tuple[str, ...] = ("wandb",)) -> None:
    """Rows of the steps, each with a loss; a validation row after the last."""
    follower = Trackers(run, names, project="p", config={"model": {"num_layers": 2}})
    with MetricsWriter(run, step=steps[0] - 1, tensorboard=False, trackers=follower) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 1 / step, "skipped": False, "mfu": None})
        metrics.write({"step": steps[-1], "validation_loss": 0.5, "sample_hash": "ab"})


def since_init(told: Path) -> tuple[str, list[tuple[int, dict[str, float]]]]:
    """The run of the last init, and what was logged after it."""
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    start = max(number for number, line in enumerate(lines) if line[0] == "init")
    assert lines[start][2:] == ["p", "run", {"model": {"num_layers": 2}}]
    assert lines[-1] == ["finish"]
    return lines[start][1], [(line[1], line[2]) for line in lines[start + 1 : -1]]


def expected(steps: range) -> list[tuple[int, dict[str, float]]]:
    rows = [(step, {"loss": 1 / step, "skipped": 0.0}) for step in steps]
    return [*rows, (steps[-1], {"validation_loss": 0.5})]


@pytest.mark.parametrize(("again", "killed"), [(range(11, 14), False), (range(6, 9), False), (range(11, 13), True)])
def test_a_resumed_run_continues_its_store_or_replaces_it(told: Path, again: range, killed: bool) -> None:
    """Steps that are done again, or a store of unknown end, as a tracker that was killed leaves
    it, make a new one with all rows.
    """
    run = told.parent / "run"
    write(run, range(1, 11))
    first, rows = since_init(told)
    assert rows == expected(range(1, 11))
    if killed:
        (run / "trackers" / "wandb.json").unlink()
    write(run, again)
    second, rows = since_init(told)
    replaced = [path.name for path in (run / "trackers").glob("*.replaced-*")]
    if again[0] == 11 and not killed:
        assert (second, rows, replaced) == (first, expected(again), [])
        return
    before = expected(range(1, again[0]))
    assert rows == (before if killed else before[:-1]) + expected(again)
    assert second != first and (killed or replaced == ["wandb.replaced-1"])


SLEEPS = "def init(**words): import time; time.sleep(20)"


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [
        (None, {}, "import of swanlab halted"),
        (SLEEPS, {"SECONDS_TO_FINISH": 1.0}, "not finished 1 s after the run"),
        (SLEEPS, {"MAX_WAITING_ROWS": 5}, "it is 5 rows behind"),
        ("def init(**words): 1 / 0", {}, "ZeroDivisionError: division by zero"),
        ("def init(**words): raise SystemExit(3)", {}, "SystemExit: 3"),
    ],
)
def test_a_tracker_that_is_not_there_hangs_or_fails_costs_one_warning(
    fault: str | None,
    limit: dict[str, float],
    reason: str,
    told: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no other tracker anything."""
    monkeypatch.setitem(sys.modules, "swanlab", None)
    if fault:
        install(monkeypatch, "swanlab", f"Settings = dict\n{fault}")
    for name, value in limit.items():
        monkeypatch.setattr(trackers, name, value)
    start = time.monotonic()
    write(told.parent / "run", range(1, 200), names=("swanlab",) if fault else ("swanlab", "wandb"))
    assert time.monotonic() - start < 10
    (warning,) = caplog.messages
    assert f"tracker swanlab is off: {reason}" in warning
    if fault is None:
        assert since_init(told)[1] == expected(range(1, 200))
    assert len((told.parent / "run" / "metrics.jsonl").read_text().splitlines()) == 200


def test_other_ranks_start_none(tmp_path: Path) -> None:
    follower = Trackers(tmp_path, ["wandb"], project="p", config={})
    with MetricsWriter(tmp_path, trackers=follower, active=False) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_figures_of_a_row() -> None:
    row = {"step": 3, "loss": 0.5, "skipped": True, "mfu": None, "hash": "ab", "norm": float("nan")}
    assert figures_of(row) == (3, {"loss": 0.5, "skipped": 1.0})


def test_events_of_a_resumed_run_replace_later_ones_and_a_full_disk_ends_only_them(tmp_path: Path) -> None:
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event

    class Full:
        def write_event(self, event: object) -> None:
            raise OSError(28, "No space left on device")

    with MetricsWriter(tmp_path, step=7) as metrics:
        metrics.write({"step": 8, "loss": 2.5, "sample_hash": "abc"})
        metrics.write({"step": 9, "validation_loss": 2.0, "validation_loss/a": 3.0})
        board: Any = metrics._board
        board._writer.flush()
        board._writer = Full()
        for step in (10, 11):
            metrics.write({"step": step, "loss": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert found[0].file_version == "brain.Event:2"
    assert (found[1].step, found[1].session_log.status) == (8, 1)
    assert [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in found[2:]] == [
        (8, {"loss": 2.5}),
        (9, {"validation_loss": 2.0, "validation_loss/a": 3.0}),
    ]

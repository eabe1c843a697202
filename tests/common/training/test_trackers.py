"""Records that a tracker gets of a run. No fault of one reaches the run. A small package in place of wandb writes down
what it is told. Event files are read by TensorBoard's format. Below are the trackers' own packages, offline: what their
stores hold is read without them, or with the record types of their files only, and held against metrics.jsonl.
"""

import json
import math
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.training import trackers
from common.training.metrics import MetricsWriter, read_metrics
from common.training.trackers import Trackers

Told = list[tuple[Any, ...]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What a small package in place of wandb is told."""
    found: Told = []

    class Run:
        def __init__(self, **words: Any) -> None:
            found.append(("init", words["id"], words["project"], words["name"], words["config"]))

        def log(self, figures: dict[str, float], step: int) -> None:
            found.append(("log", step, figures))

        def finish(self) -> None:
            found.append(("finish",))

    install(monkeypatch, "wandb", lambda settings, **words: Run(**words))
    return found


def install(monkeypatch: pytest.MonkeyPatch, name: str, init: Any) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Settings=dict, init=init))


def write(run: Path, steps: range, *, names: tuple[str, ...] = ("wandb",)) -> None:
    """Rows of the steps, each with a loss; a validation row after the last."""
    follower = Trackers(run, names, project="p", config={"model": {"num_layers": 2}})
    with MetricsWriter(run, step=steps[0] - 1, tensorboard=False, trackers=follower) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 1 / step, "skipped": False, "mfu": None, "grad_norm": math.nan})
        metrics.write({"step": steps[-1], "validation_loss": 0.5, "sample_hash": "ab"})


def since_init(told: Told) -> tuple[str, list[tuple[int, dict[str, float]]]]:
    """The run of the last init, and what was logged after it."""
    start = max(number for number, line in enumerate(told) if line[0] == "init")
    assert told[start][2:] == ("p", "run", {"model": {"num_layers": 2}})
    assert told[-1] == ("finish",)
    return told[start][1], [(line[1], line[2]) for line in told[start + 1 : -1]]


def expected(steps: range) -> list[tuple[int, dict[str, float]]]:
    rows = [(step, {"loss": 1 / step, "skipped": 0.0}) for step in steps]
    return [*rows, (steps[-1], {"validation_loss": 0.5})]


@pytest.mark.parametrize(("again", "killed"), [(range(11, 14), False), (range(6, 9), False), (range(11, 13), True)])
def test_a_resumed_run_continues_its_store_or_replaces_it(tmp_path, told, again, killed) -> None:
    """Steps that are done again, or a store of unknown end, as a killed tracker leaves, make a new one of all rows."""
    run = tmp_path / "run"
    run.mkdir()
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


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [
        (None, {}, "import of swanlab halted"),
        (lambda **words: time.sleep(20), {"SECONDS_TO_FINISH": 1.0}, "not finished 1 s after the run"),
        (lambda **words: time.sleep(20), {"MAX_WAITING_ROWS": 5}, "it is 5 rows behind"),
        (lambda **words: 1 / 0, {}, "ZeroDivisionError: division by zero"),
        (lambda **words: sys.exit(3), {}, "SystemExit: 3"),
    ],
)
def test_a_tracker_that_is_not_there_hangs_or_fails_costs_one_warning(
    fault, limit, reason, tmp_path, told, caplog, monkeypatch
) -> None:
    """And no other tracker anything."""
    monkeypatch.setitem(sys.modules, "swanlab", None)
    if fault:
        install(monkeypatch, "swanlab", fault)
    for name, value in limit.items():
        monkeypatch.setattr(trackers, name, value)
    start = time.monotonic()
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", range(1, 200), names=("swanlab",) if fault else ("swanlab", "wandb"))
    assert time.monotonic() - start < 10
    (warning,) = caplog.messages
    assert f"tracker swanlab is off: {reason}" in warning
    if fault is None:
        assert since_init(told)[1] == expected(range(1, 200))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 200


def test_other_ranks_start_none(tmp_path: Path) -> None:
    follower = Trackers(tmp_path, ["wandb"], project="p", config={})
    with MetricsWriter(tmp_path, trackers=follower, active=False) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir())


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


# ---- the packages themselves ----

Points = list[tuple[str, int, float]]

READER = """
import json, sys
from importlib import import_module
kind, *paths = sys.argv[1:]
modules = {"wandb": "wandb.proto.wandb_internal_pb2",
           "swanlab": "swanlab.proto.swanlab.record.v1.record_pb2"}
Record = import_module(modules[kind]).Record
points = []
for path in paths:
    data, at, part = open(path, "rb").read(), 7, b""
    while at < len(data):  # the log format of LevelDB, behind a header of 7 bytes
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, last = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6] in (1, 4)
        part += data[at + 7:at + 7 + size]
        at += 7 + size
        if not last:
            continue
        record, part = Record.FromString(part), b""
        if kind == "wandb" and record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json)
                     for item in record.history.item}
            points += [(name, items["_step"], value) for name, value in items.items()
                       if not name.startswith("_")]
        if kind == "swanlab" and record.HasField("scalar"):
            points.append((record.scalar.key, record.scalar.step, record.scalar.value.number))
print(json.dumps(points))
"""


LAST_RUN = """
SELECT key, step, value FROM metrics
WHERE run_uuid = (SELECT run_uuid FROM runs ORDER BY start_time DESC LIMIT 1)
"""


def points_of(store: Path, name: str) -> Points:
    """All (figure, step, value) of the store of a tracker, in its order."""
    if name == "mlflow":
        with sqlite3.connect(store / "mlflow.db") as database:
            return database.execute(LAST_RUN).fetchall()
    return said_by(READER, name, *sorted(store.rglob(f"run-*.{name}"), key=lambda path: path.stat().st_mtime))


def said_by(program: str, *words: Any) -> Points:
    said = subprocess.check_output([sys.executable, "-c", program, *map(str, words)], text=True)
    return [tuple(point) for point in json.loads(said)]


def fill(run: Path, name: str, steps: range) -> None:
    follower = Trackers(run, [name], project="gpt2", config={"model": {"num_layers": 2, "name": "tiny"}})
    with MetricsWriter(run, step=steps[0] - 1, tensorboard=False, trackers=follower) as metrics:
        for step in steps:
            row: dict[str, Any] = {"step": step, "loss": 10 / step, "step_time": time.monotonic()}
            metrics.write(row | {"skipped": False, "mfu": None, "sample_hash": "ab"})
            if step % 10 == 0:
                metrics.write({"step": step, "validation_loss": 11 / step})


def in_metrics(run: Path) -> Points:
    return sorted(
        (name, row["step"], float(value))
        for row in read_metrics(run / "metrics.jsonl")
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float)
    )


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_store_has_what_metrics_jsonl_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 120.0)
    store = tmp_path / "trackers" / name
    fill(tmp_path, name, range(1, 301))
    fill(tmp_path, name, range(301, 321))  # continued
    assert sorted(points_of(store, name)) == in_metrics(tmp_path)
    assert not list(store.parent.glob("*.replaced-*"))
    fill(tmp_path, name, range(311, 331))  # steps 311 to 320 are done again
    assert sorted(points_of(store, name)) == in_metrics(tmp_path)
    assert len(in_metrics(tmp_path)) == 330 * 3 + 33
    assert (store.parent / f"{name}.replaced-1").is_dir() is (name != "mlflow")
    if name == "mlflow":
        with sqlite3.connect(store / "mlflow.db") as database:
            assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)] * 2


EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0}).Reload()
print(json.dumps([(name, event.step, event.value) for name in board.Tags()["scalars"]
                  for event in board.Scalars(name)]))
"""


@pytest.mark.campaign
def test_tensorboards_own_reader_finds_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    for steps in (range(1, 31), range(21, 41)):
        with MetricsWriter(tmp_path, step=steps[0] - 1) as metrics:
            for step in steps:
                metrics.write({"step": step, "loss": 10 / step, "step_time": time.monotonic()})
            metrics.write({"step": steps[-1], "validation_loss": 0.5})
        time.sleep(1.1)  # the name of a file of events has its second
    found, expected = sorted(said_by(EVENTS, tmp_path / "tensorboard")), in_metrics(tmp_path)
    assert [point[:2] for point in found] == [point[:2] for point in expected]
    # events hold float32
    assert [point[2] for point in found] == pytest.approx([each[2] for each in expected], rel=1e-6)

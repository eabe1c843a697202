"""The trackers' own packages, offline: what their stores hold is read without them, or with the
record types of their files only, and held against metrics.jsonl.

An environment without a package skips its test.
"""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.training import trackers
from common.training.metrics import MetricsWriter, read_metrics
from common.training.trackers import Trackers

CONFIG = {"model": {"num_layers": 2, "name": "tiny"}, "seed": 1234}
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
    files = sorted(store.rglob(f"run-*.{name}"), key=lambda path: path.stat().st_mtime)
    words = [sys.executable, "-c", READER, name, *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [tuple(point) for point in json.loads(done.stdout)]


def write(run: Path, name: str, steps: range) -> None:
    follower = Trackers(run, [name], project="gpt2", config=CONFIG)
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
    write(tmp_path, name, range(1, 301))
    write(tmp_path, name, range(301, 321))  # continued
    assert sorted(points_of(store, name)) == in_metrics(tmp_path)
    assert not list(store.parent.glob("*.replaced-*"))
    write(tmp_path, name, range(311, 331))  # steps 311 to 320 are done again
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
    words = [sys.executable, "-c", EVENTS, str(tmp_path / "tensorboard")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found, expected = sorted(map(tuple, json.loads(done.stdout))), in_metrics(tmp_path)
    assert [point[:2] for point in found] == [point[:2] for point in expected]
    # events hold float32
    assert [point[2] for point in found] == pytest.approx([each[2] for each in expected], rel=1e-6)

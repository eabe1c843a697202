"""Records that a tracker gets of a run. No fault of one reaches the run. A small package in place
of wandb writes down what it is told; ``test_tracker_stores.py`` has the real packages.
"""

import json
import sys
import time
from pathlib import Path
from types import ModuleType

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


def test_every_row_in_order_and_the_same_run_after_a_resume(told: Path) -> None:
    run = told.parent / "run"
    write(run, range(1, 40))
    first, rows = since_init(told)
    assert rows == expected(range(1, 40))
    write(run, range(40, 43))
    second, rows = since_init(told)
    assert (second, rows) == (first, expected(range(40, 43)))
    assert not list((run / "trackers").glob("*.replaced-*"))


def test_steps_that_are_done_again_replace_the_older_ones(told: Path) -> None:
    run = told.parent / "run"
    write(run, range(1, 11))
    first, _ = since_init(told)
    write(run, range(6, 9))  # the checkpoint of step 5
    second, rows = since_init(told)
    assert second != first
    assert rows == expected(range(1, 6))[:-1] + expected(range(6, 9))
    assert [path.name for path in (run / "trackers").glob("*.replaced-*")] == ["wandb.replaced-1"]


def test_a_store_of_unknown_end_is_written_again(told: Path) -> None:
    run = told.parent / "run"
    write(run, range(1, 5))
    (run / "trackers" / "wandb.json").unlink()  # as a tracker that was killed leaves it
    write(run, range(5, 7))
    _, rows = since_init(told)
    assert rows == expected(range(1, 5)) + expected(range(5, 7))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "ModuleNotFoundError"),
        ("def init(**words): import time; time.sleep(20)", "not finished 1 s after the run"),
        ("def init(**words): 1 / 0", "ZeroDivisionError: division by zero"),
        ("def init(**words): raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_tracker_that_is_not_there_hangs_or_fails_costs_one_warning(
    fault: str | None,
    reason: str,
    told: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no other tracker anything."""
    monkeypatch.setitem(sys.modules, "swanlab", None)
    if fault:
        install(monkeypatch, "swanlab", f"Settings = dict\n{fault}")
        monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 1.0)
    start = time.monotonic()
    write(told.parent / "run", range(1, 200), names=("swanlab",) if fault else ("swanlab", "wandb"))
    assert time.monotonic() - start < 10
    (warning,) = caplog.messages
    assert f"tracker swanlab is off: {reason if fault else ''}" in warning
    if fault is None:
        assert since_init(told)[1] == expected(range(1, 200))
    assert len((told.parent / "run" / "metrics.jsonl").read_text().splitlines()) == 200


def test_a_tracker_far_behind_is_given_up(
    told: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "wandb", "Settings = dict\ndef init(**w): import time; time.sleep(20)")
    monkeypatch.setattr(trackers, "MAX_WAITING_ROWS", 5)
    write(told.parent / "run", range(1, 20))
    (warning,) = caplog.messages
    assert "tracker wandb is off: it is 5 rows behind" in warning


def test_other_ranks_start_none(tmp_path: Path) -> None:
    follower = Trackers(tmp_path, ["wandb"], project="p", config={})
    with MetricsWriter(tmp_path, trackers=follower, active=False) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_figures_of_a_row() -> None:
    row = {"step": 3, "loss": 0.5, "skipped": True, "mfu": None, "hash": "ab", "norm": float("nan")}
    assert figures_of(row) == (3, {"loss": 0.5, "skipped": 1.0})

"""Experiment trackers beside a run: W&B, MLflow and SwanLab, each called in a thread of its own.

The store is ``trackers/NAME`` of the run folder. It is offline unless the tracker's own variable says otherwise. After
a clean end, ``trackers/NAME.json`` records the tracker's run, and how many rows of ``metrics.jsonl`` it holds, up to
which step. If the run resumes after exactly these, the tracker's run is continued. Otherwise steps are repeated or the
end is unknown: the store is moved aside, and a new one gets every row (in MLflow's file, a new run). A tracker that
fails, hangs or is slow costs only a warning.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from common.config.load import flatten
from common.log import LOG
from common.structured_files import MalformedError, parse_json

SECONDS_TO_FINISH = 30.0
"""Seconds that the end of a run waits for all trackers together."""
MAX_WAITING_ROWS = 10_000
_MAX_ROWS_AT_ONCE = 500
_QUIET = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Variables that keep a package from reporting on itself, unless the user sets them."""

Row = tuple[int, dict[str, float]]
"""Step and figures."""


class InitStore:
    """W&B and SwanLab: a folder for each start, which ``wandb sync`` or ``swanlab sync`` uploads
    as one run. ``run``: the tracker's name of the run, by which it is continued.
    """

    def __init__(self, name: str, folder: Path, job: Mapping[str, Any], run: str | None) -> None:
        package = import_module(name)
        own: dict[str, Any] = {"log_dir": str(folder)}
        if name == "wandb":
            settings = package.Settings(console="off", silent=True, disable_git=True, disable_code=True)
            own = {"dir": str(folder), "settings": settings}
        self.run = run or uuid.uuid4().hex[:16]
        mode = os.environ.get(f"{name.upper()}_MODE", "offline")
        self._run = package.init(**job, id=self.run, resume="allow", mode=mode, **own)

    def log(self, rows: list[Row]) -> None:
        for step, figures in rows:
            self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow: one SQLite file, which ``mlflow ui --backend-store-uri`` opens. ``run``: its id."""

    def __init__(self, name: str, folder: Path, job: Mapping[str, Any], run: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        offline = f"sqlite:///{folder / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI", offline)
        self._client = client = MlflowClient(uri)
        if run is None:
            known = client.get_experiment_by_name(job["project"])
            place = str(folder / "artifacts") if uri == offline else None
            experiment = (
                known.experiment_id if known else client.create_experiment(job["project"], artifact_location=place)
            )
            run = str(client.create_run(experiment, run_name=job["name"]).info.run_id)
            params = [Param(key, str(value)) for key, value in flatten(job["config"])]
            for start in range(0, len(params), 100):  # as many as one call takes
                client.log_batch(run, params=params[start : start + 100])
        else:
            client.update_run(run, status="RUNNING")
        self.run = run

    def log(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for step, row in rows for name, value in row.items()]
        for start in range(0, len(metrics), 1000):  # as many as one call takes
            self._client.log_batch(self.run, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self.run)


STORES: dict[str, type[InitStore | MLflow]] = {"wandb": InitStore, "mlflow": MLflow, "swanlab": InitStore}


class Trackers:
    """The trackers in ``names``. They begin with the first row, and end within a time limit."""

    def __init__(self, folder: Path, names: Sequence[str], *, project: str, config: dict[str, Any]) -> None:
        """folder: run folder, which holds metrics.jsonl. config: settings to record."""
        self._names = [name for name in dict.fromkeys(names) if name != "tensorboard"]
        self._folder = folder.absolute()
        self._job = {"project": project, "name": self._folder.name, "config": config}
        self._running: list[_Tracker] | None = None

    def write(self, row: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> None:
        """Add a row. earlier: all rows before, of which a tracker may lack some."""
        if self._running is None:
            before = [figures_of(each) for each in earlier] if self._names else []
            self._running = [
                _Tracker(name, self._folder / "trackers" / name, self._job, before) for name in self._names
            ]
            for tracker in self._running:
                tracker.start()
        for tracker in list(self._running):
            with suppress(queue.Full):
                tracker.rows.put_nowait(figures_of(row))
            if not tracker.is_alive():
                self._give_up(tracker)
            elif tracker.rows.full():
                tracker.fault = f"it is {MAX_WAITING_ROWS:,} rows behind"
                self._give_up(tracker)

    def close(self) -> None:
        """Let the trackers write the rest and finish; those that exceed the limit are left."""
        deadline = time.monotonic() + SECONDS_TO_FINISH
        for tracker in self._running or ():
            tracker.rows.put(None)
        for tracker in list(self._running or ()):
            tracker.join(max(0.0, deadline - time.monotonic()))
            if tracker.is_alive():
                tracker.fault = f"not finished {SECONDS_TO_FINISH:g} s after the run"
            if tracker.fault:
                self._give_up(tracker)
        self._running = []

    def _give_up(self, tracker: _Tracker) -> None:
        assert self._running is not None
        self._running.remove(tracker)
        LOG.warning(f"tracker {tracker.name} is off: {tracker.fault}; the run continues, metrics.jsonl has every step")


class _Tracker(threading.Thread):
    """The thread in which one package is called. ``fault``: why it has ended early."""

    def __init__(self, name: str, folder: Path, job: Mapping[str, Any], earlier: list[Row]) -> None:
        super().__init__(name=name, daemon=True)
        self.fault = ""
        self.rows: queue.Queue[Row | None] = queue.Queue(MAX_WAITING_ROWS)
        self._folder, self._job, self._earlier = folder, job, earlier

    def run(self) -> None:
        try:
            self._follow()
        except ModuleNotFoundError as error:
            self.fault = f"{error}; docs/trackers.md says how to install it"
        except BaseException as error:  # packages may raise SystemExit
            self.fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _follow(self) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        folder, record, earlier = self._folder, self._folder.with_suffix(".json"), self._earlier
        held = {"rows": len(earlier), "step": earlier[-1][0] if earlier else 0}
        state: Any = {}
        with suppress(OSError, MalformedError):
            state = parse_json(record.read_bytes(), strict=False)
        run = state.pop("run", None) if isinstance(state, dict) else None
        if state != held:
            run = None
        record.unlink(missing_ok=True)
        if run is None and folder.exists() and self.name != "mlflow":  # its file holds many runs
            number = 1
            while (target := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
                number += 1
            folder.rename(target)
        folder.mkdir(parents=True, exist_ok=True)
        store = STORES[self.name](self.name, folder, self._job, run)
        if run is None and earlier:
            store.log(earlier)
        while rows := self._next():
            store.log(rows)
            held = {"rows": held["rows"] + len(rows), "step": rows[-1][0]}
        store.close()
        record.write_text(json.dumps({"run": store.run, **held}) + "\n", encoding="utf-8")

    def _next(self) -> list[Row]:
        """Wait for rows, and return those that are there; none after the last."""
        found: list[Row] = []
        while len(found) < _MAX_ROWS_AT_ONCE and not (found and self.rows.empty()):
            row = self.rows.get()
            if row is None:
                if found:
                    self.rows.put(None)
                break
            found.append(row)
        return found


def figures_of(row: Mapping[str, Any]) -> Row:
    """Return the step and the finite numbers of a row, without text and null."""
    numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    step = int(numbers.pop("step"))
    return step, {name: value for name, value in numbers.items() if math.isfinite(value)}

"""Follow the ``metrics.jsonl`` of a run into the store of one tracker, until the run ends.

``python -m common.training.tracker_process NAME`` reads one JSON line from its standard input:
folder, project, config. The input ends with the run, even if the run is killed. The process needs
only the tracker's own package.
The store is ``trackers/NAME`` of the run folder. It is offline unless the tracker's own variable
says otherwise. After a clean end, ``trackers/NAME.json`` records the tracker's run and the part of
``metrics.jsonl`` in it.
If that part is still the beginning of the file, the tracker's run is continued. Otherwise steps
were repeated or the end is unknown: the store is moved aside, and a new one gets every row.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from common.structured_files import MalformedError, parse_json_line

SECONDS_BETWEEN_READS = 1.0
SECONDS_AFTER_THE_RUN = 60
ROWS_AT_ONCE = 500

QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that keep a package from reporting on itself, unless the user sets them."""

Row = tuple[int, dict[str, float]]
"""Step and figures."""


class Store(Protocol):
    run: str
    """The tracker's name of the run, by which it is continued."""

    def log(self, rows: list[Row]) -> None: ...

    def close(self) -> None: ...


class WandB:
    """W&B: a folder offline-run-* for each start, which ``wandb sync`` uploads as one run."""

    def __init__(self, folder: Path, job: dict[str, Any], run: str | None) -> None:
        import wandb

        self.run = run or uuid.uuid4().hex[:16]
        self._run = wandb.init(
            project=job["project"],
            name=Path(job["folder"]).name,
            id=self.run,
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=job["config"],
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )

    def log(self, rows: list[Row]) -> None:
        for step, figures in rows:
            self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """SwanLab: a folder run-* for each start, which ``swanlab sync`` uploads."""

    def __init__(self, folder: Path, job: dict[str, Any], run: str | None) -> None:
        import swanlab

        self.run = run or uuid.uuid4().hex[:16]
        self._run = swanlab.init(
            project=job["project"],
            name=Path(job["folder"]).name,
            id=self.run,
            resume="allow",
            log_dir=str(folder),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            config=job["config"],
        )

    def log(self, rows: list[Row]) -> None:
        for step, figures in rows:
            self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow: one SQLite file, which ``mlflow ui --backend-store-uri`` opens."""

    def __init__(self, folder: Path, job: dict[str, Any], run: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        offline = f"sqlite:///{folder / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI", offline)
        self._client = client = MlflowClient(uri)
        if run is None:
            known = client.get_experiment_by_name(job["project"])
            experiment = (
                known.experiment_id
                if known
                else client.create_experiment(
                    job["project"],
                    artifact_location=str(folder / "artifacts") if uri == offline else None,
                )
            )
            made = client.create_run(experiment, run_name=Path(job["folder"]).name)
            run = str(made.info.run_id)
            params = [Param(name, str(value)) for name, value in _leaves(job["config"])]
            for start in range(0, len(params), 100):  # as many as one call takes
                client.log_batch(run, params=params[start : start + 100])
        else:
            client.update_run(run, status="RUNNING")
        self.run = run

    def log(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step) for step, row in rows for name, value in row.items()
        ]
        for start in range(0, len(metrics), 1000):  # as many as one call takes
            self._client.log_batch(self.run, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self.run)


STORES: dict[str, Callable[[Path, dict[str, Any], str | None], Store]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def figures_of(line: bytes) -> Row | None:
    """Return the step and the numbers of a row of metrics.jsonl, without text, null and booleans.

    None for a line that is not a row.
    """
    try:
        row = parse_json_line(line)
    except MalformedError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return row["step"], {name: value for name, value in numbers.items() if name != "step"}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    name = sys.argv[1]
    pipe = os.fdopen(0, "rb", buffering=0)  # unbuffered, for select
    job = parse_json_line(pipe.readline())
    run_folder = Path(job["folder"])
    folder, record = run_folder / "trackers" / name, run_folder / "trackers" / f"{name}.json"
    os.environ.update(QUIET | os.environ)
    with (
        folder.with_name(f"{name}.lock").open("a") as lock,
        (run_folder / "metrics.jsonl").open("rb") as metrics,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # a killed run's tracker may still be at work
        read = hashlib.sha256()
        run = _continued(record, metrics, read)
        record.unlink(missing_ok=True)
        if run is None and folder.exists():
            _move_aside(folder)
        folder.mkdir(exist_ok=True)
        store = STORES[name](folder, job, run)
        for lines in _new_lines(metrics, pipe):
            for line in lines:
                read.update(line)
            store.log([row for row in map(figures_of, lines) if row is not None])
        store.close()
        state = {"run": store.run, "bytes": metrics.tell(), "sha256": read.hexdigest()}
    record.write_text(json.dumps(state) + "\n", encoding="utf-8")


def _continued(record: Path, metrics: Any, read: Any) -> str | None:
    """Return the tracker's run if it holds the beginning of ``metrics``; None if a new run is
    needed.

    For a continued run, the position in ``metrics`` and the hash ``read`` are then after that part.
    """
    with suppress(OSError, MalformedError, KeyError, TypeError, ValueError):
        state = parse_json_line(record.read_bytes())
        beginning = metrics.read(state["bytes"])
        if hashlib.sha256(beginning).hexdigest() == state["sha256"]:
            read.update(beginning)
            return str(state["run"])
    metrics.seek(0)
    return None


def _move_aside(folder: Path) -> None:
    number = 1
    while (target := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    folder.rename(target)


def _new_lines(metrics: Any, pipe: Any) -> Iterator[list[bytes]]:
    """Yield whole lines as they arrive, until the run has ended and all are read."""
    over = False
    while True:
        lines: list[bytes] = []
        while len(lines) < ROWS_AT_ONCE and (line := metrics.readline()):
            if not line.endswith(b"\n"):
                metrics.seek(-len(line), os.SEEK_CUR)
                break
            lines.append(line)
        if lines:
            yield lines
        elif over:
            return
        elif select.select([pipe], [], [], SECONDS_BETWEEN_READS)[0]:
            over = True
            signal.alarm(SECONDS_AFTER_THE_RUN)  # limits the wait if the store hangs


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}.{name}" if prefix else name)


if __name__ == "__main__":
    try:
        main()
    except Exception as fault:
        traceback.print_exc()
        reason = f"{type(fault).__name__}: {str(fault).partition(chr(10))[0]}"
        if isinstance(fault, ModuleNotFoundError):
            reason = f"{fault}; docs/trackers.md says how to install it"
        sys.stderr.write(f"{reason}\n")
        sys.stderr.flush()
        os._exit(1)  # exit handlers of the package may hang, and print after this line

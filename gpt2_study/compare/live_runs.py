"""Comparison of two run folders, step by step, and the runs that it starts: of a configuration, and of
one step to record.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.checkpoint.folders import require_checkpoint, step_of, whole_checkpoints
from common.config.load import flatten
from common.errors import ConfigError, RunError, StorageError
from common.interrupts import exiting_at_sigterm
from common.launcher.launch import TOOL
from common.launcher.request import NO_TABLE
from common.log import show
from common.training.metrics import read_metrics
from common.training.recording import record_request
from common.yaml_files import read_yaml_mapping
from gpt2_study.children import Launch, run_launches
from gpt2_study.report import describe_departure
from gpt2_study.results import Measured, State
from gpt2_study.verdict import OTHER_KERNELS, Kind, depart, relative_difference

TOLERANCE = 1e-6
"""Relative tolerance within one framework: float32 sums of the same terms in another order."""
_OWN = ("output_dir", "logging", "checkpoint", "context", "runtime", "profile", "serve", "predict")
"""Keys and sections that do not change what a step computes."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Rows of a run's steps by step, and its configuration with dotted keys."""

    folder: Path
    rows: Mapping[int, Mapping[str, Any]]
    keys: Mapping[str, Any]


def read_run(folder: Path) -> RecordedRun:
    """Read metrics.jsonl and config.yaml of a run folder. Raises ConfigError."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give the folder of a run (output_dir)")
    # a resumed run repeats steps: the later row is the one that the run continued from
    rows = {row["step"]: row for row in read_metrics(file) if "loss" in row}
    if not rows:
        raise ConfigError(f"{file}: no step is recorded; train at least one step first")
    config = folder / "config.yaml"
    tree = read_yaml_mapping(config) if config.is_file() else {}
    return RecordedRun(folder=folder, rows=rows, keys=dict(flatten(tree)))


def compare_runs(one: RecordedRun, other: RecordedRun, tolerance: float | None) -> tuple[list[str], bool, int | None]:
    """Compare two runs over the steps that both have.

    tolerance: relative; None takes 1e-6, or 1e-4 between two frameworks. Returns the lines of the result, whether the
    runs differ beyond the tolerance, and the first step with other samples, loss or norm. Raises ConfigError for runs
    without a common step.
    """
    steps = sorted(one.rows.keys() & other.rows.keys())
    if not steps:
        have = [f"{run.folder} has steps {min(run.rows)} to {max(run.rows)}" for run in (one, other)]
        raise ConfigError(f"{have[0]}, and {have[1]}: no step is in both; compare runs that overlap")
    if tolerance is None:
        frameworks = {run.keys.get("backend") for run in (one, other)}
        tolerance = TOLERANCE if len(frameworks) == 1 else OTHER_KERNELS
    lines = []
    for key in sorted(one.keys.keys() | other.keys.keys()):
        before, after = one.keys.get(key), other.keys.get(key)
        if key.partition(".")[0] not in _OWN and before != after:
            lines.append(f"{key}: {before} -> {after}")
    lines.append(f"compared: {len(steps)} steps, {steps[0]} to {steps[-1]}; tolerance {tolerance:g}")
    hashes = (step for step in steps if one.rows[step].get("sample_hash") != other.rows[step].get("sample_hash"))
    samples = next(hashes, None)  # the hash is of all samples read so far
    lines.append(f"samples: {'the same' if samples is None else f'others from step {samples}'}")
    found, expected = (_measured(run, steps) for run in (other, one))
    for kind, values, others in (
        (Kind.LOSS, expected.loss, found.loss),
        (Kind.NORM, expected.gradient_norm, found.gradient_norm),
    ):
        sizes = ((relative_difference(a, b), step) for a, b, step in zip(values, others, steps, strict=True))
        size, step = max((each for each in sizes if math.isfinite(each[0])), default=(math.nan, 0))
        lines.append(f"{kind}: largest difference {size:.2g}, at step {step}")
    departure = depart(found, expected, tolerance)
    if departure is not None and departure.step:
        departure = replace(departure, step=steps[departure.step - 1])
    lines.append("the same" if departure is None else f"different: {describe_departure(departure)}")
    differ = filter(None, (samples, departure.step if departure else None))
    return lines, departure is not None, min(differ, default=None)


def _measured(run: RecordedRun, steps: Sequence[int]) -> Measured:
    def column(key: str) -> list[float]:
        values = (run.rows[step].get(key) for step in steps)
        return [math.nan if value is None else float(value) for value in values]

    return Measured(
        step_seconds=[],
        tokens_per_step=0,
        samples_per_step=0,
        loss=column("loss"),
        gradient_norm=column("grad_norm"),
        sample_hash=run.rows[steps[-1]].get("sample_hash"),
    )


_QUIET = (
    "train.exit_minutes=null",
    "checkpoint.interval=0",
    "validation.interval=0",
    "logging.plot=false",
    "logging.tensorboard=false",
    "logging.trackers=[]",
)
_IN_PYTHON = {
    "torch": ("train.compile=false", "parallel.async_tensor_parallel=false"),
    "mindspore": ("context.mode=pynative",),
}
"""Overrides by which Python computes every layer, so that hooks see it."""
_RESULTS = ("run_a", "run_b", "before", "step_a", "step_b", "record_a", "record_b", "layers.tsv")
"""Folders and files that a comparison writes."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs. given: a run folder, or a configuration to run first.

    ranks: None takes those of the run folder, or 1. words: overrides. program: a script that takes
    the words of run_gpt2.py, in its place. place: folder of the runs that are started. limit:
    seconds that each may take.
    """

    name: str
    given: Path
    ranks: int | None = None
    words: tuple[str, ...] = ()
    program: Path | None = None
    place: Path
    limit: float

    @property
    def is_config(self) -> bool:
        return self.given.is_file() and self.given.suffix in (".yaml", ".yml")


def make_empty(folder: Path) -> None:
    """Make the folder of the runs, and remove what an earlier comparison left there.

    Raises ConfigError if it holds anything else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be used: {error.strerror}; choose another folder") from None
    if unknown := sorted(there.difference(_RESULTS)):
        raise ConfigError(f"--output {folder}: holds {unknown[0]}, which no comparison wrote; choose another folder")
    for name in there:
        remove(folder / name)


def remove(path: Path) -> None:
    """Remove a file or folder of a comparison. Raises StorageError."""
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be removed: {error.strerror}") from None


def run_config(side: Side, steps: int) -> Path:
    """Train the first steps of a configuration. Returns the run folder.

    Raises ConfigError and RunError.
    """
    folder = side.place / f"run_{side.name}"
    _train(side, folder, steps)
    return folder


def record_step(
    sides: Sequence[Side], runs: Sequence[RecordedRun], *, step: int, samples: int, own_weights: bool
) -> tuple[Path, Path]:
    """Let both runs make one step, on one set of weights or each on its own. Returns the folders of the records.

    Raises ConfigError, CheckpointError, DataError and RunError.
    """
    if own_weights:  # of the newest earlier step of which both have a checkpoint
        own = [_checkpoints_before(step, run) for run in runs]
        common = max(own[0].keys() & own[1].keys(), default=None)
        starts = [each[common] if common is not None else None for each in own]
    else:
        starts = [_weights_before(step, sides[0], runs[0])] * 2
    folders = []
    for side, run, start in zip(sides, runs, starts, strict=True):
        folder = side.place / f"record_{side.name}"
        keep = ("train.recompute=none", "train.recompute_layers=null")
        words = (*keep, *_IN_PYTHON[run.keys.get("backend") or "torch"])
        trained = side.place / f"step_{side.name}"
        _train(side, trained, step, run, start, words, record_request(step=step, samples=samples, folder=folder))
        folders.append(folder)
        remove(trained)
    remove(sides[0].place / "before")
    return folders[0], folders[1]


def _checkpoints_before(step: int, run: RecordedRun) -> dict[int, Path]:
    """Return a run's whole checkpoints of earlier steps, by step in ascending order."""
    found = {step_of(path.name): path for path in whole_checkpoints(run.folder / "checkpoints")}
    return {at: path for at, path in found.items() if at < step}


def _weights_before(step: int, side: Side, run: RecordedRun) -> Path | None:
    """Return a run's weights before the step; None for the initial ones.

    Where it has no checkpoint there, it trains up to it again.
    """
    if step == 1:
        return None
    earlier = _checkpoints_before(step, run)
    if step - 1 in earlier:
        return earlier[step - 1]
    folder = side.place / "before"
    _train(side, folder, step - 1, run, next(reversed(earlier.values()), None))
    return require_checkpoint(folder, f"the weights before step {step}")


def _train(
    side: Side,
    folder: Path,
    steps: int,
    run: RecordedRun | None = None,
    start: Path | None = None,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Train a configuration, or a run again, up to a step, and wait for its end. Raises ConfigError and RunError.

    start: a checkpoint; None for the initial weights.
    """
    config, ranks, given = side.given, side.ranks or 1, side.words
    if run is not None:
        config = run.folder / "config.yaml"
        if not config.is_file():
            raise ConfigError(f"{config}: no such file; --layers runs a step with it")
        ranks = side.ranks or math.prod(
            value
            for key in ("data_parallel", "model_parallel", "pipeline_stage")
            if isinstance(value := run.keys.get(f"parallel.{key}"), int) and value > 0
        )
        given = () if side.is_config else given  # which that file has already
    program = ("--program", str(side.program.absolute())) if side.program else ()
    command = (sys.executable, str(TOOL), "distribute", "--quiet", *program, NO_TABLE[0], str(config), f"[0,{ranks})")
    resume = f"checkpoint.resume={'never' if start is None else start.resolve()}"
    command += ("train", *given, resume, *words, f"train.exit_interval={steps}", *_QUIET, f"output_dir={folder}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from None
    show(f"{side.name.upper()}: {side.given} runs in {folder}\n")
    with exiting_at_sigterm():
        outcome = run_launches([Launch(command=command, environment=environment or {})], folder, side.limit)
    if outcome.state is not State.FINISHED:
        kind = ConfigError if outcome.code == 2 else RunError
        reason = outcome.reason.replace("(time_limit)", "(--time_limit)")
        raise kind(f"{side.name.upper()}: {side.given}: {reason}")

"""Certificate of determinism: the first steps of a run, made twice and compared bit for bit."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.checkpoint.folders import find_checkpoint
from common.config.schema import RunConfig
from common.doctor.software import installed_versions
from common.errors import ConfigError
from common.files import atomic_write
from common.log import show
from common.training.metrics import read_metrics

FILE = "certificate.json"
_FOLDER = "certificate"
_COMPARED = ("loss", "grad_norm", "learning_rate", "loss_scale", "sample_hash", "skipped")

Train = Callable[[Sequence[str]], int]
"""Function that trains with further overrides and returns the exit code."""


def certify(config: RunConfig, steps: int, train: Train) -> int:
    """Train ``steps`` steps twice, compare them bit for bit, and write certificate.json.

    The runs lie in the folder ``certificate`` of output_dir, which must not hold anything else. The
    run of output_dir is not touched. Returns 0 if both are equal, 1 if not, else the exit code of
    the run that failed. Raises ConfigError.
    """
    output = Path(config.output_dir)
    folder = output / _FOLDER
    runs = [folder / "first", folder / "second"]
    _clear(folder)
    for run in runs:
        code = train(
            (
                f"output_dir={run}",
                f"train.exit_interval={steps}",
                "train.exit_minutes=null",
                "checkpoint.interval=0",
                "logging.plot=false",
                "logging.tensorboard=false",
                "logging.trackers=[]",
            )
        )
        if code:
            return code
    difference = first_difference(*runs)
    rows = _rows(runs[0])
    record = {
        "equal": difference is None,
        "first_difference": difference,
        "steps": len(rows),
        "losses": [row["loss"] for row in rows],
        "sample_hash": rows[-1]["sample_hash"] if rows else None,
        "files": dict(_digests(runs[0])),
        "backend": config.backend,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "versions": {name: value for name, value in installed_versions().items() if value},
    }
    with atomic_write(output / FILE, "w") as file:
        json.dump(record, file, indent=2)
        file.write("\n")
    said = "equal bit for bit" if difference is None else f"different: {difference}"
    text = f"certificate: {len(rows)} steps made twice are {said}; {output / FILE}"
    show(text + "\n")
    return 0 if difference is None else 1


def first_difference(one: Path, other: Path) -> str | None:
    """Return the first value in which two runs differ, in words; None if they are equal."""
    rows, others = _rows(one), _rows(other)
    if [row["step"] for row in rows] != [row["step"] for row in others]:
        return f"{len(rows)} steps and {len(others)} steps"
    for row, again in zip(rows, others, strict=True):
        for key in _COMPARED:
            if row.get(key) != again.get(key):
                return f"step {row['step']}: {key} {row.get(key)!r} and {again.get(key)!r}"
    files, again_files = dict(_digests(one)), dict(_digests(other))
    for name in sorted(files.keys() | again_files.keys()):
        if files.get(name) != again_files.get(name):
            return f"{name} of the checkpoint after step {rows[-1]['step'] if rows else 0}"
    return None


def _rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def _digests(run: Path) -> Iterator[tuple[str, str]]:
    """Yield names and SHA-256 of the tensor files of the last checkpoint."""
    checkpoint = find_checkpoint(run)
    for path in sorted(checkpoint.glob("*.safetensors")) if checkpoint is not None else ():
        with path.open("rb") as file:
            yield path.name, hashlib.file_digest(file, "sha256").hexdigest()


def _clear(folder: Path) -> None:
    """Remove the runs of an earlier certificate. Raises ConfigError if other files are there."""
    if not folder.exists():
        return
    unknown = {path.name for path in folder.iterdir()} - {"first", "second"}
    if unknown:
        raise ConfigError(
            f"{folder}: holds {sorted(unknown)[0]}, which no certificate wrote; move it away, or"
            " choose another output_dir"
        )
    shutil.rmtree(folder)

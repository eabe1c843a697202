"""The one tiny run of the tests, what runs leave behind, and the comparison of two of them."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.backends import make_run
from common.checkpoint.folders import require_checkpoint
from common.checkpoint.manifest import read_manifest
from common.checkpoint.snapshot import MODEL_FILE, OPTIMIZER_FILE
from common.config.load import build_config
from common.parallel.run import Run
from common.parallel.sharding import slice_of
from common.resolve.derive import resolve_config
from common.training.metrics import read_metrics
from common.weights.names import parameter_shapes
from common.weights.pieces import open_stored
from tests.config_overrides import changed

SGD: dict[str, Any] = {
    "name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "schedule": "constant", "clip_grad": 0.0,
}  # fmt: skip
COUNTED = (
    "step", "sample_hash", "consumed_samples", "global_batch_size", "learning_rate", "loss_scale",
    "skipped", "outlier", "validation_tokens", "validation_tokens/other",
)  # fmt: skip
"""What two equal runs agree on exactly, by the names of metrics.jsonl."""
MEASURED = ("loss", "grad_norm", "validation_loss", "validation_loss/other")
"""Sums, which depend on the order of their terms."""


def tiny_run(folder: Path | str = "unused", corpus: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Return the tree of a run of four SGD steps on two layers of width 32.

    ``train__max_steps=3`` sets a key, ``train={...}`` replaces a section.
    """
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "model": {
            "num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 101,
        },
        "train": {"max_steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
        "optimizer": dict(SGD),
        "data": {"split": "90,10,0"} | ({"train": str(corpus)} if corpus else {}),
        "validation": {"max_samples": 8},
        "logging": {"tensorboard": False, "plot": False},
    }  # fmt: skip
    return changed(tree, deepcopy(changes))


def tiny_config(folder: Path | str = "unused", corpus: Path | None = None, *, ranks: int = 1, **changes: Any) -> Run:
    """Return the resolved run of ``tiny_run``. An epoch has 100 samples, unless data are given."""
    samples = None if corpus or "data__train" in changes else 100
    config = build_config(tiny_run(folder, corpus, **changes))
    return resolve_config(config, world_size=ranks, samples_per_epoch=samples)


def train_here(tree: dict[str, Any]) -> Path:
    """Train in this process. Return the run's folder. A run that is there goes on: it would have
    the same results if it began anew, but not with the same times.
    """
    package = {"mindspore": "mindformers_gpt2"}.get(tree.get("backend", ""), "torch_gpt2")
    run = Path(tree["output_dir"])
    begun = rows_of(run)[:1] if (run / "metrics.jsonl").exists() else []
    import_module(f"{package}.train").train(*make_run(build_config(tree)))
    assert not begun or rows_of(run)[:1] == begun, "it began anew"
    return run


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of steps, without those of validations."""
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def results_of(run: Path) -> list[tuple[Any, ...]]:
    """Return of each step what an interruption must not change."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "loss_scale", "consumed_samples")
    return [tuple(row[key] for key in (*keys, "sample_hash", "skipped")) for row in rows_of(run)]


def manifest_of(run: Path) -> dict[str, Any]:
    """Return that of the newest checkpoint."""
    return read_manifest(require_checkpoint(run, "test"))


def tensors_of(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all tensors of the newest checkpoint, whole, by FILE/NAME."""
    checkpoint, manifest = require_checkpoint(run, "test"), manifest_of(run)
    config = build_config(manifest["config"])
    moments = [f".{each}" for each in config.optimizer.state_parts]
    parts = {MODEL_FILE: [""]} | ({OPTIMIZER_FILE: moments} if moments else {})
    found = {}
    for file, endings in parts.items():
        stored = open_stored(checkpoint, file, manifest)
        for name, shape in parameter_shapes(config.model).items():
            for ending in endings:
                array = stored.read(f"{name}{ending}", slice_of(name, shape))
                found[f"{file}/{name}{ending}"] = array
    return found


def require_same_bits(found: Path, wanted: Path, *, last: int = 0) -> None:
    """Compare all or the last steps of two runs, and weights and moments, bit for bit."""
    assert results_of(found) == results_of(wanted)[-last:]
    one, other = tensors_of(wanted), tensors_of(found)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].tobytes() != other[name].tobytes()] == []


def require_equal(
    found: Path, wanted: Path, tolerance: float, *, updated: float | None = None, last: int = 0, **tolerances: float
) -> None:
    """Compare the metrics of two runs. updated: tolerance after the first update, where weights
    are rounded. last: only so many rows of ``wanted`` are repeated. tolerances: of single keys.
    """
    one, many = (read_metrics(run / "metrics.jsonl")[-last:] for run in (wanted, found))
    assert one
    for key in COUNTED:
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    first = next((n for n, row in enumerate(one) if row.get("skipped") is False), 0)
    for number, (row, expected) in enumerate(zip(many, one, strict=True)):
        usual = tolerance if number <= first or updated is None else updated
        for key in MEASURED:  # a norm that overflowed is null
            value, bound = expected.get(key), tolerances.get(key, usual)
            wish = value and pytest.approx(value, rel=bound, abs=0.0)
            assert row.get(key) == wish, (number, key)


def some_but_not_all(verdicts: list[bool]) -> bool:
    return any(verdicts) and not all(verdicts)


def params_of(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the parameters of these names of the module's tests in this session."""
    calls = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    found = [tuple(call[name] for name in names) for call in calls if call.keys() >= set(names)]
    return list(dict.fromkeys(found))

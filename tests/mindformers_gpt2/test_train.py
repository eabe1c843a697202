"""Signals to a run on MindSpore, which handles Ctrl-C itself unless it is kept from it."""

import tests.needs_mindspore  # noqa: F401

# isort: split
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.folders import require_checkpoint
from tests.run_scripts import start_program, wait_until
from tests.tiny import SGD, rows_of, tiny_run


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.long)]
)
def test_a_signal_stops_at_a_step_boundary_and_saves(
    tmp_path: Path, corpus_prefix: Path, number: signal.Signals, name: str
) -> None:
    """Exit code 128 + n, finished steps are saved, and the same command resumes from there."""
    optimizer = SGD | {"momentum": 0.0, "decay_steps": 100000}
    words: dict[str, Any] = {"model__num_layers": 1, "data__split": "100,0,0"}
    tree = tiny_run(tmp_path / "run", corpus_prefix, backend="mindspore", optimizer=optimizer, **words)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tree))  # JSON is YAML
    rows = tmp_path / "run" / "metrics.jsonl"

    def start(steps: int) -> subprocess.Popen[str]:
        words = ("--config", str(config), "--run_mode", "train", f"train.max_steps={steps}")
        return start_program(*words)

    with start(100000) as child:
        wait_until(lambda: child.poll() or (rows.is_file() and rows.read_text().count("\n") >= 3), "rows")
        child.send_signal(number)
        _, error = child.communicate(timeout=60)
    kernels = "attention written out; layer norm LayerNorm in float32; optimizer ApplyGradientDescent"
    assert f"# kernels: {kernels}\n" in (tmp_path / "run" / "config.yaml").read_text()
    done = len(rows_of(tmp_path / "run"))
    checkpoint = require_checkpoint(tmp_path / "run", "test")
    assert checkpoint.name == f"step_{done:08d}"
    assert (child.returncode, error.splitlines()[-1]) == (
        128 + number,
        f"stopped by {name} after step {done}; saved in {checkpoint.parent}; the same command resumes",
    )
    with start(done + 2) as child:
        child.communicate(timeout=120)
    assert child.returncode == 0
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, done + 3))

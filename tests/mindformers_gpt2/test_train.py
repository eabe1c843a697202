"""Signals to a run on MindSpore, which handles Ctrl-C itself unless it is kept from it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")

from common.checkpoint.folders import find_checkpoint
from tests.tiny import SGD, rows_of, tiny_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_a_step_boundary_and_saves(
    tmp_path: Path, corpus_prefix: Path, number: signal.Signals
) -> None:
    """Exit code 128 + n, finished steps are saved, and the same command resumes from there."""
    changes: dict[str, Any] = {
        "model__num_layers": 1,
        "optimizer": SGD | {"momentum": 0.0, "decay_steps": 100000},
        "data__split": "100,0,0",
    }
    tree = tiny_run(tmp_path / "run", corpus_prefix, backend="mindspore", **changes)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tree))  # JSON is YAML
    command = [sys.executable, str(ROOT / "run_gpt2.py"), "--config", str(config)]
    command += ["--run_mode", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rows = tmp_path / "run" / "metrics.jsonl"
    # a shell that starts this suite in the background makes children ignore SIGINT
    restore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(
        [*command, "train.max_steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **restore,
    ) as child:
        end = time.monotonic() + 90
        while not (rows.is_file() and rows.read_text().count("\n") >= 3):
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        child.send_signal(number)
        _, error = child.communicate(timeout=60)
    kernels = (
        "attention written out; layer norm LayerNorm in float32; optimizer ApplyGradientDescent"
    )
    assert f"# kernels: {kernels}\n" in (tmp_path / "run" / "config.yaml").read_text()
    done = len(rows_of(tmp_path / "run"))
    checkpoint = find_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name == f"step_{done:08d}"
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert (child.returncode, error.splitlines()[-1]) == (
        128 + number,
        f"stopped by {name} after step {done}; saved in {checkpoint.parent}; the same command"
        " resumes",
    )
    if number == signal.SIGINT:
        subprocess.run(
            [*command, f"train.max_steps={done + 2}"],
            check=True,
            capture_output=True,
            timeout=120,
            env=environment,
        )
        steps = [row["step"] for row in rows_of(tmp_path / "run")]
        assert steps == list(range(1, done + 3))

"""Signals to a run on MindSpore, which handles Ctrl-C itself unless it is kept from it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")

from common.checkpoint.folders import find_checkpoint
from common.config.load import dump_config
from common.training.metrics import read_metrics
from tests.mindformers_gpt2.test_model import make_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_a_step_boundary_and_saves(
    tmp_path: Path, corpus_prefix: Path, number: signal.Signals
) -> None:
    """Exit code 128 + n, finished steps are saved, and the same command resumes from there."""
    tree = yaml.safe_load(
        dump_config(
            make_config(
                output_dir=str(tmp_path / "run"),
                model__num_layers=1,
                data={"train": str(corpus_prefix), "split": "100,0,0"},
                logging={"tensorboard": False, "plot": False},
                optimizer__decay_steps=100000,
            )
        )
    )
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [
        sys.executable,
        str(ROOT / "run_gpt2.py"),
        "--config",
        str(config),
        "--run_mode",
        "train",
    ]
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
    done = len([row for row in read_metrics(rows) if "loss" in row])
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
        assert [row["step"] for row in read_metrics(rows) if "loss" in row] == list(
            range(1, done + 3)
        )

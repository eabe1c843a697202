"""run_distribute.sh with two and four ranks against one process: one config, one global
batch, the same losses.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.run_scripts import ROOT, clean_environment, run_words, start_script

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
KEYS: dict[str, object] = {"train__max_steps": 10, "validation__interval": 5}


def rows_of(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


@pytest.mark.campaign
def test_ranks_that_the_script_starts_reach_the_losses_of_one_process(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    command = [
        sys.executable,
        "run_gpt2.py",
        "--config",
        CONFIG,
        "--run_mode",
        "train",
        *run_words(tmp_path / "1", corpus_prefix, **KEYS),
    ]
    subprocess.run(
        command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, timeout=120
    )
    one = rows_of(tmp_path / "1")
    for ranks in (2, 4):
        run = tmp_path / str(ranks)
        words = run_words(run, corpus_prefix, **KEYS)
        launcher = start_script(
            "none", CONFIG, f"[0,{ranks})", "train", *words, log=tmp_path / "log"
        )
        assert launcher.wait(timeout=120) == 0, (tmp_path / "log").read_text()
        many = rows_of(run)
        assert [row.get("sample_hash") for row in many] == [row.get("sample_hash") for row in one]
        for key in ("loss", "grad_norm", "validation_loss"):
            # float32 sums in another order
            assert [row.get(key) for row in many] == [
                row.get(key) and pytest.approx(row[key], rel=1e-6) for row in one
            ], (ranks, key)

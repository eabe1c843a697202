"""tools/compare_runs.py runs configurations, with ranks and frameworks, and finds what differs. The
record of a step and planted faults of one process: tests/torch_gpt2/test_recording.py.

pytest -m campaign tests/system/test_first_divergence.py
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_scripts import ROOT, clean_environment, run_program
from tests.tiny import tiny_run

pytestmark = pytest.mark.campaign

SEED = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import run_gpt2
import torch_gpt2.base_engine as base
from common.interrupts import end_process
offset = base.seed_offset
base.seed_offset = lambda *given: offset(*given) + 7 * (os.environ["RANK"] == "1")
end_process(run_gpt2.main())
"""
"""A program whose rank 1 has another dropout."""
SGD = ("--set_a", "optimizer.name=sgd", "--set_b", "optimizer.name=sgd")
LAYOUTS = (("model_parallel=2", "2"), ("pipeline_stage=3", "3"), ("zero_stage=1", "2"))


def config_of(folder: Path, corpus: Path, dropout: float = 0.0) -> Path:
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    adamw = {"name": "adamw", "learning_rate": 0.01, "decay_steps": 1000}
    changes = {"model__num_layers": 3, "model__num_heads": 2, "model__dropout": dropout, "data__split": "100,0,0"}
    tree = tiny_run("unused", corpus, **changes, train__max_steps=20, precision="float32", optimizer=adamw)
    config = folder / "tiny.yaml"
    config.write_text(json.dumps(tree))
    return config


def compare(folder: Path, one: Path, other: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and what is said."""
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), str(one), str(other)]
    command += ["--layers", "--output", str(folder / "out"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=900, check=False)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout + done.stderr


def rows_that_differ(folder: Path) -> set[str]:
    """Sections of the rows beyond the tolerance, from layers.tsv."""
    with (folder / "out" / "layers.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 137, "tokens, 49 weights, 18 outputs, 17 + 52 gradients"
    return {row["section"] for row in rows if row["first place"] != "-"}


def test_the_seed_of_one_rank_is_found(tmp_path: Path, corpus_prefix: Path) -> None:
    """Rank 1 has the samples 2 and 3 of the batch of four; its dropout begins at the embeddings."""
    config, program = config_of(tmp_path, corpus_prefix, 0.1), tmp_path / "fault.py"
    program.write_text(SEED)
    words = ("--program_b", str(program), "--ranks_a", "2", "--ranks_b", "2", "--steps", "2")
    code, text = compare(tmp_path, config, config, *words)
    assert code == 1 and "the loss differs from step 1" in text
    assert "first difference: embeddings, forward (from sample 2 of the batch on" in text
    assert "which rank 1 of A and rank 1 of B read" in text


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        # from weights of the second step of torch; AdamW would make much of a rounded zero
        ("torch", "mindspore", ("--step", "3", *SGD)),
        *(
            (each, each, ("--step", "1", "--ranks_b", ranks, "--set_b", f"parallel.{layout}"))
            for each in ("torch", "mindspore")
            for layout, ranks in LAYOUTS
        ),
    ],
)
def test_frameworks_and_layouts_have_no_difference(tmp_path, corpus_prefix, one, other, words) -> None:
    config = config_of(tmp_path, corpus_prefix)
    backends = ("--set_a", f"backend={one}", "--set_b", f"backend={other}", "--steps", "2")
    code, text = compare(tmp_path, config, config, *backends, *words)
    assert "no difference" in text and "not compared" not in text
    assert code == 0 or one == other  # which say that the layouts differ
    assert ("tolerance 0.0001" in text) == (one != other)
    assert rows_that_differ(tmp_path) == set()


def test_each_run_has_its_own_weights(tmp_path: Path, corpus_prefix: Path) -> None:
    """After a step at another rate the weights differ. From those of A nothing does."""
    config = config_of(tmp_path, corpus_prefix)
    one, other = tmp_path / "one", tmp_path / "other"
    for run, rate in ((one, "0.01"), (other, "0.02")):
        words = [f"output_dir={run}", "train.max_steps=2", "checkpoint.interval=1"]
        words += ["optimizer.warmup_steps=0", f"optimizer.learning_rate={rate}"]
        assert run_program("--config", str(config), "--run_mode", "train", *words)[0] == 0
    compare(tmp_path, one, other, "--step", "2")
    assert rows_that_differ(tmp_path) == set()
    _, text = compare(tmp_path, one, other, "--step", "2", "--own_weights")
    assert "before the step" in text and "weights" in rows_that_differ(tmp_path)

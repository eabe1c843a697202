"""Two, three and four ranks over gloo against one process: the same losses, norms, samples, and the
same bits after a resume.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from common.checkpoint.folders import find_checkpoint
from common.inputs import make_run
from common.run_config import load_config
from common.training.metrics import read_metrics
from tests.config_overrides import blended, changed
from tests.ranks import end_ranks, run_ranks, start_ranks
from torch_gpt2.evaluate import evaluate

# float32 sums of the same terms in another order: 12 steps of SGD differed by 1e-7, bounds leave a
# factor of ten
TOLERANCE = 1e-6

# Half precision rounds the float32 weights before each use. Until the first update they are the
# same bits on all ranks. Afterwards a weight that differs in its last bit may round to the
# neighbour, which is two units of roundoff away. Few weights do, with random signs, so the bounds
# are at most one unit: 2^-8 in bfloat16 (half of it here, as in test_layouts.py), 2^-11 in float16.
# Seen: 2.6e-5 and 4.1e-6 with ATEN_CPU_CAPABILITY=default, below 1e-6 with AVX2 and AVX-512. A
# missing micro batch or a scale wrong by 1 % is far beyond.
ROUNDED = {"adamw in bf16": 2.0**-9, "bf16 weights": 2.0**-9, "fp16 that overflows": 2.0**-11}

PLAIN = {"optimizer__clip_grad": 0.0}
CLIPPED = {"optimizer__clip_grad": 2.1}  # the norms go from 3.3 to 1.7: acts on some steps
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": PLAIN,
    "sgd with clip": CLIPPED,
    "adamw in bf16": {"precision": "bf16", "optimizer": {"learning_rate": 0.01, "decay_steps": 12}},
    "bf16 weights": {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}, **PLAIN},
    "fp16 that overflows": {
        "precision": "fp16",
        "loss_scale": {"initial": 2.0**26, "window": 3},
        **PLAIN,
    },
    "outliers skipped": {
        "train__on_outlier": "skip",
        "logging__outlier_deviations": 0.3,
        "logging__outlier_window": 8,
        **PLAIN,
    },
}


def tree(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    return changed(
        {
            "output_dir": str(folder),
            "device": "cpu",
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 101,
                "initializer_range": 0.1,
            },
            "train": {"max_steps": 12, "micro_batch_size": 2, "global_batch_size": 16},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.3,
                "momentum": 0.9,
                "schedule": "constant",
            },
            "data": {"train": blended(corpus), "split": "90,10,0"},
            "validation": {"max_samples": 10, "interval": 5},
            "logging": {"tensorboard": False, "plot": False},
        },
        changes,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """Every variant on one, two and four ranks: folder / ranks / variant."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2, 4):
        run_ranks(
            ranks,
            [
                tree(folder / str(ranks) / name, corpus_prefix, **changes)
                for name, changes in VARIANTS.items()
            ],
        )
    return folder


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(runs: Path, ranks: int, name: str) -> None:
    one, many = (read_metrics(runs / str(number) / name / "metrics.jsonl") for number in (1, ranks))
    assert len(one) == 15  # 12 steps and 3 validations
    for key in (
        "step",
        "sample_hash",
        "consumed_samples",
        "learning_rate",
        "loss_scale",
        "skipped",
        "outlier",
        "validation_tokens",
        "validation_tokens/other",
    ):
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    first = next(row["step"] for row in one if "loss" in row and not row["skipped"])
    for row, other in zip(one, many, strict=True):
        bound = ROUNDED.get(name, TOLERANCE) if row["step"] > first else TOLERANCE
        for key in (
            "loss",
            "grad_norm",
            "validation_loss",
            "validation_loss/other",
        ):  # a norm that overflowed is null
            assert other.get(key) == (row.get(key) and pytest.approx(row[key], rel=bound)), (
                row["step"],
                key,
            )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_blend_is_validated_as_its_parts_are_by_themselves(
    runs: Path, corpus_prefix: Path, ranks: int
) -> None:
    """10 windows of 251 and 99: 7 and 3. The loss is the mean over all tokens."""
    run = runs / str(ranks) / "sgd"
    *_, row = read_metrics(run / "metrics.jsonl")
    total = 0.0
    for name, windows in (("random_text_document", 7), ("other", 3)):
        words = [f"data.train={corpus_prefix.with_name(name)}", f"validation.max_samples={windows}"]
        words += ["parallel.data_parallel=null", "train.accumulation_steps=null"]
        evaluate(*make_run(load_config(run / "config.yaml", words), "eval"))
        found = json.loads((run / "evaluation.json").read_text())
        assert found["tokens"] == row[f"validation_tokens/{name}"] == windows * 16
        loss, perplexity = found["validation_loss"], found["validation_perplexity"]
        assert row[f"validation_loss/{name}"] == pytest.approx(loss, rel=TOLERANCE)
        assert row[f"validation_perplexity/{name}"] == pytest.approx(perplexity, rel=2e-5)
        total += loss * found["tokens"]
    assert row["validation_tokens"] == 160
    assert row["validation_loss"] == pytest.approx(total / 160, rel=TOLERANCE)


def test_the_variants_do_what_their_names_say(runs: Path) -> None:
    rows = {
        name: [row for row in read_metrics(runs / "2" / name / "metrics.jsonl") if "loss" in row]
        for name in VARIANTS
    }
    clipped = [row["grad_norm"] > 2.1 for row in rows["sgd with clip"]]
    assert any(clipped) and not all(clipped)
    for name in ("fp16 that overflows", "outliers skipped"):
        skipped = [row["skipped"] for row in rows[name]]
        assert any(skipped) and not all(skipped), name


def test_gradients_exchanged_in_bfloat16(tmp_path: Path, runs: Path, corpus_prefix: Path) -> None:
    precision = {"parameters": "float32", "compute": "float32", "reduction": "bfloat16"}
    run_ranks(2, [tree(tmp_path / "run", corpus_prefix, precision=precision, **PLAIN)])
    rounded, exact = (
        read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "run", runs / "2" / "sgd")
    )
    assert rounded[0]["loss"] == exact[0]["loss"]
    # 8 bits of mantissa in each gradient of the first step; rounding is unbiased, so the norm moves
    # by much less than 2^-8
    assert 0 < abs(rounded[0]["grad_norm"] / exact[0]["grad_norm"] - 1) < 2**-8


def bits_of(folder: Path) -> dict[str, bytes]:
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    return {
        f"{file}/{name}": array.tobytes()
        for file in ("model.safetensors", "optimizer.safetensors")
        for name, array in load_file(checkpoint / file).items()
    }


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_resumes_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """Three ranks, since two would sum alike in any order; dropout, since each rank draws masks of
    its own.
    """
    settings = {
        "model__dropout": 0.1,
        "train__global_batch_size": 12,
        "train__max_steps": 60,
        "checkpoint__interval": 25,
    }
    whole, halves = (
        tree(tmp_path / name, corpus_prefix, **settings) for name in ("whole", "halves")
    )
    run_ranks(3, [whole])
    processes = start_ranks(3, [halves])
    metrics = tmp_path / "halves" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text():
        assert time.monotonic() < end and processes[0].poll() is None
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    codes, printed = end_ranks(processes)
    assert codes == [128 + signal.SIGTERM] * 3, printed
    assert len({text.rpartition("error: ")[2] for text in printed}) == 1, "all name the same step"
    stopped = read_metrics(metrics)[-1]["step"]
    assert 0 < stopped < 60
    run_ranks(3, [halves])
    rows = [
        [
            (row["step"], row["loss"], row["grad_norm"])
            for row in read_metrics(tmp_path / name / "metrics.jsonl")
            if "loss" in row
        ]
        for name in ("whole", "halves")
    ]
    assert rows[0] == rows[1]
    assert bits_of(tmp_path / "whole") == bits_of(tmp_path / "halves")


def test_ranks_that_would_train_different_things_refuse(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    ours, theirs = (
        tree(tmp_path / "run", corpus_prefix, optimizer__learning_rate=rate) for rate in (0.3, 0.2)
    )
    codes, printed = end_ranks(start_ranks(2, [ours], other={1: [theirs]}))
    assert codes == [2, 2]
    for text in printed:
        assert "rank 1 differs from rank 0 in optimizer.learning_rate: 0.2 and 0.3" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_decision_of_rank_0_that_fails_fails_everywhere(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    whole = tmp_path / "run" / "checkpoints" / "step_00000001" / "manifest.json"
    whole.parent.mkdir(parents=True)
    whole.touch()
    codes, printed = end_ranks(
        start_ranks(2, [tree(tmp_path / "run", corpus_prefix, checkpoint__resume="never")])
    )
    assert codes == [2, 2]
    for text in printed:
        assert "holds a run and checkpoint.resume=never" in text

"""Runs that meet a bad batch, go back and leave it out, beside runs on data without that batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.dataset import IndexedWriter
from common.errors import DivergedError
from tests.tiny import manifest_of, rows_of, tensors_of, tiny_run, train_here
from torch_gpt2.engine import Engine

BATCH, LENGTH = 4, 16
"""Samples of a step, and tokens of a sample."""
BAD_STEP = 17


def write_corpus(prefix: Path, *bad_steps: int) -> Path:
    """Tokens that repeat, except for the batches of some steps, which are random.

    Without these batches the stream is the same for any choice of steps.
    """
    generator = np.random.default_rng(0)
    good = np.tile(np.arange(10), 1000)[: 40 * BATCH * LENGTH]
    parts, at = [], 0
    for number, step in enumerate(bad_steps):
        first = (step - 1 - number) * BATCH * LENGTH
        bad = generator.integers(50, 100, size=BATCH * LENGTH)
        bad[0] = good[first]  # target of the sample before it
        parts += [good[at:first], bad]
        at = first
    with IndexedWriter(prefix, np.uint16) as writer:
        stream = np.concatenate([*parts, good[at:]])
        writer.append(stream, np.array([len(stream)]))
    return prefix


REWINDS: dict[str, Any] = {
    "model__hidden_size": 16,
    "model__num_heads": 2,
    "train__max_steps": 24,
    "train__on_outlier": "rewind",
    "optimizer": {"learning_rate": 0.01, "schedule": "constant"},
    "data__split": "100,0,0",
    "data__shuffle": False,
    "validation": {},
    "checkpoint": {"interval": 5},
    "logging__outlier_deviations": 6.0,
    "logging__outlier_window": 16,
}


@pytest.fixture
def start(tmp_path: Path) -> Any:
    def run(name: str, *bad_steps: int, **changes: Any) -> Path:
        corpus = write_corpus(tmp_path / f"corpus {name}", *bad_steps)
        words = REWINDS | {"model__dropout": 0.1, "data__train": str(corpus)} | changes
        return train_here(tiny_run(tmp_path / name, **words))

    return run


def rows(run: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "skipped")
    return [tuple(row[key] for key in keys) for row in rows_of(run)]


def state(run: Path) -> dict[str, Any]:
    return manifest_of(run)["state"]


@pytest.mark.parametrize("kind", ["exploding loss", "NaN"])
def test_a_bad_batch_leaves_the_run_as_if_it_was_never_there(
    start: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "NaN":
        gradients = Engine._accumulate_gradients

        def broken(self: Engine, tokens: Any, scale: Any) -> torch.Tensor:
            loss = gradients(self, tokens, scale)
            return loss * float("nan") if (np.asarray(tokens) >= 50).any() else loss

        monkeypatch.setattr(Engine, "_accumulate_gradients", broken)
    run, never = start("run", BAD_STEP), start("never")
    assert rows(run) == rows(never) and len(rows(run)) == 24
    found, expected = tensors_of(run), tensors_of(never)
    assert all((found[name] == expected[name]).all() for name in expected)
    samples = [(BAD_STEP - 1) * BATCH, BAD_STEP * BATCH]
    assert state(run)["left_out"] == [samples] and state(run)["rewinds"] == 1
    assert state(run)["consumed_samples"] == state(never)["consumed_samples"] + BATCH
    warned = start("warned", BAD_STEP, train__on_outlier="warn")
    assert rows(warned)[-1] != rows(never)[-1], "the batch does harm"


def test_a_resume_after_a_rewind_equals_no_interruption(start: Any) -> None:
    never = start("never")
    start("run", BAD_STEP, train__max_steps=20)
    assert rows(start("run", BAD_STEP, train__max_steps=24)) == rows(never)


def test_two_bad_batches_cost_two_rewinds_and_lower_the_rate(start: Any) -> None:
    run = start("run", 17, 18, train__rewind_rate=0.5)
    assert state(run)["left_out"] == [[16 * BATCH, 18 * BATCH]]
    assert state(run)["rewinds"] == 2 and state(run)["rate_factor"] == 0.25
    rates = {step: rate for step, _, _, rate, _ in rows(run)}
    assert rates[15] == 0.01 and rates[16] == 0.01 * 0.25
    with pytest.raises(DivergedError, match=r"step 17: .* after 1 rewinds \(train.max_rewinds\)"):
        start("limited", 17, 18, train__max_rewinds=1)


@pytest.mark.parametrize(
    ("bad_step", "changes", "left_out"),
    [
        # three batches end with that of step 17, so they begin with step 15's
        (BAD_STEP, {"train__rewind_batches": 3}, [[14 * BATCH, 17 * BATCH]]),
        # before the first checkpoint there is nothing to go back to
        (12, {"checkpoint__interval": 15}, []),
    ],
)
def test_batches_that_are_left_out(
    start: Any, bad_step: int, changes: dict[str, Any], left_out: list[list[int]]
) -> None:
    found = state(start("run", bad_step, **changes))
    assert (found["left_out"], found["rewinds"]) == (left_out, len(left_out))


def test_a_checkpoint_within_a_spike_is_marked_and_passed_over(start: Any) -> None:
    run = start("run", 15, train={"max_steps": 15, "on_outlier": "warn", "micro_batch_size": 4})
    assert state(run)["is_outlier"] is True
    changes = {"max_steps": 16, "on_outlier": "rewind", "micro_batch_size": 4}
    start("run", 15, train=changes)
    assert state(run)["left_out"] == [[14 * BATCH, 15 * BATCH]], "resumed from step 10"

"""Runs of the loop with an engine of a few lines, whose losses a test chooses."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from common import run_folder
from common.checkpoint.folders import find_checkpoint
from common.checkpoint.snapshot import EngineState, TrainState, make_snapshot
from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.dataset.sampler import Batch, Tokens
from common.parallel.run import Run
from common.parallel.updates import LossScale
from common.training.data import TrainingData
from common.training.engine import NO_LIMITS, Limits, StepResult
from common.training.loop import train
from common.training.metrics import MetricsWriter
from common.training.opened_checkpoint import Checkpoint
from common.training.steps import ProfileWindow, TrainingParts
from tests.common.parallel.test_world import Told
from tests.tiny import tiny_config


def falling(step: int) -> float:
    return 3.0 / (step + 1)


def batches() -> Iterator[Batch]:
    step = 0
    while True:
        step += 1
        tokens = np.full((2, 5), step, np.int32)
        yield Batch(tokens=tokens, samples=2, consumed_samples=2 * step, sample_hash=f"hash {step}")


@dataclass(kw_only=True)
class Scripted:
    """A step is skipped where its loss is not finite or ``skips`` has it. late: the result of a step is told when it
    is asked for the next one. act: called with each step.
    """

    config: Run = field(default=None)  # type: ignore[assignment]
    step: int = 0
    loss: Callable[[int], float] = falling
    skips: Iterable[int] = ()
    stop_in_validation: int = -1
    act: Callable[[int], Any] = lambda step: None
    steps_per_run: int = 1
    late: bool = False
    seconds: float | None = None
    asked: list[int] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    under_way: list[StepResult] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        self.asked.append(steps)
        self.limits.append(limits)
        known = self.finish()
        for _ in range(steps):
            next(batches)
            self.step += 1
            self.act(self.step)
            loss = self.loss(self.step)
            skipped = self.step in self.skips or not math.isfinite(loss)
            values = {"learning_rate": 1e-4, "loss_scale": 1.0, "skipped": skipped}
            timed = {} if self.seconds is None else {"seconds": self.seconds}
            known.append(StepResult(loss=loss, grad_norm=0.1 + 0.2, **values, **timed))  # type: ignore[arg-type]
        if self.late:
            *known, last = known
            self.under_way = [last]
        return known

    def finish(self) -> list[StepResult]:
        known, self.under_way = self.under_way, []
        return known

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        assert not self.under_way
        if self.step == self.stop_in_validation:
            os.kill(os.getpid(), signal.SIGTERM)
        tokens = sum(batch.size for batch in batches)
        return tokens * self.loss(self.step), tokens

    def snapshot(self, state: TrainState) -> Snapshot:
        assert not self.under_way and self.step == state.step
        scale = LossScale(self.config.loss_scale).state()
        weights = {"w": np.full(3, state.step, np.float32)}
        engine = EngineState(optimizer_steps=0, loss_scale=scale, rng={})
        return make_snapshot(self.config, state, weights=weights, moments={}, engine=engine, versions={}, extra={})


def start(
    folder: Path, engine: Scripted | None = None, feed: Callable[[], Iterator[Batch]] = batches, **changes: Any
) -> Scripted:
    """Go on from the newest checkpoint of ``folder``, as both backends do, to step 20."""
    usual: dict[str, Any] = {
        "train": {"max_steps": 20, "micro_batch_size": 2},
        "validation": {"interval": 0},
        "checkpoint": {"interval": 5, "keep": 2},
    }
    config, engine = tiny_config(folder, **(usual | changes)), engine or Scripted()
    with run_folder.owned_folder(folder):
        found = find_checkpoint(folder)
        state = TrainState()
        if found is not None:
            state = Checkpoint(found).states(config, LossScale(config.loss_scale))[0]
        engine.config, engine.step = config, state.step
        windows: dict[str, Any] = {"all": lambda: iter([np.zeros((1, 3), np.int32)] * 3)}
        without = dict.fromkeys(("samples", "no_validation", "tokenizer_record"))
        data = TrainingData(batches=lambda _: batches(), validation=windows, validation_bytes=dict, **without)  # type: ignore[arg-type]
        keeper = run_folder.keeper(folder, [run_folder.holder(folder)], 0)
        keys = {"keep": config.checkpoint.keep, "asynchronous": config.checkpoint.asynchronous}
        with (
            CheckpointWriter(folder / "checkpoints", **keys, require_folder=keeper) as checkpoints,
            MetricsWriter(folder, step=state.step, tensorboard=False) as metrics,
        ):
            run = TrainingParts(
                config=config,
                engine=engine,
                batches=feed(),
                data=data,
                checkpoints=checkpoints,
                metrics=metrics,
                device=SimpleNamespace(peak_flops=lambda name: 1e9, peak_memory=lambda: 12345),
                profile=ProfileWindow(config, state, lambda path: nullcontext()),
                resumed=found is not None,
                world=Told(),
            )
            engine.summary = train(run, state)
    return engine

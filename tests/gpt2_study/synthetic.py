"""Studies as a runner would leave them, with speeds and losses that are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from gpt2_study.results import Cell, CellResult, Machine, Measured, Prediction, Repeat, State, Study

STEPS, WARMUP = 8, 2
TOKENS = 4096
MIB = 2**20


def losses(seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [9.2 * math.exp(-step / 12) + 2 + noise.uniform(-0.05, 0.05) for step in range(STEPS + WARMUP)]


def norms(seed: int = 0) -> list[float]:
    noise = random.Random(seed + 1000)
    return [1.5 + noise.uniform(-0.3, 0.3) for _ in range(STEPS + WARMUP)]


def measured(speed: float = 10_000.0, **changes: Any) -> Measured:
    """Return a run of this speed in tokens a second; the losses of seed 0."""
    seconds = TOKENS / speed
    parts = {"data": 0.02, "forward_backward": 0.7, "communication": 0.2, "update": 0.08}
    values: dict[str, Any] = dict(
        step_seconds=[seconds * factor for factor in (0.98, 1.0, 1.02)],
        tokens_per_step=TOKENS,
        samples_per_step=TOKENS // 128,
        loss=losses(),
        gradient_norm=norms(),
        sample_hash="a" * 64,
        peak_memory=[300 * MIB, 280 * MIB],
        peak_memory_source="resident memory beyond the start",
        split={part: share * seconds for part, share in parts.items()},
    )
    return Measured(**values | changes)


def cell(name: str, runs: Sequence[Measured | State], **changes: Any) -> CellResult:
    """Return a cell with these repeats; a state other than finished has its reason."""
    values: dict[str, Any] = {"axes": {"layout": name}, "settings": {"parallel.data_parallel": 2}, "ranks": 2}
    values |= {"id": name, "backend": "torch", "engine": "native", "group": "all"}
    prediction = changes.pop("prediction", None)
    repeats = [
        Repeat(
            index=index,
            state=run if isinstance(run, State) else State.FINISHED,
            reason=f"{run} of {name} <here>" if isinstance(run, State) else "",
            command=["python", "run_gpt2.py", f"cell={name}", "a b"],
            folder=f"cells/{name}/repeat_{index}",
            seconds=12.0,
            measured=None if isinstance(run, State) else run,
        )
        for index, run in enumerate(runs, 1)
    ]
    return CellResult(cell=Cell(**values | changes), prediction=prediction, repeats=repeats)


def prediction(peak: int = 300 * MIB, step_seconds: float | None = None) -> Prediction:
    memory = [{"weights": peak // 2, "activations": peak - peak // 2}] * 2
    return Prediction(memory=memory, peak=[peak] * 2, step_seconds=step_seconds)


def study(cells: Sequence[CellResult], **changes: Any) -> Study:
    values: dict[str, Any] = dict(
        name="layouts",
        title="Layouts of two ranks",
        definition={"title": "Layouts of two ranks", "axes": {"layout": ["dp2", "tp2"]}},
        warmup_steps=WARMUP,
        measured_steps=STEPS,
        repeats=max([len(each.repeats) for each in cells], default=3),
        tolerance=1e-6,
        machine=Machine(host="node-7", cpu="A processor", cores=2, memory=8 * 2**30),
        versions={"python": "3.12.1", "torch": "2.13.0"},
        started="2026-11-20T10:00:00+00:00",
        finished="2026-11-20T10:20:00+00:00",
    )
    return Study(cells=list(cells), **values | changes)


def speeds(median: float, spread: float, count: int = 3, seed: int = 0) -> list[float]:
    """Return speeds that deviate from the median by this relative standard deviation."""
    noise = random.Random(seed)
    return [median * math.exp(noise.gauss(0, spread)) for _ in range(count)]

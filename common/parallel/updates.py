"""Numbers of an update, the same for both backends: the learning rate with its text and warnings, the
loss scale for float16, and the factor that clips the norm of gradients.

The position in the schedule counts updates, or their samples. The n-th update takes place n - 1, as
in megatron-core 0.16 (``OptimizerParamScheduler`` is stepped after the update), transformers and
MindSpore (``global_step`` begins at 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from common.config.schema import LossScaleConfig, OptimizerConfig
from common.parallel.run import Run


def learning_rate(optimizer: OptimizerConfig, position: int) -> float:
    """Return the learning rate at a position in the schedule, in its unit.

    Linear warm-up begins at 0 and reaches the peak at ``warmup``. The decay reaches
    ``min_learning_rate`` at ``decay`` and stays there.
    """
    peak, floor = optimizer.learning_rate, optimizer.min_learning_rate
    warmup, decay = optimizer.warmup, optimizer.decay
    if warmup > 0 and position <= warmup:
        return peak * position / warmup
    if optimizer.schedule == "constant":
        return peak
    if position >= decay:
        return floor
    progress = (position - warmup) / (decay - warmup)
    if optimizer.schedule == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        shape = math.pow(1.0 - progress, optimizer.power if optimizer.schedule == "polynomial" else 1.0)
    return floor + (peak - floor) * shape


def describe_schedule(optimizer: OptimizerConfig) -> str:
    """Return the schedule as text. Without a known length it ends with the run."""
    unit = optimizer.schedule_unit
    parts: list[str] = [optimizer.schedule]
    end = optimizer.decay_samples if unit == "samples" else optimizer.decay_steps
    if optimizer.schedule != "constant":
        parts[0] += f" to {'the last step' if end is None else f'{unit[:-1]} {end:,}'}"
    if optimizer.warmup_fraction is not None and end is None:
        parts.append(f"warm-up {optimizer.warmup_fraction:.4g} of that")
    else:
        parts.append(f"warm-up {optimizer.warmup:,.6g} {unit}")
    parts.append(f"learning rate {optimizer.learning_rate:.4g}")
    if optimizer.schedule != "constant":
        parts.append(f"at the end {optimizer.min_learning_rate:.4g}")
    if optimizer.schedule_start:
        parts.append(f"the first update at {optimizer.schedule_start:,}")
    return ", ".join(parts)


def schedule_warnings(config: Run) -> list[str]:
    """Return what the schedule does not reach in this run, or leaves too early.

    An end that lies between half of the run and one and a half of it is taken as wanted.
    """
    optimizer, unit, steps = (config.optimizer, config.optimizer.schedule_unit, config.train.steps)
    length, before_last = (
        (config.batch_sizes.samples_after(count) if unit == "samples" else count) for count in (steps, steps - 1)
    )
    reached = learning_rate(optimizer, optimizer.schedule_start + before_last)
    part = reached / optimizer.learning_rate
    share = f"{part:.{0 if part >= 0.01 else 2}%}"
    if optimizer.warmup >= length:
        key = "warmup_fraction" if optimizer.warmup_fraction else f"warmup_{unit}"
        return [
            f"the warm-up ({optimizer.warmup:,.6g} {unit}) is not shorter than the run"
            f" ({length:,}): the rate reaches {share} of its peak; set optimizer.{key}"
        ]
    if optimizer.schedule == "constant":
        return []
    where = f"optimizer.decay_{unit}={optimizer.decay}"
    fix = f"set optimizer.decay_{unit}={length}, or null for the end of the run"
    if optimizer.decay > 1.5 * length:
        return [
            f"{where} is far beyond the run ({length:,} {unit}): its last update has {share} of the"
            f" peak rate; unless the run goes on later, {fix}"
        ]
    if optimizer.decay < 0.5 * length:
        return [
            f"{where} is before the end of the run ({length:,} {unit}): the last"
            f" {length - optimizer.decay:,} {unit} train at {share} of the peak rate; {fix}"
        ]
    return []


@dataclass
class LossScale:
    """Loss scale: ``value`` multiplies the loss, and ``update`` records whether gradients were finite.

    Hysteresis is that of Megatron and DeepSpeed: once it is used up, each overflow shrinks the scale, until the scale
    grows.
    """

    config: LossScaleConfig
    value: float = 1.0
    finite_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        if self.config.mode in ("dynamic", "static"):
            self.value = self.config.initial

    def update(self, finite: bool) -> None:
        if self.config.mode != "dynamic":
            return
        if finite:
            self.finite_steps += 1
            if self.finite_steps == self.config.window:
                self.value *= self.config.factor
                self.finite_steps = 0
                self.overflows = 0
            return
        self.finite_steps = 0
        self.overflows = min(self.overflows + 1, self.config.hysteresis)
        if self.overflows == self.config.hysteresis:
            self.value = max(self.value / self.config.factor, self.config.minimum)

    def state(self) -> dict[str, Any]:
        return {
            "mode": self.config.mode,
            "value": self.value,
            "finite_steps": self.finite_steps,
            "overflows": self.overflows,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Only a dynamic scale is loaded. A config with another mode, or with a static scale, keeps its own.
        """
        if state.get("mode") == self.config.mode == "dynamic":
            self.value = float(state["value"])
            self.finite_steps = int(state["finite_steps"])
            self.overflows = int(state["overflows"])


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that brings the global norm down to ``limit``. A limit of 0 turns clipping off.

    The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0

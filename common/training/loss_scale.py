"""Loss scale for float16, and the factor that clips the norm of gradients.

The scale grows while gradients stay finite and shrinks when they overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.config.schema import LossScaleConfig


@dataclass
class LossScale:
    """Loss scale: ``value`` multiplies the loss, and ``update`` records whether gradients were
    finite.

    Hysteresis is that of Megatron and DeepSpeed: once it is used up, each overflow shrinks the
    scale, until the scale grows.
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

        Only a dynamic scale is loaded. A config with another mode, or with a static scale, keeps
        its own.
        """
        if state["mode"] == self.config.mode == "dynamic":
            self.value = float(state["value"])
            self.finite_steps = int(state["finite_steps"])
            self.overflows = int(state["overflows"])


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that brings the global norm down to ``limit``. A limit of 0 turns clipping
    off.

    The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0

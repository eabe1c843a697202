"""Position of a run, apart from its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

_COUNTS = {*("step", "consumed_samples", "sample_hash", "updated_samples"), *("skipped_steps", "skipped_in_a_row")}
"""What every state says."""


@dataclass
class TrainState:
    """State saved with every checkpoint. The next samples follow only from ``consumed_samples``."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed_samples: int = 0
    """Position in the order of samples."""
    sample_hash: str = ""
    """Running hash of the samples read, equal under every layout and on both frameworks."""
    updated_samples: int = 0
    """Samples of the steps that were not skipped."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the last finite steps, oldest first, at most logging.outlier_window.

    Empty if outliers are not looked for.
    """
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of these steps."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Create a state. Raises KeyError, TypeError or ValueError for an invalid one."""
        if missing := sorted(_COUNTS - values.keys()):
            raise KeyError(missing[0])
        names = {field.name for field in fields(cls)}
        state = cls(**{name: value for name, value in values.items() if name in names})
        if not 0 <= state.skipped_in_a_row <= state.skipped_steps <= state.step:
            raise ValueError(
                f"skipped_in_a_row={state.skipped_in_a_row}, skipped_steps={state.skipped_steps}"
                f" and step={state.step} contradict"
            )
        if len(state.losses) != len(state.grad_norms):
            raise ValueError(f"{len(state.losses)} losses and {len(state.grad_norms)} gradient norms")
        return state

"""Where a run stands, apart from its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """Saved with every checkpoint. What is read next follows from ``consumed_samples`` alone."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed_samples: int = 0
    sample_hash: str = ""
    """Running hash of the samples read, equal under every layout and on both frameworks."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """Of the last finite steps, oldest first, logging.outlier_window at most; empty where outliers
    are not looked for.
    """
    grad_norms: list[float] = field(default_factory=list)
    """Of the same steps."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Raises KeyError, TypeError or ValueError for what is no state. What older checkpoints do
        not know is empty.
        """
        state = cls(
            **{
                field.name: values[field.name]
                for field in fields(cls)
                if field.name in values or field.name not in _LATER
            }
        )
        state.losses, state.grad_norms = (
            list(map(float, state.losses)),
            list(map(float, state.grad_norms)),
        )
        if len(state.losses) != len(state.grad_norms):
            raise ValueError(
                f"{len(state.losses)} losses and {len(state.grad_norms)} gradient norms"
            )
        return state


_LATER = ("losses", "grad_norms")

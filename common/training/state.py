"""Where a run stands, apart from its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**{field.name: values[field.name] for field in fields(cls)})

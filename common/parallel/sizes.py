"""Sizes of one micro batch on one rank, for the formulas of memory, messages and time."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a micro batch on one rank; number types are given as their bytes."""

    tokens: int
    seq_length: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    tensor: int
    between: int
    """Ranks that split activations between tensor-parallel regions: all with sequence parallelism,
    else 1.
    """
    held: int
    compute: int
    norm: int
    softmax: int

    @property
    def residual(self) -> int:
        """Residual stream between blocks, which stages also send each other."""
        return self.tokens * self.hidden * self.compute // self.between

    @property
    def region(self) -> int:
        """Input of attention or MLP, whole on each rank."""
        return self.tokens * self.hidden * self.compute

    @property
    def heads_part(self) -> int:
        """One of q, k, v or the attention's output, for this rank's heads."""
        return self.region // self.tensor

    @property
    def inner(self) -> int:
        """One tensor of the MLP's inner width."""
        return self.tokens * self.ffn * self.compute // self.tensor

    @property
    def mask(self) -> int:
        """Dropout mask of a residual branch."""
        return self.tokens * self.hidden // self.between

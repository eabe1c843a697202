"""Sizes of one micro batch on one rank: what formulas of memory, messages and time need."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Types are in bytes."""

    tokens: int
    seq_length: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    tensor: int
    between: int
    """Ranks that split what lies between tensor-parallel regions: all with sequence parallel, else
    1.
    """
    held: int
    compute: int
    norm: int
    softmax: int

    @property
    def residual(self) -> int:
        """The stream between blocks, which is what stages send each other too."""
        return self.tokens * self.hidden * self.compute // self.between

    @property
    def region(self) -> int:
        """The input of attention or MLP, whole on each rank."""
        return self.tokens * self.hidden * self.compute

    @property
    def heads_part(self) -> int:
        """q, k, v, or the attention's output: this rank's heads."""
        return self.region // self.tensor

    @property
    def inner(self) -> int:
        """One tensor of the MLP's inner width."""
        return self.tokens * self.ffn * self.compute // self.tensor

    @property
    def mask(self) -> int:
        """Of the dropout of a residual branch."""
        return self.tokens * self.hidden // self.between

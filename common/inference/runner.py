"""Interface of backends and exported programs to generation and evaluation."""

from __future__ import annotations

from typing import Protocol

from common.evaluation import Scorer
from common.generation.generate import Decoder


class Runner(Protocol):
    """A model in the memory of its framework."""

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each new shape of a batch costs a compilation, so that few shapes are better than
        little padding.
        """

    def decoder(self, rows: int) -> Decoder:
        """Return a decoder of up to ``rows`` sequences. One decoder works at a time."""

    def scorer(self) -> Scorer:
        """Return a function that scores batches of tokens."""

"""Update rules of the optimizer: what each keeps and counts, whichever code computes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

RuleName = Literal["adamw", "adam", "sgd"]
"""Names of the rules. mypy finds the code of each place that has no case for a new one."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Facts about a rule, for planning, checkpoints and checks."""

    parts: tuple[str, ...]
    """Float32 tensors of a parameter's shape that it keeps, by torch's names."""
    takes_momentum: bool = False
    """Whether optimizer.momentum acts. Without one, the rule keeps nothing."""
    decouples_decay: bool = False
    """Whether decay is taken from the weight, and is not added to the gradient."""
    counts_updates: bool = False
    """Whether it keeps the number of updates, as float32 for each parameter."""

    def kept(self, momentum: float) -> tuple[str, ...]:
        """Return the parts that it keeps with this value of optimizer.momentum."""
        return self.parts if momentum or not self.takes_momentum else ()


_ADAM = ("exp_avg", "exp_avg_sq")
RULES: dict[RuleName, UpdateRule] = {
    "adamw": UpdateRule(parts=_ADAM, counts_updates=True, decouples_decay=True),
    "adam": UpdateRule(parts=_ADAM, counts_updates=True),
    "sgd": UpdateRule(parts=("momentum_buffer",), takes_momentum=True),
}
STATE_PARTS = tuple(dict.fromkeys(part for rule in RULES.values() for part in rule.parts))


def takes_momentum(name: object) -> bool:
    """Tell whether a name, which may be unknown, is of a rule on which optimizer.momentum acts."""
    return any(rule.takes_momentum for known, rule in RULES.items() if known == name)


def rule_keeping(parts: Collection[str]) -> RuleName:
    """Return the first rule that keeps these parts. It is adamw where none does."""
    return next((name for name, rule in RULES.items() if set(rule.parts) == set(parts)), "adamw")

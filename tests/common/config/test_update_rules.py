"""The table of update rules: whole, and known to the formats of other systems."""

from __future__ import annotations

from typing import get_args

import pytest

from common.config.update_rules import RULES, STATE_PARTS, RuleName, rule_keeping
from common.systems.mindformers.read import MOMENTS as OF_MINDFORMERS
from common.systems.oneflow.names import MOMENTS as OF_ONEFLOW


def test_every_name_has_a_row() -> None:
    assert tuple(RULES) == get_args(RuleName)


@pytest.mark.parametrize("names", [OF_MINDFORMERS, OF_ONEFLOW])
def test_other_systems_have_a_name_for_every_part(names: dict[str, str]) -> None:
    assert names.keys() == set(STATE_PARTS)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("exp_avg_sq", "exp_avg"), "adamw"),
        (("momentum_buffer",), "sgd"),
        ((), "adamw"),
        (("exp_avg",), "adamw"),
    ],
)
def test_a_rule_is_known_by_its_parts(parts: tuple[str, ...], name: str) -> None:
    assert rule_keeping(parts) == name

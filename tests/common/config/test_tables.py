"""Tables have a row for every name that the schema takes, and for every part of an update rule."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from common.config.schema import EvaluationConfig, LoggingConfig, Tracker
from common.config.tokenizer_kinds import TokenizerKind
from common.config.update_rules import RULES, STATE_PARTS, RuleName, rule_keeping
from common.evaluation.text import DETOKENIZERS
from common.flags import make_parser
from common.systems.config import COMMAND_LINES, DIALECTS
from common.systems.mindformers.read import MOMENTS as OF_MINDFORMERS
from common.systems.oneflow.read import MOMENTS as OF_ONEFLOW
from common.tokenizer import TOKENIZERS
from common.training.report import STYLES
from common.training.trackers import STORES
from tools.convert_config import Request


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (RULES, RuleName),
        (TOKENIZERS, TokenizerKind),
        (STYLES, LoggingConfig.model_fields["style"].annotation),
        (STORES | {"tensorboard": None}, Tracker),  # which this project writes itself
        (DETOKENIZERS, EvaluationConfig.model_fields["detokenize"].annotation),
    ],
    ids=["update rules", "tokenizers", "log styles", "trackers", "detokenizers"],
)
def test_every_name_of_the_schema_has_a_row(table: dict[str, Any], names: Any) -> None:
    assert table.keys() == set(get_args(names))


def test_the_converter_knows_every_dialect() -> None:
    (option,) = (each for each in make_parser(None, Request)._actions if each.dest == "system")
    of_files = {"mindformers", "fleetx", "gpt2_chinese"}
    assert len(of_files) == len(DIALECTS)
    assert set(option.choices or ()) == of_files | COMMAND_LINES.keys()


@pytest.mark.parametrize("names", [OF_MINDFORMERS, OF_ONEFLOW])
def test_other_systems_have_a_name_for_every_part(names: dict[str, str]) -> None:
    assert names.keys() == set(STATE_PARTS)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("exp_avg_sq", "exp_avg"), "adamw"),
        (("momentum_buffer",), "sgd"),
        ((), "adamw"),
        (("sum",), "adamw"),
    ],
)
def test_a_rule_is_known_by_its_parts(parts: tuple[str, ...], name: str) -> None:
    assert rule_keeping(parts) == name

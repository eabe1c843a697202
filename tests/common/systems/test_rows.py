"""What another system does with a key that a file leaves out, and with values that mean off, all,
never or unlimited, is done here too. Each system's rows are in ``rows``: the keys of its smallest
run, the keys with which a key acts, the reasons for keys without a default in its dialect, and
values that are no plain quantities. Of such a value a row says the key, the value, what it means
there with the source, keys of ours or a part of the message of a refusal, and further keys.

A key of ours whose 0 is not a quantity says so in its description. Each key of theirs that becomes
such a key has a row for 0.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pydantic import BaseModel

from common.config.hints import section_of
from common.config.load import apply_overrides, build_config, flatten
from common.config.schema import RunConfig
from common.dialects.rules import MapTo, has_rule
from common.errors import ConfigError
from common.systems import gpt2_chinese
from common.systems.dialect import Dialect
from common.systems.fleetx import config as fleetx
from common.systems.megatron import flags as megatron
from common.systems.mindformers import config as mindformers
from common.systems.oneflow import flags as oneflow

DIALECTS = {
    "fleetx": fleetx.DIALECT, "megatron": megatron.DIALECT, "mindformers": mindformers.DIALECT,
    "oneflow": oneflow.DIALECT, "gpt2_chinese": gpt2_chinese.FILES, "gpt2_chinese_train": gpt2_chinese.TRAINING,
    "gpt2_chinese_generate": gpt2_chinese.GENERATION, "gpt2_chinese_eval": gpt2_chinese.EVALUATION,
}  # fmt: skip


class Rows(NamedTuple):
    dialect: Dialect
    minimal: dict[str, Any]
    beside: dict[str, dict[str, Any]]
    without_default: set[str]
    sentinels: list[list[Any]]


def rows_of(system: str, tree: dict[str, Any]) -> Rows:
    table = DIALECTS[system].table

    def keys(patterns: list[str]) -> list[str]:
        return [key for each in patterns for key in fnmatch.filter(table, each) or [each]]

    beside = {key: more for more, *each in tree.get("beside", ()) for key in keys(each)}
    reasons = {key for each in tree["without_default"].values() for key in keys(each)}
    return Rows(DIALECTS[system], tree["minimal"], beside, reasons, tree.get("sentinels", []))


ROWS = {
    system: rows_of(system, tree)
    for file in sorted(Path(__file__).with_name("rows").glob("*.yaml"))
    for system, tree in yaml.safe_load(file.read_text(encoding="utf-8")).items()
}
SYSTEMS = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
CASES = [(rows, *row) for rows in ROWS.values() for row in rows.sentinels]


def values_of(dialect: Dialect, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return our keys for a file with these dotted keys, or for these flags."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    ours = dialect.translate(tree, {})
    apply_overrides(ours.tree, ours.sources, [])
    dialect.settle(ours)
    return dict(flatten(build_config(ours.tree, ours.sources).model_dump()))


def mapped_keys(dialect: Dialect) -> dict[str, str]:
    """Return the keys that become one of ours by the table, with the key of ours."""
    return {key: rule.key for key, rule in dialect.table.items() if isinstance(rule, MapTo) and not key.endswith("*")}


@SYSTEMS
def test_each_key_that_becomes_ours_has_a_default_or_a_reason(rows: Rows) -> None:
    """Each key of both tables is known of the system, and has one of the two."""
    dialect = rows.dialect
    keys, defaults = mapped_keys(dialect), dialect.defaults
    assert keys.keys() - defaults.keys() - rows.without_default == set()
    assert defaults.keys() & rows.without_default == set()
    assert all(has_rule(key, dialect.table) for key in (*defaults, *rows.without_default))


@SYSTEMS
def test_a_file_without_a_key_is_the_run_of_a_file_with_its_default(rows: Rows) -> None:
    for key, value in rows.dialect.defaults.items():
        leaves = {**rows.minimal, **rows.beside.get(key, {})}
        leaves.pop(key, None)
        given = values_of(rows.dialect, {**leaves, key: value})
        assert values_of(rows.dialect, leaves) == given, key


def ours_with_a_meaning_of_zero(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    for name, each in section.model_fields.items():
        below = section_of(each.annotation)
        if below is not None:
            yield from ours_with_a_meaning_of_zero(below, f"{prefix}{name}.")
        elif re.search(r"\b0 (is|are|uses|keeps|validates|saves|reads)\b", each.description or ""):
            yield f"{prefix}{name}"


@SYSTEMS
def test_each_key_of_theirs_onto_such_a_key_has_a_row_for_zero(rows: Rows) -> None:
    special = set(ours_with_a_meaning_of_zero())
    assert {"checkpoint.interval", "predict.top_k"} <= special
    theirs = {key for key, ours in mapped_keys(rows.dialect).items() if ours in special}
    assert theirs - {key for key, value, *_ in rows.sentinels if value == 0} == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}={case[2]}")
def test_a_value_means_the_same_here(case: tuple[Any, ...]) -> None:
    rows, key, value, _, expected, *more = case
    leaves = {**rows.minimal, **(more[0] if more else {}), key: value}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            values_of(rows.dialect, leaves)
        return
    found = values_of(rows.dialect, leaves)
    assert {name: found[name] for name in expected} == expected

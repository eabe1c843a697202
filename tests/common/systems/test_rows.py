"""What another system does with a key that a file leaves out, and with values that mean off, all,
never or unlimited, is done here too. Each system's rows are in ``rows``.

A key of ours whose 0 is not a quantity says so in its description. Each key of theirs that becomes
such a key has a row for 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from common.config.hints import section_of
from common.config.schema import RunConfig
from common.dialects.rules import has_rule
from common.errors import ConfigError
from tests.common.systems.foreign_runs import (
    Rows,
    Sentinel,
    all_rows,
    config_of,
    mapped_keys,
    values_of,
)

SYSTEMS = pytest.mark.parametrize("rows", all_rows().values(), ids=all_rows())


@SYSTEMS
def test_each_key_that_becomes_ours_has_a_default_or_a_reason(rows: Rows) -> None:
    """Each key of both tables is known of the system, and has one of the two."""
    dialect = rows.dialect
    keys, defaults = mapped_keys(dialect), dialect.defaults
    assert keys.keys() - defaults.keys() - rows.without_default.keys() == set()
    assert defaults.keys() & rows.without_default.keys() == set()
    assert all(has_rule(key, dialect.table) for key in (*defaults, *rows.without_default))
    assert all(rows.without_default.values())


@SYSTEMS
def test_a_file_without_a_key_is_the_run_of_a_file_with_its_default(rows: Rows) -> None:
    dialect, different = rows.dialect, {}
    for key, value in dialect.defaults.items():
        leaves = {**rows.minimal, **rows.beside.get(key, {})}
        leaves.pop(key, None)
        without, given = (
            values_of(config_of(dialect, each)) for each in (leaves, {**leaves, key: value})
        )
        if without != given:
            names = without.keys() | given.keys()
            different[key] = {
                name: (without.get(name), given.get(name))
                for name in names
                if without.get(name) != given.get(name)
            }
    assert different == {}


CASES = [(rows, row) for rows in all_rows().values() for row in rows.sentinels]


def ours_with_a_meaning_of_zero(
    section: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[str]:
    for name, each in section.model_fields.items():
        below = section_of(each.annotation)
        if below is not None:
            yield from ours_with_a_meaning_of_zero(below, f"{prefix}{name}.")
        elif re.search(r"\b0 (is|are|uses|keeps|validates|saves|reads)\b", each.description or ""):
            yield f"{prefix}{name}"


def test_keys_of_ours_are_found_by_their_description() -> None:
    found = set(ours_with_a_meaning_of_zero())
    assert {
        "checkpoint.interval", "checkpoint.keep", "validation.interval", "validation.max_samples",
        "evaluation.max_samples", "optimizer.clip_grad", "predict.top_k", "predict.top_p",
        "data.prefetch",
    } <= found  # fmt: skip
    assert "train.max_steps" not in found and "optimizer.learning_rate" not in found


@SYSTEMS
def test_each_key_of_theirs_onto_such_a_key_has_a_row_for_zero(rows: Rows) -> None:
    special = set(ours_with_a_meaning_of_zero())
    theirs = {key for key, ours in mapped_keys(rows.dialect).items() if ours in special}
    assert theirs - {row.key for row in rows.sentinels if row.value == 0} == set()


@pytest.mark.parametrize(("rows", "row"), CASES, ids=[f"{row.key}={row.value}" for _, row in CASES])
def test_a_value_means_the_same_here(rows: Rows, row: Sentinel) -> None:
    leaves = {**rows.minimal, **row.beside, row.key: row.value}
    assert row.meaning
    if isinstance(row.expected, str):
        with pytest.raises(ConfigError, match=re.escape(row.expected)):
            config_of(rows.dialect, leaves)
        return
    found = values_of(config_of(rows.dialect, leaves))
    assert {key: found[key] for key in row.expected} == row.expected

"""What another system does with a key that a file leaves out, and with values that mean off, all,
never or unlimited, is done here too. Each system's rows are in ``rows``.

A key of ours whose 0 is not a quantity says so in its description. Each key of theirs that becomes
such a key has a row for 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from pydantic import BaseModel

from common.config.hints import section_of
from common.config.schema import RunConfig
from common.dialects.rules import has_rule
from common.errors import ConfigError
from tests.common.systems.foreign_runs import (
    Sentinel,
    all_rows,
    config_of,
    mapped_keys,
    values_of,
)

SYSTEMS = pytest.mark.parametrize("rows", all_rows(), ids=lambda rows: rows.__name__[27:])


@SYSTEMS
def test_each_key_that_becomes_ours_has_a_default_or_a_reason(rows: ModuleType) -> None:
    """Each key of both tables is known of the system, and has one of the two."""
    dialect = rows.DIALECT
    keys, defaults = mapped_keys(dialect), dialect.defaults
    assert keys.keys() - defaults.keys() - rows.WITHOUT_DEFAULT.keys() == set()
    assert defaults.keys() & rows.WITHOUT_DEFAULT.keys() == set()
    assert all(has_rule(key, dialect.table) for key in (*defaults, *rows.WITHOUT_DEFAULT))
    assert all(rows.WITHOUT_DEFAULT.values())


@SYSTEMS
def test_a_file_without_a_key_is_the_run_of_a_file_with_its_default(rows: ModuleType) -> None:
    dialect, different = rows.DIALECT, {}
    for key, value in dialect.defaults.items():
        leaves = {**rows.MINIMAL, **rows.BESIDE.get(key, {})}
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


CASES = [(rows, row) for rows in all_rows() for row in rows.SENTINELS]


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
def test_each_key_of_theirs_onto_such_a_key_has_a_row_for_zero(rows: ModuleType) -> None:
    special = set(ours_with_a_meaning_of_zero())
    theirs = {key for key, ours in mapped_keys(rows.DIALECT).items() if ours in special}
    assert theirs - {row.key for row in rows.SENTINELS if row.value == 0} == set()


@pytest.mark.parametrize(("rows", "row"), CASES, ids=[f"{row.key}={row.value}" for _, row in CASES])
def test_a_value_means_the_same_here(rows: ModuleType, row: Sentinel) -> None:
    leaves = {**rows.MINIMAL, **row.beside, row.key: row.value}
    assert row.meaning
    if isinstance(row.expected, str):
        with pytest.raises(ConfigError, match=re.escape(row.expected)):
            config_of(rows.DIALECT, leaves)
        return
    found = values_of(config_of(rows.DIALECT, leaves))
    assert {key: found[key] for key in row.expected} == row.expected

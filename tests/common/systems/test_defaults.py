"""The default of another system for a key that a file leaves out is taken here too.

A system's rows are in ``rows``; ``len(DIALECT.defaults)`` counts its defaults.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from common.dialects.rules import has_rule
from tests.common.systems.foreign_runs import all_rows, config_of, mapped_keys, values_of

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

"""Settings of hypothesis, and what every test of hostile inputs shares.

The suite has few inputs, the same each time. ``make campaign`` runs the same tests with many at
random; ``FUZZ_COUNT`` says how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fuzz.judge import Judge

SUITE = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
CAMPAIGN = settings(
    SUITE,
    max_examples=int(os.environ.get("FUZZ_COUNT", "3000")),
    derandomize=False,
    print_blob=True,
)
ENOUGH = 40
"""So many inputs show every outcome that a test needs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    campaign = config.option.markexpr == "campaign"
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    drawn = [item for item in ours if hasattr(item.obj, "hypothesis")]
    for function in {item.obj for item in drawn}:
        (CAMPAIGN if campaign else SUITE)(function)
    for item in drawn if campaign else ():
        item.add_marker("campaign")


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """One for all inputs of a test."""
    judge = Judge()
    yield judge
    print(f"\n{request.node.name}: {dict(judge.outcomes)}")
    if judge.outcomes.total() >= ENOUGH:
        assert judge.needed <= judge.outcomes.keys(), f"too narrow a fuzzer: {judge.outcomes}"

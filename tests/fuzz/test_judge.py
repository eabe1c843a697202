"""The outcomes are told apart: a refusal, and each kind of defect."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError, GPT2Error
from tests.fuzz.judge import Judge


def _hang() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (ConfigError("no"), "names none of"),
        (ConfigError(" "), AssertionError),
        (ConfigError("x.yaml: no\n" * 1000), AssertionError),
        (GPT2Error("x.yaml: no"), "exit code 1"),
        (OSError("x.yaml"), OSError),
        (_hang, "hangs"),
        (lambda: bytearray(2**33), MemoryError),
    ],
)
def test_defects_are_no_refusals(judge: Judge, failure: Any, outcome: Any) -> None:
    error, match = (AssertionError, outcome) if isinstance(outcome, str) else (outcome, None)
    with pytest.raises(error, match=match), judge("x.yaml", seconds=0.5):
        if isinstance(failure, BaseException):
            raise failure
        failure()
    assert not judge.outcomes
    with judge("x.yaml"):
        raise ConfigError("x.yaml: no")
    assert judge.outcomes == {"refused": 1}

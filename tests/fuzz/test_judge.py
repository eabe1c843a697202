"""The outcomes are told apart: a refusal, and each kind of defect."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError, GPT2Error
from tests.fuzz.judge import Judge


def _recurse() -> None:
    _recurse()


def _hang() -> None:
    while True:
        pass


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (lambda: None, "accepted"),
        (lambda: _raise(ConfigError("x.yaml: no")), "refused"),
        (lambda: _raise(ConfigError("x.yaml" * 1000 + " ")), "refused"),
        (lambda: _raise(ConfigError("no")), "names none of"),
        (lambda: _raise(ConfigError("")), "0 characters"),
        (lambda: _raise(ConfigError("x.yaml: no\n" * 1000)), "11000 characters"),
        (lambda: _raise(GPT2Error("x.yaml: no")), "exit code 1"),
        (lambda: _raise(OSError("x.yaml")), OSError),
        (lambda: _raise(SystemExit(2)), SystemExit),
        (_recurse, RecursionError),
        (_hang, "hangs"),
        (lambda: bytearray(2**33), MemoryError),
    ],
)
def test_outcomes_are_told_apart(judge: Judge, run: Any, outcome: Any) -> None:
    words = isinstance(outcome, str)
    if outcome in ("accepted", "refused"):
        with judge("x.yaml"):
            run()
        assert dict(judge.outcomes) == {outcome: 1}
        return
    error = AssertionError if words else outcome
    with pytest.raises(error, match=outcome if words else None), judge("x.yaml", seconds=0.5):
        run()
    assert not judge.outcomes

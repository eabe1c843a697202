"""The outcomes are told apart: a refusal, and each kind of defect."""

import sys
from typing import Any

import pytest

from common.errors import ConfigError, GPT2Error


def hang() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        (ConfigError("no"), (AssertionError, "names none of")),
        (ConfigError("x.yaml: no\n" * 1000), (AssertionError, "x.yaml")),
        (GPT2Error("x.yaml: no"), (AssertionError, "exit code 1")),
        (OSError("x.yaml"), (OSError, "x.yaml")),
        (hang, (AssertionError, "hangs")),
        (lambda: bytearray(2**33), (MemoryError, "")),
    ],
)
def test_defects_are_no_refusals(judge, monkeypatch, failure: Any, found: Any) -> None:
    monkeypatch.setattr(sys.modules[type(judge).__module__], "LIMIT_SECONDS", 0.5)
    error, words = found
    with pytest.raises(error) as caught, judge("x.yaml"):
        if isinstance(failure, BaseException):
            raise failure
        failure()
    assert words in str(caught.value) and not judge.outcomes
    with judge("x.yaml"):
        raise ConfigError("x.yaml: no")
    assert judge.outcomes == {"refused": 1}

"""Settings that contradict each other, one row of refusals.yaml each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from tests.config_overrides import small_tree, with_words

BASES: dict[str, dict[str, Any]] = {
    "plain": {"ranks": 1},
    "deepspeed": {"ranks": 4, "engine": "deepspeed", "train__accumulation_steps": 3},
    "mindspore": {
        "ranks": 4, "backend": "mindspore", "device": "npu", "train__accumulation_steps": 4,
    },
}  # fmt: skip


def rows() -> Iterator[Any]:
    table = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
    for base, listed in table.items():
        for words, *said in listed:
            yield pytest.param(base, words, said, id=f"{base}: {words}")


@pytest.mark.parametrize(("base", "words", "said"), [*rows()])
def test_refused(base: str, words: str, said: list[str]) -> None:
    tree = with_words(small_tree(**BASES[base]), words)
    ranks = tree.pop("ranks")
    with pytest.raises(ConfigError) as caught:
        resolve_config(build_config(tree), world_size=ranks)
    assert [each for each in said if each not in str(caught.value)] == []

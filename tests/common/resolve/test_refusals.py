"""Settings that contradict each other, one row of refusals.yaml each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from tests.config_overrides import changed

BASES: dict[str, dict[str, Any]] = {
    "plain": {"ranks": 1},
    "deepspeed": {"ranks": 4, "engine": "deepspeed", "train__accumulation_steps": 3},
    "mindspore": {
        "ranks": 4, "backend": "mindspore", "device": "npu", "train__accumulation_steps": 4,
    },
}  # fmt: skip


def small_tree(**changes: Any) -> dict[str, Any]:
    """Ten steps on four layers of width 32."""
    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 16, "seq_length": 8}
    tree: dict[str, Any] = {
        "output_dir": "out",
        "model": sizes | {"vocab_size": 100},
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    return changed(tree, changes)


def with_words(tree: dict[str, Any], words: str) -> dict[str, Any]:
    """``tree`` with words ``section.key=value`` put in, whose values are YAML."""
    for word in words.split():
        dotted, _, value = word.partition("=")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(value)
    return tree


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

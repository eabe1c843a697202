"""Settings that contradict each other, one row of refusals.yaml each."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from tests.config_overrides import changed


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


def with_words(tree: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """``tree`` with words ``section.key=value`` put in, whose values are YAML."""
    for word in words:
        dotted, _, value = word.partition("=")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(value)
    return tree


TABLE = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
BASES, FILES = TABLE.pop("bases"), TABLE.pop("deepspeed files")


def rows() -> Iterator[Any]:
    for base, listed in TABLE.items():
        for words, *said in listed:
            yield pytest.param(f"{BASES[base]} {words}".split(), said, id=f"{base}: {words}")


@pytest.mark.parametrize(("words", "said"), [*rows()])
def test_refused(words: list[str], said: list[str]) -> None:
    tree = with_words(small_tree(model__num_heads=4), words)
    ranks = tree.pop("ranks", 1)
    with pytest.raises(ConfigError) as caught:
        resolve_config(build_config(tree), world_size=ranks)
    assert [each for each in said if each not in str(caught.value)] == []

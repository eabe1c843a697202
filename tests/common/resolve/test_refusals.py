"""Settings that contradict each other, one row of refusals.yaml each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config
from common.errors import ConfigError
from common.resolve.derive import resolve_config


def rows() -> Iterator[Any]:
    table = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
    bases = table.pop("bases")
    for base, listed in table.items():
        for words, *said in listed:
            yield pytest.param(f"{bases[base]} {words}".split(), said, id=f"{base}: {words}")


@pytest.mark.parametrize(("words", "said"), [*rows()])
def test_refused(words: list[str], said: list[str]) -> None:
    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 8}
    tree: dict[str, Any] = {
        "output_dir": "out",
        "model": {**sizes, "vocab_size": 100},
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    for word in words:
        dotted, _, value = word.partition("=")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(value)
    ranks = tree.pop("ranks", 1)
    with pytest.raises(ConfigError) as caught:
        resolve_config(build_config(tree), world_size=ranks)
    assert [words for words in said if words not in str(caught.value)] == []

"""Settings that contradict each other, one row of refusals.yaml each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config
from common.errors import ConfigError
from common.resolve.derive import resolve_config

BASES: dict[str, dict[str, Any]] = {
    "plain": {"ranks": 1, "heads": 16},
    "deepspeed": {"ranks": 4, "engine": "deepspeed", "accumulation": 3},
    "mindspore": {"ranks": 4, "backend": "mindspore", "device": "npu", "accumulation": 4},
}


def rows() -> Iterator[Any]:
    table = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
    for base, listed in table.items():
        for words, *said in listed:
            yield pytest.param(base, words.split(), said, id=f"{base}: {words}")


@pytest.mark.parametrize(("base", "words", "said"), [*rows()])
def test_refused(base: str, words: list[str], said: list[str]) -> None:
    own = dict(BASES[base])
    ranks, heads = own.pop("ranks"), own.pop("heads", 4)
    train = {"max_steps": 10, "micro_batch_size": 2}
    if accumulation := own.pop("accumulation", None):
        train["accumulation_steps"] = accumulation
    sizes = {"num_layers": 4, "hidden_size": 32, "seq_length": 8, "vocab_size": 100}
    tree: dict[str, Any] = {
        "output_dir": "out",
        "model": {**sizes, "num_heads": heads},
        "train": train,
        "optimizer": {"learning_rate": 0.1},
        **own,
    }
    for word in words:
        dotted, _, value = word.partition("=")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(value)
    ranks = tree.pop("ranks", ranks)
    with pytest.raises(ConfigError) as caught:
        resolve_config(build_config(tree), world_size=ranks)
    assert [words for words in said if words not in str(caught.value)] == []

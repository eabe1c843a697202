"""Keys of other systems that say what a key of ours says: combined, refused where they
contradict.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.aliases import ALIASES
from common.config.explain import explain_key
from common.config.hints import schema_keys
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from common.run_config import load_config
from tests.common.resolve.test_refusals import with_words

MODEL = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "seq_length": 16, "vocab_size": 100}
TREE: dict[str, Any] = {"output_dir": "out", "model": MODEL, "optimizer": {"learning_rate": 0.1}}


def build(text: str = "", **sections: Any) -> RunConfig:
    """text: words ``section.key=value``."""
    return build_config(with_words(copy.deepcopy(TREE | sections), text.split()))


def test_aliases_are_not_keys_of_the_schema_and_stand_for_ones_that_are() -> None:
    keys = schema_keys()
    assert not ALIASES.keys() & keys.keys()
    assert {alias.ours for alias in ALIASES.values()} <= keys.keys()


_SHARD = "parallel.parallel_optimizer_config.gradient_accumulation_shard"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("parallel.micro_batch_num=4", "train.accumulation_steps=4"),
        ("parallel.micro_batch_num=4 train.accumulation_steps=4", "train.accumulation_steps=4"),
        ("parallel.enable_parallel_optimizer=true", "parallel.zero_stage=1"),
        (
            "parallel.enable_parallel_optimizer=true parallel.zero_stage=3",
            "parallel.zero_stage=3",
        ),
        ("parallel.enable_parallel_optimizer=false", ""),
        (f"parallel.zero_stage=1 {_SHARD}=true", "parallel.zero_stage=2"),
        ("context.device_target=Ascend", "device=npu"),
        ("context.device_target=CPU device=auto", "device=cpu"),
        ("parallel.gradients_mean=true", ""),
        ("parallel.gradients_mean=false parallel.parallel_mode=1", "parallel.parallel_mode=1"),
    ],
)
def test_an_alias_says_what_our_key_says(theirs: str, ours: str) -> None:
    assert build(theirs) == build(ours)


@pytest.mark.parametrize(
    ("train", "words", "steps"),
    [
        ({"num_samples": 30}, [], 15),
        ({"num_samples": 30, "max_epochs": 3}, [], 45),
        ({"max_epochs": 3}, ["train.num_samples=5"], 7),
        ({"max_steps": 9}, ["train.max_epochs=2", "train.num_samples=5"], 5),
        ({"num_samples": 30}, ["train.max_epochs=0.5"], 7),
        ({"num_samples": 30, "max_epochs": 3}, ["train.max_steps=7"], 7),
    ],
)
def test_samples_of_an_epoch_are_a_length(train, words, steps, tmp_path: Path) -> None:
    """In batches of 2, of data with 1,000 windows."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TREE | {"train": {"micro_batch_size": 2, **train}}))
    run = resolve_config(load_config(path, words), samples_per_epoch=1000)
    assert run.train.max_steps == steps


def test_samples_of_an_epoch_and_another_length_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TREE | {"train": {"max_steps": 9}}))
    with pytest.raises(
        ConfigError, match=r"num_samples=5 is the length of an epoch, but the run has max_steps=9"
    ):
        load_config(path, ["train.num_samples=5"])
    with pytest.raises(ConfigError, match=r"num_samples: input should be a valid integer"):
        build(train={"num_samples": "x"})


def test_both_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("parallel:\n  micro_batch_num: 4\n")
    main, tree = tmp_path / "main.yaml", TREE | {"train": {"accumulation_steps": 2}}
    main.write_text(yaml.safe_dump(tree | {"base": "base.yaml"}, default_flow_style=None))
    message = r"{}and .*base\.yaml:2: train\.accumulation_steps={} and"
    with pytest.raises(ConfigError, match=message.format(r"main\.yaml:\d+ ", 2)):
        load_config(main)
    with pytest.raises(ConfigError, match=message.format("^command line ", 3)):
        load_config(main, ["train.accumulation_steps=3"])
    assert load_config(main, ["train.accumulation_steps=4"]).train.accumulation_steps == 4


def test_an_alias_is_explained_by_our_key() -> None:
    for asked in ("parallel.micro_batch_num", "micro_batch_num"):
        text = explain_key(asked)
        assert text.startswith(
            f"{asked}: Another name for train.accumulation_steps.\n\ntrain.accumulation_steps\n"
        )

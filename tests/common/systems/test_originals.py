"""Files and flags of the original systems, key by key: what each becomes, in numbers and in
messages.
"""

import copy
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config, flatten
from common.dialects.megatron import DEEPSPEED, DEEPSPEED_DEFAULTS
from common.dialects.rules import MapTo
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.systems import config as systems
from common.systems.config import COMMAND_LINES, Opened, open_config, open_flags
from common.systems.dialect import Dialect, read_foreign
from common.systems.flags import read_command, read_flags
from common.weights.names import count_parameters
from tools import convert_config

ORIGINALS = Path(__file__).parent / "originals"
FIGURES = yaml.safe_load((ORIGINALS / "figures.yaml").read_text())

SMALLEST = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    " {rate} 1e-4 --train-iters 5"
)
RATES = {"megatron": "--lr", "oneflow": "--learning-rate"}


@pytest.fixture(autouse=True)
def _beside_the_ds_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ORIGINALS / "modelzoo")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_and_the_file_of_ours_that_convert_config_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same run, with a remark for each key."""
    monkeypatch.setattr("common.config.load.ROOT", tmp_path)  # where a clone may have data/
    words, parameters, layout, batch, rate = FIGURES[name]
    source, own, words = ORIGINALS / name, tmp_path / "ours.yaml", [*words, "seed=7"]
    config, ranks = open_config(source, words).config, math.prod(layout)
    found = resolve_config(config, world_size=ranks)
    parallel, train = found.parallel, found.train
    assert count_parameters(found.model) == parameters
    assert [parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage] == layout
    sizes = [train.micro_batch_size, train.accumulation_steps, train.global_batch_size]
    assert sizes == batch and found.optimizer.learning_rate == rate
    system = re.split("[/_]", name)[0].replace("modelzoo", "megatron")
    command = ["--from", system, str(source), *words, "--output", str(own)]
    assert convert_config.main(command) == 0
    assert resolve_config(load_config(own), world_size=ranks) == found
    lines = own.read_text().splitlines()
    assert any("seed: 7  # command line" in line for line in lines)
    bare = [line for line in lines if "  # " not in line and line[-1:] not in ("", ":")]
    assert [line for line in bare if line.lstrip()[0] not in "#-"] == []


def test_the_modelzoos_ds_config_says_what_its_flags_do_not() -> None:
    """The scale begins at 2 to the 12th, and grows after 500 steps."""
    config = open_config(ORIGINALS / "modelzoo" / "train_345M.sh").config
    scale = config.loss_scale
    assert (config.engine, config.deepspeed.config_file) == ("deepspeed", "./ds_config.json")
    assert (scale.mode, scale.initial, scale.window) == ("dynamic", 4096.0, 500)
    assert (scale.hysteresis, scale.minimum, config.parallel.zero_stage) == (2, 1.0, 0)


def ds_run(tree: dict[str, Any], folder: Path, flags: str = "") -> Opened:
    (folder / "ds.json").write_text(json.dumps(tree))
    words = f"{SMALLEST.format(rate='--lr')} --fp16 --deepspeed {flags}".split()
    return open_flags("megatron", [*words, "--deepspeed_config", str(folder / "ds.json")])


def test_a_ds_config_without_a_key_is_that_with_deepspeeds_default(tmp_path) -> None:
    assert {rule.key for rule in DEEPSPEED.values() if isinstance(rule, MapTo)} == {
        "train.global_batch_size", "train.micro_batch_size", "train.accumulation_steps",
        *(DEEPSPEED[key].key for key in DEEPSPEED_DEFAULTS),
    }  # fmt: skip
    bare = {"fp16": {"enabled": True}, "zero_optimization": {}}
    without = ds_run(bare, tmp_path).config
    assert (without.loss_scale.initial, without.optimizer.clip_grad) == (65536.0, 1.0)
    for key, value in DEEPSPEED_DEFAULTS.items():
        tree, (*sections, name) = copy.deepcopy(bare), key.split(".")
        (tree[sections[0]] if sections else tree)[name] = value
        assert ds_run(tree, tmp_path).config == without, key


def test_flags_that_deepspeed_does_not_read_are_listed(tmp_path) -> None:
    """Its engine has a file of its own, and Megatron gives it none of these."""
    flags = "--clip-grad 0.5 --initial-loss-scale 1024 --hysteresis 7 --zero-stage 1"
    opened = ds_run({"fp16": {"enabled": True}}, tmp_path, flags)
    assert opened.config == ds_run({"fp16": {"enabled": True}}, tmp_path).config
    assert {"clip_grad", "initial_loss_scale", "hysteresis", "zero_stage"} <= {*opened.ours.without_effect}
    assert "DeepSpeed reads gradient_clipping of" in opened.ours.without_effect["clip_grad"]


def flag_names(folder: str) -> list[str]:
    lines = (ORIGINALS / folder / "flag_names.txt").read_text().splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()]


@pytest.mark.parametrize(
    ("folder", "system", "count"),
    [("modelzoo", "megatron", 185), ("megatron", "megatron", 485), ("oneflow", "oneflow", 56)],
)
def test_each_flag_is_read_or_refused_with_the_reason(folder, system, count) -> None:
    """Alone and with a value: some lack one, and some take none."""
    names = flag_names(folder)
    assert len(names) == count
    base = SMALLEST.format(rate=RATES[system]).split()
    dialect = COMMAND_LINES[system]
    for name in names:
        key, outcomes = name.replace("-", "_"), []
        for value in ([], ["2"]):
            try:
                opened = open_flags(system, [*base, f"--{name}", *value])
            except ConfigError as error:
                message = str(error)
                assert key in message.replace("-", "_"), (name, message)
                assert "unknown key" not in message, message
                outcomes.append(message)
                continue
            known = {*opened.ours.origins.values(), *opened.ours.without_effect}
            assert key in known or key in dialect.table, f"{name} leaves no trace"
        assert len(outcomes) < 2 or outcomes[0] != outcomes[1] or "leave" in outcomes[0], outcomes


def trees() -> Iterator[tuple[str, Dialect, dict[str, Any], dict[Any, str]]]:
    for name in FIGURES:
        path = ORIGINALS / name
        if path.suffix == ".sh":
            words = read_command(path)[2]
            dialect = COMMAND_LINES[systems.find_command_line(words)]
            yield name, dialect, *read_flags(words, str(path), dialect.table)[:2]
        else:
            found = systems.ConfigFile.read(path).dialect
            assert found is not None
            tree, sources = read_foreign(path, found.base)
            yield name, found, tree, sources


def test_a_wrong_value_anywhere_is_a_message() -> None:
    """Every key and section of every original in turn."""
    for name, dialect, tree, sources in trees():
        keys = [key for key, _ in flatten(tree)]
        sections = {key.rpartition(".")[0] for key in keys if "." in key}
        for number, key in enumerate([*keys, *sorted(sections)]):
            broken = copy.deepcopy(tree)
            *path, last = key.split(".")
            functools.reduce(dict.__getitem__, path, broken)[last] = ("x", [1])[number % 2]
            try:
                ours = dialect.translate(broken, sources)
                dialect.settle(ours)
                build_config(ours.tree, ours.sources)
            except ConfigError as error:
                assert str(error), (name, key)

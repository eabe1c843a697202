"""model.yaml as users write it: what a run lacks, and values of wrong types."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from common.config.schema import ModelConfig
from common.errors import ConfigError
from common.systems.megatron.write import write_megatron
from common.systems.run_state import MODEL_YAML, moment_shapes, read_model_yaml, write_model_yaml
from common.systems.weights import Weights
from tests.common.systems.tiny_weights import as_weights, random_arrays

MODEL = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_heads": 2,
    "seq_length": 8,
    "vocab_size": 11,
    "ffn_hidden_size": 8,
    "max_positions": 8,
}
RUN: dict[str, Any] = {
    "state": {
        "step": 3,
        "consumed_samples": 6,
        "sample_hash": "",
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "updated_samples": 12,
    },
    "engine": {"optimizer_steps": 3, "loss_scale": {}, "rng": {}},
    "config": {"optimizer": {"name": "adamw", "decay_steps": 9}, "train": {"global_batch_size": 2}},
}


def read(folder: Path, text: str) -> tuple[ModelConfig, dict[str, Any] | None]:
    (folder / MODEL_YAML).write_text(text)
    return read_model_yaml(folder / MODEL_YAML)


def test_a_run_without_the_keys_of_the_optimizer_goes_to_megatron_without_its_schedule(
    tmp_path: Path,
) -> None:
    model, run = read(tmp_path, yaml.safe_dump({"model": MODEL, "run": RUN}))
    moments = {name: np.zeros(shape, "f4") for name, shape in moment_shapes(model, "adamw").items()}
    weights = as_weights(model, random_arrays(model), moments=moments, run=run)
    write_megatron(tmp_path / "out", weights, None)
    saved = torch.load(
        tmp_path / "out" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False
    )
    assert "opt_param_scheduler" not in saved
    assert saved["optimizer"]["param_groups"][0]["step"] == 3


def test_written_files_read_back(tmp_path: Path) -> None:
    model, run = read(tmp_path, yaml.safe_dump({"model": MODEL, "run": RUN}))
    write_model_yaml(tmp_path, Weights(path=tmp_path, format="x", model=model, tensors={}, run=run))
    assert read_model_yaml(tmp_path / MODEL_YAML) == (model, run) == (model, RUN)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("  lr: &a [*a]", "nested deeper than 64 levels"),
        ("  made: 2020-01-01\n  made: 1", r"not valid YAML: the key 'run\.made' is given twice"),
        ("  made: !!timestamp 2020-01-01", "the tag !!timestamp is not supported"),
        ("  made: .nan", "Out of range float values are not JSON compliant"),
    ],
)
def test_yaml_values_that_json_lacks(tmp_path: Path, more: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, _block(more))


def _block(more: str) -> str:
    return yaml.safe_dump({"model": MODEL, "run": RUN}, sort_keys=False) + more


def test_a_date_is_text(tmp_path: Path) -> None:
    _, run = read(tmp_path, _block("  made: 2020-01-01"))
    assert run is not None and run["made"] == "2020-01-01"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("run", 5, "it is 5"),
        ("run.state", None, "state is None"),
        ("run.state.step", -1, "state.step is -1"),
        ("run.state.losses", [None], "state.losses.0 is None"),
        ("run.engine.loss_scale", {"mode": "dynamic"}, "engine.loss_scale lacks one of mode"),
        ("run.engine.loss_scale", {"value": "x"}, "engine.loss_scale.value is 'x'"),
        ("run.config.optimizer.name", "lamb", "config.optimizer.name is 'lamb'"),
        ("run.config.optimizer.learning_rate", [], r"optimizer.learning_rate is \[\]"),
        ("run.config.precision", 5, "config.precision is 5"),
        ("run.config.train.global_batch_size", "two", "train.global_batch_size is 'two'"),
        # what a manifest of ours would refuse
        ("run.state.skipped_steps", 9, "skipped_steps=9 and step=3 contradict"),
        ("run.engine.rng", {"torch": []}, r"engine.rng.torch is \[\]: List should"),
        ("run.tokenizer", 3, "tokenizer is 3: Input should be a valid dictionary"),
        ("model", [1], "no section model .found a list"),
        ("model.num_layers", "9" * 500, "num_layers='9{70,80}... of the model"),
    ],
)
def test_values_of_wrong_types(tmp_path: Path, key: str, value: Any, problem: str) -> None:
    words: Any = copy.deepcopy({"model": MODEL, "run": RUN})
    *sections, name = key.split(".")
    functools.reduce(dict.__getitem__, sections, words)[name] = value
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, yaml.safe_dump(words))

"""Derived values, and contradictions that name both values and a fix."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from common.config.load import build_config, dump_config
from common.config.resolved import as_run
from common.config.schema import EvaluationConfig, RunConfig
from common.errors import ConfigError
from common.resolve.derive import fitting_vocabulary, resolve_config, resolve_mode
from common.yaml_files import parse_yaml
from tests.common.resolve.test_refusals import small_tree


def config(**changes: Any) -> RunConfig:
    return build_config(small_tree(**changes))


def test_derived_values_are_filled_in() -> None:
    rates = {"model__dropout": 0.1, "model__hidden_dropout": 0.0}
    resolved = resolve_config(config(**rates, train__global_batch_size=12), world_size=2)
    model = resolved.model
    assert (model.ffn_hidden_size, model.max_positions) == (128, 8)
    found = (model.embedding_dropout, model.attention_dropout, model.hidden_dropout)
    assert found == (0.1, 0.1, 0.0)
    assert (resolved.parallel.data_parallel, resolved.train.accumulation_steps) == (2, 3)
    assert resolved.loss_scale.mode == "none"
    assert resolve_config(config(precision="fp16")).loss_scale.mode == "dynamic"
    assert resolve_config(resolved, world_size=2) == resolved
    given = config(validation__max_batches=3, train__global_batch_size=12)
    assert resolve_config(given, world_size=2).validation.max_samples == 36


def test_a_run_is_written_and_read_as_a_config() -> None:
    given = config(parallel__model_parallel=2, train__global_batch_size=8)
    run = resolve_config(given, world_size=4)
    assert (run.topology.data, run.topology.tensor, run.topology.world_size) == (2, 2, 4)
    assert (run.train.global_batch_size, run.train.accumulation_steps) == (8, 2)
    assert (run.vocab_rows, run.sizes.vocabulary, run.sizes.ffn) == (256, 256, 128)
    assert list(run.model_dump()) == list(given.model_dump())
    assert list(run.model_dump()["model"]) == list(given.model_dump()["model"])
    assert resolve_config(build_config(parse_yaml(dump_config(run))), world_size=4) == run
    assert as_run(RunConfig, run) == build_config(run.model_dump())


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"train__max_steps": 7}, 7),
        ({"train__max_steps": None, "train__max_epochs": 2.5}, 2 * 100 // 2 + 25),
        ({"train__max_steps": None, "train__max_tokens": 1000}, 1000 // (2 * 8)),
    ],
)
def test_length_in_steps_epochs_or_tokens(changes: dict[str, Any], steps: int) -> None:
    resolved = resolve_config(config(optimizer__warmup_fraction=0.1, **changes), samples_per_epoch=100)
    assert resolved.train.max_steps == steps
    assert resolved.optimizer.decay == resolved.optimizer.decay_steps == steps
    assert resolved.optimizer.warmup == 0.1 * steps  # a fraction of a step too, as Megatron


def test_a_length_that_nobody_can_count_is_refused() -> None:
    endless = config(train__max_steps=None, train__max_epochs=2.0**40)
    message = r"train.max_epochs=1099511627776.0 of 100 samples are \d+ steps; lower it"
    with pytest.raises(ConfigError, match=message):
        resolve_config(endless, samples_per_epoch=100)


def every_float() -> Iterator[tuple[str, Any]]:
    """The float fields of the schema, by dotted name."""
    for section, outer in RunConfig.model_fields.items():
        if isinstance(outer.annotation, type) and issubclass(outer.annotation, BaseModel):
            for name, inner in outer.annotation.model_fields.items():
                if inner.annotation in (float, float | None):
                    yield f"{section}__{name}", inner


HOST_FLOATS = {"train__max_epochs", "runtime__stall_limit"} | {
    f"predict__{name}"
    for name in (
        "temperature", "repetition_penalty", "top_p", "length_penalty", "min_p",
        "presence_penalty", "frequency_penalty",
    )
}  # fmt: skip


def test_floats_are_bounded_by_what_float32_holds() -> None:
    names = {name for name, _ in every_float()}
    for name, value in product(names - HOST_FLOATS, (1e308, 5e-324, 10**400)):
        with pytest.raises(ConfigError, match=name.replace("__", r"\.")):
            config(**{name: value})


def test_values_of_float32_are_accepted() -> None:
    for value in map(float, (np.finfo(np.float32).tiny, np.finfo(np.float32).max, 0.0)):
        assert config(optimizer__weight_decay=value).optimizer.weight_decay == value
    below = float(np.nextafter(np.float32(1), np.float32(0)))
    assert config(model__dropout=below).model.dropout == below
    with pytest.raises(ConfigError, match=r"model.dropout: 0.9999999999 is 1 in float32"):
        config(model__dropout=0.9999999999)


def test_the_end_of_a_schedule() -> None:
    warm_up = config(optimizer__warmup_steps=11)
    assert resolve_config(warm_up, samples_per_epoch=100).optimizer.decay_steps == 11
    shorter = config(optimizer__warmup_steps=11, optimizer__decay_steps=10)
    message = "warmup_steps=11 is beyond the schedule's end at step 10"
    with pytest.raises(ConfigError, match=message):
        resolve_config(shorter, samples_per_epoch=100)
    changes = {"optimizer__warmup_steps": 0, "optimizer__warmup_samples": 3}
    found = resolve_config(config(**changes), samples_per_epoch=100)
    assert (found.optimizer.decay_samples, found.optimizer.decay_steps) == (20, None)
    assert (found.optimizer.warmup, found.train.max_steps) == (3, 10)


def test_vocabulary_against_the_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has 101 tokens but model.vocab_size=100"):
        fitting_vocabulary(config().model, 101, "the tokenizer")
    for written, tokens, changed_keys in ((50304, 50257, {"vocab_size": 50257}), (13317, 13316, {})):
        model = config(model__vocab_size=written).model
        assert fitting_vocabulary(model, tokens, "t") == changed_keys


def layout(config: RunConfig) -> tuple[Any, ...]:
    parallel = config.parallel
    sizes = (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage)
    return (*sizes, parallel.zero_stage)


@pytest.mark.parametrize("mode", ["eval", "predict", "serve", "export"])
def test_modes_of_one_device_do_not_ask_for_the_layout_of_the_training(mode: str) -> None:
    trained = config(
        parallel={"data_parallel": 4, "model_parallel": 4, "zero_stage": 1},
        train__global_batch_size=64,
        train__accumulation_steps=8,
    )
    for processes, task in ((1, "validation"), (16, "text")):
        asked = trained.model_copy(update={"evaluation": EvaluationConfig(task=task)})
        found = resolve_mode(asked, mode, world_size=processes)
        assert layout(found) == (1, 1, 1, 0) and found.validation.micro_batch_size == 2


def test_an_evaluation_that_ranks_share_keeps_what_makes_the_model_fit() -> None:
    sizes = {"data_parallel": 2, "model_parallel": 4, "pipeline_stage": 2, "zero_stage": 3}
    trained = config(
        parallel=sizes | {"pipeline_schedule": "interleaved_1f1b"},
        train__accumulation_steps=2,
        train__global_batch_size=8,
    )
    for processes, copies, stage in ((16, 2, 3), (8, 1, 0)):
        found = resolve_mode(trained, "eval", world_size=processes)
        assert layout(found) == (copies, 4, 2, stage)
    offload = {"parallel__zero_stage": 2, "deepspeed__offload_optimizer": True}
    found = resolve_mode(config(engine="deepspeed", **offload), "eval", world_size=2)
    assert found.engine == "native" and layout(found) == (2, 1, 1, 0)
    with pytest.raises(ConfigError, match="6"):
        resolve_mode(trained, "eval", world_size=6)

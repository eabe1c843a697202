"""Steps on MindSpore: dropout, precision, loss scale, modes and sink, against none, torch, or the host's rule."""

import tests.needs_mindspore  # noqa: F401

# isort: split
import gzip
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import torch_gpt2.device
import torch_gpt2.engine
from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.config.schema import LossScaleConfig
from common.dataset.sampler import Batch
from common.errors import ConfigError
from common.parallel.run import Run
from common.parallel.updates import LossScale
from common.training.engine import Limits, StepResult
from common.training.opened_checkpoint import Checkpoint
from common.training.start import Start
from mindformers_gpt2.device import open_device
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.optimizer import DeviceLossScale
from mindformers_gpt2.train import trace, train
from tests.mindformers_gpt2.test_model import make_config as base_config, run_with_dumps
from tests.tiny import SGD

HALF_WEIGHTS = {"parameters": "float16", "compute": "float16"}


ADAMW = {"learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 8, "weight_decay": 0.1}


def make_config(**changes: Any) -> Run:
    usual = {"optimizer": ADAMW, "train__max_steps": 8, "model__num_layers": 1}
    return base_config(**(usual | changes))


def make_engine(config: Run) -> Engine:
    engine = Engine(config, open_device(config))
    engine.begin(Start())
    return engine


def make_torch_engine(config: Run) -> torch_gpt2.engine.Engine:
    engine = torch_gpt2.engine.Engine(config, torch_gpt2.device.select_device("cpu"))
    engine.begin(Start())
    return engine


def batches(count: int) -> list[Batch]:
    tokens = np.random.default_rng(3).integers(0, 101, (count, 4, 17)).astype(np.int32)
    return [Batch(tokens=rows, samples=4, consumed_samples=0, sample_hash="") for rows in tokens]


def bits(results: list[StepResult]) -> list[tuple[Any, ...]]:
    return [(each.loss, each.grad_norm, each.loss_scale, each.skipped) for each in results]


def test_resume_is_exact(tmp_path: Path) -> None:
    """Another engine that resumes a run of 8 steps after 4 does the other 4 bit for bit, with
    dropout, recomputation, float16 weights and a loss scale that moves.
    """
    changes = {"model__dropout": 0.1, "train__recompute": "selective", "precision": HALF_WEIGHTS}
    scale = {"initial": 2.0**14, "window": 3}
    config = make_config(train__deterministic=True, loss_scale=scale, **changes)
    whole, state = make_engine(config), TrainState(step=4, consumed_samples=16)
    first = bits(whole.run(iter(batches(4)), 4))
    with CheckpointWriter(tmp_path, asynchronous=False) as writer:
        folder = writer.save(whole.snapshot(state))
    rest = bits(whole.run(iter(batches(8)[4:]), 4))
    resumed = make_engine(config)
    assert resumed.begin(Start(resume=Checkpoint(folder))) == state
    moments = load_file(folder / "optimizer.safetensors").values()
    assert resumed.norm_of_moments() == pytest.approx(
        math.sqrt(sum(float((values**2).sum()) for values in moments)), rel=1e-4
    )
    assert bits(resumed.run(iter(batches(8)[4:]), 4)) == rest
    assert all(np.isfinite(row[0]) for row in first + rest)
    assert len({row[2] for row in first + rest}) > 1, "the scale never moved"
    for name, tensor in whole.master.tensors.items():
        np.testing.assert_array_equal(tensor.asnumpy(), resumed.master.tensors[name].asnumpy(), err_msg=name)


@pytest.mark.long
def test_steps_in_flight_a_trace_and_pynative_change_nothing(tmp_path: Path) -> None:
    """sink_size 4 equals 1 bit for bit, and so does a trace, which holds the head's matrix product of every micro
    batch, forward and twice backward. Operators one by one agree within the rounding of fused sums, 1e-5.
    """
    one = bits(make_engine(make_config(model__dropout=0.1)).run(iter(batches(8)), 8))
    queued = make_engine(make_config(model__dropout=0.1, train__sink_size=4))
    assert queued.steps_per_run == 4
    path, steps = tmp_path / "profile" / "steps_5_6_rank_0.json.gz", iter(batches(8))
    found = queued.run(steps, 4)
    with trace(queued.device, False, path):
        found += queued.run(steps, 2)
    assert bits([*found, *queued.run(steps, 2)]) == one
    with gzip.open(path) as file:
        events = [event for event in json.load(file) if event["ph"] == "X"]
    products = [event["name"] for event in events if "MatMul" in event["name"]]
    assert len(products) % (2 * 2) == 0 and len(products) >= 2 * 2 * 3
    tables = "steps_5_6_rank_0_*_ascend_ms/FRAMEWORK/cpu_op_type_info_0.csv"
    assert list(path.parent.glob(tables)), "MindSpore's own tables stay"
    allocations = make_config(profile={"start": 1, "memory": True})
    with pytest.raises(ConfigError, match=r"profile\.memory=true: .*leave it out on a CPU"):
        train(allocations, SimpleNamespace(device=queued.device, corpus=[]))  # type: ignore[arg-type]
    try:
        eager = make_engine(make_config(model__dropout=0.1, context__mode=1))
        found = bits(eager.run(iter(batches(3)), 3))
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_allclose([row[:2] for row in found], [row[:2] for row in one[:3]], rtol=1e-5)


@pytest.mark.long
def test_rates_follow_updates_that_the_host_does_not_know() -> None:
    """The device skips steps and takes the rates of warm-up and decay: weights are those of torch's plain SGD."""
    rates = {"learning_rate": 0.3, "momentum": 0.0, "warmup_steps": 2, "schedule": "linear"}
    config = make_config(
        loss_scale={"mode": "dynamic", "initial": 2.0**66, "factor": 2.0**8, "window": 3},
        optimizer=SGD | rates,
        train__sink_size=8,
    )
    engine, reference = make_engine(config), make_torch_engine(config)
    found = engine.run(iter(batches(8)), 8)
    skipped = [result.skipped for result in found]
    assert skipped[:1] == [True] and 1 < sum(skipped) < 5
    made = [result.learning_rate for result in found if not result.skipped]
    shares = [0.0, 0.5, *(1 - number / 6 for number in range(6))]
    assert made == pytest.approx([0.3 * share for share in shares[: len(made)]])
    assert int(engine.optimizer.place.asnumpy()) == len(made)
    plain = [tensor.requires_grad_() for tensor in reference.master.tensors.values()]
    optimizer = torch.optim.SGD(plain)
    for result, batch in zip(found, batches(8), strict=True):
        if result.skipped:
            continue
        optimizer.param_groups[0]["lr"] = 0.3 * shares.pop(0)
        optimizer.zero_grad()
        ids = torch.from_numpy(batch.tokens.astype(np.int64))
        (reference.model.loss_sum(ids[:, :-1], ids[:, 1:]) / 64).backward()
        optimizer.step()
    for name, tensor in reference.master.tensors.items():
        wanted = tensor.detach().numpy()
        np.testing.assert_allclose(engine.master.tensors[name].asnumpy(), wanted, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("precision", ["fp16", HALF_WEIGHTS], ids=["float32 weights", "float16 weights"])
def test_float16_follows_torch(precision: Any) -> None:
    """Losses and gradient norms within float16's rounding, and the same steps skipped from a scale that first
    overflows.

    The scale of 2^40 overflows in both; its division by 2^8 a step ends in the range where both are finite. SGD without
    a clip: Adam, and a clip that always acts, would hide gradients that keep the scale.
    """
    scale = {"initial": 2.0**40, "factor": 2.0**8, "window": 2}
    config = make_config(precision=precision, loss_scale=scale, optimizer=SGD | {"learning_rate": 0.3})
    engine, reference = make_engine(config), make_torch_engine(config)
    found, expected = engine.run(iter(batches(8)), 8), reference.run(iter(batches(8)), 8)
    assert [step.skipped for step in found] == [step.skipped for step in expected]
    assert [step.loss_scale for step in found] == [step.loss_scale for step in expected]
    assert 0 < sum(step.skipped for step in found) < 8
    np.testing.assert_allclose([step.loss for step in found], [step.loss for step in expected], rtol=2e-3)
    norms = ([step.grad_norm for step in steps if not step.skipped] for steps in (found, expected))
    np.testing.assert_allclose(*norms, rtol=1e-2)
    moved = 0.0
    for name, start in make_torch_engine(config).master.tensors.items():
        wanted = reference.master.tensors[name].detach()
        np.testing.assert_allclose(engine.master.tensors[name].asnumpy(), wanted.numpy(), atol=1e-2, err_msg=name)
        moved = max(moved, float((wanted - start.detach()).abs().max()))
    assert moved > 0.2, "the tolerance would hide weights that stayed where they were"
    for name, parameter in engine.master.model.items():
        held, exact = parameter.asnumpy(), engine.master.tensors[name].asnumpy()
        assert held.dtype == ("float16" if precision == HALF_WEIGHTS else "float32")
        assert exact.dtype == "float32"
        np.testing.assert_array_equal(held, exact.astype(held.dtype))


@pytest.mark.parametrize("mode", ["dynamic", "static", "none"])
def test_loss_scale_on_the_device_is_the_hosts(mode: str) -> None:
    """60 random verdicts, with a window, a hysteresis and a minimum that all act."""
    limits = {"window": 3, "hysteresis": 2, "minimum": 2.0}
    config = LossScaleConfig(mode=mode, initial=64.0, factor=4.0, **limits)
    open_device(make_config())
    host, device = LossScale(config), DeviceLossScale(config)
    moved, seen = ms.jit(device), set()
    for finite in np.random.default_rng(5).random(60) < 0.6:
        host.update(bool(finite))
        moved(ms.Tensor(bool(finite)))
        assert device.read() == host
        seen.add(host.value)
    expected = {"static": {64.0}, "none": {1.0}}.get(mode, seen)
    assert seen == expected and (mode != "dynamic" or (len(seen) > 3 and min(seen) == 2.0))


def test_a_step_beyond_the_limits_changes_nothing() -> None:
    """To the loss scale a step beyond the limits is a finite one."""
    engine = make_engine(make_config(loss_scale={"mode": "dynamic", "window": 3}))
    engine.run(iter(batches(1)), 1)
    tensors = [*engine.master.tensors.values(), *engine.optimizer.first, *engine.optimizer.second]
    before = [tensor.asnumpy().copy() for tensor in tensors]
    for limits in (Limits(loss=4.0), Limits(grad_norm=0.1), Limits()):
        if limits == Limits():
            assert float(engine.loss_scale.value.asnumpy()) == 2 * 65536.0
            ms.ops.assign(engine.loss_scale.value, ms.Tensor(float("inf"), ms.float32))
        [result] = engine.run(iter(batches(1)), 1, limits)
        assert result.loss > 4.0 and result.skipped
        assert int(engine.optimizer.steps.asnumpy()) == 1
        for tensor, old in zip(tensors, before, strict=True):
            np.testing.assert_array_equal(tensor.asnumpy(), old)
    ms.ops.assign(engine.loss_scale.value, ms.Tensor(65536.0, ms.float32))
    wide = Limits(loss=10.0, grad_norm=10.0)
    assert not engine.run(iter(batches(1)), 1, wide)[0].skipped


STEPS_OF_TWO_MODELS = """
import os, sys
os.environ |= {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": sys.argv[1]}
from tests.mindformers_gpt2.test_engine import base_config, batches, make_engine
for layers in (1, 2):
    make_engine(base_config(model__num_layers=layers)).run(iter(batches(1)), 1)
"""


@pytest.mark.long
def test_more_parameters_are_not_more_graphs_to_the_compiler(tmp_path: Path) -> None:
    """In MindSpore's own dump after type inference. A loop over parameters adds more than 300 for each layer."""
    run_with_dumps(STEPS_OF_TWO_MODELS, tmp_path, "type_inference")
    texts = [path.read_text() for path in tmp_path.rglob("*_type_inference_*.ir")]
    updates = [text for text in texts if "Optimizer_construct" in text]
    one, two = (re.findall(r"# Total subgraphs: (\d+)", text) for text in updates)
    assert one == two and len(one) == 1

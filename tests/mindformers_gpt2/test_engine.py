"""Steps on MindSpore: dropout, precision, loss scale, modes and sink, against the same without,
torch, or the host's rule.
"""

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

os.environ.setdefault("GLOG_v", "3")
ms = pytest.importorskip(
    "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
)

import torch_gpt2.device  # noqa: E402
import torch_gpt2.engine  # noqa: E402
from common.checkpoint.state import TrainState  # noqa: E402
from common.checkpoint.writer import CheckpointWriter  # noqa: E402
from common.config.schema import LoggingConfig, LossScaleConfig  # noqa: E402
from common.dataset import Batch  # noqa: E402
from common.parallel.run import Run  # noqa: E402
from common.training.engine import StepResult  # noqa: E402
from common.training.loss_scale import LossScale  # noqa: E402
from common.training.opened_checkpoint import Checkpoint  # noqa: E402
from common.training.outliers import Limits, limits_of, record_outlier  # noqa: E402
from common.training.start import Start  # noqa: E402
from mindformers_gpt2.device import open_device  # noqa: E402
from mindformers_gpt2.engine import Engine  # noqa: E402
from mindformers_gpt2.optimizer import DeviceLossScale  # noqa: E402
from tests.mindformers_gpt2.test_model import make_config as base_config  # noqa: E402
from tests.tiny import SGD  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
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
    device = torch_gpt2.device.select_device("cpu")
    engine = torch_gpt2.engine.Engine(config, device)
    engine.begin(Start())
    return engine


def batches(count: int) -> list[Batch]:
    generator = np.random.default_rng(3)
    return [
        Batch(
            tokens=generator.integers(0, 101, (4, 17)).astype(np.int32),
            samples=4,
            consumed_samples=0,
            sample_hash="",
        )
        for _ in range(count)
    ]


def bits(results: list[StepResult]) -> list[tuple[Any, ...]]:
    return [
        (result.loss, result.grad_norm, result.loss_scale, result.skipped) for result in results
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dropout": 0.1, "train__recompute": "selective"},
        {
            "precision": HALF_WEIGHTS,
            "loss_scale": {"initial": 2.0**14, "window": 3},
            "model__dropout": 0.1,
        },
    ],
    ids=["dropout and recomputation", "float16 weights with a moving loss scale"],
)
def test_resume_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Another engine that resumes a run of 8 steps after 4 does the other 4 bit for bit."""
    config = make_config(train__deterministic=True, **changes)
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
    if "precision" in changes:
        assert len({row[2] for row in first + rest}) > 1, "the scale never moved"
    for name, tensor in whole.master.tensors.items():
        np.testing.assert_array_equal(
            tensor.asnumpy(), resumed.master.tensors[name].asnumpy(), err_msg=name
        )


def test_steps_in_flight_and_pynative_change_nothing() -> None:
    """sink_size 4 equals 1 bit for bit; operators one by one agree within the rounding of fused
    sums, 1e-5.
    """
    one = bits(make_engine(make_config(model__dropout=0.1)).run(iter(batches(8)), 8))
    queued = make_engine(make_config(model__dropout=0.1, train__sink_size=4))
    assert queued.steps_per_run == 4
    assert bits(queued.run(iter(batches(4)), 4)) == one[:4]
    try:
        eager = bits(
            make_engine(make_config(model__dropout=0.1, context__mode=1)).run(iter(batches(3)), 3)
        )
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_allclose([row[:2] for row in eager], [row[:2] for row in one[:3]], rtol=1e-5)


def test_rates_follow_updates_that_the_host_does_not_know() -> None:
    """The device skips steps and takes the rates of a linear warm-up and decay: weights are those
    of torch's plain SGD with these rates.
    """
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
        np.testing.assert_allclose(
            engine.master.tensors[name].asnumpy(), wanted, rtol=0, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    "precision", ["fp16", HALF_WEIGHTS], ids=["float32 weights", "float16 weights"]
)
def test_float16_follows_torch(precision: Any) -> None:
    """Losses and gradient norms within float16's rounding, and the same steps skipped from a scale
    that first overflows.

    The scale of 2^40 overflows in both; its division by 2^8 a step ends in the range where both are
    finite. SGD without a clip: Adam, and a clip that always acts, would hide gradients that keep
    the scale.
    """
    sgd = SGD | {"learning_rate": 0.3, "warmup_steps": 0}
    config = make_config(
        precision=precision,
        loss_scale={"initial": 2.0**40, "factor": 2.0**8, "window": 2},
        optimizer=sgd,
    )
    engine, reference = make_engine(config), make_torch_engine(config)
    found, expected = engine.run(iter(batches(8)), 8), reference.run(iter(batches(8)), 8)
    assert [step.skipped for step in found] == [step.skipped for step in expected]
    assert [step.loss_scale for step in found] == [step.loss_scale for step in expected]
    assert 0 < sum(step.skipped for step in found) < 8
    np.testing.assert_allclose(
        [step.loss for step in found], [step.loss for step in expected], rtol=2e-3
    )
    finite = [index for index, step in enumerate(expected) if not step.skipped]
    np.testing.assert_allclose(
        [found[i].grad_norm for i in finite], [expected[i].grad_norm for i in finite], rtol=1e-2
    )
    moved = 0.0
    for name, start in make_torch_engine(config).master.tensors.items():
        wanted = reference.master.tensors[name].detach()
        np.testing.assert_allclose(
            engine.master.tensors[name].asnumpy(), wanted.numpy(), atol=1e-2, err_msg=name
        )
        moved = max(moved, float((wanted - start.detach()).abs().max()))
    assert moved > 0.2, "the tolerance would hide weights that stayed where they were"
    for name, parameter in engine.master.model.items():
        assert parameter.dtype == (ms.float16 if precision == HALF_WEIGHTS else ms.float32)
        assert engine.master.tensors[name].dtype == ms.float32
        np.testing.assert_array_equal(
            parameter.asnumpy(),
            engine.master.tensors[name].asnumpy().astype(parameter.asnumpy().dtype),
        )


@pytest.mark.parametrize("mode", ["dynamic", "static", "none"])
def test_loss_scale_on_the_device_is_the_hosts(mode: str) -> None:
    """60 random verdicts, with a window, a hysteresis and a minimum that all act."""
    config = LossScaleConfig(
        mode=mode, initial=64.0, factor=4.0, window=3, hysteresis=2, minimum=2.0
    )
    open_device(make_config())
    host, device = LossScale(config), DeviceLossScale(config)
    moved = ms.jit(device)
    seen = set()
    for finite in np.random.default_rng(5).random(60) < 0.6:
        host.update(bool(finite))
        moved(ms.Tensor(bool(finite)))
        assert device.read() == host
        seen.add(host.value)
    assert (
        (len(seen) > 3 and min(seen) == 2.0)
        if mode == "dynamic"
        else seen == {64.0 if mode == "static" else 1.0}
    )


def test_the_same_outlier_is_skipped_as_on_torch() -> None:
    """Ten steps as the loop makes them; one batch repeats a token, and its gradients, which point
    one way, are far longer.
    """
    logging = LoggingConfig(outlier_deviations=8.0, outlier_window=8)
    config = make_config(
        optimizer={"learning_rate": 1e-4},
        loss_scale={"mode": "dynamic", "initial": 2.0, "window": 3},
    )
    calm = batches(10)
    calm[7] = replace(calm[7], tokens=np.full_like(calm[7].tokens, 7))
    found = []
    for engine in (make_engine(config), make_torch_engine(config)):
        state = TrainState()
        results = []
        for batch in calm:
            [result] = engine.run(iter([batch]), 1, limits_of(state, logging))
            results.append(result)
            outlier = record_outlier(
                state, logging, result.loss, result.grad_norm, skipped=result.skipped
            )
            assert outlier == result.skipped
        found.append(results)
    for results in found:
        assert [step for step, result in enumerate(results, 1) if result.skipped] == [8]
        # finite steps all of them to the loss scale, which doubles after 3, 6 and 9
        assert [result.loss_scale for result in results] == [2.0] * 3 + [4.0] * 3 + [8.0] * 3 + [
            16.0
        ]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            *([getattr(result, name) for result in results] for results in found), rtol=1e-4
        )


@pytest.mark.parametrize(
    "limits",
    [Limits(loss=4.0), Limits(grad_norm=0.1), None],
    ids=["loss", "gradient norm", "not finite"],
)
def test_a_step_beyond_the_limits_changes_nothing(limits: Limits | None) -> None:
    engine = make_engine(make_config())
    engine.run(iter(batches(1)), 1)
    tensors = [*engine.master.tensors.values(), *engine.optimizer.first, *engine.optimizer.second]
    before = [tensor.asnumpy().copy() for tensor in tensors]
    if limits is None:
        ms.ops.assign(engine.loss_scale.value, ms.Tensor(float("inf"), ms.float32))
        [result] = engine.run(iter(batches(1)), 1)
    else:
        [result] = engine.run(iter(batches(1)), 1, limits)
        assert result.loss > 4.0 and result.grad_norm > 0.1
    assert result.skipped and int(engine.optimizer.steps.asnumpy()) == 1
    for tensor, old in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor.asnumpy(), old)
    if limits is not None:
        wide = Limits(loss=10.0, grad_norm=10.0)
        assert not engine.run(iter(batches(1)), 1, wide)[0].skipped


ONE_STEP = """
import os, sys
os.environ |= {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": sys.argv[1]}
from tests.mindformers_gpt2.test_engine import base_config, batches, make_engine
make_engine(base_config(model__num_layers=int(sys.argv[2]))).run(iter(batches(1)), 1)
"""


def test_more_parameters_are_not_more_graphs_to_the_compiler(tmp_path: Path) -> None:
    """Graphs of the update after type inference, in MindSpore's own dump. A loop over parameters
    adds more than 300 for each layer.
    """
    counts = []
    for layers in (1, 2):
        folder = tmp_path / str(layers)
        command = [sys.executable, "-c", ONE_STEP, str(folder), str(layers)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        options: dict[str, Any] = {"capture_output": True, "timeout": 120, "env": environ}
        subprocess.run(command, cwd=ROOT, check=True, **options)
        texts = [path.read_text() for path in folder.rglob("*_type_inference_*.ir")]
        (update,) = [text for text in texts if "Optimizer_construct" in text]
        found = re.search(r"# Total subgraphs: (\d+)", update)
        assert found is not None
        counts.append(int(found[1]))
    assert counts[0] == counts[1]

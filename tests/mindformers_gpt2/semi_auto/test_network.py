"""The graph that MindSpore's compiler splits, on one device: against the model, its loss and its plan."""

import tests.needs_mindspore  # noqa: F401

# isort: split
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops

from common.dataset.sampler import Batch
from common.parallel.run import Run
from common.parallel.sharding import initial_values
from common.parallel.updates import learning_rate
from common.training.start import Start
from mindformers_gpt2.checkpoint import fill_weights
from mindformers_gpt2.data import inputs_and_targets
from mindformers_gpt2.device import MindSporeDevice, open_device
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.semi_auto.network import TrainingGraph, TrainingStep, build_network
from tests.tiny import SGD, tiny_config

CPU = MindSporeDevice(kind="cpu", index=0, name="")


def make_config(*, world_size: int = 8, **changes: Any) -> Run:
    usual: dict[str, Any] = {"backend": "mindspore", "device": "npu"}
    usual |= {"model__vocab_multiple": 8, "model__initializer_range": 0.1}
    usual |= {"train": {"max_steps": 4, "micro_batch_size": 2, "accumulation_steps": 2}}
    usual |= {"parallel": {"model_parallel": 2, "pipeline_stage": 2}}
    return tiny_config(ranks=world_size, **(usual | changes))


def open_cpu() -> None:
    open_device(make_config(world_size=1, device="cpu", parallel={"model_parallel": 1}, train__accumulation_steps=1))


@pytest.mark.parametrize(("first", "chosen"), [(1, [0, 2]), (None, [0, 1, 2, 3])])
def test_the_first_blocks_of_each_stage_recompute(
    first: int | None, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cpu()
    recomputed: list[int] = []
    monkeypatch.setattr(ms.nn.Cell, "recompute", lambda cell, *_, **__: recomputed.append(id(cell)))
    train = {"train__recompute": "full", "train__recompute_layers": first}
    network = build_network(make_config(model__num_layers=4, **train), CPU)
    assert [number for number, block in enumerate(network.h) if id(block) in recomputed] == chosen


class Alone(ms.nn.Cell):
    """An all-reduce where there is one rank."""

    def construct(self, x: Any) -> Any:
        return x


def test_a_step_is_that_of_the_engine_of_one_device() -> None:
    """Loss, gradient norm before clipping, clip, momentum, loss scale, rate, and all weights: six steps of SGD, of
    which the clip acts on some. The first two overflow, and the graph takes the rates by itself.
    """
    changes: dict[str, Any] = {
        "parallel": {},
        "train": {"max_steps": 6, "micro_batch_size": 2, "sink_size": 6},
        "optimizer": SGD
        | {"learning_rate": 0.3, "weight_decay": 0.1, "clip_grad": 2.0, "warmup_steps": 2}
        | {"schedule": "cosine"},
        "loss_scale": {"mode": "dynamic", "initial": 2.0**123, "factor": 2.0**60},
    }
    one = make_config(world_size=1, device="cpu", **changes)
    device = open_device(one)
    tokens = np.random.default_rng(0).integers(0, 101, (6, 2, 17)).astype(np.int32)
    batches = [
        Batch(tokens=rows, samples=len(rows), consumed_samples=2 * index, sample_hash="")
        for index, rows in enumerate(tokens, 1)
    ]
    engine = Engine(one, device)
    engine.begin(Start())
    expected = engine.run(iter(batches), 6)
    network = build_network(one, CPU)
    step = TrainingStep(network, one, 0)
    step.optimizer.gradient_sync.all_reduce = Alone()
    fill_weights(step.master.tensors, initial_values(one))
    ms.ops.assign(step.limits, ms.Tensor((np.inf, np.inf), ms.float32))
    step.optimizer.set_rates([learning_rate(one.optimizer, number) for number in range(6)])
    for rows, wanted in zip(tokens, expected, strict=True):
        loss, norm, applied, scale = step(*inputs_and_targets(rows))
        assert bool(applied.asnumpy()) is not wanted.skipped
        assert float(scale.asnumpy()) == wanted.loss_scale
        np.testing.assert_allclose(loss.asnumpy(), wanted.loss, rtol=1e-6)
        np.testing.assert_allclose(norm.asnumpy(), wanted.grad_norm, rtol=1e-5)
    assert list(step.master.tensors) == list(engine.master.tensors)
    for name, tensor in engine.master.tensors.items():  # another order, and another kernel of gelu
        found, wanted = step.master.tensors[name].asnumpy(), tensor.asnumpy()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=name)
    assert [result.skipped for result in expected] == [True] * 2 + [False] * 4
    assert [result.learning_rate for result in expected[2:5]] == pytest.approx([0.0, 0.15, 0.3])
    norms = [result.grad_norm for result in expected[2:]]
    assert min(norms) < 2.0 < max(norms)


def operators(network: TrainingGraph) -> dict[int, tuple[str, Any]]:
    """Every operator that cells of the training graph hold."""
    found = {}
    for path, cell in network.cells_and_names():
        for name, value in [*vars(cell).items(), *cell._primitives.items()]:
            if isinstance(value, ops.Primitive):
                found[id(value)] = f"{path}.{name}", value
    return found


@pytest.mark.parametrize(("sequence_parallel", "activation"), [(False, "gelu_new"), (True, "quick_gelu")])
def test_every_operator_has_a_strategy(sequence_parallel: bool, activation: str) -> None:
    open_cpu()
    config = make_config(
        parallel__sequence_parallel=sequence_parallel, model__dropout=0.1, model__activation=activation
    )
    network = build_network(config, CPU)
    without = [name for name, primitive in operators(network).values() if "in_strategy" not in primitive.attrs]
    # these are of devices without the kernel
    assert {name.rpartition("gelu.")[2] for name in without} == {"sigmoid", "erf"}, (
        "add these to common/parallel/operator_plan.py"
    )
    block = network.h[1]
    assert block.attn.q_proj.matmul.in_strategy == ((2, 1), (2, 1))
    assert block.attn.c_proj.matmul.in_strategy == ((2, 2), (1, 2))
    assert block.add.in_strategy == (((4, 1), (4, 1)) if sequence_parallel else ((2, 1), (2, 1)))
    assert [part.pipeline_stage for part in (network.h[0], block, network.head)] == [0, 1, 1]

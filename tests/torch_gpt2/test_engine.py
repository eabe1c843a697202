"""Training steps against a plain loop over transformers' model with torch's own optimizers and clipping."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.checkpoint.snapshot import TrainState
from common.dataset.sampler import Batch
from common.parallel.run import Run
from common.parallel.updates import learning_rate
from common.training.engine import Limits, StepResult
from common.training.start import Start
from common.weights.names import decays
from tests.graph_counters import watch
from tests.layouts import BF16_WEIGHTS, FP16_WEIGHTS
from tests.reference import hugging_face_model, hugging_face_names
from tests.tiny import tiny_config
from torch_gpt2.device import TorchDevice, select_device
from torch_gpt2.engine import Engine
from torch_gpt2.loss import cross_entropy_sum

STEPS = 10


def make_config(**changes: Any) -> Run:
    fast = {"train__max_steps": STEPS, "train__global_batch_size": 6, "optimizer__learning_rate": 0.3}
    return tiny_config(**(fast | changes))


def make_engine(config: Run) -> Engine:
    engine = Engine(config, select_device("cpu"))
    engine.begin(Start())
    return engine


def token_batches(config: Run) -> list[np.ndarray]:
    shape = (STEPS, config.train.global_batch_size, 17)
    return [*np.random.default_rng(1).integers(0, 101, shape).astype(np.int32)]


def feed(batches: list[np.ndarray]) -> Iterator[Batch]:
    for tokens in batches:
        yield Batch(tokens=tokens, samples=len(tokens), consumed_samples=0, sample_hash="")


def run(engine: Engine, batches: list[np.ndarray]) -> tuple[list[float], list[float]]:
    results = engine.run(feed(batches), len(batches))
    return [result.loss for result in results], [result.grad_norm for result in results]


def copies_of(engine: Engine) -> list[torch.Tensor]:
    """Weights, their float32 copies, moments and counters."""
    state = [value for part in engine.optimizer.state.values() for value in part.values()]
    tensors = (*engine.master.tensors.values(), *engine.model.parameters(), *state)
    return [each.clone() for each in tensors if torch.is_tensor(each)]


def plain_loop(engine: Engine, batches: list[np.ndarray]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """One whole batch a step through transformers' model: no micro batches, no padding, torch's clip."""
    own = engine.config.optimizer
    ours = dict(engine.model.named_parameters())
    model = hugging_face_model(engine.config.model, ours)
    decayed = {name: each for name, each in ours.items() if decays(name)}
    decaying = hugging_face_names(decayed, 101).keys()
    parameters = dict(model.named_parameters())
    groups = [
        {
            "params": [each for name, each in parameters.items() if (name in decaying) is decay],
            "weight_decay": own.weight_decay * decay,
        }
        for decay in (True, False)
    ]
    # four layer-norm tensors and four biases a block, and the last layer norm
    assert len(groups[1]["params"]) == 2 * 8 + 2
    adam = {"lr": 1.0, "betas": (own.beta1, own.beta2), "eps": own.epsilon, "foreach": False}
    optimizer: Any = {
        "sgd": lambda: torch.optim.SGD(groups, lr=1.0, momentum=own.momentum),
        "adam": lambda: torch.optim.Adam(groups, **adam),
        "adamw": lambda: torch.optim.AdamW(groups, **adam),
    }[own.name]()
    losses, norms = [], []
    for step, tokens in enumerate(batches, 1):
        ids = torch.from_numpy(tokens.astype(np.int64))
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        limit = own.clip_grad or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(own, step - 1)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: each.detach() for name, each in parameters.items()}


ADAMW = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 3}
ADAM = {"name": "adam", "learning_rate": 0.01, "weight_decay": 0.1, "schedule": "linear"}
LOOPS: dict[str, dict[str, Any]] = {
    "sgd-no-clip": {},
    "sgd-decay": {"optimizer__weight_decay": 0.1},
    "adamw-cosine": {"optimizer": ADAMW},
    "adam-l2": {"optimizer": ADAM},
    # a clip on some steps
    "loss-scale": {"loss_scale": {"mode": "static", "initial": 1024.0}, "optimizer__clip_grad": 1.0},
}


@pytest.mark.parametrize("changes", LOOPS.values(), ids=LOOPS)
def test_ten_steps_equal_a_plain_loop(changes: dict[str, Any]) -> None:
    """float32 rounds differently here and there (micro batches, chunked loss): losses within 1e-5 relative, SGD's
    weights within 5e-6.

    Adam divides a gradient by its own size, so that the rounding of a tiny gradient becomes part of a step: its weights
    may differ by 0.1 % of the farthest that they can move, learning rate x steps.
    """
    config = make_config(**changes)
    engine, batches = make_engine(config), token_batches(config)
    expected_losses, expected_norms, expected_weights = plain_loop(engine, batches)
    losses, norms = run(engine, batches)
    if config.optimizer.clip_grad:
        assert min(expected_norms) < config.optimizer.clip_grad < max(expected_norms)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    weights = hugging_face_names({name: p.detach() for name, p in engine.model.named_parameters()}, 101)
    own = config.optimizer
    tolerance = 5e-6 if own.name == "sgd" else 1e-3 * own.learning_rate * STEPS
    for name, weight in weights.items():
        if name.endswith("c_attn.bias"):
            # The softmax does not see the key bias: its true gradient is 0, and Adam makes steps of
            # pure rounding noise.
            weight[32:64] = expected_weights[name][32:64] = 0.0
        wanted = expected_weights[name].numpy()
        np.testing.assert_allclose(weight.numpy(), wanted, rtol=0, atol=tolerance, err_msg=name)


LOW = ["bf16", "fp16", BF16_WEIGHTS | {"reduction": "bfloat16"}, FP16_WEIGHTS | {"softmax": "float16"}]


@pytest.mark.parametrize("precision", LOW, ids=str)
def test_low_precision_follows_float32(precision: Any) -> None:
    """bfloat16 has 8 bits: losses near 4.6 agree to about 0.02; a lost gradient scale would part them by far more."""
    changes = {"optimizer__learning_rate": 0.1, "optimizer__momentum": 0.0}
    changes |= {"train__micro_batch_size": 1, "train__global_batch_size": 2}
    engine = make_engine(make_config(precision=precision, **changes))
    exact, _ = run(make_engine(make_config(**changes)), token_batches(engine.config))
    rough, _ = run(engine, token_batches(engine.config))
    np.testing.assert_allclose(rough, exact, atol=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in engine.master.tensors.values())
    assert rough[-1] != exact[-1]


def test_low_precision_weights_move_by_less_than_their_rounding() -> None:
    """Updates below half a unit in the last place of a bfloat16 weight are kept in its float32 copy."""
    engine = make_engine(make_config(precision=BF16_WEIGHTS, optimizer__learning_rate=1e-6))
    name = "h.0.mlp.c_fc.weight"
    before = engine.master.tensors[name].clone()
    run(engine, token_batches(engine.config))
    assert not torch.equal(engine.master.tensors[name], before)
    assert torch.equal(engine.master.tensors[name].bfloat16(), engine.model.get_parameter(name))


def test_the_tied_table_sums_the_gradients_of_its_two_uses_in_float32() -> None:
    """Against two tables that are not tied. A sum in bfloat16 would be off by 1,900 times the tolerance."""
    engine = make_engine(make_config(precision=BF16_WEIGHTS))
    tokens = torch.from_numpy(token_batches(engine.config)[0].astype(np.int64))
    head = engine.model.wte.weight.detach().float().requires_grad_()
    expected = torch.zeros_like(head)
    for piece in tokens.split(2):
        hidden, targets = engine.model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten()
        loss = cross_entropy_sum(hidden, head, targets, 101) / (6 * 16)
        gradients = torch.autograd.grad(loss, [engine.model.wte.weight, head])
        expected += sum(gradient.float() for gradient in gradients)
    engine._accumulate_gradients(tokens.numpy(), torch.ones(()))
    found = engine.master.take_gradients()["wte.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_are_rounded_once_a_step_with_the_same_bits(
    precision: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = make_config(precision=precision, train__recompute=recompute), []
    assert config.rounds_weights_once
    for _ in range(2):
        engine = make_engine(config)
        found.append((run(engine, token_batches(config)), engine.local_weights()))
        monkeypatch.setattr(Run, "rounds_weights_once", False)
    (first, weights), (second, others) = found
    assert first == second
    assert all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.parametrize("limits", [Limits(loss=4.0), Limits(grad_norm=0.1)], ids=["loss", "gradient norm"])
def test_a_step_beyond_the_limits_changes_nothing(limits: Limits) -> None:
    """Weights, moments and Adam's count stay; to the loss scale it is a finite step."""
    scale = {"mode": "dynamic", "window": 2}
    engine = make_engine(make_config(optimizer=ADAMW, loss_scale=scale))
    batches = feed(token_batches(engine.config))
    engine.run(batches, 1)
    before = copies_of(engine)
    [result] = engine.run(batches, 1, limits)
    assert result.skipped and result.loss > 4.0 and result.grad_norm > 0.1
    assert all(map(torch.equal, copies_of(engine), before))
    assert (engine.loss_scale.value, engine.step) == (2 * 65536.0, 2)
    assert not engine.run(batches, 1, Limits(loss=result.loss + 1, grad_norm=10.0))[0].skipped


@pytest.fixture
def runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device that the host does not wait for: all but pinned memory and a clock."""
    event = SimpleNamespace(elapsed_time=lambda other: 1.0)
    monkeypatch.setattr(TorchDevice, "runs_ahead", True)
    monkeypatch.setattr(TorchDevice, "moment", lambda device: event)


def steps_of(engine: Engine, batches: list[np.ndarray]) -> list[StepResult]:
    steps = feed(batches)
    return [result for _ in batches for result in engine.run(steps, 1)] + engine.finish()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer__clip_grad": 1.0, "optimizer__weight_decay": 0.1},
    "sgd without momentum": {"optimizer__momentum": 0.0, "optimizer__clip_grad": 1.0},
    "adamw, fused": {"optimizer": {"learning_rate": 0.01}},
    "adamw": {"optimizer": {"learning_rate": 0.01}},
    "adam": {"optimizer": ADAM},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_device_takes_or_skips(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with steps that overflow, also the first, equals one that the host decides. A skipped
    step changes neither weights nor moments nor the number of updates.
    """
    # squares of float32 overflow at 2^128, so norms of rows do at 2^64
    config = make_config(**OPTIMIZERS[name], loss_scale={"mode": "dynamic", "initial": 2.0**68, "window": 2})
    if "fused" not in name:
        monkeypatch.setattr(TorchDevice, "fused_optimizer", False)
    expected = make_engine(config)
    rows = steps_of(expected, token_batches(config))
    request.getfixturevalue("runs_ahead")
    engine = make_engine(config)
    found = steps_of(engine, token_batches(config))
    skipped = [row.skipped for row in rows]
    assert [row.skipped for row in found] == skipped
    assert skipped[0] and 1 < sum(skipped) < STEPS - 2
    assert [row.loss_scale for row in found] == [row.loss_scale for row in rows]
    for key in ("loss", "grad_norm"):  # factors are rounded to float32 once more
        one, other = ([getattr(row, key) for row in each] for each in (found, rows))
        assert one == pytest.approx(other, rel=1e-6)
    for key, tensor in expected.master.tensors.items():
        # Adam makes steps of what rounding leaves of the gradients of key biases, which are 0: 3e-5
        # was found, of the 0.01 that a step can make
        atol = 1e-4 if key.endswith("k_proj.bias") else 1e-6
        torch.testing.assert_close(engine.master.tensors[key], tensor, rtol=1e-5, atol=atol)

    before = copies_of(engine)
    engine.loss_scale.value = 2.0**68
    engine._device_scale.write(engine.loss_scale)
    [result] = steps_of(engine, token_batches(config)[:1])
    assert result.skipped and result.loss_scale == 2.0**68
    assert all(map(torch.equal, copies_of(engine), before))
    assert engine.loss_scale.value == 2.0**67 == engine._device_scale.value.item()


@pytest.mark.usefixtures("runs_ahead")
def test_results_come_when_the_next_step_has_been_started() -> None:
    engine = make_engine(make_config())
    steps = feed(token_batches(engine.config))
    assert engine.run(steps, 1) == [] == engine.run(steps, 0)
    assert len(engine.run(steps, 1)) == 1
    assert len(engine.run(steps, 3)) == 3
    assert len(engine.finish()) == 1 and engine.finish() == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adamw, fused"])
def test_no_step_waits_on_a_gpu(name: str) -> None:
    """CUDA's own check: an operator that waits for the device raises an error. Results are awaited by events."""
    config = make_config(**OPTIMIZERS[name])
    engine = Engine(config, select_device("cuda"))
    engine.begin(Start())
    steps = iter([engine.prepare_batch(batch) for batch in feed(token_batches(config))])
    results = list(engine.run(steps, 3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results += engine.run(steps, STEPS - 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [result.loss for result in (*results, *engine.finish())]
    expected, _ = run(make_engine(config), token_batches(config))
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_a_compiled_run_equals_an_eager_one_without_a_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By regions, as deep models are: embedding, block, last norm and loss are a graph each."""
    monkeypatch.setattr("common.parallel.kernels.MAX_LAYERS_IN_ONE_GRAPH", 1)
    config = make_config(train__compile=True)
    with watch(tmp_path / "counts"):
        found = run(make_engine(config), token_batches(config)[:2])
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts == {"forward": 4, "backward": 4, "breaks": 0}
    expected = run(make_engine(make_config()), token_batches(config)[:2])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "parts", "precision"),
    [({"name": "adamw"}, 2, FP16_WEIGHTS), ({"name": "sgd", "momentum": 0.9}, 1, "float32")],
    ids=["adamw-float16", "sgd-float32"],
)
def test_a_snapshot_holds_what_was_when_it_was_taken(optimizer: dict[str, Any], parts: int, precision: Any) -> None:
    """Nobody has read it yet when the next step changes the weights."""
    changes = {"precision": precision, "loss_scale__initial": 64.0, "optimizer": optimizer | {"learning_rate": 0.1}}
    engine, batches = make_engine(make_config(**changes)), token_batches(make_config())
    run(engine, batches[:1])
    held = dict(engine.master.tensors)
    for name, tensor in list(held.items()):
        state = engine.optimizer.state[tensor].items()
        held |= {f"{name}.{part}": value for part, value in state if part != "step"}
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    norms = engine.norm_of_weights(), engine.norm_of_moments()
    snapshot = engine.snapshot(TrainState(step=1))
    run(engine, batches[1:2])
    weights, moments = snapshot.files.values()
    assert len(moments) == len(weights) * parts
    for arrays, norm in zip((weights, moments), norms, strict=True):  # what ranks compare
        exact = sum(float((each.astype(np.float64) ** 2).sum()) for each in arrays.values())
        assert norm == pytest.approx(exact**0.5, rel=1e-5)
    for name, array in (weights | moments).items():  # without rows that pad the vocabulary
        np.testing.assert_array_equal(array, before[name][: len(array)].numpy(), err_msg=name)
    assert not torch.equal(engine.master.tensors["wte.weight"], before["wte.weight"])

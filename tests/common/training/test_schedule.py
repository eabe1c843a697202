"""Rates of 30 updates and the loss scale beside Megatron's, transformers' and MindSpore's; text and warnings."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.checkpoint.snapshot import TrainState
from common.config.schema import LossScaleConfig
from common.parallel.run import Run
from common.parallel.updates import LossScale, clip_factor, describe_schedule, learning_rate, schedule_warnings
from common.training.engine import Schedule
from tests.tiny import tiny_config

UPDATES = 30
SKIPPED = (0, 1, 2, 7, 20, 33)
"""Attempts that float16 skips: the first ones, and some on the way."""
RAMP = [4, 4, 60]
"""From 4 to 16 samples within the first 60."""


def make_run(train: dict[str, Any] | None = None, **optimizer: Any) -> Run:
    steps = {"max_steps": UPDATES, "global_batch_size": 16, "micro_batch_size": 1}
    rates = {"learning_rate": 0.1, "min_learning_rate": 0.001}
    return tiny_config(train=steps | (train or {}), optimizer=rates | optimizer)


def attempts(run: Run, skipped: tuple[int, ...] = ()) -> Iterator[tuple[int, bool]]:
    """Yield the samples of each step, and whether its update is made, up to the last update."""
    consumed = updates = number = 0
    while updates < UPDATES:
        samples, made = run.batch_sizes.at(consumed), number not in skipped
        yield samples, made
        consumed, updates, number = consumed + samples, updates + made, number + 1


def ours(run: Run, skipped: tuple[int, ...] = ()) -> list[float]:
    """Return the rates of the updates."""
    schedule, rates = Schedule(run.optimizer, TrainState()), []
    for samples, made in attempts(run, skipped):
        if made:
            rates.append(schedule.rate())
            schedule.advance(samples)
    return rates


BY_STEPS: dict[str, Any] = {"warmup_steps": 4, "decay_steps": 20}
BY_SAMPLES: dict[str, Any] = {"warmup_samples": 50, "decay_samples": 300}


@pytest.mark.parametrize("skipped", [(), SKIPPED], ids=["all made", "some skipped"])
@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(
    ("given", "ramp"),
    [
        (BY_STEPS, None),
        (BY_STEPS | {"warmup_steps": 0}, None),
        ({"warmup_fraction": 0.13, "decay_steps": 20}, None),  # 2.6 steps
        (BY_SAMPLES, None),
        (BY_SAMPLES, RAMP),
        ({"warmup_fraction": 0.13, "decay_samples": 300}, RAMP),
    ],
    ids=["steps", "no warm-up", "fraction", "samples", "samples and ramp", "fraction and ramp"],
)
def test_rates_are_megatrons(given, ramp, style, skipped) -> None:
    """Megatron's train_step: the optimizer, then the schedule by the samples of the step if that was successful.
    Lengths in iterations are multiplied by the batch, as in Megatron's get_optimizer_param_scheduler.
    """
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    torch = pytest.importorskip("torch")
    run = make_run({"rampup_batch_size": ramp}, schedule=style, **given)
    unit = 16 if "decay_steps" in given else 1
    decay = unit * given.get("decay_steps", given.get("decay_samples"))
    warmup = given.get("warmup_fraction", 0) * decay or unit * given.get("warmup_steps", given.get("warmup_samples", 0))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    ends = (0.0, 0.0, decay, "constant")  # of the weight decay
    theirs = module.OptimizerParamScheduler(optimizer, 0.0, 0.1, 0.001, warmup, decay, style, *ends)
    expected = []
    for samples, made in attempts(run, skipped):
        if made:
            expected.append(optimizer.param_groups[0]["lr"])
            theirs.step(samples)
    assert ours(run, skipped) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert len(set(expected)) > (1 if style == "constant" else 8) or not warmup


@pytest.mark.parametrize("style", ["cosine", "linear", "polynomial", "constant"])
def test_rates_are_transformers(style: str) -> None:
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    own = {"lr_end": 0.05, "power": 2.0} if style == "polynomial" else {}
    lengths = () if style == "constant" else (UPDATES,)
    kind = f"{style}_decay" if own else style
    scheduler = getattr(transformers, f"get_{kind}_schedule_with_warmup")(optimizer, 4, *lengths, **own)
    expected = []
    for _ in range(UPDATES):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    lowest = {"min_learning_rate": own.get("lr_end", 0.0), "power": own.get("power", 1.0)}
    run = make_run(schedule=style, warmup_steps=4, **lowest)  # to the last step
    assert ours(run) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.long
def test_rates_are_those_of_optimizers_of_mindspore(mindspore: Any) -> None:
    """Weights of SGD with a gradient of 1 move by the rate: global_step counts from 0. float32."""
    ms, nn = mindspore, mindspore.nn
    for style, schedule, warmup in (
        ("cosine", nn.CosineDecayLR(0.001, 0.1, 20), 0),
        ("polynomial", nn.PolynomialDecayLR(0.1, 0.001, 20, 2.0), 0),
        ("constant", nn.WarmUpLR(0.1, 4), 4),
    ):
        weight = ms.Parameter(ms.Tensor([0.0], ms.float32), name="weight")
        optimizer, moved = nn.SGD([weight], learning_rate=schedule), []
        for _ in range(UPDATES):
            optimizer((ms.Tensor([-1.0], ms.float32),))
            moved.append(float(weight.asnumpy()[0]))
        run = make_run(schedule=style, power=2.0, decay_steps=20, warmup_steps=warmup)
        assert np.cumsum(ours(run)) == pytest.approx(moved, rel=1e-5, abs=1e-7), style


def test_ends_and_another_start() -> None:
    def rates(*positions: int, **optimizer: Any) -> list[float]:
        run = make_run(min_learning_rate=0.02, **optimizer)
        return [learning_rate(run.optimizer, position) for position in positions]

    assert rates(0, 5, 10, 20, 30, 999, warmup_steps=10) == pytest.approx([0, 0.05, 0.1, 0.06, 0.02, 0.02])
    assert rates(0, 9, 10, 11, warmup_steps=10, decay_steps=10) == pytest.approx([0, 0.09, 0.1, 0.02])
    # FleetX's LRScheduler is stepped once when it is made: the n-th update takes f(n)
    later = ours(make_run(warmup_steps=10, schedule_start=1))
    assert later[:-1] == ours(make_run(warmup_steps=10))[1:]


def test_a_resumed_run_continues() -> None:
    state = TrainState(step=12, skipped_steps=5, updated_samples=60)
    run = make_run({"rampup_batch_size": RAMP}, **BY_SAMPLES)
    assert Schedule(run.optimizer, state).rate() == learning_rate(run.optimizer, 60)
    run = make_run(**BY_STEPS)
    assert Schedule(run.optimizer, state).rate() == learning_rate(run.optimizer, 7)


def test_text() -> None:
    run = make_run(warmup_fraction=0.13, decay_samples=3000, schedule_start=1)
    assert describe_schedule(run.optimizer) == (
        "cosine to sample 3,000, warm-up 390 samples, learning rate 0.1, at the end 0.001, the first update at 1"
    )
    constant = make_run(schedule="constant").optimizer
    assert describe_schedule(constant) == "constant, warm-up 0 steps, learning rate 0.1"


BEFORE = (
    "optimizer.decay_steps=300 is before the end of the run (3,000 steps): the last 2,700 steps train at 1% of the peak"
)
BEYOND = "optimizer.decay_steps=480 is far beyond the run (60 steps): its last update has 96% of the peak rate; unless"


@pytest.mark.parametrize(
    ("steps", "optimizer", "expected"),
    [
        (40, {"warmup_steps": 2000}, "the warm-up (2,000 steps) is not shorter than the run (40): the rate reaches 2%"),
        (3000, {"decay_steps": 300}, f"{BEFORE} rate; set optimizer.decay_steps=3000, or null for the end of the run"),
        (60, {"decay_steps": 480}, f"{BEYOND} the run goes on later, set optimizer.decay_steps=60, or null for the"),
        (40, {"decay_samples": 300}, "the last 340 samples train at 1% of"),
        (300, {"decay_steps": 300, "warmup_steps": 299}, None),
        (600, {"decay_steps": 300}, None),
        (200, {"decay_steps": 300}, None),
        (3000, {"decay_steps": 300, "schedule": "constant"}, None),
    ],
)  # fmt: skip
def test_warnings(steps: int, optimizer: dict[str, Any], expected: str | None) -> None:
    run = make_run({"max_steps": steps}, **optimizer)
    found = [*schedule_warnings(run)]
    assert len(found) == (expected is not None) and (expected or "") in "".join(found)


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_hysteresis_is_megatrons(hysteresis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 random verdicts beside Megatron-Core's scaler, which would make its tensors on CUDA."""
    theirs_of = pytest.importorskip("megatron.core.optimizer.grad_scaler").DynamicGradScaler
    torch = pytest.importorskip("torch")
    make = torch.tensor
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda values, dtype, device: make(values, dtype=dtype))
        theirs = theirs_of(2.0**8, 0.25, 2.0, 0.5, 4, hysteresis)
    ours = LossScale(LossScaleConfig(mode="dynamic", initial=2.0**8, window=4, minimum=0.25, hysteresis=hysteresis))
    seen = set()
    for finite in np.random.default_rng(hysteresis).random(300) < 0.75:
        ours.update(bool(finite))
        theirs.update(not finite)
        assert ours.value == theirs.scale.item()
        seen.add(ours.value)
    assert len(seen) > 5


def test_a_scale_that_stays_and_a_clip_that_only_lowers_gradients() -> None:
    static = LossScale(LossScaleConfig(mode="static", initial=128.0))
    static.update(False)
    assert (static.value, LossScale(LossScaleConfig(mode="none")).value) == (128.0, 1.0)
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0, 1.9)] == [1.0] * 3
    assert clip_factor(8.0, 2.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(8.0, 0.0) == 1.0

"""device=npu in a process that has the simulated NPU of tests/simulated_npu: started by test_npu.py."""

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.backends import make_run
from common.checkpoint.snapshot import TrainState
from common.config.schema import PredictConfig, QuantizationConfig
from common.dataset.sampler import Batch
from common.errors import DeviceError
from common.generation.generate import generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.parallel.run import Run
from common.run_config import load_config
from common.training.metrics import read_metrics
from common.training.start import Start as StartOfRun
from tests import tiny
from tests.host_waits import counted
from tests.layouts import BF16_WEIGHTS, SCALE
from tests.mixed_load import prompts as mixed_load, run
from tests.packed_corpus import FLAGS
from tests.tiny import manifest_of, tiny_config
from tests.twins import random_model
from torch_gpt2 import offload
from torch_gpt2.device import TorchDevice, open_device, select_device
from torch_gpt2.engine import Engine
from torch_gpt2.evaluate import evaluate
from torch_gpt2.optimizer import DeviceStep, build_optimizer
from torch_gpt2.predict import Decoder, Slots
from torch_gpt2.quantize import LinearQuantizer

Start = Callable[..., Path]
TOKENS = np.random.default_rng(0).integers(0, 101, (4, 17), np.int32)
BATCH = Batch(tokens=TOKENS, samples=4, consumed_samples=4, sample_hash="")
SGD = {"optimizer": tiny.SGD}
BITWISE: dict[str, dict[str, Any]] = {
    # the norms lie between 3.1 and 1.8: acts on some steps, and not on others
    "sgd with clip": {"optimizer__clip_grad": 2.1, "train__recompute": "selective"},
    "bf16": {"precision": "bf16"},
    "bf16 weights": {"precision": BF16_WEIGHTS},
    "documents kept apart": FLAGS | {"data__eod_id": 3},
    "fp16 that overflows": {"precision": "fp16", "loss_scale": SCALE}
    | {"optimizer__schedule": "linear", "optimizer__warmup_steps": 3},
}


@pytest.fixture
def config(corpus_prefix: Path, tmp_path: Path) -> Callable[..., Run]:
    def make(name: str, device: str, **changes: Any) -> Run:
        usual: dict[str, Any] = {
            "device": device,
            "model__num_heads": 2,
            "train__max_steps": 8,
            "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1} | {"warmup_steps": 4, "decay_steps": 8},
            "validation": {"max_samples": 8, "interval": 4},
        }
        return tiny_config(tmp_path / name, corpus_prefix, **(usual | changes))

    return make


@pytest.fixture
def start(config: Callable[..., Run], tmp_path: Path) -> Start:
    def run(name: str, device: str, **changes: Any) -> Path:
        # attention in the simulated NPU's only form, accelerators' norm and an NPU's float32: a CPU
        # has others, which round otherwise
        with (
            sdpa_kernel(SDPBackend.MATH),
            patch("torch_gpt2.optimizer._norm_by_rows", lambda x: torch._foreach_norm([x])[0]),
            patch("torch_gpt2.optimizer.wide_type", lambda _: torch.float32),
            patch("torch_gpt2.parallel.world.wide_type", lambda _: torch.float32),
        ):
            return tiny.train_here(config(name, device, **changes).model_dump(mode="json"))

    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock and the device."""
    timed = re.compile("time|per_second|mfu|data_wait|peak_memory")
    return [
        {key: value for key, value in row.items() if not timed.search(key)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def assert_same_run(one: Path, other: Path) -> None:
    assert rows_of(one) == rows_of(other)
    tiny.require_same_bits(one, other)


def test_auto_loads_torch_npu_where_cann_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test of this process, since what is loaded stays."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert select_device("cpu").kind == select_device("auto").kind == "cpu"
    assert "torch_npu" not in sys.modules
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
    assert select_device("auto").kind == "npu"
    assert "torch_npu" in sys.modules


def test_the_record(config: Callable[..., Run]) -> None:
    device = select_device("npu", index=3)
    assert device.torch_device == torch.device("npu", 3) and torch.npu.current_device() == 3
    assert device.communication_backend == "hccl"
    assert device.supports("bfloat16") and device.supports("float16")
    assert device.peak_flops("bfloat16") == 313e12  # 910B3, as the simulated one calls itself
    assert device.peak_memory() == 0
    block = torch.ones(2**20, device="npu")
    assert device.peak_memory() == block.nbytes == 2**22
    del block
    assert device.peak_memory() == 2**22 and torch.npu.memory_allocated() == 0
    with pytest.raises(DeviceError, match="device=npu: number 8 asked for, but 8 found"):
        select_device("npu", index=8)
    open_device(config("run", "npu", context={"max_device_memory": "2GB"}))
    assert torch.npu.get_per_process_memory_fraction() == 0.25  # of 8 GiB


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype | None]:
    """Types of the masks that an NPU's attention gets. It has a kernel for bool and none only."""
    attend, found = F.scaled_dot_product_attention, set()

    def noted(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if q.device.type == "npu":
            mask = options.get("attn_mask")
            found.add(None if mask is None else mask.dtype)
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return found


@pytest.mark.parametrize("name", BITWISE)
def test_a_run_equals_the_cpu_s_bit_for_bit(start: Start, name: str, masks: set[torch.dtype | None]) -> None:
    """Equal kernels in equal order: a difference in a bit would be a difference in what is computed."""
    npu, cpu = (start(device, device, **SGD, **BITWISE[name]) for device in ("npu", "cpu"))
    assert_same_run(npu, cpu)
    assert masks == {torch.bool if "documents" in name else None}
    rows = [row for row in rows_of(npu) if "loss" in row]
    assert len(rows) == 8
    if name == "sgd with clip":
        assert tiny.some_but_not_all([row["grad_norm"] > 2.1 for row in rows])
    if name.startswith("fp16"):
        made = [row["learning_rate"] for row in rows if not row["skipped"]]
        # updates count, though a step starts before the result of the last one is known
        shares = [0.0, 1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4]
        assert made == pytest.approx([0.1 * share for share in shares[: len(made)]])
        assert 3 < len(made) < 8


ADAMS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"optimizer__name": "adam"},
    "adamw with clip": {"optimizer__clip_grad": 2.1},
    # squares of float32 overflow at 2^128, so norms of rows do at 2^64
    "adamw that overflows": {"loss_scale": {"mode": "dynamic", "initial": 2.0**66, "window": 3}},
}


@pytest.fixture
def without_adam_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchDevice, "adam_kernel", False)


@pytest.mark.parametrize("name", ADAMS)
def test_adam(start: Start, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch's fused kernel, which rounds otherwise, on the NPU its own kernel, or loops over lists of
    tensors (foreach).

    Each rounds the update of a weight at other places, 1e-7 of it, which 8 steps carry on. No step waits for the host,
    but for Adam's kernel, which must not start before it is known that the step counts.
    """
    from torch_npu import adamw

    cpu = start("cpu", "cpu", **ADAMS[name])
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(TorchDevice, "adam_kernel", False)
        adamw.calls.clear()
        with counted() as waits:
            npu = start(f"npu, {kernel}", "npu", **ADAMS[name])
        taken = [row for row in rows_of(npu) if row.get("skipped") is False]
        # three probes; parameters with and without decay
        assert len(adamw.calls) == (3 + 2 * len(taken)) * kernel
        assert len(taken) == 8 or (name == "adamw that overflows" and 3 <= len(taken) < 8)
        tiny.require_equal(npu, cpu, 1e-6)
        if name == "adamw":
            first, *found, last = waits.steps
            assert first and last
            assert [each.total() for each in found] == [int(kernel)] * 7
            assert all("torch_gpt2/optimizer.py" in key for each in found for key in each)


def test_bias_corrections_are_exact(config: Callable[..., Run], without_adam_kernel: None) -> None:
    """A gradient that stays gives updates of the whole rate. 1 - 0.999^n in float32 is 1e-5 off."""
    settings = config("none", "npu", optimizer__epsilon=1e-12, optimizer__weight_decay=0.0)
    weight = torch.nn.Parameter(torch.zeros(3, device=select_device("npu").torch_device))
    optimizer = build_optimizer({"h.0.ln_1.bias": weight}, settings.optimizer, fused=False)
    step = DeviceStep(optimizer, settings.optimizer, adam_kernel=False)
    optimizer.param_groups[0]["lr"] = 1.0
    for number in range(1, 101):
        weight.grad = torch.full((3,), 2.0, device="npu")
        step(torch.ones((), device="npu") > 0, torch.full((), 0.5, device="npu"))
        wanted = torch.full((3,), -float(number))
        assert torch.allclose(weight.detach().cpu(), wanted, rtol=1e-6, atol=0.0), number


def test_adam_s_kernel_updates_the_float32_copies(config: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """After one step, since later ones begin with weights that rounding to bfloat16 tells apart."""
    settings = config("none", "npu", precision=BF16_WEIGHTS, optimizer__warmup_steps=0)
    found = []
    for kernel in (True, False):
        monkeypatch.setattr(TorchDevice, "adam_kernel", kernel)
        engine = Engine(settings, select_device("npu"))
        engine.begin(StartOfRun())
        before = {name: tensor.clone() for name, tensor in engine.master.tensors.items()}
        engine.run(iter([BATCH]), 1)
        [row] = engine.finish()
        held = dict(engine.model.named_parameters())
        for name, tensor in engine.master.tensors.items():
            assert tensor.dtype == torch.float32 and not torch.equal(tensor, before[name])
            assert torch.equal(tensor.bfloat16(), held[name])
        found.append(engine.master.tensors)
    for name, tensor in found[0].items():
        # an ulp of the largest weights, and 1e-6 of an update
        assert torch.allclose(tensor, found[1][name], rtol=2e-7, atol=1e-6 * row.learning_rate)


def test_where_adam_s_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is there, computes what AdamW does, and the device is not the first Ascend 910."""
    from torch_npu import adamw

    def found() -> bool:
        return select_device("npu").adam_kernel

    def wrong(**change: float) -> Any:
        return lambda *lists, **rest: adamw._fused_adamw(*lists, **rest | change)

    assert found() and not select_device("cpu").adam_kernel
    broken = Mock(side_effect=RuntimeError("161002"))
    for other in (wrong(weight_decay=0.0), wrong(beta2=0.998), wrong(eps=1e-2), broken):
        with patch("torch._fused_adamw_", other):
            assert not found()
    with patch.object(torch.npu, "is_bf16_supported", lambda: False):
        assert not found()
    monkeypatch.setattr("torch._C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    assert not found(), "an old torch_npu"


@pytest.mark.parametrize("activations", ["none", "abs_max", "dynamic", "moving_average_abs_max"])
def test_rounding_to_few_bits_copies_nothing_from_the_host(activations: str) -> None:
    device = select_device("npu").torch_device
    x, weight = torch.ones(3, 4, device=device), torch.ones(5, 4, device=device)
    settings = QuantizationConfig.model_validate({"activations": activations})
    quantizer = LinearQuantizer(settings, device)
    with counted() as waits:
        y = quantizer.input(x) @ quantizer.weight(weight).T
    assert not waits.steps[0]
    assert torch.allclose(y.cpu(), torch.full((3, 5), 4.0))


def test_a_snapshot_is_copied_through_pinned_memory(config: Callable[..., Run]) -> None:
    """The host reads one number and waits for no copy, the next step comes after all of them, and
    the next save takes the same memory. The rows of the token table that pad the vocabulary are
    cut off; parts of a block are pinned as it is.
    """
    settings = config("run", "npu", precision="bf16")
    engine = Engine(settings, select_device("npu"))
    engine.begin(StartOfRun())
    with counted() as waits, patch("torch.empty", wraps=torch.empty) as empty:
        engine.run(iter([BATCH] * 2), 2)
        taken = []
        for _ in range(2):
            engine.finish()
            waits.steps.append(Counter())
            empty.reset_mock()
            with patch.object(torch.npu, "Event") as made:
                snapshot = engine.snapshot(TrainState(step=engine.step))
            [found], event = waits.steps[-1].elements(), made.return_value
            assert snapshot is not None and found.startswith("_local_scalar_dense")
            taken.append(empty.call_count)
            event.record.assert_called_once()
            event.synchronize.assert_not_called()
            before = {name: tensor.cpu().numpy() for name, tensor in engine.local_weights().items()}
            moment = engine.optimizer.state[engine.master.tensors["wte.weight"]]["exp_avg"].cpu()
            engine.run(iter([BATCH]), 1)
            after = engine.local_weights()["wte.weight"].cpu().numpy()
            assert not np.array_equal(after, before["wte.weight"])
            event.synchronize.reset_mock()
            snapshot.ready()
            event.synchronize.assert_called_once()
            weights, moments = snapshot.files.values()
            for name, array in before.items():
                np.testing.assert_array_equal(weights[name], array[: len(weights[name])])
            np.testing.assert_array_equal(moments["wte.weight.exp_avg"], moment[:101].numpy())
    assert taken == [1, 0] and len(moments) == 2 * len(weights) == 2 * len(before)


@pytest.mark.usefixtures("without_adam_kernel")  # the host waits for it
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_on_the_host_change_no_bit(start: Start, recompute: str) -> None:
    """With dropout and rounded weights. Copies go through pinned memory, and no step waits."""
    settings = {"model__dropout": 0.1, "precision": "bf16", "train__recompute": recompute}
    kept = start("kept", "npu", **settings)
    with counted() as waits, patch.object(offload, "_Copy", wraps=offload._Copy) as copies:
        moved = start("moved", "npu", train__offload_activations=True, **settings)
    assert_same_run(kept, moved)
    assert copies.call_count and all(call.kwargs["pinned"] for call in copies.call_args_list)
    assert [number for number, found in enumerate(waits.steps) if found] == [0, 8]


def test_the_counter_of_waits_sees_the_threads_of_the_backward_pass() -> None:
    x = torch.ones(3, device=select_device("npu").torch_device, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda gradient: None if gradient.sum().item() else gradient)
    with counted() as waits:
        y.sum().backward()
    [found] = waits.steps[0].elements()
    assert found.startswith("_local_scalar_dense waits for the device")


@pytest.mark.parametrize(
    ("then", "settings"), [("npu", {"model__dropout": 0.1, "train__recompute": "full"}), ("cpu", SGD)]
)
def test_four_and_four_resumed_equal_eight_bit_for_bit(start: Start, then: str, settings: dict[str, Any]) -> None:
    """On another device too. Masks are drawn on the device; recomputation draws them twice."""
    whole = start("whole", then, **settings)
    parts = start("parts", "npu", train__max_steps=4, **settings)
    [states] = manifest_of(parts)["engine"]["rng"]["torch"]
    assert set(states) == {"cpu", "npu"}
    torch.manual_seed(999)
    assert_same_run(whole, start("parts", then, **settings))


def test_adam_s_kernel_resumes_its_lists_of_tensors_and_they_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = start("whole", "npu")
    for kernel in (True, False):
        for steps, takes in ((4, kernel), (8, not kernel)):
            monkeypatch.setattr(TorchDevice, "adam_kernel", takes)
            parts = start(f"{kernel} first", "npu", train__max_steps=steps)
        tiny.require_equal(parts, whole, 1e-6)


def test_evaluation_and_a_trace(start: Start) -> None:
    folder = start("run", "npu", profile={"start": 2, "memory": True}, **SGD)
    [path] = (folder / "profile").iterdir()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    # of 2 micro batches, each with 2 norms a layer and the last
    assert sum(each["name"] == "aten::native_layer_norm" for each in events) >= 2 * (2 * 2 + 1)
    for device in ("npu", "cpu"):
        with sdpa_kernel(SDPBackend.MATH):
            evaluate(*make_run(load_config(folder / "config.yaml", [f"device={device}"]), "eval"))
        found = json.loads((folder / "evaluation.json").read_text())["validation_loss"]
        assert found == rows_of(folder)[-1]["validation_loss"]


def test_greedy_tokens_of_prompts_of_different_lengths(masks: set[torch.dtype | None]) -> None:
    """The CPU's are held against transformers elsewhere; here transformers would look for more of
    torch_npu than is simulated. No step waits for the host.
    """
    model, tokens = random_model(), []
    random = np.random.default_rng(0)
    rows = [random.integers(0, 101, length).tolist() for length in (18, 1, 7)]
    prompts = [Prompt(text="", ids=row, new_tokens=20) for row in rows]
    given = mixed_load(101, model.config.max_positions)[:6]
    for device in map(select_device, ("cpu", "npu")):
        model.to(device.torch_device)
        decoder, slots = Decoder(model, device, 3), Slots(model, device, 3)
        found = generate(decoder, prompts, LogitRules(PredictConfig(), ends=()), seed=0)
        tokens.append([each.tokens for each in found] + run(slots, given, None)[0])
    assert tokens[0] == tokens[1]
    assert masks == {None, torch.bool}
    slots = Slots(model, device, 3)
    slots.admit(1, rows[0], 0, None)
    with counted() as waits:
        decoder.step([1, 2, 3])
        decoder.reorder([2, 0, 0])
        slots.step([1], [7], [len(rows[0])])
    assert not waits.steps[0]

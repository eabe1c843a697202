"""device=npu in a process where that is the simulated NPU of tests/simulated_npu; test_npu.py
starts pytest on this file there.
"""

import copy
import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.config.load import build_config, load_config
from common.config.schema import ModelConfig, PrecisionConfig, PredictConfig, RunConfig
from common.errors import DeviceError
from common.generation.generate import generate
from common.generation.prompts import Prompt
from common.resolve.derive import resolve_config
from common.training.checkpoint import find_checkpoint
from common.training.manifest import read_manifest
from common.training.metrics import read_metrics
from tests.config_overrides import changed
from tests.host_waits import counted
from torch_gpt2.device import open_device, select_device
from torch_gpt2.engine import Engine
from torch_gpt2.evaluate import evaluate
from torch_gpt2.model import GPT2
from torch_gpt2.optimizer import build_optimizer
from torch_gpt2.predict import Decoder, predict
from torch_gpt2.train import train

Start = Callable[..., Path]

SGD = {
    "optimizer": {
        "name": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "schedule": "constant",
        "clip_grad": 0.0,
    }
}
BITWISE: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    # the norms lie between 3.1 and 1.8: acts on some steps
    "sgd with clip": SGD | {"optimizer__clip_grad": 2.1},
    "recompute": SGD | {"train__recompute": "selective"},
    "bf16": SGD | {"precision": "bf16"},
    "bf16 weights": SGD | {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}},
    "fp16 that overflows": SGD
    | {"precision": "fp16", "loss_scale": {"initial": 2.0**20, "window": 3}},
}


@pytest.fixture
def config(corpus_prefix: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(name: str, device: str, **changes: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "output_dir": str(tmp_path / name),
            "device": device,
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 101,
            },
            "train": {"max_steps": 8, "micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {
                "learning_rate": 0.01,
                "warmup_steps": 4,
                "decay_steps": 8,
                "weight_decay": 0.1,
            },
            "data": {"train": str(corpus_prefix), "split": "90,10,0"},
            "validation": {"max_samples": 8, "interval": 4},
            "logging": {"tensorboard": False, "plot": False},
        }
        return resolve_config(
            build_config(changed(json.loads(json.dumps(tree)), json.loads(json.dumps(changes))))
        )

    return make


@pytest.fixture
def start(config: Callable[..., RunConfig], tmp_path: Path) -> Start:
    def run(name: str, device: str, **changes: Any) -> Path:
        # attention in the simulated NPU's only form, and accelerators' norm: a CPU has others,
        # which round otherwise
        norm = patch(
            "torch_gpt2.optimizer._norm_by_rows",
            lambda gradient: torch._foreach_norm([gradient])[0],
        )
        with sdpa_kernel(SDPBackend.MATH), norm:
            train(config(name, device, **changes))
        return tmp_path / name

    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    timed = {
        "step_time",
        "tokens_per_second",
        "samples_per_second",
        "mfu",
        "data_wait",
        "validation_time",
        "peak_memory",
    }
    return [
        {key: value for key, value in row.items() if key not in timed}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def bits_of(folder: Path) -> dict[str, bytes]:
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    files = ("model.safetensors", "optimizer.safetensors")
    return {
        f"{file}/{name}": array.tobytes()
        for file in files
        for name, array in load_file(checkpoint / file).items()
    }


def assert_same_run(one: Path, other: Path) -> None:
    assert rows_of(one) == rows_of(other)
    assert bits_of(one) == bits_of(other)


def test_auto_loads_torch_npu_where_cann_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test of this process, since what is loaded stays."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert select_device("cpu").kind == select_device("auto").kind == "cpu"
    assert "torch_npu" not in sys.modules
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
    assert select_device("auto").kind == "npu"
    assert "torch_npu" in sys.modules


def test_the_record() -> None:
    device = select_device("npu", index=3)
    assert device.torch_device == torch.device("npu", 3) and torch.npu.current_device() == 3
    assert device.communication_backend == "hccl"
    assert device.supports("bfloat16") and device.supports("float16")
    assert device.peak_flops("bfloat16") == 313e12  # 910B3, as the simulated one calls itself
    device.synchronize()
    assert device.peak_memory() == 0
    block = torch.ones(2**20, device="npu")
    assert device.peak_memory() == block.nbytes == 2**22
    del block
    assert device.peak_memory() == 2**22 and torch.npu.memory_allocated() == 0
    select_device("npu", index=0)
    with pytest.raises(DeviceError, match="device=npu: number 8 asked for, but 8 found"):
        select_device("npu", index=8)


def test_random_state_is_the_device_s_own() -> None:
    device = select_device("npu")
    device.seed(5)
    state = device.rng_state()
    assert state.keys() == {"cpu", "npu"}
    drawn = [
        (
            torch.rand(4),
            torch.rand(4, device="npu").cpu(),
            torch.dropout(torch.ones(64, device="npu"), 0.5, True).cpu(),
        )
    ]
    device.seed(6)
    device.set_rng_state(state)
    torch.rand(99)  # the host's draws do not move the device's
    drawn.append(
        (
            drawn[0][0],
            torch.rand(4, device="npu").cpu(),
            torch.dropout(torch.ones(64, device="npu"), 0.5, True).cpu(),
        )
    )
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)


def test_a_memory_limit(config: Callable[..., RunConfig]) -> None:
    open_device(config("run", "npu", context={"max_device_memory": "2GB"}))
    assert torch.npu.get_per_process_memory_fraction() == 0.25  # of 8 GiB


@pytest.mark.parametrize("name", BITWISE)
def test_a_run_equals_the_cpu_s_bit_for_bit(start: Start, name: str) -> None:
    """Equal kernels in equal order: a difference in a bit would be a difference in what is
    computed.
    """
    npu, cpu = (start(device, device, **BITWISE[name]) for device in ("npu", "cpu"))
    assert_same_run(npu, cpu)
    rows = [row for row in rows_of(npu) if "loss" in row]
    assert len(rows) == 8
    if name == "sgd with clip":
        clipped = [row["grad_norm"] > 2.1 for row in rows]
        assert any(clipped) and not all(clipped)
    if name.startswith("fp16"):
        skipped = [row["skipped"] for row in rows]
        assert any(skipped) and not all(skipped)


def test_adamw(start: Start, config: Callable[..., RunConfig]) -> None:
    """On the CPU the fused kernel, which rounds otherwise, on the NPU torch's loop over lists of
    tensors (foreach).
    """
    npu, cpu = (rows_of(start(device, device)) for device in ("npu", "cpu"))
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [row.get(key) for row in npu] == [
            value and pytest.approx(value, rel=1e-6) for value in (row.get(key) for row in cpu)
        ]
    device = select_device("npu")
    settings = config("none", "npu")
    engine = Engine(settings, device)
    assert not any(group["fused"] for group in engine.optimizer.param_groups)
    weight = torch.nn.Parameter(torch.ones(2, device="npu"))
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="no fused optimizers"):  # the test is not blind
        torch.optim.AdamW([weight], fused=True).step()


def test_no_step_waits_for_the_host(start: Start) -> None:
    with counted() as waits:
        start("run", "npu")
    assert [number for number, found in enumerate(waits.steps) if found] == [0, 8]


def test_the_counter_of_waits_sees_every_thread() -> None:
    """Also in the threads of the backward pass."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            assert gradients[0].sum().item() == 3.0
            return gradients[0]

    device, x = select_device("npu"), torch.ones(3, device="npu", requires_grad=True)
    with counted() as waits:
        Reads.apply(x).sum().backward()
        [found] = waits.steps[0].elements()
        assert found.startswith("_local_scalar_dense waits for the device")
        for act in (
            lambda: torch.ones(3).to("npu"),
            lambda: torch.ones(3).to("npu", non_blocking=True),  # not pinned
            lambda: torch.empty(3).copy_(x.detach()),
            lambda: torch.tensor([1.0], device="npu"),
            lambda: x.detach().nonzero(),
        ):
            waits.steps.append(Counter())
            act()
            assert waits.steps[-1].total() == 1
        waits.steps.append(Counter())
        assert device.fetch(x.detach() * 2)() == [2.0] * 3
        device.pin(torch.ones(3)).to("npu", non_blocking=True)
        assert not waits.steps[-1]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_four_and_four_resumed_equal_eight_bit_for_bit(start: Start, recompute: str) -> None:
    """With dropout, whose masks are drawn on the device; recomputation draws them twice."""
    settings = {"model__dropout": 0.1, "train__recompute": recompute}
    whole = start("whole", "npu", **settings)
    start("parts", "npu", train__max_steps=4, **settings)
    generators = read_manifest(find_checkpoint(tmp := whole.parent / "parts") or tmp)["engine"][
        "rng"
    ]["torch"]
    assert [set(states) for states in generators] == [{"cpu", "npu"}]
    torch.manual_seed(999)
    assert_same_run(whole, start("parts", "npu", **settings))


def test_a_run_moves_between_the_devices(start: Start) -> None:
    whole = start("whole", "cpu", **SGD)
    start("parts", "npu", train__max_steps=4, **SGD)
    assert_same_run(whole, start("parts", "cpu", **SGD))


def test_evaluation(start: Start) -> None:
    folder = start("run", "npu", **SGD)
    results = []
    for device in ("npu", "cpu"):
        with sdpa_kernel(SDPBackend.MATH):
            evaluate(resolve_config(load_config(folder / "config.yaml", [f"device={device}"])))
        results.append(json.loads((folder / "evaluation.json").read_text())["validation_loss"])
    assert results[0] == results[1] == rows_of(folder)[-1]["validation_loss"]


def test_prediction(
    start: Start, gpt2_vocab_files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"vocab_file": str(gpt2_vocab_files[0]), "merge_file": str(gpt2_vocab_files[1])}
    folder = start("run", "npu", model__vocab_size=50257, data__tokenizer=files, train__max_steps=2)
    words = [
        "predict.prompt=Hello world",
        "predict.max_new_tokens=5",
        "predict.stop_at_end_of_text=false",
    ]
    printed = []
    for device in ("npu", "cpu"):
        capsys.readouterr()
        predict(resolve_config(load_config(folder / "config.yaml", [*words, f"device={device}"])))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "Generation: Hello world" in printed[0]


def test_greedy_tokens_of_prompts_of_different_lengths() -> None:
    """The CPU's are held against transformers elsewhere; here transformers would look for more of
    torch_npu than is simulated.
    """
    settings = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        seq_length=48,
        vocab_size=101,
        ffn_hidden_size=128,
        max_positions=48,
    )
    torch.manual_seed(0)
    model = GPT2(settings, PrecisionConfig(), vocab_rows=128)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # or a tied model of random weights repeats itself
    torch.nn.init.normal_(model.wpe.weight, std=2.0)
    rows = [
        np.random.default_rng(length).integers(0, 101, length).tolist() for length in (18, 1, 7)
    ]
    prompts = [Prompt(text="", ids=row, new_tokens=20) for row in rows]
    tokens = []
    for device in map(select_device, ("cpu", "npu")):
        decoder = Decoder(copy.deepcopy(model).to(device.torch_device), device, 3)
        tokens.append(
            [
                each.tokens
                for each in generate(decoder, prompts, PredictConfig(), seed=0, end_of_text=-1)
            ]
        )
    assert tokens[0] == tokens[1]


def test_a_trace(start: Start) -> None:
    traced = start("traced", "npu", profile={"start": 2, "memory": True}, train__max_steps=3, **SGD)
    assert_same_run(traced, start("plain", "npu", train__max_steps=3, **SGD))
    [path] = (traced / "profile").iterdir()
    with gzip.open(path) as file:
        names = [
            event["name"]
            for event in json.load(file)["traceEvents"]
            if event.get("cat") == "cpu_op"
        ]
    # of 2 micro batches, each with 2 norms a layer and the last
    assert names.count("aten::native_layer_norm") >= 2 * (2 * 2 + 1)


def test_an_optimizer_of_plain_tensors_and_of_sharded_ones(
    config: Callable[..., RunConfig],
) -> None:
    """torch's loops over lists take no list of both, which a CPU, where they are not the default,
    does not show.
    """
    device = select_device("npu")
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("npu", (1,))
        names = (
            "h.0.mlp.c_fc.weight",
            "h.0.mlp.c_proj.weight",
            "h.0.mlp.c_fc.bias",
            "h.0.mlp.c_proj.bias",
        )
        plain = {name: torch.nn.Parameter(torch.arange(4.0) + 1) for name in names}
        mixed = {
            name: torch.nn.Parameter(tensor.detach().to(device.torch_device))
            for name, tensor in plain.items()
        }
        for name in ("h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias"):
            mixed[name] = torch.nn.Parameter(
                distribute_tensor(mixed[name].detach(), mesh, [Shard(0)])
            )
        for tensors in (plain, mixed):
            optimizer = build_optimizer(tensors, config("none", "npu").optimizer, fused=False)
            for _ in range(3):
                optimizer.zero_grad()
                for tensor in tensors.values():
                    (tensor * tensor).sum().backward()
                optimizer.step()
        for name in names:
            whole = mixed[name].full_tensor() if isinstance(mixed[name], DTensor) else mixed[name]
            assert torch.allclose(whole.cpu(), plain[name], rtol=1e-6, atol=0.0), name
    finally:
        dist.destroy_process_group()

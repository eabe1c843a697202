"""The device record on a CPU, accelerators where they are. Products of few rows against the same in
float64, and the library that a CPU multiplies with.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.cluster.environment import Process
from common.device import device_index
from common.errors import ConfigError, DeviceError
from tests.tiny import tiny_config
from torch_gpt2 import checkpoint, products
from torch_gpt2.device import TorchDevice, check_support, select_device
from torch_gpt2.parallel.world import World
from torch_gpt2.products import Product, use_fastest_products


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    products._set_onednn(False)
    torch.backends.cuda.matmul.allow_tf32 = False


def test_cpu() -> None:
    device = select_device("cpu")
    assert device.communication_backend == "gloo" and device.name
    assert device.supports("bfloat16") and device.supports("float16")
    block = torch.ones(30_000_000)
    assert device.peak_memory() > block.nbytes
    assert device.peak_flops("float32") == 0.0, "a CPU's peak is not known, so there is no MFU"


def test_ranks_that_see_only_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as srun --gpus-per-task=1 starts them. A device that the launcher named is taken at its word."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "one")
    assert select_device("cuda", index=3, perhaps_alone=True).index == 0 and chosen == [0]
    with pytest.raises(DeviceError, match="device=cuda: number 3 asked for, but 1 found; start"):
        select_device("cuda", index=3)


@pytest.mark.parametrize(
    ("kind", "rounds", "words"),
    [("npu", True, "float16"), ("npu", False, ""), ("cuda", True, "TF32"), ("cuda", False, "")],
)
def test_rounded_products_of_float32_are_said(kind: str, rounds: bool, words: str, caplog: Any) -> None:
    """The first Ascend 910 has no bfloat16. Also behind a training on a processor where oneDNN multiplies."""
    torch.backends.cuda.matmul.allow_tf32 = rounds
    module = SimpleNamespace(is_bf16_supported=lambda **_: not rounds)
    device = TorchDevice(kind=kind, index=0, name="", module=module)
    products._set_onednn(True)
    for precision, said in (("float32", words and f"multiplies float32 matrices in {words}"), ("fp16", "")):
        caplog.clear()
        check_support(tiny_config(device="auto", precision=precision), device)
        assert said in caplog.text and bool(caplog.text) is bool(said)


def test_each_process_has_its_device() -> None:
    free = tiny_config(device="auto")
    fixed = tiny_config(device="auto", context={"device_id": 2})
    assert device_index(free, Process()) == 0 and device_index(fixed, Process()) == 2
    assert device_index(free, Process(rank=9, world_size=16, local_rank=1)) == 1
    assert device_index(free, Process(rank=9, world_size=16, local_rank=1, device_id=5)) == 5
    message = r"context\.device_id=2, but rank 9 was started for device 5; leave the key out"
    with pytest.raises(ConfigError, match=message):
        device_index(fixed, Process(rank=9, world_size=16, local_rank=1, device_id=5))


def test_a_gpu_compiles_where_triton_can_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, npu = (replace(select_device("cpu"), kind=kind) for kind in ("cuda", "npu"))
    found = {"triton": object(), "gcc": "/usr/bin/gcc"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))
    monkeypatch.setattr(shutil, "which", lambda name: found.get(name))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert not gpu.compiles  # a system's Python without its development package
    (tmp_path / "Python.h").touch()
    assert gpu.compiles and not npu.compiles and not select_device("cpu").compiles
    del found["gcc"]
    assert not gpu.compiles
    monkeypatch.setenv("CC", "gcc-12")
    found["gcc-12"] = "/usr/bin/gcc-12"
    assert gpu.compiles
    del found["triton"]
    assert not gpu.compiles


def test_devices_that_cannot_join_messages_and_products(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = dict.fromkeys(("sequence_parallel", "async_tensor_parallel"), True)
    train = {"max_steps": 4, "micro_batch_size": 2, "compile": True}
    config = tiny_config(ranks=2, parallel={"model_parallel": 2} | keys, train=train)
    with pytest.raises(DeviceError, match="and the key needs CUDA GPUs"):
        check_support(config, select_device("cpu"))
    monkeypatch.setattr(TorchDevice, "compiles", property(lambda device: False))
    device = replace(select_device("cpu"), kind="cuda", name="NVIDIA H100")
    with pytest.raises(DeviceError, match="NVIDIA H100 without Triton, a C compiler or Python"):
        check_support(config, device)


def test_without_memory_to_pin_a_snapshot_is_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("no host memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(checkpoint, "_BLOCK", 8)
    staging, tensors = checkpoint.Staging(), {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(9)}
    copies = {name: staging.copy(name, tensor) for name, tensor in tensors.items()}
    assert all((copies[name] == tensor.numpy()).all() for name, tensor in tensors.items())
    assert "no host memory" in caplog.text


IN, OUT = 96, (33, 64)


@pytest.mark.parametrize("cpu", ["as it is", "no oneDNN", "no narrow kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_equal_float64(cpu: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tolerance: float32's error of sums of 96 products; in bfloat16 that of the result, 2^-8 of the largest."""
    if cpu == "no oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif cpu == "no narrow kernels":
        monkeypatch.setattr(products, "has_kernel", lambda dtype: dtype == torch.float32)
    torch.manual_seed(0)
    weights = [torch.randn(out, IN).to(dtype) / 10 for out in OUT]
    biases, x = [torch.randn(out).to(dtype) for out in OUT], torch.randn(1, rows, IN).to(dtype)
    exact = x.double() @ torch.cat(weights).double().T
    unit = 2e-6 if dtype == torch.float32 else 2**-8
    for given in (biases, []):
        product = Product(weights, given, dtype)
        # native kernels of a narrow type take three times as long for a prompt
        assert cpu == "as it is" or product.weight.dtype == torch.float32
        found = product(x)
        expected = exact + torch.cat(given).double() if given else exact
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found.double() - expected).abs().max() <= unit * expected.abs().max()


def uses_onednn() -> bool:
    return bool(torch.backends.mkldnn.matmul.fp32_precision == "bf16")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "capability", "other", "chosen"),
    [("AMD EPYC 9654", "AVX512", 1.0, True), ("AMD EPYC 9654", "AVX512", 0.0, False),
     ("AMD EPYC 7763", "AVX2", 1.0, False), ("Intel(R) Xeon(R) Platinum 8480C", "AVX512", 1.0, False)],
)  # fmt: skip
def test_the_processors_of_all_ranks_decide(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: str, other: float, chosen: bool
) -> None:
    """And no time, which a busy machine would change. other: what the other one of two says."""
    monkeypatch.setattr(products, "processor_name", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "_rounds_nothing", lambda: True)
    monkeypatch.setattr(World, "sum", lambda _, *values: [value + other for value in values])
    use_fastest_products(select_device("cpu"), World(size=2))
    assert uses_onednn() is chosen


def test_products_that_round_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with matrix units would round like this, unless the setting is off."""

    def rounding(x: torch.Tensor, weight: torch.Tensor, bias: object = None) -> torch.Tensor:
        return (x.bfloat16() @ weight.bfloat16().t()).float() if uses_onednn() else x @ weight.t()

    assert products._rounds_nothing() or torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(F, "linear", rounding)
    assert not products._rounds_nothing()
    assert not uses_onednn(), "left as it was"

"""The device record on a CPU; accelerators where they are."""

import pytest
import torch

from common.errors import DeviceError
from torch_gpt2.device import select_device


def test_cpu() -> None:
    device = select_device("cpu")
    assert device.torch_device == torch.device("cpu") and device.communication_backend == "gloo"
    assert device.supports("bfloat16") and device.supports("float16")
    assert device.name
    device.synchronize()
    block = torch.ones(30_000_000)
    assert device.peak_memory() > block.nbytes
    # between a slow core without vector units and a large socket
    assert 1e9 < device.peak_flops("float32") < 1e14


def test_random_state_is_restored() -> None:
    device = select_device("cpu")
    device.seed(5)
    torch.rand(3)
    state = device.rng_state()
    first = torch.rand(4)
    device.seed(6)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_states_of_another_kind_of_device_are_left_out() -> None:
    device = select_device("cpu")
    device.set_rng_state({"other": "AAAA", **device.rng_state()})


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError, match=r"device=cuda: no usable GPU \(torch .*\); check nvidia-smi, or use device=cpu"):
        select_device("cuda")
    with pytest.raises(DeviceError, match="device=npu: torch_npu"):
        select_device("npu")


def test_first_accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    device = select_device("auto")
    assert device.kind == "cuda" and device.peak_flops("bfloat16") >= 0.0

"""Stands in for Ascend's adapter of PyTorch: registers the simulated device and its collectives."""

import _simulated_npu
import torch
import torch.distributed as dist
from torch import profiler

from . import adamw, npu

__all__ = ["adamw", "npu", "profiler"]

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend(
    "hccl",
    lambda store, rank, size, timeout: _simulated_npu.hccl(dist.ProcessGroupGloo(store, rank, size, timeout)),
    devices=["npu"],
)

"""Devices as data: the accelerators known by name, with the source of each figure, and what a run needs of any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

TERA = 1e12
GIB = 2**30

_NVIDIA = "NVIDIA data sheet, dense (without sparsity)"
_ASCEND = "Huawei product pages; peaks by chip bin as used by roofline tools, not measured here"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Peak rates of one device as the framework counts devices (one die of a two-die package)."""

    name: str
    matches: tuple[str, ...]
    """Parts of the device name that frameworks report, most special first in ACCELERATORS."""
    half_flops: float
    """Peak FLOP/s of bf16 and fp16 matrix products (fp16 alone on V100 and Ascend 910A)."""
    single_flops: float
    """Peak FLOP/s of float32 matrix products as the framework runs them by default."""
    bandwidth: float
    """Memory bytes per second."""
    memory: int
    """Bytes."""
    source: str


ACCELERATORS: tuple[Accelerator, ...] = tuple(
    Accelerator(
        name=name,
        matches=matches,
        half_flops=half * TERA,
        single_flops=single * TERA,
        bandwidth=band * TERA,
        memory=gib * GIB,
        source=source,
    )
    for name, matches, half, single, band, gib, source in (
        ("H200", ("H200",), 989.4, 66.9, 4.8, 141, _NVIDIA),
        ("H100 PCIe", ("H100 PCIe",), 756.0, 51.2, 2.0, 80, _NVIDIA),
        ("H100", ("H100",), 989.4, 66.9, 3.35, 80, _NVIDIA + ", SXM"),
        ("A100 80GB", ("A100-SXM4-80GB", "A100 80GB"), 312.0, 19.5, 2.039, 80, _NVIDIA),
        ("A100", ("A100", "A800"), 312.0, 19.5, 1.555, 40, _NVIDIA),
        ("V100 32GB", ("V100-SXM2-32GB",), 125.0, 15.7, 0.9, 32, _NVIDIA),
        ("V100", ("V100",), 125.0, 15.7, 0.9, 16, _NVIDIA + ", SXM2"),
        ("Ascend A3", ("910_93", "910C"), 400.0, 94.0, 1.6, 64, _ASCEND + "; one die of two"),
        ("Ascend 910B1", ("910B1",), 414.0, 94.0, 1.6, 64, _ASCEND),
        ("Ascend 910B2", ("910B2",), 376.0, 94.0, 1.6, 64, _ASCEND),
        ("Ascend 910B3", ("910B3",), 313.0, 78.0, 1.6, 64, _ASCEND),
        ("Ascend 910B4", ("910B4",), 280.0, 70.0, 0.8, 32, _ASCEND),
        (
            "Ascend 910A",
            ("910A", "910PremiumA", "910ProA", "Ascend910"),
            256.0,
            16.0,
            1.2,
            32,
            "Huawei Ascend 910 launch (2019): 256 TFLOP/s fp16",
        ),
    )
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The record of a device by the name its framework reports, or None when it is not known."""
    return next((a for a in ACCELERATORS if any(part.lower() in device_name.lower() for part in a.matches)), None)


class Device(Protocol):
    """What both backends' devices offer; everything else about a device stays inside its backend."""

    @property
    def kind(self) -> str:
        """cpu, cuda or npu."""
        ...

    @property
    def name(self) -> str:
        """What the framework or the operating system calls it."""
        ...

    @property
    def communication_backend(self) -> str:
        """gloo, nccl, hccl."""
        ...

    def supports(self, float_name: str) -> bool: ...
    def peak_flops(self, float_name: str) -> float:
        """Peak FLOP/s of matrix products in this type: from the table, or measured on a CPU; 0 when unknown."""
        ...

    def synchronize(self) -> None: ...
    def peak_memory(self) -> int:
        """Most bytes held so far."""
        ...

    def seed(self, seed: int) -> None: ...
    def rng_state(self) -> dict[str, Any]: ...
    def set_rng_state(self, state: dict[str, Any]) -> None: ...

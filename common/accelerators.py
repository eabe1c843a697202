"""Peak rates, memory and links of accelerators by name, with the source of each figure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import ConfigError

GIGA, TERA = 1e9, 1e12
GIB = 2**30

# GB/s within a server and to others, devices of a server
_HGX_H = (450.0, 50.0, 8)  # NVIDIA DGX H100 and H200 user guides: NVLink 900 GB/s both ways, a 400 Gb/s adapter a GPU
_H100_PCIE = (64.0, 25.0, 8)  # NVIDIA data sheet: PCIe 5 128 GB/s both ways; a 200 Gb/s adapter a GPU is assumed
_DGX_A = (300.0, 25.0, 8)  # NVIDIA DGX A100 user guide: NVLink 600 GB/s both ways, a 200 Gb/s adapter a GPU
# NVIDIA DGX-1 V100 user guide: NVLink 300 GB/s both ways, four 100 Gb/s adapters for eight GPUs
_DGX_V = (150.0, 6.25, 8)
# Liao et al., HPCA 2021: HCCS 30 GB/s among four, PCIe 32 GB/s between the fours, 100 Gb/s a device
_SERVER_910 = (30.0, 12.5, 8)
_ATLAS_A2 = (196.0, 25.0, 8)  # Huawei Atlas 800T A2: HCCS 392 GB/s both ways over seven links, 200 Gb/s a device
_ATLAS_A3 = (196.0, 25.0, 16)  # CloudMatrix384, arXiv 2506.12708: 196 GB/s one way and 200 Gb/s RDMA a die


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device of a run, as far as it is known."""

    kind: str
    """cpu, cuda or npu; auto for any accelerator."""
    name: str | None = None
    memory: int | None = None
    """Bytes of an accelerator; None for a CPU, and if they are not known."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Peak rates of one device as the framework counts devices (one die of a two-die package)."""

    name: str
    pattern: str
    """Regular expression for the device name in frameworks; the first match of ACCELERATORS counts."""
    half_flops: float
    """Peak FLOP/s of bf16 and fp16 matrix products (only fp16 on V100 and Ascend 910A)."""
    single_flops: float
    """Peak FLOP/s of float32 matrix products as the framework runs them by default."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory: int
    """Memory in bytes."""
    link: float
    """Bytes per second that a device sends to the others of its server, one way."""
    network: float
    """Bytes per second that a device sends to other servers, one way."""
    server_devices: int
    """Devices of the server to which link and network refer."""
    float8_flops: float = 0.0
    """Peak FLOP/s of float8 matrix products; 0 for a device without."""

    @property
    def family(self) -> str:
        """Devices by whose published steps a plan is judged: A100, H100 (Hopper), V100, Ascend."""
        return "H100" if self.float8_flops else self.name.split()[0]

    def float8_peak(self) -> float:
        """Return ``float8_flops``. Raises ConfigError for a device that multiplies no float8."""
        if not self.float8_flops:
            able = ", ".join(other.name for other in ACCELERATORS if other.float8_flops)
            raise ConfigError(
                f"precision=fp8: {self.name} has no products of float8; choose {able}, or set precision=bf16"
            )
        return self.float8_flops


_FLOAT8 = {"H200": 1978.9, "H100": 1978.9, "H100 PCIe": 1513.0}
"""TFLOP/s of float8 products, from NVIDIA's data sheets."""

ACCELERATORS: tuple[Accelerator, ...] = tuple(
    Accelerator(
        name=name,
        pattern=pattern,
        half_flops=half * TERA,
        single_flops=single * TERA,
        bandwidth=band * TERA,
        memory=gib * GIB,
        link=link * GIGA,
        network=network * GIGA,
        server_devices=devices,
        float8_flops=_FLOAT8.get(name, 0.0) * TERA,
    )
    for name, pattern, half, single, band, gib, (link, network, devices) in (
        # NVIDIA's data sheets, dense (without sparsity); H100 and V100 are SXM, and the H800 differs in its links
        ("H200", r"\bH200\b", 989.4, 66.9, 4.8, 141, _HGX_H),
        ("H100 PCIe", r"\bH100 PCIe\b", 756.0, 51.2, 2.0, 80, _H100_PCIE),
        ("H100", r"\bH[18]00\b", 989.4, 66.9, 3.35, 80, _HGX_H),
        ("A100 80GB", r"\bA[18]00\b.*80GB", 312.0, 19.5, 2.039, 80, _DGX_A),
        ("A100", r"\bA[18]00\b", 312.0, 19.5, 1.555, 40, _DGX_A),
        ("V100 32GB", r"\bV100\b.*32GB", 125.0, 15.7, 0.9, 32, _DGX_V),
        ("V100", r"\bV100\b", 125.0, 15.7, 0.9, 16, _DGX_V),
        # Huawei's product pages; peaks by chip bin as used by roofline tools, not measured here
        ("Ascend A3", r"910(_93|C)", 400.0, 94.0, 1.6, 64, _ATLAS_A3),  # one die of two
        ("Ascend 910B1", r"910B1", 414.0, 94.0, 1.6, 64, _ATLAS_A2),
        ("Ascend 910B2", r"910B2", 376.0, 94.0, 1.6, 64, _ATLAS_A2),
        ("Ascend 910B3", r"910B3", 313.0, 78.0, 1.6, 64, _ATLAS_A2),
        ("Ascend 910B4", r"910B4", 280.0, 70.0, 0.8, 32, _ATLAS_A2),
        # its launch (2019): 256 TFLOP/s fp16
        ("Ascend 910A", r"\b(Ascend ?)?910(A|B|PremiumA|Pro[AB])?$", 256.0, 16.0, 1.2, 32, _SERVER_910),
    )
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return a device's record by the name in its framework, or None if unknown."""
    return next((a for a in ACCELERATORS if re.search(a.pattern, device_name, flags=re.I)), None)


def require_accelerator(name: str) -> Accelerator:
    """Return the record for --accelerator, by its own name or the one in frameworks.

    Raises ConfigError naming the known devices.
    """
    known = {accelerator.name.lower(): accelerator for accelerator in ACCELERATORS}
    found = known.get(name.strip().lower()) or find_accelerator(name)
    if re.fullmatch(r"(ascend ?)?910B", name.strip(), flags=re.I):
        raise ConfigError(  # what the first generation calls itself, and people call the second
            f"--accelerator {name}: the chips of this name differ; choose Ascend 910B1, 910B2,"
            " 910B3 or 910B4 as npu-smi info shows it, or Ascend 910A for the first generation"
        )
    if found is None:
        raise ConfigError(
            f"--accelerator {name}: no figures are known for it; choose {', '.join(a.name for a in ACCELERATORS)}"
        )
    return found


def accelerator_flops(device_name: str, float_name: str) -> float:
    """Return the peak FLOP/s of matrix products in this type by the table; 0 for an unknown device."""
    accelerator = find_accelerator(device_name)
    if accelerator is None:
        return 0.0
    return accelerator.single_flops if float_name == "float32" else accelerator.half_flops

"""The table of accelerators: names as frameworks report them, and figures."""

import pytest

from common.accelerators import ACCELERATORS, Accelerator, find_accelerator, require_accelerator
from common.errors import ConfigError

FIRST_GENERATION = ("Ascend910A", "Ascend910", "Ascend910B", "Ascend910PremiumA", "Ascend910ProA", "Ascend910ProB")
REPORTED = {
    "H200": (989.4, "NVIDIA H200"),
    "H100": (989.4, "NVIDIA H100 80GB HBM3", "NVIDIA H800"),
    "H100 PCIe": (756.0, "NVIDIA H100 PCIe"),
    "A100 80GB": (312.0, "NVIDIA A100-SXM4-80GB", "NVIDIA A800-SXM4-80GB"),
    "A100": (312.0, "NVIDIA A100-SXM4-40GB"),
    "V100": (125.0, "Tesla V100-SXM2-16GB"),
    "V100 32GB": (125.0, "Tesla V100-PCIE-32GB"),
    # each of torch_npu's NpuVariables.cpp
    "Ascend 910A": (256.0, *FIRST_GENERATION),
    "Ascend 910B1": (414.0, "Ascend910B1"),
    "Ascend 910B2": (376.0, "Ascend910B2", "Ascend910B2C"),
    "Ascend 910B3": (313.0, "Ascend910B3"),
    "Ascend 910B4": (280.0, "Ascend910B4", "Ascend910B4-1"),
    "Ascend A3": (400.0, *(f"Ascend910_{n}" for n in (9362, 9372, 9381, 9382, 9391, 9392))),
}
"""Of each accelerator, TFLOP/s of products in half precision, and what it calls itself."""


@pytest.mark.parametrize("each", ACCELERATORS, ids=lambda each: each.name)
def test_every_one_is_known_and_has_figures(each: Accelerator) -> None:
    half_tflops, *reported = REPORTED[each.name]
    assert [name for name in reported if find_accelerator(str(name)) is not each] == []
    assert each.half_flops == float(half_tflops) * 1e12
    assert 1e12 < each.single_flops < each.half_flops < 1e16 and each.half_flops > 1e13
    assert 5e11 < each.bandwidth < 1e13 and 16 * 2**30 <= each.memory <= 200 * 2**30
    assert each.float8_flops in (0.0, pytest.approx(2 * each.half_flops, rel=1e-3))
    assert 1e9 < each.network < each.link < each.bandwidth
    for name in (each.name, each.name.upper()):
        assert require_accelerator(name) is each


@pytest.mark.parametrize("reported", ["NVIDIA GeForce RTX 9090", "NVIDIA RTX A1000", "NVIDIA H20", "Ascend310P3"])
def test_unknown_devices_have_no_figures(reported: str) -> None:
    assert find_accelerator(reported) is None
    with pytest.raises(ConfigError, match=f"{reported}: no figures are known for it; choose H200, H100 PCIe, .*, A"):
        require_accelerator(reported)


@pytest.mark.parametrize("name", ["910B", "ascend 910b", "Ascend910B"])
def test_a_name_of_two_generations_is_asked_for(name: str) -> None:
    """The first one calls a chip of itself so, and people the chips of Atlas A2."""
    with pytest.raises(ConfigError, match=f"--accelerator {name}: .*910B3 or 910B4.*910A for the"):
        require_accelerator(name)

"""The table of accelerators: names as frameworks report them, and figures with a source."""

import pytest

from common.accelerators import ACCELERATORS, Accelerator, find_accelerator, require_accelerator
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("reported", "name", "half_tflops"),
    [
        ("NVIDIA H200", "H200", 989.4),
        ("NVIDIA H100 80GB HBM3", "H100", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312.0),
        ("NVIDIA A100-SXM4-40GB", "A100", 312.0),
        ("Tesla V100-SXM2-16GB", "V100", 125.0),
        ("Ascend910A", "Ascend 910A", 256.0),
        ("Ascend910B1", "Ascend 910B1", 414.0),
        ("Ascend910B2C", "Ascend 910B2", 376.0),
        ("Ascend910B3", "Ascend 910B3", 313.0),
        ("Ascend910B4", "Ascend 910B4", 280.0),
        # with those below, each of torch_npu's NpuVariables.cpp
        ("Ascend910B2", "Ascend 910B2", 376.0),
        ("Ascend910B4-1", "Ascend 910B4", 280.0),
        *((f"Ascend910_{n}", "Ascend A3", 400.0) for n in (9362, 9372, 9381, 9382, 9391, 9392)),
        *((f"Ascend910{n}", "Ascend 910A", 256.0) for n in ("", "B", "PremiumA", "ProA", "ProB")),
        ("NVIDIA A800-SXM4-80GB", "A100 80GB", 312.0),
        ("Tesla V100-PCIE-32GB", "V100 32GB", 125.0),
        ("NVIDIA H800", "H100", 989.4),
    ],
)
def test_devices_are_known_by_the_name_they_report(reported, name, half_tflops) -> None:
    found = find_accelerator(reported)
    assert found is not None and found.name == name
    assert found.half_flops == half_tflops * 1e12


@pytest.mark.parametrize("reported", ["NVIDIA GeForce RTX 9090", "NVIDIA RTX A1000", "NVIDIA H20", "Ascend310P3"])
def test_unknown_devices_have_no_figures(reported: str) -> None:
    assert find_accelerator(reported) is None


@pytest.mark.parametrize("each", ACCELERATORS, ids=lambda each: each.name)
def test_every_figure_has_a_source_and_a_sane_size(each: Accelerator) -> None:
    assert each.source and each.link_source
    assert 1e12 < each.single_flops < each.half_flops < 1e16 and each.half_flops > 1e13
    assert 5e11 < each.bandwidth < 1e13 and 16 * 2**30 <= each.memory <= 200 * 2**30
    assert each.float8_flops in (0.0, pytest.approx(2 * each.half_flops, rel=1e-3))
    assert 1e9 < each.network < each.link < each.bandwidth
    for name in (each.name, each.name.upper()):
        assert require_accelerator(name) is each


def test_a_device_without_figures_is_refused_with_those_that_have() -> None:
    message = "abacus: no figures are known for it; choose H200, H100 PCIe, .*, Ascend 910A$"
    with pytest.raises(ConfigError, match=f"--accelerator {message}"):
        require_accelerator("abacus")


@pytest.mark.parametrize("name", ["910B", "ascend 910b", "Ascend910B"])
def test_a_name_of_two_generations_is_asked_for(name: str) -> None:
    """The first one calls a chip of itself so, and people the chips of Atlas A2."""
    with pytest.raises(ConfigError, match=f"--accelerator {name}: .*910B3 or 910B4.*910A for the"):
        require_accelerator(name)

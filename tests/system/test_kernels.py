"""The numerical tests with the kernels of other processors: sums in other orders, bf16 products
without instructions for them.

No setting goes beyond what this processor has. On one with AVX512_BF16 and without AMX the setting
AVX512_CORE_BF16 is the default. Torch heeds all three variables. MindSpore heeds only oneDNN's,
and only in its products: one kind of them has other kernels below AVX-512, and all have below AVX2.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_scripts import ROOT

TORCH = (
    "tests/torch_gpt2/parallel",
    *(f"tests/torch_gpt2/test_{name}.py" for name in ("engine", "int8", "loss", "model", "npu", "train")),
)
MINDSPORE = (
    "tests/mindformers_gpt2/parallel",
    *(f"tests/mindformers_gpt2/test_{name}.py" for name in ("engine", "model")),
)
BOTH = ("tests/parity",)
ATEN, ONEDNN, MKL = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"
SETTINGS: dict[tuple[str, str], tuple[str, ...]] = {
    (ATEN, "default"): TORCH + BOTH,
    (ATEN, "avx2"): TORCH + BOTH,
    (ONEDNN, "SSE41"): MINDSPORE + BOTH,
    (ONEDNN, "AVX2"): TORCH + MINDSPORE + BOTH,
    (ONEDNN, "AVX512_CORE"): TORCH + BOTH,
    (ONEDNN, "AVX512_CORE_BF16"): TORCH + BOTH,
    (MKL, "COMPATIBLE"): TORCH + BOTH,
}


@pytest.mark.campaign
@pytest.mark.parametrize(("variable", "value"), SETTINGS)
def test_the_bounds_hold_with_other_kernels(tmp_path: Path, variable: str, value: str) -> None:
    """With a cache of compiled graphs of their own. Torch's usual one would hand out those of other kernels."""
    changes = {variable: value, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, *["-m", "pytest", "--all", "-q", "-p", "no:cacheprovider"]]
    command += SETTINGS[variable, value]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | changes, capture_output=True, text=True)
    print(f"\n{variable}={value}: {found.stdout.splitlines()[-1]}")
    assert found.returncode == 0, found.stdout

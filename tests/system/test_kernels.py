"""The numerical tests with the kernels of other processors: sums in other orders, bf16 products without instructions for them.

No setting goes beyond what this processor has. Of the libraries that read them, torch has all three; MindSpore has oneDNN alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = [
    *(f"tests/torch_gpt2/test_{name}.py" for name in ("change_of_layout", "data_parallel", "deepspeed", "engine", "layouts", "loss")),
    *(f"tests/torch_gpt2/test_{name}.py" for name in ("model", "npu", "strategies", "train")),
]
BOTH = [*(f"tests/mindformers_gpt2/test_{name}.py" for name in ("engine", "layouts", "loss", "model")), "tests/parity"]
ATEN, ONEDNN, MKL = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (ATEN, "default"),
        (ATEN, "avx2"),
        (ONEDNN, "AVX2"),
        (ONEDNN, "AVX512_CORE"),
        (ONEDNN, "AVX512_CORE_BF16"),
        (MKL, "COMPATIBLE"),
    ],
)
def test_the_bounds_hold_with_other_kernels(variable: str, value: str) -> None:
    files = TORCH + BOTH if variable == ONEDNN else [*TORCH, "tests/parity"]
    command = [sys.executable, "-m", "pytest", "--all", "-q", "-p", "no:cacheprovider", *files]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: value}, capture_output=True, text=True, check=False)
    print(f"\n{variable}={value}: {found.stdout.splitlines()[-1]}")
    assert found.returncode == 0, found.stdout

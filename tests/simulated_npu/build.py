"""Tells a child process how to find the simulated NPU, which is built at the first call.

    subprocess.run([...], env=os.environ | npu_variables())

In that process ``import torch_npu`` registers a device npu with 8 places in host memory, and hccl over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.native_library import built

_HERE = Path(__file__).resolve().parent


def npu_variables() -> dict[str, str]:
    """Environment variables with which a child process finds torch_npu. Raises CannotBuild."""
    libraries = ("c10", "torch", "torch_cpu", "torch_python")
    module = built(_HERE / "npu.cpp", "_simulated_npu", libraries)
    places = [_HERE / "packages", module.parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, places))}

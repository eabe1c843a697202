"""Builds the simulated NPU once for each torch and source, and tells a child process how to find
it.

    subprocess.run([...], env=os.environ | npu_variables())

In that process ``import torch_npu`` registers a device npu with 8 places in host memory, and hccl
over gloo.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_NAME = "_simulated_npu"


class CannotBuild(Exception):
    """A compiler is missing, or what it needs of Python or torch is not installed. The message says
    which.
    """


def npu_variables() -> dict[str, str]:
    """Environment variables with which a child process finds torch_npu. Builds at the first call.
    Raises CannotBuild.
    """
    places = [_HERE / "packages", _built(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, places))}


def _built() -> Path:
    """The folder of the compiled module: among torch's other extensions, named by all that it
    depends on.
    """
    import torch
    from torch.utils.cpp_extension import get_default_build_root, include_paths, library_paths

    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler: c++ is not on PATH, and CXX names none; install g++")
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise CannotBuild(f"no {python}/Python.h; install Python's headers (python3-dev)")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    words = [
        *(compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared"),
        *(
            "-DUSE_DISTRIBUTED",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            f"-DTORCH_EXTENSION_NAME={_NAME}",
        ),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in [*include_paths(), python]),
        str(_HERE / "npu.cpp"),
        *(f"-L{path}" for path in library_paths()),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]
    files = [*sorted(_HERE.glob("*.[ch]pp")), Path(__file__)]
    versions = [torch.__version__, torch.version.git_version, suffix]
    digest = hashlib.sha256(
        repr(versions).encode() + b"".join(path.read_bytes() for path in files)
    ).hexdigest()[:16]
    folder = (
        Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        / f"gpt2_simulated_npu_{digest}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"{_NAME}{suffix}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run want it at the same time
        if not module.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / module.name
                subprocess.run([*words, "-o", str(made)], check=True)
                made.replace(module)
    return folder

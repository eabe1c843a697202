"""Builds libraries that replace a device, once for each torch and source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path


class CannotBuild(Exception):
    """A compiler is missing, or what it needs of Python or torch is not installed. The message says which."""


def built(source: Path, name: str, libraries: Sequence[str]) -> Path:
    """Return the path of a C++ file as a shared library, which Python can import by ``name``.

    It lies in a folder of its own among torch's other extensions, named by all that it depends on.
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
        *("-DUSE_DISTRIBUTED", "-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={name}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in [*include_paths(), python]),
        str(source),
        *(word for path in library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *(f"-l{library}" for library in libraries),
    ]
    files = [*sorted(source.parent.glob("*.[ch]pp")), Path(__file__)]
    # the library looks for torch's in the folder of the environment that built it
    versions = [torch.__version__, torch.version.git_version, suffix, *library_paths()]
    text = repr(versions).encode() + b"".join(path.read_bytes() for path in files)
    digest = hashlib.sha256(text).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    folder = Path(root) / f"gpt2{name}_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}{suffix}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run want it at the same time
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / library.name
                subprocess.run([*words, "-o", str(made)], check=True)
                made.replace(library)
    return library

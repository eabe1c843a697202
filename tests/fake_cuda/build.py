"""Tells a child process (``env=os.environ | cuda_variables()``) how to have a CUDA device for fake tensors."""

from __future__ import annotations

from pathlib import Path

from tests.native_library import CannotBuild, built


def cuda_variables() -> dict[str, str]:
    """Environment variables of the child process. Raises CannotBuild."""
    import torch

    if torch.version.cuda is not None:
        raise CannotBuild("this torch is built for CUDA and has a device of its own; install +cpu")
    library = built(Path(__file__).with_name("cuda.cpp"), "_fake_cuda", ("c10", "torch_cpu"))
    return {"LD_PRELOAD": str(library)}

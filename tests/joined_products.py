"""Asynchronous tensor parallelism without GPUs: torch's own fallbacks compute the joined products.

``watch`` counts them. The compiler joins nothing unless it finds NCCL, and the fallbacks are not registered for a CPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FALLBACKS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@contextmanager
def watch(path: Path) -> Iterator[None]:
    """Write the number of calls of each operator to ``path``."""
    import torch
    from torch import library
    from torch.distributed import _symmetric_memory

    import torch_gpt2.device

    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        fallback = getattr(_symmetric_memory, f"_{name}_fallback")

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return fallback(*args, **kwargs)

        return call

    for name in FALLBACKS:
        library.impl(f"symm_mem::{name}", "CPU", counted(name))
    with (
        _symmetric_memory._test_mode(),
        mock.patch.object(torch.distributed, "is_nccl_available", lambda: True),
        mock.patch.object(torch_gpt2.device, "_check_async_tensor_parallel"),
    ):
        yield
    path.write_text(json.dumps(calls))

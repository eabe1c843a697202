"""Trace of some steps by torch's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from common.parallel.run import Run
from common.training.profile import Trace, compress
from torch_gpt2.device import TorchDevice


def make_trace(config: Run, device: TorchDevice) -> Trace:
    """Return a trace of operators on the host and kernels on the device.

    With profile.memory it also records allocations.
    """
    return partial(_trace, device, config.profile.memory)


@contextmanager
def _trace(device: TorchDevice, memory: bool, path: Path) -> Iterator[None]:
    profiler = device.profiler.profile(
        activities=device.profiler.supported_activities(), record_shapes=True, profile_memory=memory
    )
    profiler.start()
    try:
        yield
        device.synchronize()
    finally:
        profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        compress(plain, path)

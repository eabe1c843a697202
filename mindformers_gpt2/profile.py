"""Trace of some steps by MindSpore's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mindspore import profiler

from common.errors import ConfigError
from common.log import LOG
from common.parallel.run import Run
from common.training.profile import Trace, compress
from mindformers_gpt2.device import MindSporeDevice


def make_trace(config: Run, device: MindSporeDevice) -> Trace:
    """Return a trace of operators on the host and kernels on the device.

    With profile.memory it also records allocations. MindSpore's own folder of tables, for
    MindStudio Insight, stays beside the trace. Raises ConfigError for allocations on a CPU.
    """
    if config.profile.memory and device.kind == "cpu":
        raise ConfigError(
            "profile.memory=true: MindSpore records allocations only on accelerators; leave it out"
            " on a CPU"
        )
    return partial(_trace, device, config.profile.memory)


@contextmanager
def _trace(device: MindSporeDevice, memory: bool, path: Path) -> Iterator[None]:
    kinds = profiler.ProfilerActivity
    activities = [kinds.CPU] + (
        [kinds.NPU] if device.kind == "npu" else [kinds.GPU] if device.kind == "cuda" else []
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".json.gz")
    session = profiler.profile(
        activities=activities,
        profile_memory=memory,
        start_profile=False,
        on_trace_ready=profiler.tensorboard_trace_handler(str(path.parent), worker_name=name),
    )
    session.start()
    try:
        yield
        device.synchronize()
    finally:
        session.stop()  # writes the folder NAME_PROCESS_TIME_ascend_ms, on a CPU too
    written = sorted(
        path.parent.glob(f"{name}_*/ASCEND_PROFILER_OUTPUT/trace_view.json"),
        key=lambda file: file.stat().st_mtime,
    )
    if written:
        compress(written[-1], path)
    else:
        LOG.warning(
            f"profile: MindSpore left no trace_view.json under {path.parent}; its folder may hold"
            " what it recorded"
        )

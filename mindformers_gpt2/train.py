"""Train or finetune as one rank of the run, from a resolved config to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mindspore import profiler

from common.backends import Inputs
from common.cluster.environment import ALONE, Process
from common.errors import ConfigError
from common.log import LOG
from common.parallel.run import Run
from common.resolve.engine_checks import compiled_mode
from common.run_folder import owned_folder
from common.training.data import open_data
from common.training.recording import open_recorder
from common.training.session import agree_on_start
from common.training.steps import compress
from mindformers_gpt2.base_engine import BaseEngine
from mindformers_gpt2.checkpoint import Recorder
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.parallel.world import open_world
from mindformers_gpt2.semi_auto.engine import SemiAutoEngine


@contextmanager
def trace(device: MindSporeDevice, memory: bool, path: Path) -> Iterator[None]:
    """Write a trace of operators on the host and kernels on the device. memory: also of allocations.

    MindSpore's own folder of tables, for MindStudio Insight, stays beside the trace.
    """
    kinds = profiler.ProfilerActivity
    activities = [kinds.CPU] + ([kinds.NPU] if device.kind == "npu" else [kinds.GPU] if device.kind == "cuda" else [])
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
        path.parent.glob(f"{name}_*/ASCEND_PROFILER_OUTPUT/trace_view.json"), key=lambda file: file.stat().st_mtime
    )
    if written:
        compress(written[-1], path)
    else:
        LOG.warning(
            f"profile: MindSpore left no trace_view.json under {path.parent}; its folder may hold what it recorded"
        )


ENGINES: dict[bool, type[BaseEngine]] = {False: Engine, True: SemiAutoEngine}
"""Engine classes by whether MindSpore's compiler splits the graph."""


def train(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    device, corpus = inputs.device, inputs.corpus
    assert corpus is not None
    if config.profile.memory and device.kind == "cpu":
        raise ConfigError(
            "profile.memory=true: MindSpore records allocations only on accelerators; leave it out on a CPU"
        )
    compiled = compiled_mode(config, device.kind)
    reads_all = compiled and config.parallel.full_batch is not False
    data = open_data(
        config,
        corpus,
        rank=0 if reads_all else config.topology.coordinates(process.rank).data,
        ranks=1 if reads_all else None,
        whole_validation=compiled,
    )
    with owned_folder(Path(config.output_dir), active=process.rank == 0), open_world(config, process, device) as world:
        session = agree_on_start(config, data, world, inputs.checkpoint)
        engine = ENGINES[compiled](config, device, world, session.manifest_extra)
        engine.recorder = open_recorder(Recorder, config, world.topology, world.rank)
        if engine.recorder is not None and isinstance(engine, SemiAutoEngine):
            raise ConfigError(
                "parallel.parallel_mode: steps that MindSpore's compiler splits cannot be recorded;"
                " set parallel.parallel_mode=0"
            )
        session.train(engine, device, partial(trace, device, config.profile.memory))

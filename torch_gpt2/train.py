"""Train or finetune as one rank of the run, from a resolved config to a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from common.backends import Inputs
from common.cluster.environment import ALONE, Process
from common.errors import ConfigError
from common.parallel.run import Run
from common.run_folder import owned_folder
from common.training.data import open_data
from common.training.engine import Engine
from common.training.recording import open_recorder
from common.training.session import agree_on_start
from common.training.steps import compress
from torch_gpt2.base_engine import BaseEngine
from torch_gpt2.checkpoint import Recorder
from torch_gpt2.deepspeed.engine import DeepSpeedEngine
from torch_gpt2.device import TorchDevice
from torch_gpt2.engine import Engine as NativeEngine
from torch_gpt2.parallel.world import open_world
from torch_gpt2.products import use_fastest_products


@contextmanager
def trace(device: TorchDevice, memory: bool, path: Path) -> Iterator[None]:
    """Write a trace of operators on the host and kernels on the device. memory: also of allocations."""
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


ENGINES: dict[str, type[BaseEngine]] = {"native": NativeEngine, "deepspeed": DeepSpeedEngine}


def train(
    config: Run, inputs: Inputs, process: Process = ALONE, *, engines: Mapping[str, Callable[..., Engine]] = ENGINES
) -> None:
    """Train. engines: constructors like BaseEngine's, by the engine's name in the config."""
    device, corpus = inputs.device, inputs.corpus
    assert corpus is not None
    data = open_data(config, corpus, rank=config.topology.coordinates(process.rank).data)
    with owned_folder(Path(config.output_dir), active=process.rank == 0), open_world(config, process, device) as world:
        if engines is ENGINES:  # a peer computes as its own users do
            use_fastest_products(device, world)
        session = agree_on_start(config, data, world, inputs.checkpoint)
        engine = engines[config.engine](config, device, process, world, session.manifest_extra)
        engine.recorder = open_recorder(Recorder, config, world.topology, world.rank)
        if engine.recorder is not None and not isinstance(engine, NativeEngine):
            raise ConfigError(
                f"engine={config.engine}: its steps cannot be recorded; set engine=native, which"
                " has the model and the layouts of both"
            )
        session.train(engine, device, partial(trace, device, config.profile.memory))

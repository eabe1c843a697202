"""Train or finetune as one rank of the run, from a resolved config to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from common.cluster.environment import ALONE, Process
from common.errors import ConfigError
from common.inputs import Inputs
from common.parallel.run import Run
from common.resolve.parallel_mode import compiled_mode
from common.run_folder import owned_folder
from common.training.data import open_data
from common.training.recording import open_recorder
from common.training.session import agree_on_start
from mindformers_gpt2.base_engine import BaseEngine
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.parallel.world import open_world
from mindformers_gpt2.profile import make_trace
from mindformers_gpt2.recording import Recorder
from mindformers_gpt2.semi_auto.engine import SemiAutoEngine

ENGINES: dict[bool, type[BaseEngine]] = {False: Engine, True: SemiAutoEngine}
"""Engine classes by whether MindSpore's compiler splits the graph."""


def train(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    device, corpus = inputs.device, inputs.corpus
    assert corpus is not None
    trace = make_trace(config, device)
    compiled = compiled_mode(config, device.kind)
    reads_all = compiled and config.parallel.full_batch is not False
    data = open_data(
        config,
        corpus,
        rank=0 if reads_all else config.topology.coordinates(process.rank).data,
        ranks=1 if reads_all else None,
        whole_validation=compiled,
    )
    with (
        owned_folder(Path(config.output_dir), active=process.rank == 0),
        open_world(config, process, device) as world,
    ):
        session = agree_on_start(config, data, world, inputs.checkpoint)
        engine = ENGINES[compiled](config, device, world, session.manifest_extra)
        recorder = open_recorder(Recorder, config, world.topology, world.rank)
        if isinstance(engine, Engine):
            engine.recorder = recorder
        elif recorder is not None:
            raise ConfigError(
                "parallel.parallel_mode: steps that MindSpore's compiler splits cannot be recorded;"
                " set parallel.parallel_mode=0"
            )
        session.train(engine, device, trace)

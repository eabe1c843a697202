"""Train or finetune, from a resolved config to a checkpoint: this process is one rank of the
run.
"""

from __future__ import annotations

from pathlib import Path

from common.cluster.environment import ALONE, Process
from common.parallel.resolved_run import ResolvedRun
from common.planner.room import check_memory
from common.run_folder import owned_folder
from common.training.data import open_data
from common.training.session import agree_on_start
from torch_gpt2.base_engine import BaseEngine
from torch_gpt2.deepspeed.engine import DeepSpeedEngine
from torch_gpt2.device import open_device
from torch_gpt2.engine import Engine
from torch_gpt2.parallel.world import open_world
from torch_gpt2.profile import make_trace

ENGINES: dict[str, type[BaseEngine]] = {"native": Engine, "deepspeed": DeepSpeedEngine}


def train(config: ResolvedRun, process: Process = ALONE) -> None:
    device = open_device(config, process)
    check_memory(config, process, device, training=True)
    at = config.topology.coordinates(process.rank)
    data, config = open_data(config, rank=at.data)
    with (
        owned_folder(Path(config.output_dir), active=process.rank == 0),
        open_world(config, process, device) as world,
    ):
        session = agree_on_start(config, data, world)
        engine = ENGINES[config.engine](config, device, process, world, session.manifest_extra)
        session.train(engine, device, make_trace(config, device))

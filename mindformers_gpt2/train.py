"""Train or finetune, from a resolved config to a checkpoint: this process is one rank of the run."""

from __future__ import annotations

from pathlib import Path

from common import run_folder
from common.cluster.environment import ALONE, Process
from common.config.schema import RunConfig
from common.log import LOG
from common.parallel.topology import Topology
from common.resolve.parallel_mode import compiled_mode
from common.training import setup
from common.training.agreement import check_everywhere
from common.training.checkpoint_writer import CheckpointWriter
from common.training.data import open_data
from common.training.loop import Run, train as train_loop
from common.training.metrics import MetricsWriter
from common.training.profile import ProfileWindow
from common.training.state import TrainState
from mindformers_gpt2.checkpoint import load_weights, restore
from mindformers_gpt2.data import training_batches
from mindformers_gpt2.device import open_device
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.model import initialise
from mindformers_gpt2.parallel.layout import build_parts
from mindformers_gpt2.parallel.world import open_world
from mindformers_gpt2.profile import make_trace
from mindformers_gpt2.semi_auto.engine import SemiAutoEngine


def train(config: RunConfig, process: Process = ALONE) -> None:
    device = open_device(config, process)
    setup.check_memory(config, process, device, training=True)
    at = Topology.from_config(config.parallel).coordinates(process.rank)
    compiled = compiled_mode(config, device.kind)
    whole = compiled and config.parallel.full_batch is not False
    data, config = open_data(config, rank=0 if whole else at.data, ranks=1 if whole else None, whole_validation=compiled)
    folder = Path(config.output_dir)
    writes = process.rank == 0
    with run_folder.owned_folder(folder, active=writes), open_world(config, process, device) as world:
        start = world.decide_on_rank_0(lambda: setup.where_to_start(config, data))
        check_everywhere(world, start.resume or start.weights)
        holders = world.gather(run_folder.holder(folder))
        if len(set(holders)) > 1 and writes:
            LOG.warning(f"output_dir={folder} is another folder on some hosts: share it, or they cannot take the run up again")
        record = {"tokenizer": data.tokenizer_record, "data": data.fingerprint, "samples_per_epoch": data.samples_per_epoch}
        state = TrainState(sample_hash=data.fingerprint)
        engine = (
            SemiAutoEngine(config, device, world, record)
            if compiled
            else Engine(build_parts(config, device, world)[0], config, device, record, world)
        )
        device.seed(config.seed)
        if start.resume is not None:
            state = restore(engine, start.resume)
        elif start.weights is not None:
            load_weights(engine.master.tensors, config.model, start.weights, engine.pieces)
        else:
            initialise(engine.master.tensors, config, engine.pieces)
        world.meet()  # with ZeRO the next line communicates
        engine.master.write_back()
        if not config.parallel.zero_stage:
            norms = {"norm of the weights": engine.norm_of_weights()}
            if start.resume is not None:
                norms["norm of the optimizer's state"] = engine.norm_of_moments()
            world.require_equal(norms, world.replicas)
        world.require_equal(engine.identity(state))
        profile = ProfileWindow(config, state, make_trace(config, device), rank=process.rank)
        setup.announce(config, data, device.name, start, state)
        if writes:
            setup.begin(config, start)
        with (
            CheckpointWriter(
                folder / "checkpoints",
                keep=config.checkpoint.keep,
                asynchronous=config.checkpoint.asynchronous,
                active=writes,
                patience=config.runtime.stall_limit,
                require_folder=run_folder.keeper(folder, holders, process.rank),
            ) as checkpoints,
            MetricsWriter(folder, step=state.step, tensorboard=config.logging.tensorboard, active=writes) as metrics,
            training_batches(data, state) as batches,
            profile,
        ):
            run = Run(
                config=config,
                engine=engine,
                batches=batches,
                validation=data.validation,
                checkpoints=checkpoints,
                metrics=metrics,
                peak_flops=device.peak_flops(config.precision.compute) * world.size,
                resumed=start.in_folder(folder),
                samples_per_epoch=data.samples_per_epoch,
                peak_memory=device.peak_memory,
                profile=profile,
                agree=world.all_reduce_max,
            )
            summary = train_loop(run, state)
        if writes:
            setup.finish(config, state, summary, peak_memory=device.peak_memory())

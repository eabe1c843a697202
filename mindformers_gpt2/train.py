"""Train or finetune on one device, from a resolved config to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from common.cluster.environment import ALONE, Process
from common.config.schema import RunConfig
from common.training import setup
from common.training.checkpoint import CheckpointWriter
from common.training.data import open_data
from common.training.loop import Run, train as train_loop
from common.training.metrics import MetricsWriter
from common.training.profile import ProfileWindow
from common.training.state import TrainState
from mindformers_gpt2.checkpoint import load_weights, restore
from mindformers_gpt2.data import training_batches
from mindformers_gpt2.device import open_device
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.model import build_model, initialise
from mindformers_gpt2.profile import make_trace


def train(config: RunConfig, process: Process = ALONE) -> None:
    device = open_device(config, process)
    data, config = open_data(config)
    folder = Path(config.output_dir)
    with setup.owned_folder(folder):
        start = setup.where_to_start(config, data)
        model = build_model(config, device)
        record = {"tokenizer": data.tokenizer_record, "data": data.fingerprint, "samples_per_epoch": data.samples_per_epoch}
        engine = Engine(model, config, device, record)
        device.seed(config.seed)
        state = TrainState(sample_hash=data.fingerprint)
        if start.resume is not None:
            state = restore(engine, start.resume)
        elif start.weights is not None:
            load_weights(engine.master.tensors, config.model, start.weights)
        else:
            initialise(engine.master.tensors, config)
        engine.master.write_back()
        profile = ProfileWindow(config, state, make_trace(config, device))
        setup.announce(config, data, device.name, start, state)
        setup.begin(config, start)
        with (
            CheckpointWriter(
                folder / "checkpoints", keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
            ) as checkpoints,
            MetricsWriter(folder, step=state.step, tensorboard=config.logging.tensorboard) as metrics,
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
                peak_flops=device.peak_flops(config.precision.compute),
                taken_up=start.in_folder(folder),
                samples_per_epoch=data.samples_per_epoch,
                peak_memory=device.peak_memory,
                profile=profile,
            )
            summary = train_loop(run, state)
        setup.finish(config, state, summary, peak_memory=device.peak_memory())

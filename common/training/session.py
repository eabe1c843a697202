"""Training run on one rank, for both backends: agreement of the ranks, then all steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import run_folder
from common.checkpoint.folders import find_checkpoint
from common.checkpoint.state import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.config.load import flatten
from common.device import Device, resident_bytes
from common.errors import StopRequested
from common.log import LOG
from common.parallel.run import Run
from common.parallel.world import WorldBase
from common.training.agreement import check_everywhere
from common.training.data import TrainingData
from common.training.engine import Engine
from common.training.loop import train as train_loop
from common.training.memory import record_memory
from common.training.metrics import MetricsWriter
from common.training.opened_checkpoint import Checkpoint
from common.training.profile import ProfileWindow, Trace
from common.training.rewind import RewindNeeded, checkpoint_before, go_back
from common.training.saving import write_epoch_models
from common.training.start import Start, record_start, where_to_start
from common.training.steps import TrainingParts
from common.training.summary import announce, draw, finish
from common.training.trackers import Trackers


@dataclass(kw_only=True)
class Session:
    """State that all ranks agree on before an engine is created. Rank 0 holds the run folder."""

    config: Run
    data: TrainingData
    world: WorldBase
    start: Start
    holders: list[str]
    """Text that each rank reads in the lock of the run folder: see ``run_folder.keeper``."""
    resident_at_start: int = field(default_factory=resident_bytes)
    """Memory of this process in bytes before an engine is created."""

    @property
    def manifest_extra(self) -> dict[str, Any]:
        """Return plain data about the run's data, kept in every checkpoint's manifest."""
        return {
            "tokenizer": self.data.tokenizer_record,
            "data": self.data.fingerprint,
            "samples_per_epoch": self.data.samples_per_epoch,
        }

    def train(self, engine: Engine, device: Device, trace: Trace) -> None:
        """Train from the agreed start to the last step. Raises the errors of ``loop.train``."""
        config, folder, is_first = self.config, Path(self.config.output_dir), self.world.rank == 0
        state = engine.begin(self.start)
        state.sample_hash = state.sample_hash or self.data.fingerprint
        self._require_equal_ranks(engine, state)
        announce(config, self.data, device.name, self.start, state)
        if state.step < config.train.steps:  # a token that the model lacks is found here
            next(self.data.batches(state))
        while True:
            try:
                summary = self._train_from(state, engine, device, trace)
                break
            except StopRequested:
                if is_first:
                    draw(config)
                raise
            except RewindNeeded as needed:
                engine.finish()
                self.start = self._start_before(needed.state)
                state = engine.begin(self.start)
                go_back(config, state, needed.state)
                engine.schedule.factor = state.rate_factor
        speed = summary.get("median_tokens_per_second")
        tokens = config.train.global_batch_size * config.model.seq_length
        record_memory(
            folder,
            self.world,
            device,
            state_bytes=engine.state_bytes(),
            resident_at_start=self.resident_at_start,
            step_seconds=tokens / speed if speed else None,
        )
        if is_first:
            finish(config, state, summary, peak_memory=device.peak_memory())
            checkpoint = find_checkpoint(folder)
            if config.checkpoint.epoch_models and checkpoint:  # an earlier run may have been killed
                write_epoch_models(checkpoint, missing=True)

    def _start_before(self, state: TrainState) -> Start:
        """Return the checkpoint to go back to after an outlier, the same on every rank."""
        folder = Path(self.config.output_dir) / "checkpoints"
        step = state.step - self.config.train.rewind_batches
        return Start(resume=self.world.decide_on_rank_0(lambda: checkpoint_before(folder, step)))

    def _train_from(
        self, state: TrainState, engine: Engine, device: Device, trace: Trace
    ) -> dict[str, Any]:
        """Train from ``state``, which the engine holds. Raises the errors of ``loop.train``."""
        config, folder, is_first = self.config, Path(self.config.output_dir), self.world.rank == 0
        profile = ProfileWindow(config, state, trace, rank=self.world.rank)
        if is_first:
            record_start(config, self.start, engine.kernels())
        with (
            CheckpointWriter(
                folder / "checkpoints",
                keep=config.checkpoint.keep,
                asynchronous=config.checkpoint.asynchronous,
                active=is_first,
                patience=config.runtime.stall_limit,
                require_folder=run_folder.keeper(folder, self.holders, self.world.rank),
                after_saving=write_epoch_models if config.checkpoint.epoch_models else None,
            ) as checkpoints,
            MetricsWriter(
                folder,
                step=state.step,
                tensorboard=config.logging.tensorboard,
                trackers=Trackers(
                    folder,
                    config.logging.trackers,
                    project=config.logging.project,
                    config=config.model_dump(mode="json"),
                ),
                active=is_first,
            ) as metrics,
            self.data.training_batches(state, engine.prepare_batch) as batches,
            profile,
        ):
            run = TrainingParts(
                config=config,
                engine=engine,
                batches=batches,
                validation=self.data.validation,
                validation_bytes=self.data.validation_bytes,
                checkpoints=checkpoints,
                metrics=metrics,
                peak_flops=device.peak_flops(config.precision.compute) * self.world.size,
                resumed=self.start.in_folder(folder),
                samples_per_epoch=self.data.samples_per_epoch,
                peak_memory=device.peak_memory,
                profile=profile,
                max_over_ranks=self.world.all_reduce_max,
                start_max=self.world.start_max,
            )
            return train_loop(run, state)

    def _require_equal_ranks(self, engine: Engine, state: TrainState) -> None:
        """Raise ConfigError if ranks differ in values that must be equal before the first step.

        With ZeRO every rank holds other weights, so their norms are not compared.
        """
        if not self.config.parallel.zero_stage:
            norms = {"norm of the weights": engine.norm_of_weights()}
            if self.start.resume is not None:
                norms["norm of the optimizer's state"] = engine.norm_of_moments()
            self.world.require_equal(norms, self.world.replicas)
        settings = dict(flatten(self.config.model_dump(exclude={"context"})))
        facts = {"data": self.data.fingerprint, "state": state.to_dict()}
        self.world.require_equal(settings | facts | engine.identity())


def agree_on_start(
    config: Run, data: TrainingData, world: WorldBase, named: Checkpoint | None = None
) -> Session:
    """Let rank 0 choose where to start, and make sure that every rank finds the same checkpoint.

    named: see ``where_to_start``. Raises ConfigError and CheckpointError.
    """
    start = world.decide_on_rank_0(lambda: where_to_start(config, data, named))
    check_everywhere(world, start.checkpoint)
    folder = Path(config.output_dir)
    holders = world.gather(run_folder.holder(folder))
    if len(set(holders)) > 1 and world.rank == 0:
        LOG.warning(
            f"output_dir={folder} is another folder on some hosts: share it, or they cannot resume"
            " the run"
        )
    return Session(config=config, data=data, world=world, start=start, holders=holders)

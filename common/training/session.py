"""Training run on one rank, for both backends: agreement of the ranks, then all steps."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import run_folder
from common.checkpoint.folders import find_checkpoint
from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.config.load import flatten
from common.dataset.blend import Blend
from common.device import Device, resident_bytes
from common.errors import CheckpointError, StopRequested
from common.files import atomic_write
from common.interrupts import StopSignal
from common.log import LOG, listed
from common.parallel.batch import describe_ramp
from common.parallel.run import Run
from common.parallel.updates import describe_schedule, schedule_warnings
from common.parallel.world import WorldBase
from common.training.data import TrainingData, named_parts
from common.training.engine import Engine
from common.training.loop import train as train_loop
from common.training.metrics import MEMORY_FILE, MetricsWriter
from common.training.opened_checkpoint import Checkpoint, check_everywhere
from common.training.plot import plot_loss
from common.training.report import bits_a_byte, use_style
from common.training.saving import write_epoch_models
from common.training.start import Start, record_start, where_to_start
from common.training.steps import ProfileWindow, Trace, TrainingParts
from common.training.trackers import Trackers
from common.weights.names import count_parameters


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
        """Train from the agreed start to the last step.

        Raises ConfigError if ranks differ in values that must be equal before the first step, and the errors of
        ``loop.train``.
        """
        config, folder, is_first = self.config, Path(self.config.output_dir), self.world.rank == 0
        state = engine.begin(self.start)
        state.sample_hash = state.sample_hash or self.data.fingerprint
        if not config.parallel.zero_stage:  # with ZeRO every rank holds other weights
            norms = {"norm of the weights": engine.norm_of_weights()}
            if self.start.resume is not None:
                norms["norm of the optimizer's state"] = engine.norm_of_moments()
            self.world.require_equal(norms, self.world.replicas)
        settings = dict(flatten(config.model_dump(exclude={"context"})))
        facts = {"data": self.data.fingerprint, "state": state.to_dict()}
        self.world.require_equal(settings | facts | engine.identity())
        announce(config, self.data, device.name, self.start, state)
        if state.step < config.train.steps:  # a token that the model lacks is found here
            next(self.data.batches(state))
        try:
            summary = self._train_from(state, engine, device, trace)
        except StopRequested:
            if is_first:
                draw(config)
            raise
        speed = summary.get("median_tokens_per_second")
        tokens = config.train.global_batch_size * config.model.seq_length
        at_start = self.resident_at_start if device.kind == "cpu" else 0
        ranks = self.world.gather({"peak": device.peak_memory(), "at_start": at_start, "state": engine.state_bytes()})
        if is_first:
            with atomic_write(folder / MEMORY_FILE, "w") as file:
                found = {"device": device.kind, "name": device.name, "step_seconds": tokens / speed if speed else None}
                json.dump(found | {"ranks": ranks}, file, indent=1)
            finish(config, state, summary, peak_memory=device.peak_memory())

    def _train_from(self, state: TrainState, engine: Engine, device: Device, trace: Trace) -> dict[str, Any]:
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
                data=self.data,
                checkpoints=checkpoints,
                metrics=metrics,
                device=device,
                resumed=self.start.in_folder(folder),
                profile=profile,
                world=self.world,
            )
            return train_loop(run, state)


def agree_on_start(config: Run, data: TrainingData, world: WorldBase, named: Checkpoint | None = None) -> Session:
    """Let rank 0 choose where to start, and make sure that every rank finds the same checkpoint.

    named: see ``where_to_start``. Raises ConfigError and CheckpointError.
    """
    start = world.decide_on_rank_0(lambda: where_to_start(config, data, named))
    check_everywhere(world, start.checkpoint)
    folder = Path(config.output_dir)
    holders = world.gather(run_folder.holder(folder))
    if len(set(holders)) > 1 and world.rank == 0:
        LOG.warning(f"output_dir={folder} is another folder on some hosts: share it, or they cannot resume the run")
    return Session(config=config, data=data, world=world, start=start, holders=holders)


def announce(config: Run, data: TrainingData, device_name: str, start: Start, state: TrainState) -> None:
    """Log the arithmetic of the run before its first step, in the style of its log."""
    use_style(config)
    model, train = config.model, config.train
    rows = config.vocab_rows
    padding = f", padded to {rows}" if rows != model.vocab_size else ""
    LOG.info(
        f"model: {model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads,"
        f" {count_parameters(model):,} parameters, vocabulary {model.vocab_size}{padding}"
    )
    batch = train.global_batch_size
    LOG.info(
        f"batch: global {batch} = micro {train.micro_batch_size} x data parallel {config.parallel.data_parallel} x"
        f" accumulation {train.accumulation_steps} samples; {batch * model.seq_length:,} tokens a step"
    )
    if train.rampup_batch_size is not None:
        LOG.info(f"batch ramp: {describe_ramp(config.batch_sizes)}")
    stride = config.data.stride or model.seq_length
    overlap = f", one every {stride} tokens" if stride != model.seq_length else ""
    epochs = config.batch_sizes.samples_after(train.steps) / data.samples_per_epoch
    LOG.info(f"length: {train.steps} steps = {epochs:.2f} epochs of {data.samples_per_epoch:,} samples{overlap}")
    blend = data.samples
    if isinstance(blend, Blend):  # the share of each data set, and how often the run reads it
        samples, parts = config.batch_sizes.samples_after(train.steps), []
        for name, weight, part in zip(named_parts(config.data.train), blend.weights, blend.datasets, strict=True):
            epochs = float(f"{samples * weight / part.samples_per_epoch:.3g}")
            parts.append(f"{name} {weight:.4g} -> {epochs:g} epochs")
        LOG.info(f"blend: {listed(parts)}")
    LOG.info(f"schedule: {describe_schedule(config.optimizer)}")
    for warning in schedule_warnings(config):
        LOG.warning(warning)
    LOG.info(f"device: {device_name}; compute {config.precision.compute}; run folder {config.output_dir}")
    for remark in data.remarks if LOG.isEnabledFor(logging.INFO) else ():  # known only on rank 0
        LOG.warning(remark)
    if data.no_validation is not None:
        LOG.info(f"no validation: {data.no_validation}")
    if start.resume is not None:
        LOG.info(f"resuming {start.resume} after step {state.step}, {state.consumed_samples:,} samples")
        whole, done = (config.batch_sizes.samples_after(steps) for steps in (train.steps, state.step))
        if done != state.consumed_samples:
            LOG.warning(
                f"{state.step} steps of this batch would be {done:,} samples: the run ends with"
                f" {state.consumed_samples + whole - done:,} samples, not {whole:,}, since length, epochs and schedule"
                " count steps; to keep them, train with the batch of the checkpoint"
            )
    elif start.weights is not None:
        LOG.info(f"starting from the weights of {start.weights}")
    else:
        LOG.info(f"starting from initial weights of seed {config.seed}")


def finish(config: Run, state: TrainState, summary: dict[str, Any], *, peak_memory: int) -> None:
    """Log the summary at the end, draw the plot, and write the models that a killed run left out."""
    draw(config)
    end = "finished" if state.step >= config.train.steps else "ended early"
    parts = [f"{end}: step {state.step}, {state.consumed_samples:,} samples"]
    if "loss" in summary:
        parts.append(f"loss {summary['loss']:.4f}")
    if "validation_loss" in summary:
        parts.append(
            f"validation loss {summary['validation_loss']:.4f}, perplexity"
            f" {summary['validation_perplexity']:.2f}{bits_a_byte(summary)}"
        )
    if "seconds" in summary:
        parts.append(f"{summary['seconds']:.0f} s, median {summary['median_tokens_per_second']:.0f} tokens/s")
    parts.append(f"{state.skipped_steps} skipped steps, peak memory {peak_memory / 2**30:.2f} GiB")
    LOG.info("; ".join(parts))
    try:
        checkpoint = find_checkpoint(Path(config.output_dir))
    except CheckpointError as error:  # all saves are done here
        LOG.warning(str(error))
        checkpoint = None
    LOG.info(f"sample hash {state.sample_hash}; checkpoint {checkpoint}")
    if config.checkpoint.epoch_models and checkpoint:
        write_epoch_models(checkpoint, missing=True)


def draw(config: Run) -> None:
    """Draw loss.png, if it is wanted. A further signal does not cut it short."""
    if config.logging.plot:
        with StopSignal():
            try:
                plot_loss(Path(config.output_dir))
            except OSError as error:
                LOG.warning(f"no plot: {error}")

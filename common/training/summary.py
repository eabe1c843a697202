"""Summary of a run before its first step and after its last one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.state import TrainState
from common.dataset import Blend
from common.errors import CheckpointError
from common.log import LOG, listed
from common.parallel.learning_rate import describe_schedule, schedule_warnings
from common.parallel.ramp import describe_ramp
from common.parallel.run import Run
from common.training.data import TrainingData, named_parts
from common.training.plot import plot_loss
from common.training.report import bits_a_byte, use_style
from common.training.start import Start
from common.training.stop import StopSignal
from common.weights.names import count_parameters


def announce(
    config: Run,
    data: TrainingData,
    device_name: str,
    start: Start,
    state: TrainState,
) -> None:
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
        f"batch: global {batch} = micro {train.micro_batch_size} x data parallel"
        f" {config.parallel.data_parallel} x accumulation {train.accumulation_steps} samples;"
        f" {batch * model.seq_length:,} tokens a step"
    )
    if train.rampup_batch_size is not None:
        LOG.info(f"batch ramp: {describe_ramp(config.batch_sizes)}")
    stride = config.data.stride or model.seq_length
    overlap = f", one every {stride} tokens" if stride != model.seq_length else ""
    epochs = config.batch_sizes.samples_after(train.steps) / data.samples_per_epoch
    LOG.info(
        f"length: {train.steps} steps = {epochs:.2f} epochs of {data.samples_per_epoch:,}"
        f" samples{overlap}"
    )
    blend = _describe_blend(config, data)
    if blend is not None:
        LOG.info(f"blend: {blend}")
    LOG.info(f"schedule: {describe_schedule(config.optimizer)}")
    for warning in schedule_warnings(config):
        LOG.warning(warning)
    LOG.info(
        f"device: {device_name}; compute {config.precision.compute}; run folder {config.output_dir}"
    )
    for remark in data.remarks if LOG.isEnabledFor(logging.INFO) else ():  # known only on rank 0
        LOG.warning(remark)
    if data.no_validation is not None:
        LOG.info(f"no validation: {data.no_validation}")
    if start.resume is not None:
        LOG.info(
            f"resuming {start.resume} after step {state.step}, {state.consumed_samples:,} samples"
        )
    elif start.weights is not None:
        LOG.info(f"starting from the weights of {start.weights}")
    else:
        LOG.info(f"starting from initial weights of seed {config.seed}")


def _describe_blend(config: Run, data: TrainingData) -> str | None:
    """Return the share of each data set of a blend, and how often the run reads it."""
    blend = data.sampler.samples if data.sampler is not None else None
    if not isinstance(blend, Blend):
        return None
    samples = config.batch_sizes.samples_after(config.train.steps)
    parts = []
    for name, weight, part in zip(
        named_parts(config.data.train), blend.weights, blend.datasets, strict=True
    ):
        epochs = float(f"{samples * weight / part.samples_per_epoch:.3g}")
        parts.append(f"{name} {weight:.4g} -> {epochs:g} epochs")
    return listed(parts)


def finish(config: Run, state: TrainState, summary: dict[str, Any], *, peak_memory: int) -> None:
    """Log the summary at the end, and draw the plot."""
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
        parts.append(
            f"{summary['seconds']:.0f} s, median {summary['median_tokens_per_second']:.0f} tokens/s"
        )
    parts.append(f"{state.skipped_steps} skipped steps, peak memory {peak_memory / 2**30:.2f} GiB")
    LOG.info("; ".join(parts))
    try:
        checkpoint = find_checkpoint(Path(config.output_dir))
    except CheckpointError as error:  # all saves are done here
        LOG.warning(str(error))
        checkpoint = None
    LOG.info(f"sample hash {state.sample_hash}; checkpoint {checkpoint}")


def draw(config: Run) -> None:
    """Draw loss.png, if it is wanted. A further signal does not cut it short."""
    if config.logging.plot:
        with StopSignal():
            try:
                plot_loss(Path(config.output_dir))
            except OSError as error:
                LOG.warning(f"no plot: {error}")

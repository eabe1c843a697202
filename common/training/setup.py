"""What a run does before its first and after its last step, the same on both backends: data, folder, start, report."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cluster.environment import Process
from common.config.load import flatten, save_config
from common.device import Device
from common.errors import CheckpointError, ConfigError
from common.files import clean_up
from common.log import LOG
from common.parallel.resolved_run import ResolvedRun, TrainingRun
from common.planner.room import check_room
from common.training.checkpoint import find_checkpoint, point_latest, read_or_name_older, require_checkpoint, step_of
from common.training.data import TrainingData
from common.training.fits import require_same_model
from common.training.plot import plot_loss
from common.training.report import make_report, use_style
from common.training.state import TrainState
from common.weights.names import count_parameters


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: a checkpoint to resume, weights to start from, or neither."""

    resume: Path | None = None
    weights: Path | None = None

    def in_folder(self, folder: Path) -> bool:
        """True when a checkpoint of this very run is resumed."""
        return self.resume is not None and self.resume.parent.resolve() == (folder / "checkpoints").resolve()


def check_memory(config: ResolvedRun, process: Process, device: Device, *, training: bool = False) -> None:
    """Hold the plan's memory against what is there, before anything is allocated. Raises ConfigError where it cannot fit."""
    warning = check_room(
        config,
        kind=device.kind,
        device_memory=device.total_memory(),
        rank=process.rank % config.topology.world_size,
        ranks=min(process.local_world_size, config.topology.world_size),
        training=training,
    )
    if warning is not None and process.rank == 0:
        LOG.warning(warning)


def require_writable(checkpoints: Path) -> None:
    """Raise ConfigError unless checkpoints can be written into this folder, which is made if need be."""
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=checkpoints):
            pass
        with os.scandir(checkpoints) as entries:
            wrong = [entry.path for entry in entries if step_of(entry.name) >= 0 and not entry.is_dir()]
    except OSError as error:
        raise ConfigError(
            f"{checkpoints}: checkpoints cannot be written there: {error.strerror}; make it a folder that this user can write, or choose"
            " another output_dir"
        ) from None
    if wrong:
        raise ConfigError(f"{wrong[0]}: is not a folder, and has the name of a checkpoint; move it away, or choose another output_dir")


def where_to_start(config: TrainingRun, data: TrainingData) -> Start:
    """Obey checkpoint.resume and checkpoint.init_from. Raises CheckpointError or ConfigError when they cannot be obeyed, or where no
    checkpoint could be written."""
    start = _choose(config, data)
    require_writable(Path(config.output_dir) / "checkpoints")
    return start


def _choose(config: TrainingRun, data: TrainingData) -> Start:
    wish, folder = config.checkpoint.resume, Path(config.output_dir)
    with suppress(OSError):  # a kill may have left the only checkpoint under a temporary name
        clean_up(folder / "checkpoints", "step_*")
    if config.checkpoint.load is not None:
        LOG.warning(
            f"checkpoint.load={config.checkpoint.load} is for eval and predict, and training does not begin there: to go on from it say"
            " checkpoint.resume, to begin with its weights checkpoint.init_from"
        )
    if wish == "auto":
        resume = find_checkpoint(folder)
    elif wish == "latest":
        resume = require_checkpoint(folder, "checkpoint.resume=latest")
    elif wish == "never":
        resume = None
        if find_checkpoint(folder) is not None:
            raise ConfigError(
                f"output_dir={folder} holds a run and checkpoint.resume=never; choose another folder or checkpoint.resume=auto"
            )
    else:
        resume = require_checkpoint(Path(wish), f"checkpoint.resume={wish}")
    if resume is not None:
        manifest = read_or_name_older(resume, "checkpoint.resume")
        _check_tokenizer(manifest, data.tokenizer_record, resume)
        require_same_model(manifest, config, resume, anew=wish == "auto")
        _tell_changes(manifest, config, data)
        return Start(resume=resume)
    if config.checkpoint.init_from is not None:
        weights = require_checkpoint(Path(config.checkpoint.init_from), "checkpoint.init_from")
        manifest = read_or_name_older(weights, "checkpoint.init_from")
        _check_tokenizer(manifest, data.tokenizer_record, weights)
        require_same_model(manifest, config, weights)
        return Start(weights=weights)
    return Start()


def begin(config: TrainingRun, start: Start) -> None:
    """The last thing before the first step: the resolved config is written, and ``latest`` names where the run stands."""
    folder = Path(config.output_dir)
    if start.resume is not None and start.in_folder(folder):
        point_latest(start.resume)  # a run sent back to an older checkpoint must not return to the newer one when it is killed
    save_config(config, folder / "config.yaml")


def checkpoint_to_use(config: ResolvedRun) -> Path:
    """checkpoint.load, else the newest checkpoint of the run folder, else checkpoint.init_from. Raises CheckpointError."""
    settings = config.checkpoint
    if settings.load is not None:
        return require_checkpoint(Path(settings.load), f"checkpoint.load={settings.load}")
    found = find_checkpoint(Path(config.output_dir))
    return found or require_checkpoint(Path(settings.init_from or config.output_dir), "the run in output_dir, or checkpoint.load")


def weights_to_use(config: ResolvedRun, tokenizer: dict[str, Any] | None, *, export: bool = False) -> Path:
    """The checkpoint to evaluate, generate with or export, once its tokenizer and its model are those of the config."""
    checkpoint = checkpoint_to_use(config)
    manifest = read_or_name_older(checkpoint, "checkpoint.load")
    _check_tokenizer(manifest, tokenizer, checkpoint)
    require_same_model(manifest, config, checkpoint, export=export)
    return checkpoint


def announce(config: TrainingRun, data: TrainingData, device_name: str, start: Start, state: TrainState) -> None:
    """The arithmetic of the run, before its first step, in the style of its log."""
    use_style(config)
    model, train, optimizer = config.model, config.train, config.optimizer
    rows = config.vocab_rows
    padding = f", padded to {rows}" if rows != model.vocab_size else ""
    LOG.info(
        f"model: {model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, {count_parameters(model):,} parameters,"
        f" vocabulary {model.vocab_size}{padding}"
    )
    batch = train.global_batch_size
    LOG.info(
        f"batch: global {batch} = micro {train.micro_batch_size} x data parallel {config.parallel.data_parallel} x accumulation"
        f" {train.accumulation_steps} samples; {batch * model.seq_length:,} tokens a step"
    )
    epochs = train.max_steps * batch / data.samples_per_epoch
    LOG.info(
        f"length: {train.max_steps} steps = {epochs:.2f} epochs of {data.samples_per_epoch:,} samples;"
        f" {optimizer.schedule} schedule to step {optimizer.decay_steps}, warm-up {optimizer.warmup_steps}"
    )
    LOG.info(f"device: {device_name}; compute {config.precision.compute}; run folder {config.output_dir}")
    for remark in data.remarks if LOG.isEnabledFor(logging.INFO) else ():  # rank 0's alone
        LOG.warning(remark)
    if data.no_validation is not None:
        LOG.warning(f"no validation: {data.no_validation}")
    if start.resume is not None:
        LOG.info(f"resuming {start.resume} after step {state.step}, {state.consumed_samples:,} samples")
    elif start.weights is not None:
        LOG.info(f"starting from the weights of {start.weights}")
    else:
        LOG.info(f"starting from initial weights of seed {config.seed}")


def finish(config: TrainingRun, state: TrainState, summary: dict[str, Any], *, peak_memory: int) -> None:
    """The summary lines, and the plot."""
    folder = Path(config.output_dir)
    if config.logging.plot:
        try:
            plot_loss(folder)
        except OSError as error:
            LOG.warning(f"no plot: {error}")
    parts = [f"finished: step {state.step}, {state.consumed_samples:,} samples"]
    if "loss" in summary:
        parts.append(f"loss {summary['loss']:.4f}")
    if "validation_loss" in summary:
        parts.append(f"validation loss {summary['validation_loss']:.4f}, perplexity {summary['validation_perplexity']:.2f}")
    if "seconds" in summary:
        parts.append(f"{summary['seconds']:.0f} s, median {summary['median_tokens_per_second']:.0f} tokens/s")
    parts.append(f"{state.skipped_steps} skipped steps, peak memory {peak_memory / 2**30:.2f} GiB")
    LOG.info("; ".join(parts))
    try:
        checkpoint = find_checkpoint(folder)
    except CheckpointError as error:  # all is written by now
        LOG.warning(str(error))
        checkpoint = None
    LOG.info(f"sample hash {state.sample_hash}; checkpoint {checkpoint}")
    make_report(config).final(summary)


def _tell_changes(manifest: dict[str, Any], config: TrainingRun, data: TrainingData) -> None:
    """Say aloud what has changed since the checkpoint."""
    if manifest.get("data") != data.fingerprint:
        LOG.warning("the data, its split, the window or the seed has changed since the checkpoint: the order of samples is a new one")
    before, now = dict(flatten(manifest["config"])), dict(flatten(config.model_dump()))
    silent = {"predict", "evaluation", "logging", "profile", "checkpoint"}
    decisive = {"logging.outlier_deviations", "logging.outlier_window"} if config.train.skip_outliers else set()
    for key, value in now.items():
        if (key in decisive or key.partition(".")[0] not in silent) and before.get(key, value) != value:
            LOG.info(f"changed since the checkpoint: {key} {before[key]} -> {value}")


def _check_tokenizer(manifest: dict[str, Any], tokenizer: dict[str, Any] | None, checkpoint: Path) -> None:
    trained = manifest.get("tokenizer")
    if trained and tokenizer and trained.get("sha256", "") != tokenizer["sha256"]:
        raise CheckpointError(
            f"{checkpoint}: trained with tokenizer {trained.get('kind')} of {trained.get('vocab_size')} tokens"
            f" (sha256 {trained.get('sha256', '')[:12]}),"
            f" the one given is {tokenizer['kind']} of {tokenizer['vocab_size']} tokens (sha256 {tokenizer['sha256'][:12]});"
            " give the vocabulary files it was trained with"
        )

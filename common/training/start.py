"""Start of a run: choice of the checkpoint to resume, load or start from, and check that it
fits.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.checkpoint.folders import (
    find_checkpoint,
    point_latest,
    read_or_name_older,
    require_checkpoint,
    step_of,
)
from common.checkpoint.integers import holds_integers
from common.checkpoint.manifest import read_manifest
from common.checkpoint.snapshot import OPTIMIZER_FILE
from common.config.load import flatten, save_config
from common.config.resolved import as_run
from common.errors import CheckpointError, ConfigError, GPT2Error
from common.files import clean_up
from common.log import LOG
from common.parallel.resolved_run import ResolvedRun
from common.run_folder import RESTART_COUNT, SLURM_RESTART_COUNT, append_attempt
from common.systems.direct import is_foreign, manifest_of
from common.training.data import TrainingData
from common.training.fits import multiple_that_keeps, require_same_model
from common.training.rewind import checkpoint_before, in_spike


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of a run: a checkpoint to resume, weights to start from, or neither."""

    resume: Path | None = None
    weights: Path | None = None

    def in_folder(self, folder: Path) -> bool:
        """Return whether a checkpoint of this run itself is resumed."""
        return (
            self.resume is not None
            and self.resume.parent.resolve() == (folder / "checkpoints").resolve()
        )


def require_writable(checkpoints: Path) -> None:
    """Raise ConfigError unless checkpoints can be written into this folder, which is created if
    needed.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=checkpoints):
            pass
        with os.scandir(checkpoints) as entries:
            wrong = [
                entry.path for entry in entries if step_of(entry.name) >= 0 and not entry.is_dir()
            ]
    except OSError as error:
        raise ConfigError(
            f"{checkpoints}: checkpoints cannot be written there: {error.strerror}; make it a"
            " folder that this user can write, or choose another output_dir"
        ) from None
    if wrong:
        raise ConfigError(
            f"{wrong[0]}: is not a folder, and has the name of a checkpoint; move it away, or"
            " choose another output_dir"
        )


def where_to_start(config: ResolvedRun, data: TrainingData) -> Start:
    """Apply checkpoint.resume and checkpoint.init_from.

    Raises CheckpointError or ConfigError if that is impossible, or if no checkpoint could be
    written.
    """
    start = _choose(config, data)
    require_writable(Path(config.output_dir) / "checkpoints")
    return start


def _choose(config: ResolvedRun, data: TrainingData) -> Start:
    folder = Path(config.output_dir)
    with suppress(OSError):  # a kill may have left the only checkpoint under a temporary name
        clean_up(folder / "checkpoints", "step_*")
    if config.checkpoint.load is not None:
        LOG.warning(
            f"checkpoint.load={config.checkpoint.load} is for eval and predict, not for"
            " training; set checkpoint.resume to resume from it, or checkpoint.init_from to"
            " begin with its weights"
        )
    resume = _checkpoint_to_resume(_wish(config), folder)
    if resume is not None and resume.parent == folder / "checkpoints":
        resume = _prefer_healthy(resume, config)
    init_from = config.checkpoint.init_from
    if resume is not None and _holds_weights_alone(resume, config):
        LOG.warning(
            f"checkpoint.resume={resume}: holds only weights, not the state of a run; it is"
            " used as checkpoint.init_from"
        )
        init_from, resume = str(resume), find_checkpoint(folder)
    for key, path in (("checkpoint.resume", resume), ("checkpoint.init_from", init_from)):
        _refuse_integers(key, path, config)
    if resume is not None:
        manifest = _read_fitting(
            resume,
            "checkpoint.resume",
            config,
            data.tokenizer_record,
            may_move=config.checkpoint.resume == "auto",
        )
        _log_changes(manifest, config, data)
        return Start(resume=resume)
    if init_from is not None:
        key = "checkpoint.init_from"
        weights = require_weights(Path(init_from), key)
        _read_fitting(weights, key, config, data.tokenizer_record)
        return Start(weights=weights)
    return Start()


def _refuse_integers(key: str, path: Path | str | None, config: ResolvedRun) -> None:
    """Raise ConfigError if a run would start from 8-bit weights."""
    found = None if path is None else find_checkpoint(Path(path))
    if found is None or not holds_integers(found):
        return
    manifest = manifest_of(found, config.model, checksums=False)
    source = manifest.get("exported_from") or manifest.get("converted_from", {}).get("path")
    raise ConfigError(
        f"{key}={path}: its weights have 8 bits, which eval and predict accept, but not training;"
        f" give the weights they were made from ({source}), or convert them to float32: python"
        f" tools/convert_weight.py --to torch_gpt2 --input {path} --output FOLDER"
    )


def _prefer_healthy(checkpoint: Path, config: ResolvedRun) -> Path:
    """Return an older checkpoint where the last update of this one was an outlier, if rewinds are
    allowed; else the same one, with a warning.
    """
    try:
        step = step_of(checkpoint.name)
        older = checkpoint_before(checkpoint.parent, step) if in_spike(checkpoint) else checkpoint
        if step_of(older.name) >= step or in_spike(older):
            return checkpoint
    except CheckpointError:  # reported where the checkpoint is read, with a remedy
        return checkpoint
    text = f"{checkpoint}: its last update was an outlier"
    if config.train.on_outlier == "rewind":
        LOG.warning(f"{text}; {older} is resumed instead (train.on_outlier=rewind)")
        return older
    LOG.warning(f"{text}; if the loss does not recover, set checkpoint.resume={older}")
    return checkpoint


def _wish(config: ResolvedRun) -> str:
    """Return checkpoint.resume, or auto in a restart of a run that has saved.

    A launcher that starts the ranks again counts its attempts in RESTART_COUNT, Slurm in its own
    variable.
    """
    counts = (RESTART_COUNT, SLURM_RESTART_COUNT)
    is_restart = any(os.environ.get(name, "0") != "0" for name in counts)
    if is_restart and find_checkpoint(Path(config.output_dir)) is not None:
        return "auto"
    return config.checkpoint.resume


def _checkpoint_to_resume(wish: str, folder: Path) -> Path | None:
    """Return the checkpoint that checkpoint.resume asks for; None to start over."""
    if wish == "auto":
        return find_checkpoint(folder)
    if wish == "latest":
        return require_checkpoint(folder, "checkpoint.resume=latest")
    if wish != "never":
        return require_weights(Path(wish), f"checkpoint.resume={wish}")
    if find_checkpoint(folder) is not None:
        raise ConfigError(
            f"output_dir={folder} holds a run and checkpoint.resume=never; choose another folder or"
            " checkpoint.resume=auto"
        )
    return None


def require_weights(where: Path, why: str) -> Path:
    """Return the checkpoint at ``where``, or ``where`` itself if it holds another system's weights.

    Raises NoCheckpointError if there is neither.
    """
    found = find_checkpoint(where)
    return found or (where if is_foreign(where) else require_checkpoint(where, why))


def _holds_weights_alone(path: Path, config: ResolvedRun) -> bool:
    return is_foreign(path) and OPTIMIZER_FILE not in manifest_of(path, config.model)["files"]


def kept_choice(
    config: ResolvedRun, possible: Collection[int]
) -> tuple[int, str, int | None] | None:
    """Return micro batch, recomputation and its blocks of the checkpoint to resume.

    None unless the micro batch is a possible one, and global batch, layout and every such key that
    the config does not leave open are those of the config.
    """
    with suppress(GPT2Error):  # it is reported where the run starts
        checkpoint = _checkpoint_to_resume(_wish(config), Path(config.output_dir))
        if checkpoint is None or is_foreign(checkpoint):
            return None
        before = dict(flatten(read_manifest(checkpoint, checksums=False).get("config", {})))
        now = dict(flatten(config.model_dump()))
        equal = list(_OF_MEMORY)
        if not config.train.micro_batch_is_auto:
            equal.append("train.micro_batch_size")
        if not config.train.recompute_is_auto:
            equal += ["train.recompute", "train.recompute_layers"]
        size = before.get("train.micro_batch_size")
        if (
            isinstance(size, int)
            and (size in possible or not config.train.micro_batch_is_auto)
            and all(before.get(key) == now[key] for key in equal)
        ):
            return size, before.get("train.recompute", "none"), before.get("train.recompute_layers")
    return None


_OF_MEMORY = (
    "train.global_batch_size",
    *(
        f"parallel.{name}"
        for name in ("data_parallel", "model_parallel", "pipeline_stage", "zero_stage")
    ),
)
"""Keys that the memory of a step depends on, with the sizes of the model."""


def record_start(config: ResolvedRun, start: Start, kernels: Mapping[str, str]) -> None:
    """Write the resolved config, and let ``latest`` name the checkpoint that is resumed.

    kernels: of the parts of a step, for a remark at the end of the config.

    A run that was sent back to an older checkpoint must not return to the newer one after a kill.
    """
    folder = Path(config.output_dir)
    if start.resume is not None and start.in_folder(folder):
        point_latest(start.resume)
    used = "; ".join(f"{part} {name}" for part, name in kernels.items())
    save_config(config, folder / "config.yaml", f"# kernels: {used}\n" if used else "")
    if _counts_restarts():
        began = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        after = 0 if start.resume is None else step_of(start.resume.name)
        append_attempt(folder, {"began": began, "first_step": max(0, after) + 1})


def _counts_restarts() -> bool:
    """Tell whether torchrun or Slurm starts this run again; our launcher writes its own lines."""
    return "TORCHELASTIC_RUN_ID" in os.environ or (
        "SLURM_JOB_ID" in os.environ and "GPT2_LAUNCHER_PID" not in os.environ
    )


def checkpoint_to_use(config: ResolvedRun) -> Path:
    """Return the checkpoint to read: checkpoint.load, else the run folder's newest, else
    checkpoint.init_from.

    It is a checkpoint of ours, or weights of another system. Raises CheckpointError.
    """
    settings = config.checkpoint
    if settings.load is not None:
        return require_weights(Path(settings.load), f"checkpoint.load={settings.load}")
    found = find_checkpoint(Path(config.output_dir))
    return found or require_weights(
        Path(settings.init_from or config.output_dir), "the run in output_dir, or checkpoint.load"
    )


def with_trained_vocabulary(config: ResolvedRun) -> ResolvedRun:
    """Return the config with a vocab_multiple that keeps model.vocab_size, if the checkpoint has
    this size.

    A run without a tokenizer trains all rows of a padded table. A tokenizer that is given later
    would take that size for the padded size of its own vocabulary.
    """
    size = config.model.vocab_size
    if size % config.model.vocab_multiple:
        return config
    with suppress(GPT2Error):  # it is reported where the checkpoint is read
        manifest = manifest_of(checkpoint_to_use(config), config.model, checksums=False)
        if manifest["config"].get("model", {}).get("vocab_size") == size:
            return as_run(ResolvedRun, config, model={"vocab_multiple": multiple_that_keeps(size)})
    return config


def weights_to_use(
    config: ResolvedRun, tokenizer: dict[str, Any] | None, *, export: bool = False
) -> Path:
    """Return the checkpoint to evaluate, generate with or export.

    Raises CheckpointError unless it has the tokenizer and the model of the config.
    """
    checkpoint = checkpoint_to_use(config)
    resume = config.checkpoint.resume
    if resume not in ("auto", "latest", "never") and config.checkpoint.load is None:
        LOG.warning(
            f"checkpoint.resume={resume} is for training; the weights are those of {checkpoint};"
            f" to use the others, set checkpoint.load={resume}"
        )
    _read_fitting(checkpoint, "checkpoint.load", config, tokenizer, export=export)
    return checkpoint


def _read_fitting(
    checkpoint: Path,
    key: str,
    config: ResolvedRun,
    tokenizer: dict[str, Any] | None,
    *,
    may_move: bool = False,
    export: bool = False,
) -> dict[str, Any]:
    """Return the manifest of a checkpoint of the config's model and this tokenizer.

    key: the override that takes another checkpoint. may_move, export: see ``require_same_model``.
    Raises CheckpointError.
    """
    manifest = (
        manifest_of(checkpoint, config.model)
        if is_foreign(checkpoint)
        else read_or_name_older(checkpoint, key)
    )
    left_out = manifest.get("left_out", {})
    for reason, count in Counter(left_out.values()).items():
        name = next(name for name, why in left_out.items() if why == reason)
        LOG.info(
            f"{checkpoint}: left out: "
            + (f"{count} x {reason}" if count > 1 else f"{name} ({reason})")
        )
    _check_tokenizer(manifest, tokenizer, checkpoint)
    require_same_model(manifest, config, checkpoint, may_move=may_move, export=export)
    return manifest


def _log_changes(manifest: dict[str, Any], config: ResolvedRun, data: TrainingData) -> None:
    """Log what has changed since the checkpoint."""
    if "updated_samples" not in manifest.get("state", {}):
        LOG.info(
            "the checkpoint is of an older version, whose schedule was one step ahead and counted"
            " skipped steps; from here it counts the updates that were made"
        )
    if manifest.get("data") != data.fingerprint:
        LOG.warning(
            "the data, its split, the window or the seed has changed since the checkpoint, so"
            " the order of samples changes too"
        )
    before, now = dict(flatten(manifest["config"])), dict(flatten(config.model_dump()))
    silent = {"predict", "evaluation", "serve", "logging", "profile", "checkpoint"}
    decisive = (
        {"logging.outlier_deviations", "logging.outlier_window"}
        if config.train.on_outlier != "warn"
        else set()
    )
    for key, value in now.items():
        if (key in decisive or key.partition(".")[0] not in silent) and before.get(
            key, value
        ) != value:
            LOG.info(f"changed since the checkpoint: {key} {before[key]} -> {value}")


def _check_tokenizer(
    manifest: dict[str, Any], tokenizer: dict[str, Any] | None, checkpoint: Path
) -> None:
    trained = manifest.get("tokenizer")
    if trained and tokenizer and trained.get("sha256", "") != tokenizer["sha256"]:
        raise CheckpointError(
            f"{checkpoint}: trained with tokenizer {trained.get('kind')} of"
            f" {trained.get('vocab_size')} tokens (sha256 {trained.get('sha256', '')[:12]}), the"
            f" one given is {tokenizer['kind']} of {tokenizer['vocab_size']} tokens (sha256"
            f" {tokenizer['sha256'][:12]}); give the vocabulary files it was trained with"
        )

"""Where a run begins: which checkpoint it resumes, loads or begins from, and whether that fits the
config.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.load import flatten, save_config
from common.config.resolved import as_run
from common.errors import CheckpointError, ConfigError, GPT2Error
from common.files import clean_up
from common.log import LOG
from common.parallel.resolved_run import ResolvedRun
from common.training.checkpoint import (
    find_checkpoint,
    point_latest,
    read_or_name_older,
    require_checkpoint,
    step_of,
)
from common.training.checkpoint_reader import holds_integers
from common.training.data import TrainingData
from common.training.fits import multiple_that_keeps, require_same_model
from common.training.foreign import is_foreign, manifest_of
from common.training.snapshot import OPTIMIZER_FILE


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: a checkpoint to resume, weights to start from, or neither."""

    resume: Path | None = None
    weights: Path | None = None

    def in_folder(self, folder: Path) -> bool:
        """True when a checkpoint of this very run is resumed."""
        return (
            self.resume is not None
            and self.resume.parent.resolve() == (folder / "checkpoints").resolve()
        )


def require_writable(checkpoints: Path) -> None:
    """Raise ConfigError unless checkpoints can be written into this folder, which is made if need
    be.
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
    """Obey checkpoint.resume and checkpoint.init_from.

    Raises CheckpointError or ConfigError where that is not possible, or no checkpoint could be
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
            f"checkpoint.load={config.checkpoint.load} is for eval and predict, and training does"
            " not begin there: to go on from it say checkpoint.resume, to begin with its weights"
            " checkpoint.init_from"
        )
    resume = _checkpoint_to_resume(config.checkpoint.resume, folder)
    init_from = config.checkpoint.init_from
    if resume is not None and _holds_weights_alone(resume, config):
        LOG.warning(
            f"checkpoint.resume={resume}: holds weights alone, without where a run stood; it is"
            " taken for checkpoint.init_from"
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
            anew=config.checkpoint.resume == "auto",
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
    """Raise ConfigError where a run would begin with weights of 8 bits."""
    found = None if path is None else find_checkpoint(Path(path))
    if found is None or not holds_integers(found):
        return
    manifest = manifest_of(found, config.model, checksums=False)
    source = manifest.get("exported_from") or manifest.get("converted_from", {}).get("path")
    raise ConfigError(
        f"{key}={path}: its weights are of 8 bits, which eval and predict take and training does"
        f" not; give what they were made of ({source}), or make float32 of them: python"
        f" tools/convert_weight.py --to torch_gpt2 --input {path} --output FOLDER"
    )


def _checkpoint_to_resume(wish: str, folder: Path) -> Path | None:
    """Return the checkpoint that checkpoint.resume asks for; None to begin anew."""
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
    """Return the checkpoint at ``where``, or the path itself where another system's weights lie
    there. Raises NoCheckpointError where neither does.
    """
    found = find_checkpoint(where)
    return found or (where if is_foreign(where) else require_checkpoint(where, why))


def _holds_weights_alone(path: Path, config: ResolvedRun) -> bool:
    return is_foreign(path) and OPTIMIZER_FILE not in manifest_of(path, config.model)["files"]


def record_start(config: ResolvedRun, start: Start) -> None:
    """Write the resolved config, and let ``latest`` name the checkpoint that is resumed.

    A run sent back to an older checkpoint must not return to the newer one when it is killed.
    """
    folder = Path(config.output_dir)
    if start.resume is not None and start.in_folder(folder):
        point_latest(start.resume)
    save_config(config, folder / "config.yaml")


def checkpoint_to_use(config: ResolvedRun) -> Path:
    """Return checkpoint.load, else the run folder's newest checkpoint, else checkpoint.init_from:
    checkpoints of ours, or weights of another system.

    Raises CheckpointError.
    """
    settings = config.checkpoint
    if settings.load is not None:
        return require_weights(Path(settings.load), f"checkpoint.load={settings.load}")
    found = find_checkpoint(Path(config.output_dir))
    return found or require_weights(
        Path(settings.init_from or config.output_dir), "the run in output_dir, or checkpoint.load"
    )


def with_trained_vocabulary(config: ResolvedRun) -> ResolvedRun:
    """Return the config with model.vocab_size as it stands, where the checkpoint to use has it too.

    A run without a tokenizer trains a padded table whole. A tokenizer that is given later would
    take that size for the padded one of its own vocabulary.
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

    Raises CheckpointError unless its tokenizer and its model are those of the config.
    """
    checkpoint = checkpoint_to_use(config)
    resume = config.checkpoint.resume
    if resume not in ("auto", "latest", "never") and config.checkpoint.load is None:
        LOG.warning(
            f"checkpoint.resume={resume} is for training; the weights are those of {checkpoint};"
            f" to take the others say checkpoint.load={resume}"
        )
    _read_fitting(checkpoint, "checkpoint.load", config, tokenizer, export=export)
    return checkpoint


def _read_fitting(
    checkpoint: Path,
    key: str,
    config: ResolvedRun,
    tokenizer: dict[str, Any] | None,
    *,
    anew: bool = False,
    export: bool = False,
) -> dict[str, Any]:
    """Return the manifest of a checkpoint of the config's model and this tokenizer.

    key: the override that takes another checkpoint. anew, export: see ``require_same_model``.
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
        LOG.info(f"{checkpoint}: left out: {f'{count} x' if count > 1 else f'{name},'} {reason}")
    _check_tokenizer(manifest, tokenizer, checkpoint)
    require_same_model(manifest, config, checkpoint, anew=anew, export=export)
    return manifest


def _log_changes(manifest: dict[str, Any], config: ResolvedRun, data: TrainingData) -> None:
    """Log what has changed since the checkpoint."""
    if manifest.get("data") != data.fingerprint:
        LOG.warning(
            "the data, its split, the window or the seed has changed since the checkpoint: the"
            " order of samples is a new one"
        )
    before, now = dict(flatten(manifest["config"])), dict(flatten(config.model_dump()))
    silent = {"predict", "evaluation", "serve", "logging", "profile", "checkpoint"}
    decisive = (
        {"logging.outlier_deviations", "logging.outlier_window"}
        if config.train.skip_outliers
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

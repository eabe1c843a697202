"""Start of a run: choice of the checkpoint to resume, load or start from, and check that it fits.

Its model section is compared with the config's before any tensor is read. Differences are named as
overrides for the command line.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.checkpoint.folders import find_checkpoint, point_latest, require_checkpoint, step_of
from common.checkpoint.snapshot import OPTIMIZER_FILE
from common.config.load import flatten, save_config
from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, ConfigError, GPT2Error
from common.files import clean_up
from common.log import LOG
from common.parallel.run import Run
from common.run_folder import RESTART_COUNT, SLURM_RESTART_COUNT, append_attempt
from common.training.data import TrainingData
from common.training.opened_checkpoint import Checkpoint, newest_checkpoint, open_checkpoint


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of a run: a checkpoint to resume, weights to start from, or neither."""

    resume: Checkpoint | None = None
    weights: Checkpoint | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.resume or self.weights

    def in_folder(self, folder: Path) -> bool:
        """Return whether a checkpoint of this run itself is resumed."""
        return self.resume is not None and self.resume.path.parent.resolve() == (folder / "checkpoints").resolve()


def where_to_start(config: Run, data: TrainingData, named: Checkpoint | None = None) -> Start:
    """Apply checkpoint.resume and checkpoint.init_from. named: what one of them names, if open.

    Raises CheckpointError or ConfigError if that is impossible, or if no checkpoint could be written.
    """
    folder = Path(config.output_dir)
    with suppress(OSError):  # a kill may have left the only checkpoint under a temporary name, and a full disk
        clean_up(folder / "checkpoints", "step_*")
    if config.checkpoint.load is not None:
        LOG.warning(
            f"checkpoint.load={config.checkpoint.load} is for eval and predict, not for"
            " training; set checkpoint.resume to resume from it, or checkpoint.init_from to"
            " begin with its weights"
        )
    resume, weights = _checkpoint_to_resume(config, named), None
    if resume is not None and resume.is_foreign and OPTIMIZER_FILE not in resume.manifest(config.model)["files"]:
        LOG.warning(
            f"checkpoint.resume={resume}: holds only weights, not the state of a run; it is"
            " used as checkpoint.init_from"
        )
        weights, resume = resume, newest_checkpoint(folder)
    key, init_from = "checkpoint.init_from", config.checkpoint.init_from
    if resume is not None:
        weights, may_move = None, config.checkpoint.resume == "auto"
        _refuse_integers("checkpoint.resume", resume, config)
        require_fitting(resume, "checkpoint.resume", config, data.tokenizer_record, may_move=may_move)
        _log_changes(resume.manifest(config.model), config, data)
    elif weights is None and init_from is not None:
        weights = named or open_checkpoint(Path(init_from), key)
        _refuse_integers(key, weights, config)
    if weights is not None:
        require_fitting(weights, key, config, data.tokenizer_record)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / "checkpoints"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder / 'checkpoints'}: checkpoints cannot be written there: {error.strerror}; make it a"
            " folder that this user can write, or choose another output_dir"
        ) from None
    return Start(resume=resume, weights=weights)


def _refuse_integers(key: str, found: Checkpoint, config: Run) -> None:
    if not found.holds_integers():
        return
    manifest, path = found.manifest(config.model), found.path
    source = manifest.get("exported_from") or manifest.get("converted_from", {}).get("path")
    raise ConfigError(
        f"{key}={path}: its weights have 8 bits, which eval and predict accept, but not training;"
        f" give the weights they were made from ({source}), or convert them to float32: python"
        f" tools/convert_weight.py --to torch_gpt2 --input {path} --output FOLDER"
    )


def _checkpoint_to_resume(config: Run, named: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that checkpoint.resume asks for, or the newest in a restart of a run that has saved.

    None to start over. A launcher that starts the ranks again counts its attempts in RESTART_COUNT, Slurm in its own
    variable.
    """
    wish, folder = config.checkpoint.resume, Path(config.output_dir)
    is_restart = any(os.environ.get(name, "0") != "0" for name in (RESTART_COUNT, SLURM_RESTART_COUNT))
    if wish == "auto" or (is_restart and find_checkpoint(folder) is not None):
        return newest_checkpoint(folder)
    if wish == "latest":
        return Checkpoint(require_checkpoint(folder, "checkpoint.resume=latest"))
    if wish != "never":
        return named or open_checkpoint(Path(wish), f"checkpoint.resume={wish}")
    if find_checkpoint(folder) is not None:
        raise ConfigError(
            f"output_dir={folder} holds a run and checkpoint.resume=never; choose another folder or"
            " checkpoint.resume=auto"
        )
    return None


def record_start(config: Run, start: Start, kernels: Mapping[str, str]) -> None:
    """Write the resolved config, and let ``latest`` name the checkpoint that is resumed.

    kernels: of the parts of a step, for a remark at the end of the config.

    A run that was sent back to an older checkpoint must not return to the newer one after a kill.
    """
    folder = Path(config.output_dir)
    if start.resume is not None and start.in_folder(folder):
        point_latest(start.resume.path)
    used = "; ".join(f"{part} {name}" for part, name in kernels.items())
    save_config(config, folder / "config.yaml", f"# kernels: {used}\n" if used else "")
    slurm_alone = "SLURM_JOB_ID" in os.environ and "GPT2_LAUNCHER_PID" not in os.environ
    if slurm_alone or "TORCHELASTIC_RUN_ID" in os.environ:  # our launcher writes its own lines
        began = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        after = 0 if start.resume is None else step_of(start.resume.path.name)
        append_attempt(folder, {"began": began, "first_step": max(0, after) + 1})


def checkpoint_to_use(config: Run) -> Checkpoint:
    """Return the checkpoint to read: checkpoint.load, else the run folder's newest, else checkpoint.init_from.

    It is a checkpoint of ours, or weights of another system. Raises CheckpointError.
    """
    settings = config.checkpoint
    if settings.load is not None:
        return open_checkpoint(Path(settings.load), f"checkpoint.load={settings.load}")
    return newest_checkpoint(Path(config.output_dir)) or open_checkpoint(
        Path(settings.init_from or config.output_dir), "the run in output_dir, or checkpoint.load"
    )


def trained_multiple(model: ResolvedModel, checkpoint: Checkpoint) -> dict[str, int]:
    """Return a vocab_multiple that keeps model.vocab_size, if the checkpoint has this size.

    A run without a tokenizer trains all rows of a padded table. A tokenizer that is given later
    would take that size for the padded size of its own vocabulary.
    """
    if model.vocab_size % model.vocab_multiple == 0:
        with suppress(GPT2Error):  # it is reported where the checkpoint is verified
            trained = checkpoint.manifest(model)["config"].get("model", {})
            if trained.get("vocab_size") == model.vocab_size:
                return {"vocab_multiple": multiple_that_keeps(model.vocab_size)}
    return {}


def weights_to_use(config: Run, checkpoint: Checkpoint, tokenizer: dict[str, Any] | None) -> Checkpoint:
    """Return the checkpoint to evaluate, generate with or export.

    Raises CheckpointError unless it has the tokenizer and the model of the config.
    """
    resume = config.checkpoint.resume
    if resume not in ("auto", "latest", "never") and config.checkpoint.load is None:
        LOG.warning(
            f"checkpoint.resume={resume} is for training; the weights are those of {checkpoint};"
            f" to use the others, set checkpoint.load={resume}"
        )
    require_fitting(checkpoint, "checkpoint.load", config, tokenizer)
    return checkpoint


def require_fitting(
    checkpoint: Checkpoint, key: str, config: Run, tokenizer: dict[str, Any] | None, *, may_move: bool = False
) -> None:
    """Raise CheckpointError unless a checkpoint is whole and of the config's model and tokenizer.

    key: the override that takes another checkpoint. may_move: see ``require_same_model``.
    """
    checkpoint.verify(key)
    manifest = checkpoint.manifest(config.model)
    left_out = manifest.get("left_out", {})
    for reason, count in Counter(left_out.values()).items():
        name = next(name for name, why in left_out.items() if why == reason)
        LOG.info(f"{checkpoint}: left out: " + (f"{count} x {reason}" if count > 1 else f"{name} ({reason})"))
    trained = manifest.get("tokenizer")
    if trained and tokenizer and trained.get("sha256", "") != tokenizer["sha256"]:
        raise CheckpointError(
            f"{checkpoint}: trained with tokenizer {trained.get('kind')} of {trained.get('vocab_size')} tokens (sha256"
            f" {trained.get('sha256', '')[:12]}), the one given is {tokenizer['kind']} of {tokenizer['vocab_size']}"
            f" tokens (sha256 {tokenizer['sha256'][:12]}); give the vocabulary files it was trained with"
        )
    require_same_model(manifest, config, checkpoint.path, may_move=may_move)


def _log_changes(manifest: dict[str, Any], config: Run, data: TrainingData) -> None:
    if manifest.get("data") != data.fingerprint:
        LOG.warning(
            "the data, its split, the window or the seed has changed since the checkpoint, or the"
            " checkpoint is of an older version, so the order of samples changes too"
        )
    before, now = dict(flatten(manifest["config"])), dict(flatten(config.model_dump()))
    key = "checkpoint.init_from"
    if now[key] not in (None, before.get(key)):
        LOG.warning(f"{key}={now[key]} is not read, since a run is resumed; to start from it give another output_dir")
    silent = {"predict", "evaluation", "serve", "logging", "profile", "checkpoint"}
    decisive = {"logging.outlier_deviations", "logging.outlier_window"} if config.train.on_outlier == "skip" else set()
    for key, value in now.items():
        if (key in decisive or key.partition(".")[0] not in silent) and before.get(key, value) != value:
            LOG.info(f"changed since the checkpoint: {key} {before[key]} -> {value}")


_SIZES = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "max_positions", "vocab_size")
_DECISIVE = (*_SIZES, "layer_norm_epsilon", "activation")
"""Keys that change shapes or the computed function. The window (seq_length) may be any up to max_positions."""


def require_same_model(manifest: Mapping[str, Any], config: Run, checkpoint: Path, *, may_move: bool = False) -> None:
    """Raise CheckpointError if the models of checkpoint and config differ, listing the keys to set.

    may_move: the message offers another output_dir.
    """
    trained, model = {"activation": "gelu_new", **manifest["config"]["model"]}, config.model
    differ = {key: trained[key] for key in _DECISIVE if trained[key] != getattr(model, key)}
    if not differ:
        return
    found = ", ".join(
        f"{key} is {value} there and {getattr(model, key)} in the config" for key, value in differ.items()
    )
    given = dict(differ)  # the overrides that turn the config's model into that of the checkpoint
    if model.seq_length > given.get("max_positions", model.seq_length):
        given["seq_length"] = given["max_positions"]
    vocabulary = given.get("vocab_size", 0)
    if vocabulary > model.vocab_size and vocabulary % model.vocab_multiple == 0:
        given["vocab_multiple"] = multiple_that_keeps(vocabulary)
    words = " ".join(f"model.{key}={value}" for key, value in given.items())
    say = (
        f"{checkpoint}: holds another model than the config: {found}. To use it, add: model=from_checkpoint, or {words}"
    )
    if may_move:
        names = (f"{config.output_dir.rstrip('/')}_{number}" for number in range(2, 10_000))
        free = next(name for name in names if not Path(name).exists())
        say += f". To train the model of the config instead, begin in another folder: output_dir={free}"
    raise CheckpointError(say)


def multiple_for(vocabulary: int, multiple: int) -> int:
    """Return the vocab_multiple, or another one if the size would be taken for a padded one."""
    return multiple if vocabulary % multiple else multiple_that_keeps(vocabulary)


def multiple_that_keeps(vocabulary: int) -> int:
    """Return a vocab_multiple with which a size is not taken for a padded one."""
    return next(number for number in range(2, vocabulary + 2) if vocabulary % number)

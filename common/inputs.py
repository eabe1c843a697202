"""Checks of the inputs that a run needs, before a framework is imported.

A missing path is thus reported within a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.checkpoint.folders import NoCheckpointError, find_checkpoint
from common.config.resolved import as_run
from common.conversion.foreign import explained
from common.dataset import parse_blend, require_data
from common.errors import CheckpointError, ConfigError, DataError
from common.evaluation.corpus import find_evaluation_file
from common.evaluation.task import VALIDATION_TASKS
from common.generation.prompts import encode_prompts, given_prompts
from common.hub import located
from common.inference.run_modes import program_to_use
from common.parallel.resolved_run import ResolvedRun
from common.resolve.derive import require_length
from common.tokenizer import require_files
from common.training.data import open_tokenizer, require_entries, tokenizer_source
from common.training.start import checkpoint_to_use, require_weights


def check_inputs(run_mode: str, config: ResolvedRun) -> None:
    """Check the inputs of a run mode, but not the content of files, which is checked at opening.

    Raises ConfigError, DataError, TokenizerError or CheckpointError naming a missing setting, or a
    missing path and where it was looked for.
    """
    try:
        _check(run_mode, config)
    except NoCheckpointError as error:
        raise explained(error) from None


def with_inputs_here(config: ResolvedRun) -> ResolvedRun:
    """Return the config with folders in place of the models that it names on the hub, and with
    data sets in place of the folders that hold them.

    checkpoint.init_from stays a name where output_dir holds a run. Raises ConfigError, DataError
    and CheckpointError.
    """
    settings, wish = config.checkpoint, config.data.tokenizer
    paths = {key: Path(getattr(settings, key) or "") for key in ("load", "resume", "init_from")}
    if settings.init_from and find_checkpoint(Path(config.output_dir)) is not None:
        del paths["init_from"]
    here = {key: located(path) for key, path in paths.items()}
    checkpoint = {key: str(path) for key, path in here.items() if path != paths[key]}
    if wish is not None and wish.folder is not None:
        folder = str(located(Path(wish.folder), weights=False))
        wish = wish.model_copy(update={"folder": folder})
    data = {"tokenizer": wish} | {
        name: [_corpus_in(entry, f"data.{name}") for entry in entries]
        for name in ("train", "validation")
        if (entries := getattr(config.data, name)) is not None
    }
    return as_run(ResolvedRun, config, checkpoint=checkpoint, data=data)


def _corpus_in(entry: str | float, key: str) -> str | float:
    """Return the prefix of the only .bin/.idx pair below an entry that is a folder. An entry
    without any stays, as a folder of MindRecord. Raises DataError.
    """
    if not isinstance(entry, str) or not (folder := Path(entry)).is_dir():
        return entry
    if Path(f"{folder}.idx").is_file():
        return entry
    prefixes = sorted(
        path.with_suffix("") for path in folder.rglob("*.idx") if path.with_suffix(".bin").is_file()
    )
    if len(prefixes) > 1:
        shown = ", ".join(str(prefix.relative_to(folder)) for prefix in prefixes[:5])
        raise DataError(
            f"{folder} holds {len(prefixes)} corpora ({shown}); give one as {key}=FOLDER/NAME, or a"
            " folder with one"
        )
    return str(prefixes[0]) if prefixes else entry


def check_before_ranks(run_mode: str, config: ResolvedRun) -> None:
    """Check in the process that starts the ranks what rank 0 would, and fetch the models that the
    config names. Raises as ``check_inputs``.
    """
    config = with_inputs_here(config)
    takes_program = run_mode in ("eval", "predict", "serve")
    if not takes_program or program_to_use(config) is None:
        check_inputs(run_mode, config)


def _check(run_mode: str, config: ResolvedRun) -> None:
    if run_mode in ("train", "finetune"):
        _check_training(run_mode, config)
        return
    if run_mode == "predict":
        given_prompts(config)
    on_text = run_mode == "eval" and config.evaluation.task not in VALIDATION_TASKS
    if run_mode in ("predict", "serve") or on_text:
        _check_tokenizer(config)
    if run_mode == "eval":
        _check_evaluation(config)
    try:
        checkpoint_to_use(config)
    except CheckpointError:
        # a fault in the prompts comes first, as it does with a checkpoint
        if run_mode == "predict":
            tokenizer, config = open_tokenizer(config)
            encode_prompts(config, tokenizer)
        raise


def _check_training(run_mode: str, config: ResolvedRun) -> None:
    settings = config.checkpoint
    if run_mode == "finetune" and settings.init_from is None:
        raise ConfigError(
            "--run_mode finetune starts from weights: give checkpoint.init_from=PATH (a"
            " checkpoint, a run folder, or another system's weights)"
        )
    require_length(config)
    _check_data(require_entries(config.data.train))
    if config.data.validation is not None:
        _check_data(config.data.validation)
    if settings.resume not in ("auto", "never"):
        where = config.output_dir if settings.resume == "latest" else settings.resume
        require_weights(Path(where), f"checkpoint.resume={settings.resume}")
    elif settings.init_from is not None and find_checkpoint(Path(config.output_dir)) is None:
        require_weights(Path(settings.init_from), "checkpoint.init_from")


def _check_evaluation(config: ResolvedRun) -> None:
    if config.evaluation.task in VALIDATION_TASKS:
        _check_data(require_entries(config.data.validation or config.data.train))
    else:
        find_evaluation_file(config.evaluation)


def _check_data(entries: Sequence[str | float]) -> None:
    for _, prefix in parse_blend([str(entry) for entry in entries]):
        require_data(prefix)


def _check_tokenizer(config: ResolvedRun) -> None:
    wish, source = tokenizer_source(config)
    require_files(source, wish.merge_file)

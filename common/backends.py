"""The run of this process, and the backend that runs its mode.

What the configuration, its inputs and its device say is put together once. Inputs are checked before a framework is
imported, so that a missing path is reported within a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.accelerators import Hardware
from common.checkpoint.folders import NoCheckpointError, find_checkpoint, require_checkpoint
from common.cluster.environment import ALONE, Process
from common.config.resolved import as_run, as_section
from common.config.schema import RunConfig, TokenizerConfig
from common.conversion.export import PROGRAMS, export_program
from common.dataset.blend import parse_blend, require_data
from common.dataset.fleetx import find_fleetx
from common.dataset.mindrecord import mindrecords_below
from common.errors import CheckpointError, ConfigError, DataError, RunError
from common.evaluation.corpus import find_evaluation_file
from common.evaluation.task import VALIDATION_TASKS
from common.generation.prompts import encode_prompts, given_prompts
from common.hub import located
from common.inference.load import hardware_of, import_backend, open_device, quieten_frameworks
from common.inference.run_modes import continue_prompts, of_program, program_to_use, run_program, serve_completions
from common.inference.source import Source
from common.interrupts import receive_interrupts
from common.log import LOG
from common.parallel.run import Run
from common.planner.fitting import Fitting, check_memory, gibibytes, is_open, memory_limit, out_of_memory
from common.resolve.derive import (
    ONE_DEVICE_MODES,
    export_format,
    length_in_steps,
    require_length,
    resolve_mode,
    uses_one_device,
)
from common.resolve.engine_checks import check_here
from common.systems.table import explain
from common.tokenizer import Tokenizer, require_files
from common.training.data import Corpus, open_corpus, open_tokenizer, require_entries, tokenizer_source
from common.training.export import export, exported_vocabulary
from common.training.opened_checkpoint import Checkpoint, open_checkpoint
from common.training.start import checkpoint_to_use, trained_multiple


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Parts that a run computes with, each opened once by ``make_run``."""

    device: Any = None
    """The backend's device; None where none is needed."""
    corpus: Corpus | None = None
    """Data of a training or a validation."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of every mode that reads texts."""
    checkpoint: Checkpoint | None = None
    """The weights to use. In rank 0 of a training those that a key names, if one does."""
    program: Source | None = None
    """An export that runs without conversion."""


def make_run(config: RunConfig, run_mode: str = "train", process: Process = ALONE) -> tuple[Run, Inputs]:
    """Resolve the configuration of this process, and open what it names. Nothing changes the run after it.

    The order is that of the cost: contradictions, paths, data, and the device, for which a framework is imported.
    Raises ConfigError, DataError, TokenizerError, CheckpointError and DeviceError.
    """
    run = resolve_mode(config, run_mode, world_size=process.world_size)
    run = as_run(Run, run, **_paths_here(run))
    takes_program = run_mode in ("eval", "predict", "serve")
    program = program_to_use(run) if takes_program else None
    trains = run_mode in ("train", "finetune")
    needs_device = program is None and (run_mode != "export" or export_format(run) == "mindir")
    checkpoint = None
    if program is not None:
        run = as_run(Run, run, **of_program(run, program))
    else:
        if run_mode != "export" or export_format(run) not in ("safetensors", *PROGRAMS):
            check_here(run)
        if process.rank == 0:
            checkpoint = check_inputs(run_mode, run)
        elif not trains:
            checkpoint = checkpoint_to_use(run)
    if checkpoint is not None and takes_program:
        run = as_run(Run, run, model=trained_multiple(run.model, checkpoint))
    corpus = tokenizer = None
    vocabulary: dict[str, int] = {}
    if trains or (run_mode == "eval" and run.evaluation.task in VALIDATION_TASKS):
        corpus = open_corpus(run, training=trains)
        vocabulary = corpus.vocabulary
    elif takes_program:
        tokenizer, vocabulary = open_tokenizer(run)
    elif checkpoint is not None and run_mode == "export":
        vocabulary = exported_vocabulary(run.model, checkpoint)
    device = open_device(run, process, lengths_vary=not trains) if needs_device else None
    hardware = None if device is None else hardware_of(device)
    changes: dict[str, dict[str, Any]] = {}
    if trains and hardware is not None and is_open(config):
        changes = _chosen(config, run, hardware, process)
    if corpus is not None:
        changes["data"] = {"eod_id": corpus.eod_id}
        if corpus.samples is not None:
            length = length_in_steps(run, run.batch_sizes, corpus.samples.samples_per_epoch)
            changes["train"] = {**changes.get("train", {}), **length.get("train", {})}
            changes["optimizer"] = length.get("optimizer", {})
    run = as_run(Run, run, model=vocabulary, hardware=hardware, **changes)
    if hardware is not None:
        check_memory(run, process, training=trains)
    inputs = Inputs(device=device, corpus=corpus, tokenizer=tokenizer, checkpoint=checkpoint, program=program)
    return run, inputs


def _chosen(config: RunConfig, run: Run, hardware: Hardware, process: Process) -> dict[str, dict[str, Any]]:
    """Return the keys that the plan chooses for the memory of this rank."""
    world_size = run.topology.world_size
    limit = memory_limit(config, hardware, ranks=min(process.most_here, world_size))
    found = Fitting(config, world_size, hardware, limit).fastest()
    train = found.train
    blocks = "" if train.recompute_layers is None else f" in {train.recompute_layers} blocks"
    keys = [key for key in ("micro_batch_size", "recompute") if getattr(config.train, key) == "auto"]
    reserve = "" if limit == config.context.most_bytes else ", which leaves a reserve"
    room = "unknown memory" if limit is None else gibibytes(limit) + reserve
    LOG.info(
        f"train.{' and '.join(keys)}=auto: micro batch {train.micro_batch_size}, recompute"
        f" {train.recompute}{blocks + ' of a stage' if blocks else ''}, by the plan for"
        f" {room}; accumulation {train.accumulation_steps}, global batch"
        f" {train.global_batch_size}"
    )
    chosen = ("micro_batch_size", "accumulation_steps", "recompute", "recompute_layers")
    return {
        "train": {key: getattr(train, key) for key in chosen},
        "validation": {"micro_batch_size": found.validation.micro_batch_size},
    }


def _paths_here(config: Run) -> dict[str, Any]:
    """Return the keys that change where folders take the place of the models that the config names on the hub, and data
    sets the place of the folders that hold them.

    checkpoint.init_from stays a name where output_dir holds a run. Raises ConfigError, DataError and CheckpointError.
    """
    settings, wish = config.checkpoint, config.data.tokenizer
    paths = {key: Path(getattr(settings, key) or "") for key in ("load", "resume", "init_from")}
    if settings.init_from and find_checkpoint(Path(config.output_dir)) is not None:
        del paths["init_from"]
    checkpoint = {key: str(here) for key, path in paths.items() if (here := located(path)) != path}
    if wish is not None and wish.folder is not None:
        folder = str(located(Path(wish.folder), weights=False))
        wish = as_section(TokenizerConfig, wish, {"folder": folder})
    data = {"tokenizer": wish} | {
        name: [_corpus_in(entry, f"data.{name}") for entry in entries]
        for name in ("train", "validation")
        if (entries := getattr(config.data, name)) is not None
    }
    return {"checkpoint": checkpoint, "data": data}


def _corpus_in(entry: str | float, key: str) -> str | float:
    """Return the prefix of the only .bin/.idx pair below an entry that is a folder, or of FleetX's files in it. A
    folder of MindRecord, or without any, stays. Raises DataError.
    """
    if not isinstance(entry, str) or not (folder := Path(entry)).is_dir() or Path(f"{folder}.idx").is_file():
        return entry
    records = mindrecords_below(folder)[:1]
    pairs = (path.with_suffix("") for path in folder.rglob("*.idx") if path.with_suffix(".bin").is_file())
    found = sorted([*pairs, *records])
    if (fleetx := find_fleetx(folder)) is not None:  # FleetX does not look into the folders below
        found = [fleetx, *(path for path in found if path.parent == folder)]
    if len(found) > 1:
        shown = ", ".join(str(path.relative_to(folder)) for path in found[:5])
        raise DataError(
            f"{folder} holds {len(found)} corpora ({shown}); give one as {key}=FOLDER/NAME, or a folder with one"
        )
    return entry if found in ([], records) else str(found[0])


def check_before_ranks(run_mode: str, config: Run) -> None:
    """Check in the process that starts the ranks what rank 0 would, and fetch the models that the
    config names. Raises as ``check_inputs``.
    """
    config = as_run(Run, config, **_paths_here(config))
    takes_program = run_mode in ("eval", "predict", "serve")
    if not takes_program or program_to_use(config) is None:
        check_inputs(run_mode, config)


def check_inputs(run_mode: str, config: Run) -> Checkpoint | None:
    """Check the inputs of a run mode, but not the content of files, which is checked at opening.

    Returns the checkpoint that is named. Raises ConfigError, DataError, TokenizerError or
    CheckpointError naming a missing setting, or a missing path and where it was looked for.
    """
    try:
        if run_mode in ("train", "finetune"):
            return _check_training(run_mode, config)
        if run_mode == "predict":
            given_prompts(config)
        if run_mode == "eval" and config.evaluation.task in VALIDATION_TASKS:
            _check_data(config.data.validation or config.data.train)
        elif run_mode != "export":
            wish, source = tokenizer_source(config)
            require_files(source, wish.merge_file)
            if run_mode == "eval":
                find_evaluation_file(config.evaluation)
        try:
            return checkpoint_to_use(config)
        except CheckpointError:
            if run_mode == "predict":  # a fault in the prompts comes first, as it does with a checkpoint
                encode_prompts(config, open_tokenizer(config)[0])
            raise
    except NoCheckpointError as error:
        where, why = error.where, error.why
        raise CheckpointError(f"{where}: no whole checkpoint here ({why}): {explain(where, why)}") from None


def _check_training(run_mode: str, config: Run) -> Checkpoint | None:
    settings = config.checkpoint
    if run_mode == "finetune" and settings.init_from is None:
        raise ConfigError(
            "--run_mode finetune starts from weights: give checkpoint.init_from=PATH (a"
            " checkpoint, a run folder, or another system's weights)"
        )
    require_length(config)
    _check_data(config.data.train)
    if config.data.validation is not None:
        _check_data(config.data.validation)
    if settings.resume == "latest":  # which may be another one when the run holds its folder
        require_checkpoint(Path(config.output_dir), "checkpoint.resume=latest")
    elif settings.resume not in ("auto", "never"):
        return open_checkpoint(Path(settings.resume), f"checkpoint.resume={settings.resume}")
    elif settings.init_from is not None and find_checkpoint(Path(config.output_dir)) is None:
        return open_checkpoint(Path(settings.init_from), "checkpoint.init_from")
    return None


def _check_data(entries: Sequence[str | float] | None) -> None:
    for _, prefix in parse_blend(require_entries(entries)):
        require_data(prefix)


def run_backend(run_mode: str, config: RunConfig, process: Process) -> None:
    """Run a mode in the backend of a config. An export of weights needs no backend."""
    quieten_frameworks()
    if process.rank > 0 and uses_one_device(config, run_mode, process.world_size):
        LOG.warning(
            f"--run_mode {run_mode} takes one device in this version, that of rank 0; rank"
            f" {process.rank} has nothing to do"
        )
        return
    if config.backend == "mindspore":
        receive_interrupts()
    run, inputs = make_run(config, run_mode, process)
    if run_mode == "export" and export_format(run) in ("safetensors", *PROGRAMS):
        assert inputs.checkpoint is not None
        (export if export_format(run) == "safetensors" else export_program)(run, inputs.checkpoint)
        return
    if inputs.program is not None:
        run_program(run_mode, run, inputs.program, inputs.corpus, inputs.tokenizer)
        return
    work = {"predict": continue_prompts, "serve": serve_completions}.get(run_mode)
    # the module of a backend, with a function of that name
    name = "predict" if work else {"finetune": "train", "eval": "evaluate"}.get(run_mode, run_mode)
    module = import_backend(run.backend, name)
    try:
        if work is None:
            getattr(module, name)(run, inputs, process)
        else:
            assert inputs.tokenizer is not None
            work(run, inputs.tokenizer, partial(module.open_runner, run, inputs.device, inputs.checkpoint))
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        at = process.rank % run.topology.world_size
        message = out_of_memory(error, run, rank=at, training=run_mode in ("train", "finetune"))
        if message is None:
            raise
        raise RunError(message) from None


def serve_as_scheduler(run_mode: str, config: RunConfig) -> None:
    """Run msrun's scheduler, which has the same command as the ranks."""
    if config.backend == "mindspore" and run_mode not in ONE_DEVICE_MODES:
        importlib.import_module("mindformers_gpt2.parallel.world").serve_as_scheduler()

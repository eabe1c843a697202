"""Choice and import of the backend of a run, and call of its run mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial

from common.cluster.environment import Process
from common.config.schema import RunConfig
from common.conversion.export import PROGRAMS, export_program
from common.errors import RunError
from common.inference.load import PACKAGES, import_backend, quieten_frameworks
from common.inference.run_modes import continue_prompts, run_program, serve_completions
from common.inputs import Inputs, make_run
from common.interrupts import ending_at_interrupts, receive_interrupts
from common.log import LOG, start_log
from common.parallel.run import Run
from common.planner.room import out_of_memory
from common.resolve.derive import ONE_DEVICE_MODES, export_format, uses_one_device
from common.training.export import export

_ENTRIES = {"train": "train", "finetune": "train", "eval": "evaluate", "export": "export"}
"""Run mode -> module of a backend, with a function of that name."""


def begin(process: Process, remarks: Iterable[str]) -> None:
    """Start the log of a process, in which rank 0 says what is left out of its arguments."""
    start_log(rank=process.rank)
    if process.rank == 0:
        for remark in (*remarks, *process.remarks):
            LOG.warning(remark)


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
        is_program = export_format(run) in PROGRAMS
        (export_program if is_program else export)(run, inputs.checkpoint)
        return
    if inputs.program is not None:
        run_program(run_mode, run, inputs.program, inputs.corpus, inputs.tokenizer)
        return
    with ending_at_interrupts():
        import_backend(run.backend)
        entry = _entry(run_mode, run.backend)
    training = run_mode in ("train", "finetune")
    try:
        entry(run, inputs, process)
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        at = process.rank % run.topology.world_size
        message = out_of_memory(error, run, rank=at, training=training)
        if message is None:
            raise
        raise RunError(message) from None


def _entry(run_mode: str, backend: str) -> Callable[[Run, Inputs, Process], None]:
    """Import what runs a mode."""
    work = {"predict": continue_prompts, "serve": serve_completions}.get(run_mode)
    name = "predict" if work else _ENTRIES[run_mode]
    module = importlib.import_module(f"{PACKAGES[backend]}.{name}")
    if work is None:
        return getattr(module, name)  # type: ignore[no-any-return]

    def run_with_model(run: Run, inputs: Inputs, process: Process) -> None:
        assert inputs.tokenizer is not None
        opener = partial(module.open_runner, run, inputs.device, inputs.checkpoint)
        work(run, inputs.tokenizer, opener)

    return run_with_model


def serve_as_scheduler(run_mode: str, config: RunConfig) -> None:
    """Run msrun's scheduler, which has the same command as the ranks."""
    if config.backend == "mindspore" and run_mode not in ONE_DEVICE_MODES:
        importlib.import_module("mindformers_gpt2.parallel.world").serve_as_scheduler()

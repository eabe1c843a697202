"""Choice and import of the backend of a run, and call of its run mode."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from common.cluster.environment import Process
from common.config.schema import RunConfig
from common.conversion.export import PROGRAMS, export_program
from common.errors import RunError
from common.inference.load import PACKAGES, import_backend, quieten_frameworks
from common.inference.run_modes import program_to_use, run_program
from common.inputs import check_inputs, with_inputs_here
from common.interrupts import ending_at_interrupts
from common.log import LOG, start_log
from common.parallel.resolved_run import ResolvedRun
from common.planner.room import out_of_memory
from common.resolve.derive import ONE_DEVICE_MODES, export_format
from common.resolve.engine_checks import check_here
from common.training.export import export
from common.training.start import with_trained_vocabulary
from common.training.stop import receive_interrupts

_ENTRIES = {
    "train": "train",
    "finetune": "train",
    "eval": "evaluate",
    "predict": "predict",
    "serve": "serve",
    "export": "export",
}
"""Run mode -> module of a backend, with a function of that name."""


def begin(process: Process, remarks: Iterable[str]) -> None:
    """Start the log of a process, in which rank 0 says what is left out of its arguments."""
    start_log(rank=process.rank)
    if process.rank == 0:
        for remark in (*remarks, *process.remarks):
            LOG.warning(remark)


def run_backend(run_mode: str, config: ResolvedRun, process: Process) -> None:
    """Run a mode in the backend of a resolved config. An export of weights needs no backend."""
    quieten_frameworks()
    ranks = config.topology.world_size
    if process.rank > 0 and run_mode in ONE_DEVICE_MODES and ranks == 1:
        LOG.warning(
            f"--run_mode {run_mode} takes one device in this version, that of rank 0; rank"
            f" {process.rank} has nothing to do"
        )
        return
    config = with_inputs_here(config)
    if run_mode == "export" and export_format(config) == "safetensors":
        check_inputs(run_mode, config)
        export(config)
        return
    if run_mode == "export" and export_format(config) in PROGRAMS:
        check_inputs(run_mode, config)
        export_program(config)
        return
    if run_mode in ("eval", "predict", "serve") and (program := program_to_use(config)) is not None:
        run_program(run_mode, config, program)
        return
    check_here(config)
    if run_mode in ("eval", "predict", "serve"):
        config = with_trained_vocabulary(config)
    if process.rank == 0:
        check_inputs(run_mode, config)
    if config.backend == "mindspore":
        receive_interrupts()
    name = _ENTRIES[run_mode]
    with ending_at_interrupts():
        import_backend(config.backend)
        entry = getattr(importlib.import_module(f"{PACKAGES[config.backend]}.{name}"), name)
    training = name == "train"
    try:
        entry(config, process)
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        message = out_of_memory(error, config, rank=process.rank % ranks, training=training)
        if message is None:
            raise
        raise RunError(message) from None


def serve_as_scheduler(run_mode: str, config: RunConfig) -> None:
    """Run msrun's scheduler, which has the same command as the ranks."""
    if config.backend == "mindspore" and run_mode not in ONE_DEVICE_MODES:
        importlib.import_module("mindformers_gpt2.parallel.world").serve_as_scheduler()

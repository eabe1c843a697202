"""Choice and import of the backend of a run, and call of its run mode."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from common.cluster.environment import Process
from common.config.schema import RunConfig
from common.conversion.export import PROGRAMS, export_program
from common.errors import RunError
from common.inference.load import PACKAGES, import_backend, quieten_frameworks
from common.inference.run_modes import run_program
from common.inputs import make_run
from common.interrupts import ending_at_interrupts
from common.log import LOG, start_log
from common.planner.room import out_of_memory
from common.resolve.derive import ONE_DEVICE_MODES, export_format, uses_one_device
from common.training.export import export
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
    name = _ENTRIES[run_mode]
    with ending_at_interrupts():
        import_backend(run.backend)
        entry = getattr(importlib.import_module(f"{PACKAGES[run.backend]}.{name}"), name)
    training = name == "train"
    try:
        entry(run, inputs, process)
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        at = process.rank % run.topology.world_size
        message = out_of_memory(error, run, rank=at, training=training)
        if message is None:
            raise
        raise RunError(message) from None


def serve_as_scheduler(run_mode: str, config: RunConfig) -> None:
    """Run msrun's scheduler, which has the same command as the ranks."""
    if config.backend == "mindspore" and run_mode not in ONE_DEVICE_MODES:
        importlib.import_module("mindformers_gpt2.parallel.world").serve_as_scheduler()

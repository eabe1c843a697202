"""Export a checkpoint in torch's own format."""

from __future__ import annotations

import torch

from common.cluster.environment import ALONE, Process
from common.conversion.export import ProgramFormat, export_program
from common.inputs import Inputs
from common.parallel.run import Run
from torch_gpt2.program import FILE, ProgramModel, write_program


def export(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    """Write the folder pt2 in the run folder. Raises the errors of ``export_program``."""
    program = ProgramFormat(
        write=lambda folder, weights, run: write_program(folder, weights, cache=run.export.cache),
        open=lambda folder, model: ProgramModel(folder / FILE, model),
        versions={"torch": torch.__version__},
    )
    assert inputs.checkpoint is not None
    export_program(config, inputs.checkpoint, program)

"""Layouts in which torch.compile can compile the model."""

from __future__ import annotations

from common.parallel.run import Run


def compile_error(config: Run) -> str | None:
    """Return what contradicts train.compile=true in a config for torch, or None."""
    parallel = config.parallel
    if config.engine == "deepspeed" and (parallel.zero_stage == 3 or parallel.pipeline_stage > 1):
        return (
            f"with parallel.zero_stage={parallel.zero_stage} and"
            f" pipeline_stage={parallel.pipeline_stage}: DeepSpeed's hooks break the graph; leave"
            " compile out, or set engine=native"
        )
    if parallel.pipeline_stage > 1 and "zero_bubble" in parallel.pipeline_schedule:
        return (
            f"with parallel.pipeline_schedule={parallel.pipeline_schedule}: a compiled backward"
            " pass cannot be split into its two parts; leave compile out, or choose 1f1b or"
            " interleaved_1f1b"
        )
    if parallel.strategy == "parameter_server" and config.topology.world_size == 1:
        return (
            "with parallel.strategy=parameter_server in one process: torch.nn.DataParallel copies"
            " the model in each step; leave it out"
        )
    return None

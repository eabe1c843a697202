"""Checks of ``parallel.parallel_mode`` (who splits the work on MindSpore), without any
framework.
"""

from __future__ import annotations

from common.config.resolved import ResolvedParallel
from common.errors import refuse_first
from common.parallel.batch import check_divides
from common.parallel.run import Run

COMPILED = ("semi_auto_parallel", "auto_parallel")
"""Modes in which MindSpore's compiler splits the graph."""


def compiled_mode(config: Run, kind: str) -> bool:
    """Tell whether MindSpore's compiler splits the graph of this run on a device of this kind."""
    parallel = config.parallel
    if config.backend != "mindspore":
        return False
    return (
        parallel.parallel_mode in COMPILED
        if parallel.parallel_mode
        else kind == "npu" and config.topology.world_size > 1
    )


def check_parallel_mode(config: Run, kind: str) -> None:
    """Check a run on MindSpore. kind: of the device; auto if not known yet.

    Raises ConfigError naming the settings that contradict each other, and a fix.
    """
    mode, ramp = config.parallel.parallel_mode, config.train.rampup_batch_size
    named = f"parallel.parallel_mode={mode}"
    refuse_first(
        mode in COMPILED
        and kind in ("cpu", "cuda")
        and f"{named}: MindSpore's compiler splits graphs for Ascend, but this run has"
        f" device={kind}; set parallel.parallel_mode=3 (hybrid_parallel), whose own collectives"
        " run here in the same layouts"
    )
    if kind == "auto" and mode is None:
        return  # checked again when the device is open
    if not compiled_mode(config, kind):
        _check_explicit(config)
        return
    _check_compiled(config)
    refuse_first(
        ramp is not None
        and f"train.rampup_batch_size={ramp} with"
        f" parallel.parallel_mode={mode or 'semi_auto_parallel'}: the graph of a step holds"
        " a fixed number of micro batches; set parallel.parallel_mode=3 (hybrid_parallel),"
        " or leave the key out"
    )


def _check_explicit(config: Run) -> None:
    parallel, train = config.parallel, config.train
    given = parallel.changed("parallel_mode")
    if parallel.full_batch is False:  # hybrid_parallel always reads so
        given.remove("full_batch")
    words = ", ".join(
        [f"parallel.{name}={getattr(parallel, name)}" for name in given]
        + [f"train.{name}={getattr(train, name)}" for name in train.changed("parallel_mode")]
    )
    mode = f" with parallel_mode={parallel.parallel_mode}" if parallel.parallel_mode else ""
    refuse_first(
        parallel.parallel_mode == "data_parallel"
        and parallel.model_parallel * parallel.pipeline_stage > 1
        and "parallel.parallel_mode=data_parallel with"
        f" parallel.model_parallel={parallel.model_parallel} and"
        f" pipeline_stage={parallel.pipeline_stage}: set both to 1, or parallel_mode=3"
        " (hybrid_parallel), or 1 (semi_auto_parallel) on Ascend",
        words
        and f"{words}: only parallel.parallel_mode 1 (semi_auto_parallel) and 2 (auto_parallel)"
        f" have this, on several Ascends; leave it out{mode}",
    )


def unmet_needs(parallel: ResolvedParallel) -> tuple[object, ...]:
    """Return the faults of splits that have nothing to split, for every framework."""
    return (
        parallel.sequence_parallel
        and parallel.model_parallel == 1
        and "parallel.sequence_parallel=true needs parallel.model_parallel above 1; leave it out",
        parallel.zero_stage
        and parallel.data_parallel == 1
        and f"parallel.zero_stage={parallel.zero_stage} splits over data-parallel ranks, and there"
        " is 1; set zero_stage=0",
        parallel.shard_size is not None
        and not parallel.zero_stage
        and f"parallel.shard_size={parallel.shard_size} needs parallel.zero_stage 1 to 3; set it,"
        " or leave shard_size out",
    )


def _check_compiled(config: Run) -> None:
    parallel, train, reduction = config.parallel, config.train, config.precision.reduction
    named = f"parallel.parallel_mode={parallel.parallel_mode or 'semi_auto_parallel'}"
    data, tensor, stages = parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage
    interleave, accumulation = parallel.micro_batch_interleave_num, train.accumulation_steps
    split, load = parallel.parallel_optimizer_config, parallel.strategy_ckpt_config.load_file
    of_search = {"search_mode": parallel.search_mode, "strategy_ckpt_config.load_file": load}
    refuse_first(
        config.topology.world_size == 1
        and f"{named} splits over several processes, and there is 1; leave it out, or start more",
        config.context.mode == "pynative"
        and f"{named} needs context.mode=graph; set it, or parallel.parallel_mode=3 (hybrid_parallel)",
        reduction != "float32"
        and f"{named} sums gradients in float32, found precision.reduction={reduction}; leave it out",
        parallel.pipeline_schedule != "1f1b"
        and f"{named} has pipeline_schedule=1f1b with one stage a rank, found"
        f" {parallel.pipeline_schedule} with virtual_stages={parallel.virtual_stages}; choose that",
        accumulation < stages
        and f"parallel.micro_batch_num={accumulation} is below parallel.pipeline_stage={stages}:"
        " MindSpore's pipeline needs a micro batch for each stage; raise the first",
        *unmet_needs(parallel),
        split != type(split)()
        and not parallel.zero_stage
        and "parallel.parallel_optimizer_config needs parallel.enable_parallel_optimizer=true; set it, or leave it out",
        interleave > 1
        and tensor > 1
        and stages > 1
        and f"parallel.micro_batch_interleave_num={interleave} with model_parallel={tensor} and"
        f" pipeline_stage={stages}: MindSpore 2.10 cannot compile the three together; leave the"
        " first out",
        *(
            value is not None
            and parallel.parallel_mode != "auto_parallel"
            and f"parallel.{key}={value} is for parallel.parallel_mode=2 (auto_parallel); set that, or leave it out"
            for key, value in of_search.items()
        ),
    )
    if parallel.shard_size is not None:
        check_divides("parallel.shard_size", parallel.shard_size, "parallel.data_parallel", data)
    name = "parallel.micro_batch_interleave_num"
    check_divides(name, interleave, "train.micro_batch_size", train.micro_batch_size)

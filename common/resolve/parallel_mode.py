"""Checks of ``parallel.parallel_mode`` (who splits the work on MindSpore), without any
framework.
"""

from __future__ import annotations

from common.errors import ConfigError
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
    mode = config.parallel.parallel_mode
    named = f"parallel.parallel_mode={mode}"
    if mode in COMPILED and kind in ("cpu", "cuda"):
        raise ConfigError(
            f"{named}: MindSpore's compiler splits graphs for Ascend, but this run has"
            f" device={kind}; set parallel.parallel_mode=3 (hybrid_parallel), whose own collectives"
            " run here in the same layouts"
        )
    if kind == "auto" and mode is None:
        return  # checked again when the device is open
    if compiled_mode(config, kind):
        _check_compiled(config)
        if config.train.rampup_batch_size is not None:
            raise ConfigError(
                f"train.rampup_batch_size={config.train.rampup_batch_size} with"
                f" parallel.parallel_mode={mode or 'semi_auto_parallel'}: the graph of a step holds"
                " a fixed number of micro batches; set parallel.parallel_mode=3 (hybrid_parallel),"
                " or leave the key out"
            )
    else:
        _check_explicit(config)


def _check_explicit(config: Run) -> None:
    parallel, train = config.parallel, config.train
    if (
        parallel.parallel_mode == "data_parallel"
        and parallel.model_parallel * parallel.pipeline_stage > 1
    ):
        raise ConfigError(
            "parallel.parallel_mode=data_parallel with"
            f" parallel.model_parallel={parallel.model_parallel} and"
            f" pipeline_stage={parallel.pipeline_stage}: set both to 1, or parallel_mode=3"
            " (hybrid_parallel), or 1 (semi_auto_parallel) on Ascend"
        )
    given = parallel.changed("parallel_mode")
    if parallel.full_batch is False:  # hybrid_parallel always reads so
        given.remove("full_batch")
    words = ", ".join(
        [f"parallel.{name}={getattr(parallel, name)}" for name in given]
        + [f"train.{name}={getattr(train, name)}" for name in train.changed("parallel_mode")]
    )
    if words:
        mode = f" with parallel_mode={parallel.parallel_mode}" if parallel.parallel_mode else ""
        raise ConfigError(
            f"{words}: only parallel.parallel_mode 1 (semi_auto_parallel) and 2 (auto_parallel)"
            f" have this, on several Ascends; leave it out{mode}"
        )


def _check_compiled(config: Run) -> None:
    parallel, train = config.parallel, config.train
    named = f"parallel.parallel_mode={parallel.parallel_mode or 'semi_auto_parallel'}"
    micro, accumulation = train.micro_batch_size, train.accumulation_steps
    if config.topology.world_size == 1:
        raise ConfigError(
            f"{named} splits over several processes, and there is 1; leave it out, or start more"
        )
    if config.context.mode == "pynative":
        raise ConfigError(
            f"{named} needs context.mode=graph; set it, or parallel.parallel_mode=3"
            " (hybrid_parallel)"
        )
    if config.precision.reduction != "float32":
        raise ConfigError(
            f"{named} sums gradients in float32, found"
            f" precision.reduction={config.precision.reduction}; leave it out"
        )
    if parallel.pipeline_schedule != "1f1b":
        raise ConfigError(
            f"{named} has pipeline_schedule=1f1b with one stage a rank, found"
            f" {parallel.pipeline_schedule} with virtual_stages={parallel.virtual_stages}; choose"
            " that"
        )
    if accumulation < parallel.pipeline_stage:
        raise ConfigError(
            f"parallel.micro_batch_num={accumulation} is below"
            f" parallel.pipeline_stage={parallel.pipeline_stage}: MindSpore's pipeline needs a"
            " micro batch for each stage; raise the first"
        )
    if parallel.sequence_parallel and parallel.model_parallel == 1:
        raise ConfigError(
            "parallel.sequence_parallel=true needs parallel.model_parallel above 1; leave it out"
        )
    if parallel.zero_stage and parallel.data_parallel == 1:
        raise ConfigError(
            f"parallel.zero_stage={parallel.zero_stage} splits over data-parallel ranks, and there"
            " is 1; set zero_stage=0"
        )
    if parallel.shard_size is not None:
        if not parallel.zero_stage:
            raise ConfigError(
                f"parallel.shard_size={parallel.shard_size} needs parallel.zero_stage 1 to 3; set"
                " it, or leave it out"
            )
        check_divides(
            "parallel.shard_size",
            parallel.shard_size,
            "parallel.data_parallel",
            parallel.data_parallel,
        )
    if (
        parallel.parallel_optimizer_config != type(parallel.parallel_optimizer_config)()
        and not parallel.zero_stage
    ):
        raise ConfigError(
            "parallel.parallel_optimizer_config needs parallel.enable_parallel_optimizer=true; set"
            " it, or leave it out"
        )
    check_divides(
        "parallel.micro_batch_interleave_num",
        parallel.micro_batch_interleave_num,
        "train.micro_batch_size",
        micro,
    )
    if (
        parallel.micro_batch_interleave_num > 1
        and parallel.model_parallel > 1
        and parallel.pipeline_stage > 1
    ):
        raise ConfigError(
            f"parallel.micro_batch_interleave_num={parallel.micro_batch_interleave_num} with"
            f" model_parallel={parallel.model_parallel} and"
            f" pipeline_stage={parallel.pipeline_stage}: MindSpore 2.10 cannot compile the three"
            " together; leave the first out"
        )
    if parallel.parallel_mode != "auto_parallel":
        for key, value in (
            ("search_mode", parallel.search_mode),
            ("strategy_ckpt_config.load_file", parallel.strategy_ckpt_config.load_file),
        ):
            if value is not None:
                raise ConfigError(
                    f"parallel.{key}={value} is for parallel.parallel_mode=2 (auto_parallel); set"
                    " that, or leave it out"
                )

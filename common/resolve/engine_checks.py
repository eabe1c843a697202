"""Checks of the settings that ``engine: deepspeed`` and ``parallel.strategy`` can be combined with, and
of ``parallel.parallel_mode`` (who splits the work on MindSpore).

They run before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedParallel
from common.config.schema import DeepSpeedConfig, RunConfig
from common.device import check_device_id, naming_auto, sees_ascend
from common.errors import ConfigError, refuse_first
from common.parallel.batch import check_divides
from common.parallel.kernels import compile_error
from common.parallel.pipeline import schedule_error
from common.parallel.run import Run, wanted_keys
from common.quantization import quantized_layers
from common.resolve.vendor_settings import deepspeed_settings
from common.structured_files import read_json_mapping

DEEPSPEED_MATRIX = """engine=deepspeed goes with
  parallel.zero_stage  data  pipeline  tensor
  0, 1                 yes   yes       yes
  2, 3                 yes   no        yes"""

NATIVE_MATRIX = """engine=native goes with (any value of one column with any of the others)
  data                         tensor                      pipeline
  copies, or zero_stage        model_parallel, also    gpipe, 1f1b, interleaved_1f1b,
  1, 2, 3 from 2 ranks on,     with sequence_parallel      interleaved_zero_bubble,
  shard_size dividing them                                 zbv_zero_bubble; equal stages,
                                                           or stage_layers
and train.compile with all but zero bubbles; strategy parameter_server or horovod with copies
only"""

MINDSPORE_MATRIX = """backend=mindspore goes with
  parallel.data_parallel x model_parallel x pipeline_stage  any product
  parallel.zero_stage                                       0, 1
  parallel.pipeline_schedule                                gpipe, 1f1b; stage_layers
and on several Ascends (device=npu), in parallel_mode 1, with 1f1b only, and also
sequence_parallel, zero_stage 2 and 3, shard_size"""


def check_engine(config: Run) -> None:
    """Check that the settings of a run can be combined.

    Raises ConfigError naming the values that contradict each other, and a fix.
    """
    train, parallel, reason = config.train, config.parallel, compile_error(config)
    if config.engine == "deepspeed":
        _check_deepspeed(config)
    else:
        if config.backend == "torch":
            _check_native(config)
        else:
            check_mindspore(config, config.device)
        refuse_first(
            *(
                value != DeepSpeedConfig.model_fields[name].default
                and f"deepspeed.{name}={value} needs engine=deepspeed; set it, or leave the key out"
                for name, value in config.deepspeed
            )
        )
        if parallel.shard_size is not None:
            check_divides("parallel.shard_size", parallel.shard_size, "parallel.data_parallel", parallel.data_parallel)
    if parallel.strategy != "ddp":
        named = f"parallel.strategy={parallel.strategy}"
        refuse_first(config.backend != "torch" and f"{named} is for backend torch, not {config.backend}; leave it out")
        whole = {"parallel.model_parallel": (1,), "parallel.pipeline_stage": (1,), "parallel.zero_stage": (0,)}
        _refuse_with(NATIVE_MATRIX, *unmet(config, named, whole, "parallel.strategy=ddp"))
    refuse_first(train.compile is True and reason and f"train.compile=true {reason}")
    if parallel.async_tensor_parallel:
        key, remedy = "parallel.async_tensor_parallel=true", "leave the key out"
        wanted = {
            "engine": ("native",),
            "parallel.sequence_parallel": (True,),
            "train.compile": (True, "auto"),
            "train.compile_mode": ("default",),
        }
        refuse_first(
            *unmet(config, key, wanted, remedy),
            reason and f"{key} needs a compiled model, not a layout {reason}; set that, or {remedy}",
            config.quantization is not None
            and f"{key} needs no section quantization, not quantization; set that, or {remedy}",
        )
    refuse_first(
        train.compile_mode == "reduce-overhead"
        and train.accumulation_steps > 1
        and "train.compile_mode=reduce-overhead replays graphs that overwrite the gradients of the"
        f" micro batch before, and a step has {train.accumulation_steps} micro batches; leave it"
        " out, or raise train.micro_batch_size until one is enough"
    )
    if config.quantization is not None:
        quantized_layers(config.quantization, config.model.num_layers)
        wanted = {"engine": ("native",), "parallel.strategy": ("ddp",)}
        refuse_first(*unmet(config, "quantization-aware training", wanted, "take the section quantization out"))


def unmet(config: RunConfig, key: str, wanted: Mapping[str, tuple[object, ...]], remedy: str) -> Iterator[object]:
    """Yield a fault for each name in ``wanted`` whose value is none of those that ``key`` needs."""
    for name, values in wanted.items():
        found = reduce(getattr, name.split("."), config)
        needed = " or ".join(map(str, values)).lower()
        yield (
            found not in values
            and f"{key} needs {name}={needed}, not {name}={str(found).lower()}; set that, or {remedy}"
        )


def read_deepspeed_file(config: Run) -> dict[str, Any]:
    """Return the content of ``deepspeed.config_file``, empty if there is none.

    Raises ConfigError for anything but a JSON object.
    """
    name = config.deepspeed.config_file
    if name is None:
        return {}
    try:
        return read_json_mapping(Path(name))
    except ConfigError as error:
        raise ConfigError(
            f"deepspeed.config_file: {error}; expected the ds_config.json of DeepSpeed's manual"
        ) from None


def _check_deepspeed(config: Run) -> None:
    parallel, train, own = config.parallel, config.train, config.deepspeed
    stage, pipeline, shard = parallel.zero_stage, parallel.pipeline_stage, parallel.shard_size
    sequence, *_ = unmet_needs(parallel)
    refuse_first(
        config.backend != "torch" and f"engine=deepspeed is for backend torch, not {config.backend}; set engine=native",
        sequence and f"{sequence}.\n{DEEPSPEED_MATRIX}",
        pipeline > 1
        and stage > 1
        and f"parallel.zero_stage={stage} with parallel.pipeline_stage={pipeline}: DeepSpeed"
        f" rejects it; set zero_stage=1, or engine=native.\n{DEEPSPEED_MATRIX}",
        pipeline > 1
        and parallel.pipeline_schedule != "1f1b"
        and f"parallel.pipeline_schedule={parallel.pipeline_schedule} with"
        f" parallel.virtual_stages={parallel.virtual_stages}: DeepSpeed has 1f1b with one stage"
        " a rank; choose that, or engine=native",
        shard not in (None, parallel.data_parallel)
        and f"parallel.shard_size={shard}: DeepSpeed splits over all"
        f" parallel.data_parallel={parallel.data_parallel} ranks here; leave it out, or set engine=native",
        parallel.strategy != "ddp"
        and f"parallel.strategy={parallel.strategy}: DeepSpeed combines gradients itself; leave it"
        " out, or set engine=native",
        own.offload_optimizer
        and (stage == 0 or pipeline > 1)
        and f"deepspeed.offload_optimizer=true with parallel.zero_stage={stage} and"
        f" pipeline_stage={pipeline}: needs zero_stage 1 to 3 without pipeline; change one of them",
        own.offload_parameters
        and stage != 3
        and f"deepspeed.offload_parameters=true with parallel.zero_stage={stage}: needs"
        " zero_stage=3; change one of them",
        train.rampup_batch_size is not None
        and f"train.rampup_batch_size={train.rampup_batch_size}: DeepSpeed ends a step by a count"
        " of all micro batches of the run, so their number in a step cannot change; set"
        " engine=native, or leave the key out",
        train.on_outlier != "warn"
        and f"train.on_outlier={train.on_outlier}: DeepSpeed reports the norm of a step only after"
        " it; leave it out, or set engine=native",
    )
    deepspeed_settings(config, read_deepspeed_file(config))


def check_mindspore(config: Run, kind: str) -> None:
    """Check a MindSpore run for a device of this kind. Raises ConfigError.

    With auto the number of Ascends is not known yet; the check runs again once it is.
    """
    parallel, mode = config.parallel, config.parallel.parallel_mode
    refuse_first(
        mode in COMPILED
        and kind in ("cpu", "cuda")
        and f"parallel.parallel_mode={mode}: MindSpore's compiler splits graphs for Ascend, but this run has"
        f" device={kind}; set parallel.parallel_mode=3 (hybrid_parallel), whose own collectives"
        " run here in the same layouts"
    )
    if compiled_mode(config, kind):
        _check_compiled(config)
        return
    is_open = kind == "auto" and mode is None
    if not is_open:
        _check_explicit(config)
    of_torch = {
        f"shard_size={parallel.shard_size}": (parallel.shard_size, "leave it out"),
        "sequence_parallel=true": (parallel.sequence_parallel, "leave it out"),
        f"zero_stage={parallel.zero_stage}": (parallel.zero_stage > 1, "set 1"),
    }
    _refuse_with(
        MINDSPORE_MATRIX,
        *unmet_needs(parallel)[:2],
        parallel.pipeline_schedule not in ("gpipe", "1f1b")
        and f"parallel.pipeline_schedule={parallel.pipeline_schedule} is for backend torch; choose one of its own",
        *(
            is_given and not is_open and f"parallel.{setting} is for backend torch; {remedy}"
            for setting, (is_given, remedy) in of_torch.items()
        ),
    )


def check_here(config: Run, root: Path = Path("/")) -> str:
    """Check a run that this host is about to start, and return its device as far as it is known.

    No framework is needed: on MindSpore ``auto`` can only be the CPU if the host shows no Ascend
    (/dev/davinciN). Raises ConfigError as ``check_mindspore``.
    """
    if config.backend == "mindspore" and config.device == "auto" and not sees_ascend(root):
        with naming_auto(config, "cpu", "Ascend"):
            check_device_id(config, "cpu")
            check_mindspore(config, "cpu")
        return "cpu"
    return config.device


def _check_native(config: Run) -> None:
    schedule = config.parallel.pipeline_schedule
    _refuse_with(NATIVE_MATRIX, *unmet_needs(config.parallel))
    if schedule != "1f1b":  # with few micro batches it equals gpipe
        part = config.train.micro_batch_size * config.parallel.data_parallel
        reasons = (schedule_error(schedule, config.topology, size // part) for size in config.batch_sizes.all)
        remedy = "change train.accumulation_steps or the schedule"
        _refuse_with(
            NATIVE_MATRIX, *(reason and f"parallel.pipeline_schedule: {reason}; {remedy}" for reason in reasons)
        )


def _refuse_with(matrix: str, *faults: object) -> None:
    """Raise ConfigError with the first fault that is a text, and what goes together."""
    refuse_first(*(fault and f"{fault}.\n{matrix}" for fault in faults))


COMPILED = ("semi_auto_parallel", "auto_parallel")
"""Modes in which MindSpore's compiler splits the graph."""


def compiled_mode(config: Run, kind: str) -> bool:
    """Tell whether MindSpore's compiler splits the graph of this run on a device of this kind."""
    mode, several = config.parallel.parallel_mode, config.topology.world_size > 1
    return config.backend == "mindspore" and (mode in COMPILED if mode else kind == "npu" and several)


def _check_explicit(config: Run) -> None:
    parallel = config.parallel
    words = ", ".join(
        f"{section}.{name}={getattr(values, name)}"
        for section, values in (("parallel", parallel), ("train", config.train))
        for name in values.changed("parallel_mode")
        if name != "full_batch" or parallel.full_batch  # hybrid_parallel always reads as with false
    )
    mode = f" with parallel_mode={parallel.parallel_mode}" if parallel.parallel_mode else ""
    refuse_first(
        parallel.parallel_mode == "data_parallel"
        and parallel.model_parallel * parallel.pipeline_stage > 1
        and "parallel.parallel_mode=data_parallel with"
        f" parallel.model_parallel={parallel.model_parallel} and pipeline_stage={parallel.pipeline_stage}: set both to"
        " 1, or parallel_mode=3 (hybrid_parallel), or 1 (semi_auto_parallel) on Ascend",
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
    parallel, train = config.parallel, config.train
    needs: dict[str, tuple[object, ...]] = {
        "context.mode": ("graph",), "precision.reduction": ("float32",), "parallel.pipeline_schedule": ("1f1b",),
        "model.activation": ("gelu_new", "quick_gelu"),
    }  # fmt: skip
    named = f"parallel.parallel_mode={parallel.parallel_mode or 'semi_auto_parallel'}"
    tensor, stages = parallel.model_parallel, parallel.pipeline_stage
    interleave, accumulation = parallel.micro_batch_interleave_num, train.accumulation_steps
    split, load = parallel.parallel_optimizer_config, parallel.strategy_ckpt_config.load_file
    of_search = {"search_mode": parallel.search_mode, "strategy_ckpt_config.load_file": load}
    refuse_first(
        config.topology.world_size == 1
        and f"{named} splits over several processes, and there is 1; leave it out, or start more",
        *unmet(config, named, needs, "parallel.parallel_mode=3 (hybrid_parallel)"),
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
        f" pipeline_stage={stages}: MindSpore 2.10 cannot compile the three together; leave the first out",
        *(
            value is not None
            and parallel.parallel_mode != "auto_parallel"
            and f"parallel.{key}={value} is for parallel.parallel_mode=2 (auto_parallel); set that, or leave it out"
            for key, value in of_search.items()
        ),
    )
    check_divides("parallel.micro_batch_interleave_num", interleave, "train.micro_batch_size", train.micro_batch_size)
    wanted = wanted_keys(config.data)
    graphs = "does not go with graphs that MindSpore's compiler splits"
    graphs += f" (parallel.parallel_mode={parallel.parallel_mode})"
    refuse_first(
        train.rampup_batch_size is not None
        and f"train.rampup_batch_size={train.rampup_batch_size} with {named}: the graph of a step holds"
        " a fixed number of micro batches; set parallel.parallel_mode=3 (hybrid_parallel),"
        " or leave the key out",
        config.quantization is not None and f"quantization {graphs}; set parallel_mode=0, or take the section out",
        wanted
        and f"{wanted[0]} {graphs}, whose plan has one mask for all windows; set parallel_mode=0, or leave the key out",
    )

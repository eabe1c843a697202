"""Derive values that follow from others, and reject values that contradict each other.

``resolve_config`` runs before any framework is imported, so that a bad config fails in a second.
"""

from __future__ import annotations

from typing import Any

from common.accelerators import Hardware
from common.config.resolved import as_run, resolve_model
from common.config.schema import MAX_COUNT, DeepSpeedConfig, ModelConfig, ParallelConfig, RunConfig, Section
from common.device import check_device_id
from common.errors import ConfigError, refuse_first
from common.parallel.batch import (
    BatchSizes,
    batch_sizes,
    check_divides,
    check_ramp,
    pad_vocabulary,
    plan_batch,
    plan_data_parallel,
)
from common.parallel.run import Run, topology_of
from common.resolve.engine_checks import check_engine, unmet

ONE_DEVICE_MODES = ("eval", "predict", "serve", "export")
"""Run modes that use only the device of rank 0, except for a validation on torch."""


def resolve_config(
    config: RunConfig,
    *,
    world_size: int = 1,
    samples_per_epoch: int | None = None,
    trains: bool = True,
    hardware: Hardware | None = None,
) -> Run:
    """Fill in every derived value.

    A length in epochs stays open until samples_per_epoch is known. An automatic micro batch is the
    smallest that the layout accepts, and automatic recomputation is none: ``planner.fitting`` asks
    for others. Raises ConfigError naming both values of a contradiction and a fix.
    """
    for check in _CHECKS:
        check(config)
    train, parallel, micro_batch = config.train, config.parallel, config.train.micro_batch_size
    if micro_batch == "auto" and (train.global_batch_size is None or train.accumulation_steps is not None):
        raise ConfigError(
            f"train.micro_batch_size=auto divides train.global_batch_size, found {train.global_batch_size}, and gives"
            f" train.accumulation_steps, found {train.accumulation_steps}; set the first, and leave the second out"
        )
    axes = parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage
    data_parallel = plan_data_parallel(*axes, world_size)
    # a config for many devices also runs on few
    splits_nothing = data_parallel == 1 and config.engine == "native" and parallel.shard_size is None
    halves = "float16" in (config.precision.compute, config.precision.parameters)
    scale_mode = config.loss_scale.mode if config.loss_scale.mode != "auto" else "dynamic" if halves else "none"

    def resolve_with(size: int | None) -> Run:
        whole, micro, accumulation = plan_batch(train.global_batch_size, size, train.accumulation_steps, data_parallel)
        sizes = batch_sizes(whole, train.rampup_batch_size)
        check_ramp(sizes, train.rampup_batch_size, micro, data_parallel)
        length = length_in_steps(config, sizes, samples_per_epoch) if trains else {}
        resolved = as_run(
            Run,
            config,
            model=dict(resolve_model(config.model)),
            train={
                "micro_batch_size": micro,
                "global_batch_size": whole,
                "accumulation_steps": accumulation,
                "recompute": "none" if train.recompute == "auto" else train.recompute,
                **length.get("train", {}),
            },
            optimizer=length.get("optimizer", {}),
            parallel={
                "data_parallel": data_parallel,
                "zero_stage": 0 if splits_nothing else parallel.zero_stage,
            },
            validation={
                "micro_batch_size": config.validation.micro_batch_size or micro,
                **_windows(config, whole),
            },
            loss_scale={"mode": scale_mode},
            hardware=hardware,
        )
        check_engine(resolved)
        return resolved

    if micro_batch != "auto":
        return resolve_with(micro_batch)
    refused = []
    for size in batch_sizes(train.global_batch_size or 1, train.rampup_batch_size).micro_batches(data_parallel):
        try:
            return resolve_with(size)
        except ConfigError as error:
            refused.append(error)
    raise refused[0]


def resolve_other(config: RunConfig, *, world_size: int, hardware: Hardware | None = None, **changes: Any) -> Run:
    """Resolve another configuration, which differs from this one in ``changes``: a question, whose
    answer no run takes over. Raises ConfigError.
    """
    other = as_run(RunConfig, config, **changes)
    return resolve_config(other, world_size=world_size, hardware=hardware)


def _windows(config: RunConfig, global_batch: int) -> dict[str, int | None]:
    """Return validation.max_samples for validation.max_batches batches of a size."""
    batches = config.validation.max_batches
    return {} if batches is None else {"max_samples": batches * global_batch, "max_batches": None}


def written_copies(config: RunConfig) -> int:
    """Return data_parallel of the files; one that is left out counts as shard_size, or as 1."""
    return config.parallel.data_parallel or config.parallel.shard_size or 1


def written_ranks(config: RunConfig) -> int:
    """Return how many processes the layout of the files needs."""
    parallel = config.parallel
    return written_copies(config) * parallel.model_parallel * parallel.pipeline_stage


def uses_one_device(config: RunConfig, run_mode: str, world_size: int) -> bool:
    """Tell whether only rank 0 has something to do in a run mode."""
    validates = run_mode == "eval" and config.evaluation.task == "validation"
    is_shared = validates and config.backend == "torch" and world_size > 1
    return run_mode in ONE_DEVICE_MODES and not is_shared


def resolve_mode(config: RunConfig, run_mode: str, *, world_size: int) -> Run:
    """Resolve a config for a run mode that may use one device, whatever the layout of the training.

    An evaluation that several processes share keeps the splits that make the model fit: tensor, pipeline and ZeRO-3.
    """
    if run_mode not in ONE_DEVICE_MODES:
        return resolve_config(config, world_size=world_size)
    if run_mode == "export":
        _check_window(config)
    parallel, given = config.parallel, config.train.micro_batch_size
    micro = given if isinstance(given, int) else 1
    shared = not uses_one_device(config, run_mode, world_size)
    plain = dict(ParallelConfig())
    if shared:
        one_stage = parallel.pipeline_schedule in ("gpipe", "1f1b") and (parallel.virtual_stages or 1) == 1
        is_split = world_size > parallel.model_parallel * parallel.pipeline_stage
        plain |= {
            "model_parallel": parallel.model_parallel,
            "pipeline_stage": parallel.pipeline_stage,
            "sequence_parallel": parallel.sequence_parallel,
            "stage_layers": parallel.stage_layers if one_stage else None,
            "zero_stage": parallel.zero_stage // 3 * 3 if is_split else 0,
        }
    batch = {
        "micro_batch_size": micro,
        "global_batch_size": None,
        "accumulation_steps": None,
        "rampup_batch_size": None,
        "mp_comm_recompute": True,
        "recompute_slice_activation": False,
        "offload_activations": False,
        "recompute_layers": None,
    }
    alone = {"engine": "native", "deepspeed": DeepSpeedConfig()}
    windows = _windows(config, config.train.global_batch_size or micro * written_copies(config))
    bf16 = {"float8": "none", "float8_head": False}
    return resolve_config(
        as_run(RunConfig, config, parallel=plain, train=batch, precision=bf16, validation=windows, **alone),
        world_size=world_size if shared else 1,
        trains=False,
    )


def _check_export(config: RunConfig) -> None:
    export, format = config.export, config.export.format or "the backend's own"
    formats = ["onnx", "gguf", *["safetensors"] * (export.weights == "int8")]
    *others, last = formats
    refuse_first(
        export.batch_size is not None
        and export.format not in (None, "mindir")
        and f"export.batch_size={export.batch_size} is for export.format=mindir; leave it out with {format}",
        export.weights != "float32"
        and export.format not in formats
        and f"export.weights={export.weights} is for export.format={', '.join(others)} and {last},"
        f" not {format}; leave it out, or set export.format",
        not export.cache
        and export.format not in ("onnx", "pt2")
        and "export.cache=false is for export.format=onnx and pt2; leave it out",
    )


def _check_for_mindspore(config: RunConfig) -> None:
    context, train = config.context, config.train
    refuse_first(
        config.export.format == "pt2"
        and "export.format=pt2 is for backend torch; set backend=torch, which takes the same"
        " checkpoint, or export.format=onnx, gguf or mindir",
        train.compile is True
        and "train.compile=true is for backend torch; on mindspore leave it out (graph mode compiles)",
        train.offload_activations
        and "train.offload_activations=true is for backend torch; leave it out on mindspore, whose"
        " compiler offloads no operator that is recomputed, and set train.recompute=full",
        config.parallel.async_tensor_parallel
        and "parallel.async_tensor_parallel=true is for backend torch; leave it out on mindspore",
        train.compile_mode != "default"
        and f"train.compile_mode={train.compile_mode} is for backend torch; leave it out on mindspore",
        train.recompute not in ("none", "auto")
        and context.mode == "pynative"
        and f"train.recompute={train.recompute} needs context.mode=graph on mindspore; set one of them otherwise",
        context.graph_kernel_flags
        and not context.enable_graph_kernel
        and "context.graph_kernel_flags needs context.enable_graph_kernel=true; set it, or leave the flags out",
        train.parallel_optimizer_comm_recompute
        and "train.parallel_optimizer_comm_recompute=true: MindSpore 2.10 ignores it; leave it out."
        " parallel.zero_stage=3 gathers parameters again in the backward pass, on several Ascends",
        train.recompute_slice_activation
        and config.parallel.model_parallel == 1
        and "train.recompute_slice_activation=true needs parallel.model_parallel above 1; leave it out",
    )


def _check_for_torch(config: RunConfig) -> None:
    train = config.train
    refuse_first(
        train.offload_activations
        and train.compile_mode == "reduce-overhead"
        and "train.compile_mode=reduce-overhead replays graphs in memory of their own, which"
        " train.offload_activations=true moves to the host; leave one of them out",
        config.export.format == "mindir"
        and "export.format=mindir is for backend mindspore; set export.format=safetensors, onnx or"
        " gguf, or backend=mindspore",
        *(
            f"{section}.{name}={getattr(values, name)} is for backend mindspore; leave it out with backend torch"
            for section, values in config
            if isinstance(values, Section)
            for name in values.changed("backend")
        ),
    )


def _check_window(config: RunConfig) -> None:
    predict = config.predict
    positions = config.model.max_positions or config.model.seq_length
    slides = predict.window is not None or (predict.max_new_tokens or 0) > positions
    refuse_first(
        export_format(config) == "mindir"
        and slides
        and "predict.window and predict.max_new_tokens above the positions let the window slide,"
        f" which export.format=mindir cannot: the cache of decode.mindir has the fixed shape of {positions} positions;"
        " leave them out, and let the program that runs the files give model.mindir the last tokens"
    )


def _check_observation(config: RunConfig) -> None:
    train, profile = config.train, config.profile
    start, stop = profile.start, profile.stop
    skips = train.on_outlier == "skip"
    refuse_first(
        stop is not None and start is None and f"profile.stop={stop} needs profile.start, the first step to trace",
        stop is not None
        and start is not None
        and stop < start
        and f"profile.stop={stop} is before profile.start={start}; give a start that is not after it",
        profile.memory and start is None and "profile.memory=true needs profile.start, the first step to trace",
        skips
        and not config.logging.outlier_deviations
        and "train.on_outlier=skip needs to know what an outlier is; set logging.outlier_deviations=6",
        skips
        and train.sink_size > 1
        and "train.on_outlier=skip decides by the steps before,"
        f" train.sink_size={train.sink_size} starts a step before it knows them; set sink_size=1",
    )


def length_in_steps(
    config: RunConfig, sizes: BatchSizes, samples_per_epoch: int | None
) -> dict[str, dict[str, int | None]]:
    """Return the lengths of the run and of its schedule in steps, from epochs or tokens. Nothing if
    no length is given, or if it needs the samples of an epoch. Raises ConfigError.
    """
    train, optimizer = config.train, config.optimizer
    samples = train.num_samples or samples_per_epoch
    if train.max_steps is not None:
        steps = train.max_steps
    elif (train.max_epochs, train.num_samples) != (None, None):
        if samples is None:
            return {}
        epochs = train.max_epochs or 1
        steps = max(1, sizes.steps_within(int(epochs * samples)))
        if steps > MAX_COUNT:
            raise ConfigError(
                f"train.max_epochs={epochs} of {samples} samples are {steps}"
                f" steps; lower it to at most {MAX_COUNT} steps"
            )
    elif train.max_tokens is not None:
        steps = max(1, sizes.steps_within(train.max_tokens // config.model.seq_length))
    else:
        return {}
    unit = optimizer.schedule_unit
    warmup = optimizer.warmup_samples if unit == "samples" else optimizer.warmup_steps
    decay = optimizer.decay_samples if unit == "samples" else optimizer.decay_steps
    if decay is None:
        # a run shorter than its warm-up is a trial run, which is warned about
        decay = max(sizes.samples_after(steps) if unit == "samples" else steps, warmup or 0)
    elif (warmup or 0) > decay:
        raise ConfigError(
            f"optimizer.warmup_{unit}={warmup} is beyond the schedule's end at {unit[:-1]} {decay};"
            f" lower it or raise optimizer.decay_{unit}"
        )
    return {
        "train": {"max_steps": steps, "max_epochs": None, "max_tokens": None},
        "optimizer": {f"decay_{unit}": decay},
    }


def fitting_vocabulary(model: ModelConfig, tokenizer_size: int, tokenizer_name: str) -> dict[str, int]:
    """Compare the model's vocabulary with the tokenizer's. Returns the key to change: a padded
    ``model.vocab_size`` is replaced by the number of token ids. Raises ConfigError.
    """
    if tokenizer_size > model.vocab_size:
        raise ConfigError(
            f"{tokenizer_name} has {tokenizer_size} tokens but model.vocab_size={model.vocab_size};"
            f" set model.vocab_size={tokenizer_size} (the table is padded to a multiple of"
            f" {model.vocab_multiple} by itself)"
        )
    is_padded = tokenizer_size < model.vocab_size and model.vocab_size % model.vocab_multiple == 0
    return {"vocab_size": tokenizer_size} if is_padded else {}


def export_format(config: RunConfig) -> str:
    """Return the format that --run_mode export writes.

    The key may stay empty in a run folder, whose config the other backend may read.
    """
    return config.export.format or {"torch": "safetensors", "mindspore": "mindir"}[config.backend]


def _check_model(config: RunConfig) -> None:
    model, parallel = config.model, config.parallel
    tensor, ffn = parallel.model_parallel, model.ffn_hidden_size or 4 * model.hidden_size
    check_divides("model.num_heads", model.num_heads, "model.hidden_size", model.hidden_size)
    check_divides("parallel.model_parallel", tensor, "model.num_heads", model.num_heads)
    topology_of(parallel, parallel.data_parallel or 1).layers_of_stage(0, model.num_layers)
    check_divides("parallel.model_parallel", tensor, "model.ffn_hidden_size", ffn)
    if parallel.sequence_parallel:
        check_divides("parallel.model_parallel", tensor, "model.seq_length", model.seq_length)
    window, stride, positions = config.predict.window, config.data.stride, model.max_positions
    refuse_first(
        positions is not None
        and model.seq_length > positions
        and f"model.seq_length={model.seq_length} is longer than model.max_positions={positions};"
        " shorten the window or leave max_positions out",
        window is not None
        and not 2 <= window <= (positions or model.seq_length)
        and f"predict.window={window}: expected 2 to {positions or model.seq_length}, the model's positions",
        stride is not None
        and stride > model.seq_length
        and f"data.stride={stride} is above model.seq_length={model.seq_length}: the tokens in"
        f" between would never be read; set data.stride={model.seq_length} or lower",
    )


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    lengths = {
        f"optimizer.{name}": getattr(optimizer, name)
        for name in ("warmup_steps", "warmup_samples", "decay_steps", "decay_samples")
        if getattr(optimizer, name) is not None
    }
    in_samples, in_steps = (
        [f"{key}={value}" for key, value in lengths.items() if value and key.endswith(unit)]
        for unit in ("samples", "steps")
    )
    rate, least = optimizer.learning_rate, optimizer.min_learning_rate
    refuse_first(
        *(
            "warmup" in key
            and optimizer.warmup_fraction is not None
            and f"{key}={value} and optimizer.warmup_fraction={optimizer.warmup_fraction} both set"
            " the warm-up; keep one"
            for key, value in lengths.items()
        ),
        in_samples
        and in_steps
        and f"{in_steps[0]} and {in_samples[0]} count in two units; give warm-up and end of the"
        " schedule both in steps or both in samples, and set the other to null",
        least > rate
        and f"optimizer.min_learning_rate={least} is above optimizer.learning_rate={rate}; lower the first",
        optimizer.momentum
        and not optimizer.rule.takes_momentum
        and f"optimizer.momentum={optimizer.momentum} has no effect with"
        f" optimizer.name={optimizer.name}; use optimizer.beta1, or optimizer.name=sgd",
    )


def _check_recompute(config: RunConfig) -> None:
    train, count, layers = config.train, config.train.recompute_layers, config.model.num_layers
    if count is None:
        return
    refuse_first(
        train.recompute == "auto"
        and f"train.recompute=auto chooses train.recompute_layers too, found {count}; leave it out,"
        " or set train.recompute to full or selective",
        train.recompute == "none"
        and f"train.recompute_layers={count} says how many blocks recompute, and train.recompute is"
        " none; set it to full or selective, or leave the key out",
        count > layers
        and f"train.recompute_layers={count} is above model.num_layers={layers}; leave the key out,"
        " and all blocks recompute",
    )


def _check_precision(config: RunConfig) -> None:
    """Also refuse runs whose linear layers or head cannot be multiplied in float8."""
    model, precision = config.model, config.precision
    held, reduction = precision.parameters, precision.reduction
    refuse_first(
        held != "float32"
        and reduction not in ("float32", held)
        and f"precision.reduction={reduction} is neither float32 nor precision.parameters={held}; choose one of these"
    )
    wanted = {"engine": ("native",), "precision.compute": ("bfloat16",), "parallel.model_parallel": (1,)}
    sizes = {"model.hidden_size": model.hidden_size, "model.seq_length": model.seq_length}
    parts = {}
    if precision.float8 != "none":
        wanted_too = {"parallel.strategy": ("ddp",), "parallel.zero_stage": (0,)}
        layer = {"model.ffn_hidden_size": model.ffn_hidden_size or 0}
        parts[f"precision.float8={precision.float8}"] = wanted | wanted_too, sizes | layer
    if precision.float8_head:
        rows = pad_vocabulary(model.vocab_size, model.vocab_multiple, config.parallel.model_parallel)
        head = {"the padded vocabulary": rows, "train.loss_rows": config.train.loss_rows or 0}
        parts["precision.float8_head=true"] = wanted, sizes | head
    for key, (needs, multiples) in parts.items():
        wrong = ", ".join(f"{name}={size}" for name, size in multiples.items() if size % 16)
        refuse_first(
            config.backend != "torch"
            and f"{key} is for backend torch; set precision=bf16 with backend={config.backend}",
            *unmet(config, key, needs, "precision=bf16"),
            config.quantization is not None
            and f"{key} needs no section quantization, not quantization; set that, or precision=bf16",
            wrong and f"{key} needs multiples of 16, not {wrong}; set that, or precision=bf16",
        )


def _check_length(config: RunConfig) -> None:
    train, validation = config.train, config.validation
    given = [
        f"train.{name}={getattr(train, name)}"
        for name in ("max_steps", "max_epochs", "max_tokens")
        if getattr(train, name) is not None
    ]
    samples, batches = validation.max_samples, validation.max_batches
    refuse_first(
        len(given) > 1 and f"{' and '.join(given)} both set the length of the run; keep one",
        samples
        and batches is not None
        and f"validation.max_samples={samples} and validation.max_batches={batches} both set the"
        " length of a validation; keep one",
    )


def require_length(config: RunConfig) -> None:
    """Check that training has a length; evaluation and generation need none."""
    train = config.train
    given = (train.max_steps, train.max_epochs, train.max_tokens, train.num_samples)
    refuse_first(
        given == (None,) * 4
        and "the length of the run is not given; set train.max_steps, train.max_epochs or train.max_tokens"
    )


_CHECKS = (
    _check_model,
    _check_optimizer,
    _check_length,
    _check_precision,
    _check_recompute,
    _check_export,
    lambda config: check_device_id(config, config.device),
    lambda config: (_check_for_mindspore if config.backend == "mindspore" else _check_for_torch)(config),
    _check_observation,
)
"""Checks of what is written, in their order."""

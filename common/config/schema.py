"""Schema of a run. Every key of every YAML file is a field here, documented under its definition.

A config is data: frozen and strict, and it rejects unknown keys. Values that follow from others (the data-parallel
size, the accumulation, the inner size of the MLP) are None until ``common.resolve.derive`` fills them in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.accelerators import GIB
from common.config.values import (
    RULES,
    TOKENIZER_NAMES,
    RuleName,
    TokenizerKind,
    UpdateRule,
    expand_precision,
    kind_named,
    parse_split,
)
from common.errors import DataError

Float = Literal["float32", "bfloat16", "float16"]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
MAX_COUNT = 2**40
"""Upper limit of every count."""
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
FLOAT32_MIN, FLOAT32_MAX, FLOAT32_BELOW_ONE = 2.0**-126, (2 - 2.0**-23) * 2.0**127, 1 - 2.0**-24
"""Smallest normal number of float32, its largest number, and its largest number below 1."""


def _in_float32(value: float) -> float:
    """Reject numbers that devices would round to 0 or to infinity in float32."""
    if value and not FLOAT32_MIN <= value <= FLOAT32_MAX:
        raise ValueError(
            f"{value!r} is beyond float32, which holds {FLOAT32_MIN:.4g} to {FLOAT32_MAX:.4g}; give a number in between"
        )
    return value


def _below_one(value: float) -> float:
    if value > FLOAT32_BELOW_ONE:
        raise ValueError(f"{value!r} is 1 in float32; give at most {FLOAT32_BELOW_ONE:.8f}")
    return value


Positive32 = Annotated[float, Field(gt=0.0), AfterValidator(_in_float32)]
NonNegative32 = Annotated[float, Field(ge=0.0), AfterValidator(_in_float32)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), AfterValidator(_in_float32), AfterValidator(_below_one)]

MINDSPORE = Field(json_schema_extra={"backend": "mindspore"})
"""Mark of a key that only backend mindspore has."""
COMPILED = Field(json_schema_extra={"backend": "mindspore", "parallel_mode": "1 or 2"})
"""Mark of a key that only acts in graphs split by MindSpore's compiler."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def changed(self, mark: str) -> list[str]:
        """Return the keys that carry this mark and differ from their default."""
        found = []
        for name, field in type(self).model_fields.items():
            marks = field.json_schema_extra
            if isinstance(marks, dict) and mark in marks and getattr(self, name) != field.default:
                found.append(name)
        return found


def _named(names: Mapping[Any, Any], **schema: Any) -> BeforeValidator:
    """Take other names and numbers of a key's values. schema: what the JSON schema says of them."""

    def meant(value: Any) -> Any:
        return names.get(value, value) if type(value) in (str, int) else value

    return BeforeValidator(meant, **schema)


FloatName = Annotated[Float, _named({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})]


class PrecisionConfig(Section):
    """Number types of the parts of a step. O0 is float32 and O1 is the preset fp16. O2 is fp16 with
    parameters in float16. pure_fp16 is O2 with softmax and layer_norm in float16 too.
    """

    parameters: FloatName = "float32"
    """Type in which the model holds its weights. Below float32, the optimizer keeps and updates a float32 copy."""
    compute: FloatName = "float32"
    """Type of activations and matrix products."""
    reduction: FloatName = "float32"
    """Type in which gradients are summed over micro batches (for weights below float32) and over
    data-parallel ranks.
    """
    softmax: FloatName = "float32"
    """Type of the attention softmax. float32 costs nothing with fused attention."""
    layer_norm: FloatName = "float32"
    """Type in which layer norms are computed."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply the linear layers of the blocks in float8 with a scale for each tensor, or for each
    row. For CUDA GPUs from compute capability 8.9 (rowwise 9.0), with the extra fp8.
    """
    float8_head: bool = False
    """Multiply the head and its gradients in float8 while training, whatever float8 says of the
    blocks. For CUDA GPUs from compute capability 8.9.
    """


class ModelConfig(Section):
    num_layers: Count
    """Transformer blocks."""
    hidden_size: Count
    """Width of the residual stream."""
    num_heads: Count
    """Attention heads; divides hidden_size."""
    seq_length: Count
    """Tokens in a training window."""
    vocab_size: Count
    """Number of token ids, without padding. A size that is already padded to a multiple of 128 is
    recognized when the tokenizer is smaller.
    """
    ffn_hidden_size: Count | None = None
    """Inner width of the MLP; 4 x hidden_size when left out."""
    max_positions: Count | None = None
    """Rows of the position table; seq_length when left out."""
    dropout: Fraction = 0.0
    """Dropout of the embedding, attention weights and residual branches, unless one of the next
    three keys overrides it.
    """
    embedding_dropout: Fraction | None = None
    """Dropout after the sum of token and position embeddings."""
    attention_dropout: Fraction | None = None
    """Dropout of the attention weights."""
    hidden_dropout: Fraction | None = None
    """Dropout of the attention and MLP outputs."""
    activation: Literal["gelu_new", "gelu", "quick_gelu"] = "gelu_new"
    """Between the layers of the MLP: GPT-2's GELU in its tanh form, the exact one, or x sigmoid(1.702 x), which
    MindFormers calls fast_gelu.
    """
    layer_norm_epsilon: Positive32 = 1e-5
    """Added to the variance inside layer norms."""
    initializer_range: Positive32 = 0.02
    """Standard deviation of initial weights. Residual projections use it divided by sqrt(2 x num_layers)."""
    vocab_multiple: Count = 128
    """The embedding table is padded to a multiple of this times parallel.model_parallel. Padded logits are masked."""


class TrainConfig(Section):
    max_steps: Count | None = None
    """Optimizer steps of the whole run. Give this, max_epochs or max_tokens."""
    max_epochs: Annotated[float, Field(gt=0.0, le=MAX_COUNT)] | None = None
    """Length of the run in passes over the training samples. Of a blend a pass is as many samples
    as all its parts have windows, drawn by weight.
    """
    max_tokens: Count | None = None
    """Length of the run in training tokens."""
    num_samples: Count | None = None
    """Windows that count as an epoch, in max_epochs (1 when left out) and in the log. All of them when left out."""
    exit_interval: Count | None = None
    """Save and end with exit code 0 after a step that is a multiple of this. The same command resumes the run."""
    exit_minutes: Annotated[float, Field(gt=0.0, le=MAX_COUNT)] | None = None
    """Save and end with exit code 0 after the step in which the process has trained for so many
    minutes. The same command resumes the run.
    """
    micro_batch_size: Count | Literal["auto"] | None = None
    """Samples that one device processes at once. auto takes the most that fit in memory by the
    plan, with a margin of 6 %; it needs global_batch_size.
    """
    global_batch_size: Count | None = None
    """Samples of one optimizer step over all devices (micro batch x data parallel x accumulation)."""
    accumulation_steps: Count | None = None
    """Micro batches per device and optimizer step."""
    rampup_batch_size: (
        Annotated[list[Count], Field(min_length=3, max_length=3)]
        | Annotated[
            list[Annotated[list[NonNegative], Field(min_length=2, max_length=2)]], Field(min_length=1, max_length=1000)
        ]
        | None
    ) = None
    """Growth of the global batch, [start, increment, samples]: it grows from start to global_batch_size in equal
    increments while the first samples are read. A list of pairs [first sample, size] says the sizes, which rise. All
    batches are multiples of micro batch x data parallel.
    """
    recompute: Literal["none", "selective", "full", "auto"] = "none"
    """Activations to recompute in the backward pass. selective recomputes attention and the inner
    part of the MLP; full recomputes whole blocks. auto takes the fastest of them that fits in
    memory by the plan, in as few blocks as possible.
    """
    recompute_layers: Count | None = None
    """Blocks of each stage that recompute, from its first one. When left out, all of them."""
    offload_activations: bool = False
    """Keep the activations of blocks in pinned memory of the host until the backward pass. With
    recompute=full that is only the input of each block.
    """
    mp_comm_recompute: Annotated[bool, COMPILED] = True
    """Repeat the communication when activations are recomputed. Acts with tensor parallelism in
    parallel.parallel_mode 1 and 2.
    """
    parallel_optimizer_comm_recompute: Annotated[bool, MINDSPORE] = False
    """Switch of MindFormers that MindSpore 2.10 ignores, so true is rejected. Use
    parallel.zero_stage=3, which has its effect.
    """
    recompute_slice_activation: Annotated[bool, COMPILED] = False
    """Split the activations kept for recomputation over the tensor-parallel ranks. Acts in
    parallel.parallel_mode 1 and 2.
    """
    sink_size: Annotated[int, Field(gt=0, le=100), MINDSPORE] = 1
    """Steps that MindSpore queues before it reads the result of the first. A stop by signal waits for all of them."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model with torch.compile. auto does so on CUDA. The first step then takes about a minute."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile. reduce-overhead replays CUDA graphs; max-autotune tries kernels for
    each product, which takes minutes.
    """
    fused_attention: bool = True
    """Compute attention by one kernel where the device has it. Otherwise the scores of all pairs of tokens are kept."""
    loss_rows: Count | None = None
    """Positions whose logits exist at one time. When left out, 1024 on a CPU; on an accelerator
    more by its memory, 16384 with 80 GB.
    """
    deterministic: bool = False
    """Reject operators whose result changes from run to run."""
    max_skipped_steps: Count = 50
    """Stop the run after this many skipped steps in a row."""
    on_outlier: Literal["warn", "skip"] = "warn"
    """Action after a step whose loss or gradient norm is an outlier by logging.outlier_deviations.
    warn logs it. skip leaves out its update.
    """

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in ("max_steps", "max_tokens"):
            if self.num_samples is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"num_samples={self.num_samples} is the length of an epoch, but the run has"
                    f" {name}={getattr(self, name)}; give max_epochs instead"
                )
        return self


class LossScaleConfig(Section):
    mode: Literal["auto", "dynamic", "static", "none"] = "auto"
    """auto is dynamic when precision.compute is float16, and none otherwise."""
    initial: Positive32 = 65536.0
    """First scale of dynamic mode; constant scale of static mode."""
    factor: Annotated[float, Field(gt=1.0), AfterValidator(_in_float32)] = 2.0
    """Factor by which the scale grows or shrinks."""
    window: Count = 1000
    """Finite steps in a row before the scale grows."""
    hysteresis: Count = 1
    """Overflows before the scale shrinks for the first time. Each further overflow shrinks it too,
    until it has grown again.
    """
    minimum: Positive32 = 1.0
    """Lower limit of the scale."""


class OptimizerConfig(Section):
    name: RuleName = "adamw"
    """Update rule. adamw decays weights apart from the gradient; adam and sgd add the decay to the gradient."""
    learning_rate: Positive32
    """Peak learning rate."""
    min_learning_rate: NonNegative32 = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "polynomial", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    power: Positive32 = 1.0
    """Exponent of the polynomial schedule."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up from 0; 0 when left out. Skipped steps do not count."""
    warmup_samples: NonNegative | None = None
    """Warm-up in samples, as Megatron's --lr-warmup-samples. The schedule then counts samples."""
    warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of decay_steps or decay_samples, instead of its length."""
    decay_steps: Count | None = None
    """Step at which the schedule reaches its end; the last step of the run when left out."""
    decay_samples: Count | None = None
    """Sample at which the schedule reaches its end, as Megatron's --lr-decay-samples. The schedule
    then counts the samples of all updates, which differ from steps while the batch grows.
    """
    schedule_start: NonNegative = 0
    """Position of the first update in the schedule. With 0, as in Megatron, transformers and
    MindSpore, a warm-up begins with a rate of 0. PaddleFleetX begins at 1.
    """
    beta1: Fraction = 0.9
    """Decay of the first moment of adam and adamw."""
    beta2: Fraction = 0.999
    """Decay of the second moment of adam and adamw."""
    epsilon: Positive32 = 1e-8
    """Added to the square root of the second moment."""
    momentum: Fraction = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative32 = 0.0
    """Weight decay of matrices and embeddings. Biases and layer norms have none."""
    clip_grad: NonNegative32 = 1.0
    """Largest global gradient norm; 0 is off."""

    @property
    def schedule_unit(self) -> Literal["steps", "samples"]:
        """Unit of the schedule."""
        in_samples = self.warmup_samples or self.decay_samples
        return "samples" if in_samples else "steps"

    @property
    def decay(self) -> int:
        """Where the schedule of a resolved training ends, in its unit."""
        end = self.decay_samples if self.schedule_unit == "samples" else self.decay_steps
        assert end is not None
        return end

    @property
    def warmup(self) -> float:
        """Length of its warm-up. A fraction need not give a whole number, as in Megatron."""
        if self.warmup_fraction is not None:
            return self.warmup_fraction * self.decay
        given = self.warmup_samples if self.schedule_unit == "samples" else self.warmup_steps
        return given or 0

    @property
    def rule(self) -> UpdateRule:
        """Facts about the update rule."""
        return RULES[self.name]

    @property
    def state_parts(self) -> tuple[str, ...]:
        """Names of the tensors that are kept for each parameter."""
        return self.rule.kept(self.momentum)


class TokenizerConfig(Section):
    type: Annotated[
        TokenizerKind | None, BeforeValidator(kind_named, json_schema_input_type=Literal[*TOKENIZER_NAMES] | None)  # type: ignore[valid-type]
    ] = None
    """Kind of tokenizer, or the name that Megatron or transformers has for it; detected from the
    files when left out. BertWordLevel splits Chinese into words and is never detected.
    """
    folder: Text | None = None
    """Folder of the tokenizer's files, instead of naming them: vocab.json and merges.txt, vocab.txt, a SentencePiece
    .model, or tokenizer.json. hf://OWNER/NAME takes them from the Hugging Face hub.
    """
    vocab_file: Text | None = None
    """Vocabulary: vocab.json, encoder.json, vocab.txt, a SentencePiece .model or tokenizer.json."""
    merge_file: Text | None = None
    """Merges of a byte-level BPE: merges.txt or vocab.bpe."""
    backend: Literal["auto", "gigatoken", "tiktoken", "tokenizers"] = "auto"
    """Library that tokenizes for GPT2BPETokenizer. All give the same ids."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _split_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        return value
    value = value.strip("[] ")
    try:
        parse_split(value)
    except DataError as error:
        raise ValueError(str(error)) from None
    return value if "," in value else value.replace("/", ",")


def expand_tokenizer(value: Any) -> Any:
    """Turn the folder of a tokenizer into the mapping that it stands for."""
    return {"folder": value} if isinstance(value, str) else value


def _prefix_or_weight(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(f"expected the prefix of a .bin/.idx pair, a MindRecord, or a weight, found {value!r}")
    return value


DataPrefixes = Annotated[
    list[Annotated[str | float, BeforeValidator(_prefix_or_weight)]],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str | float]),
]


class DataConfig(Section):
    train: DataPrefixes | None = None
    """Training data: the prefix of a .bin/.idx pair or of FleetX's _ids.npy and _idx.npz, or a
    MindRecord (file, shard or folder). A list [weight, prefix, weight, prefix, ...] blends several.
    Without weights an epoch reads each window of all once.
    """
    validation: DataPrefixes | None = None
    """Validation data, all of it used: a prefix, MindRecord or blend, whose weights have no effect.
    All of data.train is then for training, and data.split has no effect.
    """
    split: Annotated[str, BeforeValidator(_split_text, json_schema_input_type=str | list[float])] = "949,50,1"
    """Weights of the training, validation and test parts of the documents, or of the rows of a MindRecord."""
    tokenizer: (
        Annotated[TokenizerConfig, BeforeValidator(expand_tokenizer, json_schema_input_type=str | TokenizerConfig)]
        | None
    ) = None
    """The tokenizer, or the folder of its files. Needed to read or write text, and optional in training."""
    shuffle: bool = True
    """Shuffle windows anew in every epoch; each epoch begins at another token."""
    stride: Count | None = None
    """Tokens between the starts of training windows; model.seq_length (no overlap) when left out.
    Below it windows overlap, and the last window ends with the last token of the epoch.
    """
    reset_position_ids: bool = False
    """Count positions from 0 again after each end-of-document token of a window."""
    reset_attention_mask: bool = False
    """Let a token attend only to tokens of its own document, not to others in the window."""
    eod_mask_loss: bool | Literal["targets"] = False
    """Leave out the loss of positions whose input is the end-of-document token (true), or whose target is it (targets,
    for rows padded with it). The mean is over the other positions of the global batch.
    """
    eod_id: NonNegative | None = None
    """Id of the end-of-document token for the three keys above; that of the data or of data.tokenizer when left out."""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 2
    """Batches that a thread reads ahead; 0 reads each batch when it is needed."""


class ValidationConfig(Section):
    interval: NonNegative | Literal["never"] = 0
    """Steps between validations; 0 validates only at the end. With never a run does
    not validate."""
    max_samples: NonNegative = 0
    """Windows per validation, always the first ones; 0 uses all. The parts of a blend give them in
    proportion to their windows, and at least one each.
    """
    max_batches: Count | None = None
    """Windows per validation in global batches, instead of max_samples."""
    micro_batch_size: Count | None = None
    """Windows per device at once; train.micro_batch_size when left out."""

    @property
    def steps_between(self) -> int:
        """Return ``interval`` as a number of steps, 0 where no step before the last validates."""
        return 0 if self.interval == "never" else self.interval


PARALLEL_MODES = ("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")
"""Names of parallel modes, in the order of MindFormers' numbers from 0."""


class ParallelOptimizerConfig(Section):
    """Splitting of the optimizer by MindSpore's compiler (zero_stage)."""

    parallel_optimizer_threshold: NonNegative = 64
    """Size in KB below which a parameter stays whole, counted after the split over tensor-parallel ranks."""


class StrategyFileConfig(Section):
    """Files in which MindSpore's compiler writes how each parameter was split."""

    save_file: Text | None = None
    """File to write, in which ``{rank}`` becomes the rank; strategy/ckpt_strategy_rank_{rank}.ckpt
    in output_dir when left out.
    """
    load_file: Text | None = None
    """File of splits that auto_parallel uses instead of ours."""
    only_trainable_params: bool = False
    """Leave out the optimizer's state, so that the file describes weights only."""


class ParallelConfig(Section):
    data_parallel: Count | None = None
    """Ranks that see different samples, including those of ZeRO; derived from the number of processes when left out."""
    model_parallel: Count = 1
    """Ranks that split every layer (tensor parallelism)."""
    pipeline_stage: Count = 1
    """Ranks that split the stack of layers (pipeline parallelism)."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""
    async_tensor_parallel: bool = False
    """Run the messages of sequence_parallel during the products beside them (asynchronous tensor
    parallelism). For compiled models on CUDA GPUs that read each other's memory (NVLink).
    """
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"] = (
        "1f1b"
    )
    """Order of forward and backward passes over the stages. The last three schedules give each rank
    several stages (virtual_stages).
    """
    virtual_stages: Count | None = None
    """Stages on each pipeline rank; 2 with the interleaved schedules and 1 with the others when left out."""
    stage_layers: list[Count] | None = None
    """Layers of each stage in order; equally many when left out."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """ZeRO stage. 1 splits the optimizer's state over data-parallel ranks, 2 also gradients, 3 also parameters."""
    shard_size: Count | None = None
    """Data-parallel ranks over which zero_stage splits; all when left out. Groups of this size hold
    copies (hybrid sharding).
    """
    strategy: Annotated[
        Literal["ddp", "parameter_server", "horovod"],
        _named(
            {"SPS": "parameter_server", "DPS": "ddp"},
            json_schema_input_type=Literal["ddp", "parameter_server", "horovod", "SPS", "DPS"],
        ),
    ] = "ddp"
    """Method that keeps data-parallel replicas equal. ddp sums gradients over all ranks. parameter_server gathers them
    on one rank, which updates and sends out the weights (DataParallel). horovod is ddp with Horovod.
    """
    parallel_mode: Annotated[
        Annotated[
            Literal["data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel"],
            _named(
                dict(enumerate(PARALLEL_MODES)),
                json_schema_input_type=Literal[*PARALLEL_MODES, 0, 1, 2, 3],  # type: ignore[valid-type]
            ),
        ]
        | None,
        MINDSPORE,
    ] = None
    """Component that splits the work on MindSpore. data_parallel (0) and hybrid_parallel (3): our
    own collectives. semi_auto_parallel (1): MindSpore's compiler, following our plan. auto_parallel
    (2): the compiler by itself. 1 and 2 are for Ascend; when left out, 1 on Ascend and 3 elsewhere.
    """
    parallel_optimizer_config: Annotated[ParallelOptimizerConfig, COMPILED] = ParallelOptimizerConfig()
    """Settings of the optimizer's split in modes 1 and 2."""
    vocab_emb_dp: Annotated[bool, COMPILED] = False
    """Keep the whole embedding table on every tensor-parallel rank, in modes 1 and 2. With a
    pipeline the ranks split it nevertheless.
    """
    gradient_aggregation_group: Annotated[Count, COMPILED] = 4
    """Groups of neighbouring blocks whose gradients are communicated at once, in modes 1 and 2."""
    full_batch: Annotated[bool | None, COMPILED] = None
    """Let every rank read the whole batch (true, also when left out) or only its data-parallel
    share, in modes 1 and 2.
    """
    enable_alltoall: Annotated[bool, COMPILED] = False
    """Let the compiler change layouts by AllToAll, in modes 1 and 2."""
    search_mode: Annotated[
        Literal["recursive_programming", "sharding_propagation", "dynamic_programming"] | None, COMPILED
    ] = None
    """Search for splits with auto_parallel. sharding_propagation, also when left out, starts from our plan. Checkpoints
    and the gradient norm need the plan's parts of parameters, so a run ends at its start if a search finds others.
    """
    micro_batch_interleave_num: Annotated[Count, COMPILED] = 1
    """Parts of a micro batch whose communication and computation overlap, in modes 1 and 2."""
    strategy_ckpt_config: Annotated[StrategyFileConfig, COMPILED] = StrategyFileConfig()
    """Files of splits in modes 1 and 2."""


def _resume(value: Any) -> Any:
    return {"true": "latest", "false": "never", "none": "never"}.get(str(value).lower(), value)


class CheckpointConfig(Section):
    interval: NonNegative = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: NonNegative = 3
    """Number of newest checkpoints to keep; 0 keeps all."""
    resume: Annotated[str, BeforeValidator(_resume, json_schema_input_type=str | bool | None), Field(min_length=1)] = (
        "auto"
    )
    """Whether to continue a run. auto continues the one in output_dir if it exists. latest requires it to exist; never
    requires that it does not. Any other value is the folder of a checkpoint or of a run to continue.
    """
    init_from: Text | None = None
    """Weights to start from (finetune): the folder of a checkpoint or of a run, or anything that
    tools/convert_weight.py takes as --input, such as hf://OWNER/NAME on the Hugging Face hub.
    """
    load: Text | None = None
    """Weights to evaluate or generate with; when left out, the newest checkpoint of output_dir, else init_from."""
    ckpt_prefix: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.-]*$", max_length=100)] | None, MINDSPORE
    ] = None
    """On MindSpore, also write PREFIX_rank_{rank}-{epoch}_{step}.ckpt into checkpoints/rank_{rank},
    with MindFormers' names. With several ranks, also write checkpoints/ckpt_strategy.ckpt.
    """
    asynchronous: bool = True
    """Write checkpoints from a thread while training continues."""
    epoch_models: bool = False
    """Also save at the end of each epoch, and write the weights for transformers into GPT2-Chinese's folders of
    output_dir. These are model_epoch{n} after an epoch and final_model after the last step.
    """


def _top_p(value: Any) -> Any:
    return 1.0 if type(value) in (int, float) and value == 0 else value


def _prompts(value: Any) -> Any:
    is_ids = isinstance(value, list) and value and all(type(each) is int for each in value)
    return _texts_or_ids([value] if is_ids else _as_list(value))


def _texts_or_ids(value: Any) -> Any:
    entries = _as_list(value)
    for entry in entries if isinstance(entries, list) else ():
        is_ids = isinstance(entry, list) and entry and all(type(each) is int for each in entry)
        if not (isinstance(entry, str) or is_ids):
            raise ValueError(f"{entry!r} is neither text nor a list of ids; write 'text' or [464, 3290]")
    return entries


def _with_text_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(key) if type(key) is int else key: number for key, number in value.items()}


def _without_empty(values: Any) -> Any:
    if "" in values:
        raise ValueError("an empty text matches everywhere; give at least one character")
    return values


_MIN_TEMPERATURE = 1e-6
"""Below it logits overflow, and the most probable token has all of the probability."""
Strategy = Literal["greedy", "sampling", "beam_search"]
_TextOrIds = str | list[int]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class PredictConfig(Section):
    prompt: Annotated[
        list[_TextOrIds], BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[_TextOrIds])
    ] = []
    """A prompt or a list of prompts; <|endoftext|> in a prompt is that token. A prompt may also be a list of ids."""
    prompt_file: Text | None = None
    """File of prompts, instead of prompt or in addition to it. A text file has one prompt per line;
    a .jsonl file has the field prompt (or text), or ids for a list of ids.
    """
    output_file: Text | None = None
    """File to which results are also written. A name ending in .txt gives plain text with an empty
    line after each result, any other name one JSON object per line.
    """
    output_folder: Text | None = None
    """Folder that gets one file per text: {i}-{j}.txt for continuation j of prompt i, both from 0.
    Existing files are kept, so a stopped run can be resumed.
    """
    stream: bool = True
    """Print tokens as they are generated, if standard output is a terminal and one sequence is generated at a time."""
    strategy: Annotated[Strategy, _named({"greedy_search": "greedy"})] | None = None
    """Choice of the next token. greedy takes the most probable token, sampling draws one, and beam_search looks for the
    most probable sequences. When left out, temperature, top_k, top_p or min_p choose sampling, and else it is greedy.
    """
    num_sequences: Annotated[int, Field(gt=0, le=100_000)] = 1
    """Continuations of each prompt: drawn independently, or the best of num_beams. Must be 1 with greedy."""
    num_beams: Annotated[int, Field(gt=0, le=1_000)] = 4
    """Sequences of each prompt that beam_search follows at once."""
    length_penalty: Annotated[float, Field(ge=-100.0, le=100.0)] = 1.0
    """Power of the length by which beam_search divides the sum of log-probabilities. Above 0 it
    favours long sequences.
    """
    early_stopping: Annotated[Literal["never"] | bool, _named({"true": True, "false": False})] = False
    """End of beam_search: once num_beams sequences have ended (true), once no better one is likely
    (false), or once none is possible (never).
    """
    num_beam_groups: Annotated[int, Field(gt=0, le=1_000)] = 1
    """Groups of beams in beam_search that compete among themselves and avoid each other's tokens.
    Must divide num_beams.
    """
    diversity_rate: NonNegative32 = 0.0
    """Amount subtracted in beam_search from the log-probability of a token, for each beam of an
    earlier group that chose it at the same place.
    """
    batch_size: Count = 8
    """Sequences generated at once."""
    min_new_tokens: NonNegative = 0
    """Number of new tokens before which the end-of-text token is not chosen."""
    max_new_tokens: Count | None = None
    """Most tokens to add to each prompt; when left out, 100 or as many as the model has positions
    for. To go above model.max_positions, set window.
    """
    window: Count | None = None
    """Positions of a sliding window, for texts longer than the model. Each token is then chosen after the last window -
    1 tokens, which costs a whole pass per token. At most model.max_positions, its value when left out.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of sampling; the run's seed when left out."""
    temperature: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Divisor of the logits before sampling, 1 when left out; 0 takes the most probable token."""
    top_k: NonNegative = 0
    """Sample from the k most probable tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(_top_p)] = 1.0
    """Sample from the smallest set of tokens with at least this total probability; 1 and 0 are off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from the tokens with at least this fraction of the largest probability, after top_k
    and top_p; 0 is off.
    """
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Factor that divides positive logits and multiplies negative logits of tokens that have
    already occurred; 1 is off.
    """
    no_repeat_ngram_size: NonNegative = 0
    """Length of token sequences that must not occur twice, including those of the prompt; 0 is off."""
    presence_penalty: Penalty = 0.0
    """Amount subtracted from the logit of each token that has been generated; 0 is off."""
    frequency_penalty: Penalty = 0.0
    """Amount subtracted from the logit of a token each time it has been generated; 0 is off."""
    logit_bias: Annotated[
        dict[str, Bias],
        BeforeValidator(_with_text_keys, json_schema_input_type=dict[str, Bias]),
        AfterValidator(_without_empty),
    ] = {}
    """Amounts added to the logits of tokens, by id or by text, from -100 to 100: {50256: -100, " the": 2.5}. For a text
    of several tokens it is added to the last one where the others precede it.
    """
    bad_words: Annotated[
        list[_TextOrIds],
        BeforeValidator(_texts_or_ids, json_schema_input_type=str | list[_TextOrIds]),
        AfterValidator(_without_empty),
    ] = []
    """Texts, or lists of ids, whose tokens are never generated one after another. A text without a
    leading space is also forbidden with one. One that is only an end of text forbids
    nothing, as in transformers; use min_new_tokens, or -100 in logit_bias.
    """
    stop: Annotated[
        list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str]), AfterValidator(_without_empty)
    ] = []
    """A text or a list of texts. A continuation ends before the first one that occurs in it."""
    stop_at_end_of_text: bool = True
    """End a sequence at an end that generation_config.json beside the weights names, else
    config.json, else the tokenizer.
    """
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Number of most probable tokens per place whose log-probabilities are written into the JSON lines, beside that of
    the chosen token. They are those of the model, before biases, penalties and temperature.
    """

    @property
    def method(self) -> Strategy:
        """The strategy, also where it is left out. Sampling at temperature 0 is greedy."""
        draws = self.temperature is not None or self.top_k or self.top_p < 1.0 or self.min_p
        found: Strategy = self.strategy or ("sampling" if draws else "greedy")
        is_cold = self.temperature is not None and self.temperature < _MIN_TEMPERATURE
        return "greedy" if is_cold and found == "sampling" else found

    @model_validator(mode="after")
    def _agree(self) -> Self:
        beams = self.method == "beam_search"
        if beams and self.num_sequences > self.num_beams:
            raise ValueError(
                f"num_sequences={self.num_sequences} is above num_beams={self.num_beams}; lower the"
                " first or raise the second"
            )
        if beams and self.num_beams % self.num_beam_groups:
            raise ValueError(
                f"num_beam_groups={self.num_beam_groups} does not divide num_beams={self.num_beams}; choose a divisor"
            )
        if beams and self.diversity_rate and self.num_beam_groups == 1:
            raise ValueError(
                f"diversity_rate={self.diversity_rate} needs several groups of beams; set"
                " num_beam_groups, such as num_beams"
            )
        if self.num_sequences > 1 and self.method == "greedy":
            change = "raise temperature" if self.strategy == "sampling" else "set strategy=sampling"
            raise ValueError(f"num_sequences={self.num_sequences}: greedy gives equal continuations; {change}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; lower the first"
            )
        return self


class EvaluationConfig(Section):
    """Settings of --run_mode eval."""

    task: Literal["validation", "text", "lambada"] = "validation"
    """Measurement. validation: the loss of the validation windows. text: perplexity of a file.
    lambada: accuracy on the last word of each passage of a file.
    """
    file: Text | None = None
    """File to evaluate, which may be gzipped. For text: plain text (WikiText, Penn Treebank), or
    .jsonl with the field text and one document per line. For lambada: .jsonl with the field text.
    """
    detokenize: Literal["none", "wikitext"] = "none"
    """Undo the spaces that WikiText puts around punctuation, as Megatron and lm-eval do. Words are counted before."""
    stride: Count | None = None
    """Tokens between the starts of the windows over a text; model.seq_length (no overlap) when left
    out. Each token is scored once, with more than model.seq_length - stride tokens before it.
    """
    batch_size: Count = 8
    """Windows or passages at once. The task validation uses validation.micro_batch_size instead."""
    max_samples: NonNegative = 0
    """Windows of text or passages of lambada, always the first ones; 0 uses all. The task
    validation uses validation.max_samples instead.
    """


class ExportConfig(Section):
    """Settings of --run_mode export."""

    format: Literal["safetensors", "mindir", "onnx", "gguf", "pt2"] | None = None
    """Format of the export. On either backend: safetensors (one file, whichever ranks wrote the checkpoint), onnx (for
    onnxruntime and optimum) or gguf (for llama.cpp). On MindSpore: mindir, a program. On torch: pt2, a program of
    torch.export. When left out, mindir on mindspore and safetensors on torch.
    """
    weights: Literal["float32", "float16", "int8", "int4"] = "float32"
    """Type of the weights. onnx and gguf have all four; int8 and int4 then share a scale in blocks
    of 32. safetensors has float32 and int8, with a scale for each output channel.
    """
    cache: bool = True
    """Let the program take and return keys and values, so that a step computes one token (onnx and pt2)."""
    check: bool = True
    """Compare the export with the backend's model before its folder is published (onnx and pt2)."""
    overwrite: bool = False
    """Replace an older export of this format in output_dir."""
    batch_size: Annotated[Count | None, MINDSPORE] = None
    """Sequences at once that a mindir file accepts; any number when left out."""


class QuantizationConfig(Section):
    """Quantization-aware training: the linear layers of the blocks compute with numbers rounded to few bits, so that
    the weights adapt. An evaluation with this section measures what rounding costs.
    """

    weight_bits: Annotated[int, Field(ge=2, le=8)] = 8
    """Bits of the weights."""
    activation_bits: Annotated[int, Field(ge=2, le=8)] = 8
    """Bits of the input of a layer."""
    weights: Literal["abs_max", "channel_wise_abs_max"] = "channel_wise_abs_max"
    """Weights that share a scale: a whole matrix, or one output channel."""
    activations: Literal["none", "abs_max", "dynamic", "moving_average_abs_max"] = "moving_average_abs_max"
    """Activations that share a scale: a micro batch (abs_max), a token (dynamic), or all batches
    through a moving average of their maxima. none leaves activations in float.
    """
    moving_rate: Fraction = 0.9
    """Weight of earlier maxima in moving_average_abs_max."""
    skip: list[str] = Field(default_factory=list)
    """Layers that stay in float: a block (h.3), one layer (h.3.mlp.c_proj), or a layer of every block (mlp.c_proj)."""
    freeze_embedding: bool = False
    """Keep the token and position embeddings as they are."""


class ServeConfig(Section):
    """Settings of --run_mode serve, which answers completion requests over HTTP. predict.window
    lets a text outgrow the model; all other keys of predict are ignored.
    """

    host: Text = "127.0.0.1"
    """Address to listen at; when left out, only this machine can connect. Use 0.0.0.0 for every network."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    """Port to listen at; 0 takes a free one, which the log names."""
    name: Text | None = None
    """The model's name for clients; the last part of output_dir when left out."""
    api_key_file: Text | None = None
    """File with the key that clients must send, on one line; the variable GPT2_API_KEY when left
    out. Without either no key is required.
    """
    slots: Annotated[int, Field(gt=0, le=1024)] = 8
    """Sequences generated at once. Each has keys and values for all positions in memory."""
    max_waiting: Annotated[int, Field(gt=0, le=100_000)] = 64
    """Sequences that may wait for a slot, and the most sequences of one request. Further requests get status 429."""
    max_body_bytes: Annotated[int, Field(gt=0, le=2**25)] = 2**20
    """Largest body of a request, in bytes."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt; the model's number of positions when left out."""
    max_new_tokens: Count | None = None
    """Most tokens that a request may ask for; the model's number of positions when left out."""
    max_connections: Annotated[int, Field(gt=0, le=100_000)] = 512
    """Connections at once; further connections get status 503."""
    read_timeout: Annotated[float, Field(ge=0.1, le=3600.0)] = 30.0
    """Seconds within which the head of a request must arrive, and then its body."""
    request_timeout: Annotated[float, Field(ge=0.1, le=1e6)] = 600.0
    """Seconds that a request may take in total, waiting and running."""
    drain_timeout: Annotated[NonNegative32, Field(le=1e6)] = 30.0
    """Seconds that running requests have left after SIGTERM or Ctrl-C."""
    log_prompts: bool = False
    """Write prompts into the log, which otherwise has one line per request without its text."""


Tracker = Literal["tensorboard", "wandb", "mlflow", "swanlab"]


class LoggingConfig(Section):
    interval: Count = 1
    """Steps between log lines; metrics.jsonl has every step."""
    hash_interval: Annotated[int, Field(ge=0)] = 100
    """Steps between log lines with the hash of all samples read so far; 0 is off. The hash is equal
    under every layout and on both frameworks. metrics.jsonl has it for every step.
    """
    style: Literal["gpt2", "megatron", "fleetx", "mindformers", "oneflow", "oneflow-normal", "gpt2-chinese"] = "gpt2"
    """System whose format the log lines of steps and validations use: ours, Megatron-DeepSpeed,
    PaddleFleetX, MindFormers, OneFlow (a table or plain lines) or GPT2-Chinese. gpt2-chinese also
    formats generated texts. metrics.jsonl does not change.
    """
    outlier_deviations: NonNegative32 = 0.0
    """Warn when a loss or gradient norm is this many standard deviations above the mean of the
    steps before; 0 is off, 6 is usual.
    """
    outlier_window: Annotated[int, Field(ge=8, le=10_000)] = 128
    """Steps over which mean and deviation are taken, outliers included. There are no warnings until
    half of them have passed.
    """
    tensorboard: bool = True
    """Write TensorBoard events."""
    trackers: Annotated[list[Tracker], BeforeValidator(_as_list, json_schema_input_type=Tracker | list[Tracker])] = []
    """Trackers that also record the metrics and the configuration. They write offline, into
    trackers/NAME of the run folder, unless WANDB_MODE, MLFLOW_TRACKING_URI or SWANLAB_MODE is set.
    tensorboard here is the same as logging.tensorboard.
    """
    project: Text = "gpt2"
    """Name of the project or experiment in a tracker. The run is named after its folder."""
    plot: bool = True
    """Draw loss.png after the run."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "tensorboard" in self.trackers and not self.tensorboard:
            raise ValueError("tensorboard=false contradicts tensorboard in trackers; remove one of them")
        return self


class ProfileConfig(Section):
    """Trace of the operators of some steps, made by the framework's own profiler. It is written to
    profile/steps_FIRST_LAST_rank_RANK.json.gz of the run folder, for Perfetto or TensorBoard.
    """

    start: Count | None = None
    """First step to trace; nothing is traced when left out."""
    stop: Count | None = None
    """Last step to trace; start when left out. The trace also ends with the run."""
    memory: bool = False
    """Also record memory allocations. MindSpore cannot do so on a CPU."""


def _memory(value: Any) -> Any:
    if (
        not isinstance(value, str)
        or not re.fullmatch(r"\d+(\.\d+)?GB", value, re.ASCII)
        or not 0 < float(value[:-2]) <= 1e6
    ):
        raise ValueError(f"expected a size such as 30GB, found {value!r}")
    return value


class DeepSpeedConfig(Section):
    """Settings of engine deepspeed."""

    config_file: Text | None = None
    """Your own ds_config.json, merged with the settings that follow from this file. Contradictions are rejected."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and update in host memory."""
    offload_parameters: bool = False
    """Keep parameters that are not in use in host memory (with zero_stage 3)."""
    build_kernels: bool = False
    """Let DeepSpeed compile its own C++ kernels at first use, which takes minutes."""


class ContextConfig(Section):
    """Settings of the device, with MindFormers' names. On torch only device_id and max_device_memory act."""

    mode: Annotated[
        Literal["graph", "pynative"],
        _named({0: "graph", 1: "pynative"}, json_schema_input_type=Literal["graph", "pynative", 0, 1]),
        MINDSPORE,
    ] = "graph"
    """Execution mode. graph (0) compiles a whole step; pynative (1) runs operator by operator, for debugging."""
    device_id: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Number of the device on this machine, from 0."""
    max_device_memory: Annotated[str, BeforeValidator(_memory)] | None = None
    """Most memory to use of an accelerator, such as 30GB."""
    max_call_depth: Annotated[int, Field(ge=1000, le=1_000_000), MINDSPORE] = 10000
    """Largest depth of nested calls in a graph."""
    save_graphs: Annotated[bool, MINDSPORE] = False
    """Write the compiled graphs into save_graphs_path."""
    save_graphs_path: Annotated[Text | None, MINDSPORE] = None
    """Folder for save_graphs; graph in output_dir when left out."""
    enable_graph_kernel: Annotated[bool, MINDSPORE] = False
    """Fuse neighbouring operators into one kernel (Ascend and GPU)."""
    graph_kernel_flags: Annotated[Text | None, MINDSPORE] = None
    """Flags that MindSpore takes for that fusion."""

    @property
    def most_bytes(self) -> float | None:
        memory = self.max_device_memory
        return None if memory is None else float(memory.removesuffix("GB")) * GIB


class RuntimeConfig(Section):
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """CPU threads of the framework; the framework's default when left out."""
    stall_limit: Annotated[float, Field(ge=1.0, le=1e6)] = 3600.0
    """Seconds without progress after which a rank counts as failed. They limit one step, the
    wait until all ranks have come, and one message to the others.
    """
    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Times that the launcher starts all ranks again after a failure, from the newest complete checkpoint. A refused
    setting, a first attempt without a finished step, and a step that fails twice end the run.
    """
    return_limit: Annotated[float, Field(ge=1.0, le=1e6)] = 600.0
    """Seconds to wait before a restart for hosts that have not come back."""


class RunConfig(Section):
    """One run of one model on one backend."""

    backend: Literal["torch", "mindspore"] = "torch"
    """Framework that trains."""
    engine: Literal["native", "deepspeed"] = "native"
    """Engine of a training step on torch: our own (native) or DeepSpeed."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Kind of device. auto takes an accelerator if there is one. On mindspore, npu is the Ascend."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of initial weights, data order, dropout and sampling."""
    output_dir: Text
    """Folder of the run, for checkpoints, metrics, logs and the plot."""
    precision: Annotated[
        PrecisionConfig,
        BeforeValidator(expand_precision, json_schema_input_type=str | PrecisionConfig),
    ] = PrecisionConfig()
    """Number types: float32, bf16, fp16, O2, pure_fp16, or a mapping of types."""
    model: ModelConfig
    """Sizes of the model. Left out, or with the value from_checkpoint, they are those of the
    checkpoint that the run uses. Other keys of the section override it.
    """
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig = LossScaleConfig()
    quantization: QuantizationConfig | None = None
    """Quantization-aware training; {} takes the defaults. Off when left out."""
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    predict: PredictConfig = PredictConfig()
    export: ExportConfig = ExportConfig()
    serve: ServeConfig = ServeConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    context: ContextConfig = ContextConfig()
    runtime: RuntimeConfig = RuntimeConfig()


def expand_model(value: str) -> Any:
    """Turn the value from_checkpoint into a section without sizes."""
    if value != "from_checkpoint":
        raise ValueError(f"{value!r}: expected from_checkpoint, or a mapping of sizes")
    return {}

"""The one schema of a run. Every key of every YAML is a field here, documented under its
definition.

A config is data: frozen, strict, with unknown keys refused. Values that follow from others
(the data-parallel size, the accumulation, the inner size of the MLP) are None until
``common.resolve.derive`` fills them in.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.config.tokenizer_kinds import NAMES, TokenizerKind, kind_named

Float = Literal["float32", "bfloat16", "float16"]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
MOST = 2**40
"""Largest number of anything that is counted."""
Count = Annotated[int, Field(gt=0, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
FLOAT32_LEAST, FLOAT32_MOST, FLOAT32_BELOW_ONE = 2.0**-126, (2 - 2.0**-23) * 2.0**127, 1 - 2.0**-24
"""The smallest normal number of float32, its largest, and its largest below 1."""


def _in_float32(value: float) -> float:
    """Refuse what the arithmetic of the devices would round to 0 or to infinity."""
    if value and not FLOAT32_LEAST <= value <= FLOAT32_MOST:
        raise ValueError(
            f"{value!r} is beyond float32, which holds {FLOAT32_LEAST:.4g} to {FLOAT32_MOST:.4g};"
            " give a number in between"
        )
    return value


def _below_one(value: float) -> float:
    if value > FLOAT32_BELOW_ONE:
        raise ValueError(f"{value!r} is 1 in float32; give at most {FLOAT32_BELOW_ONE:.8f}")
    return value


Positive32 = Annotated[float, Field(gt=0.0), AfterValidator(_in_float32)]
NonNegative32 = Annotated[float, Field(ge=0.0), AfterValidator(_in_float32)]
Fraction = Annotated[
    float, Field(ge=0.0, lt=1.0), AfterValidator(_in_float32), AfterValidator(_below_one)
]

_FLOAT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

PRECISION_PRESETS: dict[str, dict[str, str]] = {
    "float32": dict.fromkeys(
        ("parameters", "compute", "reduction", "softmax", "layer_norm"), "float32"
    ),
    "bf16": {
        "parameters": "float32",
        "compute": "bfloat16",
        "reduction": "float32",
        "softmax": "float32",
        "layer_norm": "float32",
    },
    "fp16": {
        "parameters": "float32",
        "compute": "float16",
        "reduction": "float32",
        "softmax": "float32",
        "layer_norm": "float32",
    },
}
PRECISION_PRESETS["O2"] = PRECISION_PRESETS["fp16"] | {"parameters": "float16"}
PRECISION_PRESETS["pure_fp16"] = PRECISION_PRESETS["O2"] | dict.fromkeys(
    ("softmax", "layer_norm"), "float16"
)
_PRECISION_NAMES = {
    "fp32": "float32",
    "O0": "float32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "O1": "fp16",
}


MINDSPORE = Field(json_schema_extra={"backend": "mindspore"})
"""Marks a key that only backend mindspore has."""
COMPILED = Field(json_schema_extra={"backend": "mindspore", "parallel_mode": "1 or 2"})
"""Marks a key that only graphs have that MindSpore's compiler splits."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def changed(self, mark: str) -> list[str]:
        """Return the keys with this mark that have another value than their default."""
        found = []
        for name, field in type(self).model_fields.items():
            marks = field.json_schema_extra
            if isinstance(marks, dict) and mark in marks and getattr(self, name) != field.default:
                found.append(name)
        return found


def _float_name(value: Any) -> Any:
    return _FLOAT_NAMES.get(value, value) if isinstance(value, str) else value


FloatName = Annotated[Float, BeforeValidator(_float_name)]


class PrecisionConfig(Section):
    """Number types of the parts of a step. O0 is float32, O1 the preset fp16; O2 is fp16 with
    parameters float16; pure_fp16 is O2 with softmax and layer_norm float16 too.
    """

    parameters: FloatName = "float32"
    """Type in which the model holds its weights. Below float32, the optimizer keeps and updates a
    float32 copy.
    """
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
    """True number of token ids. A size that is already padded to a multiple of 128 is understood
    when the tokenizer is smaller.
    """
    ffn_hidden_size: Count | None = None
    """Inner width of the MLP; 4 x hidden_size when left out."""
    max_positions: Count | None = None
    """Rows of the position table; seq_length when left out."""
    dropout: Fraction = 0.0
    """Dropout of the embedding, attention weights and residual branches, unless the next three say
    otherwise.
    """
    embedding_dropout: Fraction | None = None
    """Dropout after the sum of token and position embeddings."""
    attention_dropout: Fraction | None = None
    """Dropout of the attention weights."""
    hidden_dropout: Fraction | None = None
    """Dropout of the attention and MLP outputs."""
    layer_norm_epsilon: Positive32 = 1e-5
    """Added to the variance inside layer norms."""
    initializer_range: Positive32 = 0.02
    """Standard deviation of initial weights; residual projections use it divided by sqrt(2 x
    num_layers).
    """
    vocab_multiple: Count = 128
    """The embedding table is padded to a multiple of this times parallel.model_parallel; padded
    logits are masked.
    """


class TrainConfig(Section):
    max_steps: Count | None = None
    """Optimizer steps of the whole run. Give this, max_epochs or max_tokens."""
    max_epochs: Annotated[float, Field(gt=0.0, le=MOST)] | None = None
    """Length of the run in passes over the training samples."""
    max_tokens: Count | None = None
    """Length of the run in training tokens."""
    micro_batch_size: Count | None = None
    """Samples that one device takes through the model at once."""
    global_batch_size: Count | None = None
    """Samples of one optimizer step over all devices = micro x data parallel x accumulation."""
    accumulation_steps: Count | None = None
    """Micro batches per device and optimizer step."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: of attention and the MLP's inner part
    (selective) or of whole blocks (full).
    """
    mp_comm_recompute: Annotated[bool, COMPILED] = True
    """With recomputation and tensor parallel, in parallel.parallel_mode 1 and 2: repeat the
    communication too.
    """
    parallel_optimizer_comm_recompute: Annotated[bool, MINDSPORE] = False
    """A switch of MindFormers' that MindSpore 2.10 takes no notice of: true is refused.
    parallel.zero_stage=3 is what it did.
    """
    recompute_slice_activation: Annotated[bool, COMPILED] = False
    """With recomputation and tensor parallel, in parallel.parallel_mode 1 and 2: split what is kept
    over the tensor-parallel ranks.
    """
    sink_size: Annotated[int, Field(gt=0, le=100), MINDSPORE] = 1
    """Steps that MindSpore starts before it reads the result of the first; a stop by signal waits
    for them.
    """
    compile: bool = False
    """Compile the model (torch.compile); the first step then takes about a minute."""
    deterministic: bool = False
    """Refuse operators whose result changes from run to run."""
    max_skipped_steps: Count = 50
    """Stop after this many skipped steps in a row."""
    skip_outliers: bool = False
    """Skip the update of a step whose loss or gradient norm is an outlier by
    logging.outlier_deviations.
    """


class LossScaleConfig(Section):
    mode: Literal["auto", "dynamic", "static", "none"] = "auto"
    """auto is dynamic when precision.compute is float16 and none otherwise."""
    initial: Positive32 = 65536.0
    """First scale of dynamic mode, the only one of static mode."""
    factor: Annotated[float, Field(gt=1.0), AfterValidator(_in_float32)] = 2.0
    """What the scale is multiplied or divided by."""
    window: Count = 1000
    """Finite steps in a row before the scale grows."""
    hysteresis: Count = 1
    """Overflows at which the scale shrinks. Each further one shrinks it too, until it grows."""
    minimum: Positive32 = 1.0
    """The scale never shrinks below this."""


class OptimizerConfig(Section):
    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw decays weights apart from the gradient; adam and sgd add the decay to the gradient."""
    learning_rate: Positive32
    """Peak learning rate."""
    min_learning_rate: NonNegative32 = 0.0
    """Where the schedule ends."""
    schedule: Literal["cosine", "linear", "polynomial", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    power: Positive32 = 1.0
    """Exponent of the polynomial schedule."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up from 0; 0 when left out."""
    warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of decay_steps, instead of warmup_steps."""
    decay_steps: Count | None = None
    """Step at which the schedule reaches its end; the last step of the run when left out."""
    beta1: Fraction = 0.9
    """Decay of the first moment of adam and adamw."""
    beta2: Fraction = 0.999
    """Decay of the second moment of adam and adamw."""
    epsilon: Positive32 = 1e-8
    """Added to the root of the second moment."""
    momentum: Fraction = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative32 = 0.0
    """Applied to matrices and embeddings, never to biases and layer norms."""
    clip_grad: NonNegative32 = 1.0
    """Largest global gradient norm; 0 is off."""


class TokenizerConfig(Section):
    type: Annotated[
        TokenizerKind | None,
        BeforeValidator(kind_named, json_schema_input_type=Literal[*NAMES] | None),  # type: ignore[valid-type]
    ] = None
    """Kind of tokenizer, or the name that Megatron or transformers has for it; told from the files
    when left out. BertWordLevel cuts Chinese into words, and must be named.
    """
    folder: Text | None = None
    """Folder of the tokenizer's files (vocab.json and merges.txt, vocab.txt, a SentencePiece
    .model, tokenizer.json), instead of naming them.
    """
    vocab_file: Text | None = None
    """vocab.json, encoder.json, vocab.txt, a SentencePiece .model or tokenizer.json."""
    merge_file: Text | None = None
    """merges.txt or vocab.bpe."""
    backend: Literal["auto", "gigatoken", "tiktoken", "tokenizers"] = "auto"
    """Library that does the work of GPT2BPETokenizer; all give the same ids."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _split_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value.strip("[] ") if isinstance(value, str) else value


def expand_tokenizer(value: Any) -> Any:
    """The folder of a tokenizer becomes its mapping."""
    return {"folder": value} if isinstance(value, str) else value


def _prefix_or_weight(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(
            f"expected the prefix of a .bin/.idx pair, a MindRecord, or a weight, found {value!r}"
        )
    return value


DataPrefixes = Annotated[
    list[Annotated[str | float, BeforeValidator(_prefix_or_weight)]],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str | float]),
]


class DataConfig(Section):
    train: DataPrefixes | None = None
    """Prefix of a .bin/.idx pair or of FleetX's _ids.npy and _idx.npz, a MindRecord (file, one of
    its shards, or folder), or a blend of these: [weight, prefix, weight, prefix, ...].
    """
    validation: DataPrefixes | None = None
    """Prefix, MindRecord or blend used whole for validation; data.train is then used whole for
    training, and the split for nothing.
    """
    split: Annotated[
        str, BeforeValidator(_split_text, json_schema_input_type=str | list[float])
    ] = "949,50,1"
    """Weights of the training, validation and test parts of the documents (of a MindRecord: of its
    rows).
    """
    tokenizer: (
        Annotated[
            TokenizerConfig,
            BeforeValidator(expand_tokenizer, json_schema_input_type=str | TokenizerConfig),
        ]
        | None
    ) = None
    """The tokenizer, or the folder of its files. Training can do without; text in or out needs
    it.
    """
    shuffle: bool = True
    """Shuffle documents and windows anew in every epoch."""
    stride: Count | None = None
    """Tokens between the starts of training windows: below model.seq_length they overlap, and the
    last one ends with the last token of the epoch. model.seq_length (no overlap) when left out.
    """
    index_cache: Text | None = None
    """Folder of cached sample indices; beside the data when left out."""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 2
    """Batches read ahead by a thread; 0 reads when asked."""


class ValidationConfig(Section):
    interval: NonNegative = 0
    """Steps between validations; 0 validates at the end only."""
    max_samples: NonNegative = 0
    """Windows per validation, always the first ones; 0 is all."""
    micro_batch_size: Count | None = None
    """Windows at once; train.micro_batch_size when left out."""


PARALLEL_MODES = ("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")
"""In the order of MindFormers' numbers, from 0."""


def _parallel_mode(value: Any) -> Any:
    return (
        PARALLEL_MODES[value]
        if type(value) is int and value in range(len(PARALLEL_MODES))
        else value
    )


class ParallelOptimizerConfig(Section):
    """How MindSpore's compiler splits the optimizer (zero_stage)."""

    parallel_optimizer_threshold: NonNegative = 64
    """Parameters that take fewer KB than this, after the split over tensor-parallel ranks, stay
    whole.
    """


class StrategyFileConfig(Section):
    """Files in which MindSpore's compiler writes how each parameter was split."""

    save_file: Text | None = None
    """Where to write; ``{rank}`` in it is the rank. strategy/ckpt_strategy_rank_{rank}.ckpt in
    output_dir when left out.
    """
    load_file: Text | None = None
    """Splits to take instead of ours, with auto_parallel."""
    only_trainable_params: bool = False
    """Leave out the optimizer's state, so that the file does for weights alone."""


_STRATEGY_NAMES = {"SPS": "parameter_server", "DPS": "ddp"}
"""Of the study DistributedTrainingGPT2: single and distributed parameter server."""


class ParallelConfig(Section):
    data_parallel: Count | None = None
    """Ranks that see different samples, ZeRO's included; derived from the number of processes when
    left out.
    """
    model_parallel: Count = 1
    """Ranks that split every layer (tensor parallel)."""
    pipeline_stage: Count = 1
    """Ranks that split the stack of layers (pipeline parallel)."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"
    ] = "1f1b"
    """Order of forward and backward passes over the stages; the last three give each rank several
    stages (virtual_stages).
    """
    virtual_stages: Count | None = None
    """Pieces of the model on each pipeline rank: 2 with the interleaved schedules unless said
    otherwise, 1 with the others.
    """
    stage_layers: list[Count] | None = None
    """Layers of each stage in order, where they are not to be equally many."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """ZeRO: 1 splits the optimizer's state over data-parallel ranks, 2 gradients too, 3 parameters
    too.
    """
    shard_size: Count | None = None
    """Data-parallel ranks over which zero_stage splits; copies in between (hybrid sharding). All of
    them when left out.
    """
    strategy: Annotated[
        Literal["ddp", "parameter_server", "horovod"],
        BeforeValidator(
            lambda value: _STRATEGY_NAMES.get(value, value) if isinstance(value, str) else value,
            json_schema_input_type=Literal["ddp", "parameter_server", "horovod", "SPS", "DPS"],
        ),
    ] = "ddp"
    """How replicas meet: ddp sums gradients over all ranks (DDP), parameter_server gathers them on
    one that updates and hands out the weights (DataParallel), horovod does as ddp with Horovod.
    """
    parallel_mode: Annotated[
        Annotated[
            Literal["data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel"],
            BeforeValidator(
                _parallel_mode,
                json_schema_input_type=Literal[
                    "data_parallel",
                    "semi_auto_parallel",
                    "auto_parallel",
                    "hybrid_parallel",
                    0,
                    1,
                    2,
                    3,
                ],
            ),
        ]
        | None,
        MINDSPORE,
    ] = None
    """On MindSpore, who splits the work: data_parallel (0) and hybrid_parallel (3) our own
    collectives, semi_auto_parallel (1) MindSpore's compiler after our plan, auto_parallel (2) the
    compiler alone. 1 and 2 are for Ascend; left out, 1 there and 3 elsewhere.
    """
    parallel_optimizer_config: Annotated[ParallelOptimizerConfig, COMPILED] = (
        ParallelOptimizerConfig()
    )
    """Of modes 1 and 2."""
    vocab_emb_dp: Annotated[bool, COMPILED] = False
    """In modes 1 and 2: every tensor-parallel rank holds the whole embedding table; with a pipeline
    the ranks split it all the same.
    """
    gradient_aggregation_group: Annotated[Count, COMPILED] = 4
    """In modes 1 and 2: groups of neighbouring blocks whose gradients are communicated at once."""
    full_batch: Annotated[bool | None, COMPILED] = None
    """In modes 1 and 2: every rank reads the whole batch (true, also when left out), or only what
    its data-parallel rank sees.
    """
    enable_alltoall: Annotated[bool, COMPILED] = False
    """In modes 1 and 2: the compiler may change layouts by AllToAll."""
    search_mode: Annotated[
        Literal["recursive_programming", "sharding_propagation", "dynamic_programming"] | None,
        COMPILED,
    ] = None
    """How auto_parallel looks for splits. sharding_propagation, also when left out, starts from our
    plan; a run ends at its start where one of the others finds other parts of parameters than the
    plan's, which checkpoints and the gradient norm need.
    """
    micro_batch_interleave_num: Annotated[Count, COMPILED] = 1
    """In modes 1 and 2: parts of a micro batch whose communication and computation overlap."""
    strategy_ckpt_config: Annotated[StrategyFileConfig, COMPILED] = StrategyFileConfig()
    """Of modes 1 and 2."""


def _resume(value: Any) -> Any:
    return {"true": "latest", "false": "never", "none": "never"}.get(str(value).lower(), value)


class CheckpointConfig(Section):
    interval: NonNegative = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: NonNegative = 3
    """Newest checkpoints that stay on disk; 0 keeps all."""
    resume: Annotated[
        str, BeforeValidator(_resume, json_schema_input_type=str | bool | None), Field(min_length=1)
    ] = "auto"
    """auto continues the run in output_dir if there is one; latest insists that there is; never
    insists that there is none; anything else is the folder of a checkpoint or of a run.
    """
    init_from: Text | None = None
    """Weights to start from (finetune): the folder of a checkpoint or of a run, or what
    tools/convert_weight.py takes as --input.
    """
    load: Text | None = None
    """Weights to evaluate or generate with; the newest of output_dir when left out, else
    init_from.
    """
    ckpt_prefix: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.-]*$", max_length=100)] | None, MINDSPORE
    ] = None
    """On MindSpore also write PREFIX_rank_{rank}-{epoch}_{step}.ckpt into checkpoints/rank_{rank},
    with MindFormers' names, and of several ranks checkpoints/ckpt_strategy.ckpt.
    """
    asynchronous: bool = True
    """Write checkpoints from a thread while training goes on."""
    epoch_models: bool = False
    """Also save at the end of each epoch, and write the weights in GPT2-Chinese's folders of
    output_dir, for transformers: model_epoch{n} after an epoch, final_model after the last step.
    """


def _strategy(value: Any) -> Any:
    return {"greedy_search": "greedy"}.get(value, value) if isinstance(value, str) else value


def _early_stopping(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


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
            raise ValueError(
                f"{entry!r} is neither text nor a list of ids; write 'text' or [464, 3290]"
            )
    return entries


def _with_text_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(key) if type(key) is int else key: number for key, number in value.items()}


def _without_empty(values: Any) -> Any:
    if "" in values:
        raise ValueError("an empty text is everywhere; give at least one character")
    return values


_TextOrIds = str | list[int]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class PredictConfig(Section):
    prompt: Annotated[
        list[_TextOrIds],
        BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[_TextOrIds]),
    ] = []
    """One prompt or a list of them; <|endoftext|> in it is that token. A prompt may be a list of
    ids.
    """
    prompt_file: Text | None = None
    """File of prompts, instead of prompt or besides it: one a line, or .jsonl with the field prompt
    (or text), or ids for a list of ids.
    """
    output_file: Text | None = None
    """Also write the results here: plain text, with an empty line after each, where the name ends
    in .txt; else one JSON object a line.
    """
    output_folder: Text | None = None
    """Write each text into a file of its own here, {i}-{j}.txt for continuation j of prompt i, both
    from 0. What is there already is kept: a run that was stopped goes on.
    """
    stream: bool = True
    """Print tokens as they come, where standard output is a terminal and one sequence is generated
    at a time.
    """
    strategy: Annotated[
        Literal["greedy", "sampling", "beam_search"], BeforeValidator(_strategy)
    ] = "greedy"
    """greedy takes the most probable token; sampling draws one; beam_search looks for the most
    probable sequences.
    """
    num_sequences: Annotated[int, Field(gt=0, le=100_000)] = 1
    """Continuations of each prompt: drawn independently, or the best of num_beams. 1 with
    greedy.
    """
    num_beams: Annotated[int, Field(gt=0, le=1_000)] = 4
    """Of beam_search: sequences of each prompt that are followed at once."""
    length_penalty: Annotated[float, Field(ge=-100.0, le=100.0)] = 1.0
    """Of beam_search: the power of the length that the sum of log-probabilities is divided by;
    above 0 favours long sequences.
    """
    early_stopping: Annotated[Literal["never"] | bool, BeforeValidator(_early_stopping)] = False
    """Of beam_search: end once num_beams sequences have ended (true), once no better one is likely
    (false), or once none is possible (never).
    """
    num_beam_groups: Annotated[int, Field(gt=0, le=1_000)] = 1
    """Of beam_search: groups of beams that compete among themselves and avoid each other's tokens;
    divides num_beams.
    """
    diversity_rate: NonNegative32 = 0.0
    """Of beam_search: subtracted from the log-probability of a token for each beam of an earlier
    group that has chosen it at the same place.
    """
    batch_size: Count = 8
    """Sequences generated at once."""
    min_new_tokens: NonNegative = 0
    """The end-of-text token is not chosen before this many new tokens."""
    max_new_tokens: Count | None = None
    """Most tokens to add to each prompt; 100, or as many as the model has positions for, when left
    out. Above model.max_positions the window slides: see window.
    """
    window: Count | None = None
    """Let a text outgrow the model: each token is then chosen after the last window - 1 tokens,
    which costs a whole pass for each. At most model.max_positions, which it is when left out.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of sampling; the run's seed when left out."""
    temperature: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Divides the logits before sampling. This, top_k, top_p and min_p are for strategy sampling
    alone.
    """
    top_k: NonNegative = 0
    """Sample from the k most probable tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(_top_p)] = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 is off, and so is
    0.
    """
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from the tokens with at least this part of the largest probability, after top_k and
    top_p; 0 is off.
    """
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Divides positive and multiplies negative logits of tokens already there; 1 is off."""
    no_repeat_ngram_size: NonNegative = 0
    """No sequence of so many tokens comes twice, the prompt's included; 0 is off."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that has been generated; 0 is off."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token as often as it has been generated; 0 is off."""
    logit_bias: Annotated[
        dict[str, Bias],
        BeforeValidator(_with_text_keys, json_schema_input_type=dict[str, Bias]),
        AfterValidator(_without_empty),
    ] = {}
    """Added to the logits of tokens by id or by text, -100 to 100: {50256: -100, " the": 2.5}. A
    text of several tokens has it added to the last one where the others precede it.
    """
    bad_words: Annotated[
        list[_TextOrIds],
        BeforeValidator(_texts_or_ids, json_schema_input_type=str | list[_TextOrIds]),
        AfterValidator(_without_empty),
    ] = []
    """Texts, or lists of ids, whose tokens are never generated one after another. A text without a
    space in front is also forbidden behind one.
    """
    stop: Annotated[
        list[str],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        AfterValidator(_without_empty),
    ] = []
    """A text or a list of them: what is generated ends before the first one in it."""
    stop_at_end_of_text: bool = True
    """End a sequence at the end-of-text token."""
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Write the log-probability of each token, and of so many most probable ones in its place, into
    the JSON lines: those of the model, before biases, penalties and temperature.
    """

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.strategy == "beam_search":
            self._check_beams()
        if self.num_sequences > 1 and self.strategy == "greedy":
            raise ValueError(
                f"num_sequences={self.num_sequences}: greedy has one continuation, they would all"
                " be equal; set strategy=sampling"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above"
                f" max_new_tokens={self.max_new_tokens}; lower the first"
            )
        return self

    def _check_beams(self) -> None:
        if self.num_sequences > self.num_beams:
            raise ValueError(
                f"num_sequences={self.num_sequences} is above num_beams={self.num_beams}; lower the"
                " first or raise the second"
            )
        if self.num_beams % self.num_beam_groups:
            raise ValueError(
                f"num_beam_groups={self.num_beam_groups} does not divide"
                f" num_beams={self.num_beams}; choose a divisor"
            )
        if self.diversity_rate and self.num_beam_groups == 1:
            raise ValueError(
                f"diversity_rate={self.diversity_rate} needs several groups of beams; set"
                " num_beam_groups, such as num_beams"
            )


class EvaluationConfig(Section):
    """What --run_mode eval measures."""

    task: Literal["validation", "sensitivity", "text", "lambada"] = "validation"
    """validation: the validation windows of the data; sensitivity: the same with one layer at a
    time quantized, on torch; text: perplexity of a file; lambada: the last
    word of each passage of a file.
    """
    file: Text | None = None
    """Of text: plain text (WikiText, Penn Treebank), or .jsonl with the field text, one document a
    line. Of lambada: .jsonl with the field text. Either may be gzipped.
    """
    detokenize: Literal["none", "wikitext"] = "none"
    """Undo the spaces that WikiText puts around punctuation, as Megatron and lm-eval do; words are
    counted before.
    """
    stride: Count | None = None
    """Tokens between the starts of the windows over a text: each token is scored once, with more
    than model.seq_length - stride tokens before it. model.seq_length (no overlap) when left out.
    """
    batch_size: Count = 8
    """Windows, or passages, at once. validation has validation.micro_batch_size."""
    max_samples: NonNegative = 0
    """Windows of text or passages of lambada, always the first ones; 0 is all. validation has
    validation.max_samples.
    """


class ExportConfig(Section):
    """What --run_mode export writes of a checkpoint."""

    format: Literal["safetensors", "mindir", "onnx", "gguf", "pt2"] | None = None
    """safetensors: its weights as one file, whichever ranks wrote it; onnx: for onnxruntime and
    optimum; gguf: for llama.cpp; these on either backend. mindir: a program, on MindSpore; pt2: a
    program of torch.export, on torch. When left out, mindir on mindspore and safetensors on torch.
    """
    weights: Literal["float32", "float16", "int8", "int4"] = "float32"
    """The type of the weights: any of these of onnx and gguf, where int8 and int4 share a scale in
    blocks of 32; float32 or int8 of safetensors, where each output channel has a scale.
    """
    cache: bool = True
    """Of onnx and pt2: the program takes and returns keys and values, so that a step computes one
    token.
    """
    check: bool = True
    """Of onnx and pt2: compare it with the backend's model before the folder gets its name."""
    overwrite: bool = False
    """Replace an older export of this format in output_dir."""
    batch_size: Annotated[Count | None, MINDSPORE] = None
    """Of mindir: sequences at once that the files take; any number when left out."""


class QuantizationConfig(Section):
    """Quantization-aware training: the linear layers of the blocks compute with numbers rounded to
    few bits, and learn to bear it. An evaluation with this section measures what rounding costs.
    """

    weight_bits: Annotated[int, Field(ge=2, le=8)] = 8
    """Bits of the weights."""
    activation_bits: Annotated[int, Field(ge=2, le=8)] = 8
    """Bits of what enters a layer."""
    weights: Literal["abs_max", "channel_wise_abs_max"] = "channel_wise_abs_max"
    """What shares a scale: a whole weight, or each of its output channels."""
    activations: Literal["none", "abs_max", "dynamic", "moving_average_abs_max"] = (
        "moving_average_abs_max"
    )
    """What shares a scale: a micro batch (abs_max), a token (dynamic), or all batches, by a moving
    average of their maxima. none leaves activations in float.
    """
    moving_rate: Fraction = 0.9
    """Of moving_average_abs_max: the weight of the maxima before."""
    skip: list[str] = Field(default_factory=list)
    """Layers that stay in float: of a block (h.3), one (h.3.mlp.c_proj), or of all blocks
    (mlp.c_proj).
    """
    freeze_embedding: bool = False
    """Keep the token and position embeddings as they are."""


class ServeConfig(Section):
    """Completions over HTTP by --run_mode serve. A text may outgrow the model where predict.window
    is set; of predict nothing else is looked at.
    """

    host: Text = "127.0.0.1"
    """Address to listen at: this machine alone when left out, every network with 0.0.0.0."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    """Port to listen at; 0 takes a free one, which the log names."""
    name: Text | None = None
    """The model's name for clients; the last part of output_dir when left out."""
    api_key_file: Text | None = None
    """File with the key that clients must send, on one line; the variable GPT2_API_KEY when left
    out. Without either no key is asked for.
    """
    slots: Annotated[int, Field(gt=0, le=1024)] = 8
    """Sequences generated at once. Each has keys and values for all positions in memory."""
    max_waiting: Annotated[int, Field(gt=0, le=100_000)] = 64
    """Sequences that may wait for a slot, and most of one request. Further requests get status
    429.
    """
    max_body_bytes: Annotated[int, Field(gt=0, le=2**25)] = 2**20
    """Largest body of a request."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt; the model's positions when left out."""
    max_new_tokens: Count | None = None
    """Most tokens that a request may ask for; the model's positions when left out."""
    max_connections: Annotated[int, Field(gt=0, le=100_000)] = 512
    """Connections at once; further ones get status 503."""
    read_timeout: Annotated[float, Field(ge=0.1, le=3600.0)] = 30.0
    """Seconds in which the head of a request must have come, and then its body."""
    request_timeout: Annotated[float, Field(ge=0.1, le=1e6)] = 600.0
    """Seconds that a request may take in all, in the queue and at work."""
    drain_timeout: Annotated[NonNegative32, Field(le=1e6)] = 30.0
    """Seconds that requests at work may still take after SIGTERM or Ctrl-C."""
    log_prompts: bool = False
    """Write prompts into the log, which otherwise has one line a request without its text."""


Tracker = Literal["tensorboard", "wandb", "mlflow", "swanlab"]


class LoggingConfig(Section):
    interval: Count = 1
    """Steps between log lines; metrics.jsonl has every step."""
    hash_interval: Annotated[int, Field(ge=0)] = 100
    """Steps between log lines with the hash of all samples read so far, equal under every layout
    and on both frameworks; 0: none. metrics.jsonl has it for every step.
    """
    style: Literal[
        "gpt2", "megatron", "fleetx", "mindformers", "oneflow", "oneflow-normal", "gpt2-chinese"
    ] = "gpt2"
    """Whose words the log lines of steps and validations use: ours, Megatron-DeepSpeed's,
    PaddleFleetX's, MindFormers', OneFlow's, as a table or as plain lines, or GPT2-Chinese's, which
    has its own for generated texts too; metrics.jsonl is the same in all.
    """
    outlier_deviations: NonNegative32 = 0.0
    """Warn when a loss or gradient norm lies this many standard deviations above the mean of the
    steps before; 0 is off, 6 is usual.
    """
    outlier_window: Annotated[int, Field(ge=8, le=10_000)] = 128
    """Steps over which mean and deviation are taken, outliers included; there are no warnings
    before half of it has passed.
    """
    tensorboard: bool = True
    """Write TensorBoard events."""
    trackers: Annotated[
        list[Tracker], BeforeValidator(_as_list, json_schema_input_type=Tracker | list[Tracker])
    ] = []
    """What else records the metrics and the configuration, offline in trackers/NAME of the run
    folder unless WANDB_MODE, MLFLOW_TRACKING_URI or SWANLAB_MODE says otherwise. tensorboard is
    logging.tensorboard.
    """
    project: Text = "gpt2"
    """Name of the project or experiment that a tracker puts the run in; the run has its folder's
    name.
    """
    plot: bool = True
    """Draw loss.png after the run."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "tensorboard" in self.trackers and not self.tensorboard:
            raise ValueError(
                "tensorboard=false, and trackers holds tensorboard; leave one of them out"
            )
        return self


class ProfileConfig(Section):
    """A trace of the operators of some steps, by the framework's own profiler, as
    profile/steps_FIRST_LAST_rank_RANK.json.gz of the run folder, for Perfetto or TensorBoard.
    """

    start: Count | None = None
    """First step to trace; nothing is traced when left out."""
    stop: Count | None = None
    """Last step to trace; start when left out. A run that ends before ends the trace."""
    memory: bool = False
    """Also record allocations. On MindSpore not on a CPU."""


def _mode(value: Any) -> Any:
    return {0: "graph", 1: "pynative"}.get(value, value) if type(value) is int else value


def _memory(value: Any) -> Any:
    if (
        not isinstance(value, str)
        or not re.fullmatch(r"\d+(\.\d+)?GB", value, re.ASCII)
        or not 0 < float(value[:-2]) <= 1e6
    ):
        raise ValueError(f"expected a size such as 30GB, found {value!r}")
    return value


class DeepSpeedConfig(Section):
    """Of engine deepspeed alone."""

    config_file: Text | None = None
    """A ds_config.json of your own, merged with the settings that follow from this file;
    contradictions are refused.
    """
    offload_optimizer: bool = False
    """Keep the optimizer's state and update in host memory."""
    offload_parameters: bool = False
    """Keep parameters that are not in use in host memory (zero_stage 3)."""
    build_kernels: bool = False
    """Let DeepSpeed compile its own C++ kernels at first use, which takes minutes."""


class ContextConfig(Section):
    """How the device is used, in MindFormers' words. On torch, device_id and max_device_memory
    only.
    """

    mode: Annotated[
        Literal["graph", "pynative"],
        BeforeValidator(_mode, json_schema_input_type=Literal["graph", "pynative", 0, 1]),
        MINDSPORE,
    ] = "graph"
    """graph (0) compiles a step whole; pynative (1) runs operator by operator, for debugging."""
    device_id: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Which of this machine's devices."""
    max_device_memory: Annotated[str, BeforeValidator(_memory)] | None = None
    """Most memory to take of an accelerator, such as 30GB."""
    max_call_depth: Annotated[int, Field(ge=1000, le=1_000_000), MINDSPORE] = 10000
    """Deepest nesting of calls in a graph."""
    save_graphs: Annotated[bool, MINDSPORE] = False
    """Write the compiled graphs into save_graphs_path."""
    save_graphs_path: Annotated[Text | None, MINDSPORE] = None
    """Folder for save_graphs; graph in output_dir when left out."""
    enable_graph_kernel: Annotated[bool, MINDSPORE] = False
    """Fuse neighbouring operators into one kernel (Ascend and GPU)."""
    graph_kernel_flags: Annotated[Text | None, MINDSPORE] = None
    """MindSpore's settings of that fusion."""


class RuntimeConfig(Section):
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """CPU threads of the framework; its own choice when left out."""
    stall_limit: Annotated[float, Field(ge=1.0, le=1e6)] = 3600.0
    """Seconds in which every rank must get on: a rank of a launched run that takes longer for one
    step, for its start or for one message to the others has failed.
    """


class RunConfig(Section):
    """One run of one model on one backend."""

    backend: Literal["torch", "mindspore"] = "torch"
    """Framework that trains."""
    engine: Literal["native", "deepspeed"] = "native"
    """What makes a training step on torch: our own engine, or DeepSpeed's."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Kind of device; auto takes an accelerator if there is one. On mindspore, npu is the
    Ascend.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of initial weights, data order, dropout and sampling."""
    output_dir: Text
    """The run folder."""
    precision: Annotated[
        PrecisionConfig,
        BeforeValidator(
            lambda value: expand_precision(value), json_schema_input_type=str | PrecisionConfig
        ),
    ] = PrecisionConfig()
    """float32, bf16, fp16, O2, pure_fp16, or a mapping of types."""
    model: ModelConfig
    """Sizes of the model. Left out, or from_checkpoint, they are those of the checkpoint that the
    run uses; other keys given here win.
    """
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig = LossScaleConfig()
    quantization: QuantizationConfig | None = None
    """Train with rounded weights and activations; {} takes the defaults."""
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


def expand_model(value: Any) -> Any:
    """The word from_checkpoint stands for a section without sizes."""
    if not isinstance(value, str):
        return value
    if value != "from_checkpoint":
        raise ValueError(f"{value!r}: expected from_checkpoint, or a mapping of sizes")
    return {}


def expand_precision(value: Any) -> Any:
    """A preset's name becomes its mapping."""
    if not isinstance(value, str):
        return value
    name = _PRECISION_NAMES.get(value, value)
    if name not in PRECISION_PRESETS:
        raise ValueError(
            f"{value!r} is no preset; choose float32, bf16 or fp16, or give a mapping (O0, O1, O2"
            " and pure_fp16 are understood too)"
        )
    return PRECISION_PRESETS[name]

"""Checkpoints of Megatron-LM (``megatron``) and Megatron-Core (``megatron_core``) in the shards of any tensor and pipeline size, read.

Heads come from the ``args`` inside, the true vocabulary from a model.yaml beside them, which what we write has: args know its padded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.config.schema import ModelConfig
from common.conversion.megatron_shards import (
    FILE,
    RankTensors,
    Shards,
    find_folder,
    join,
    model_tensors,
    open_shards,
    rank_files,
    read_joined,
)
from common.conversion.model_yaml import MODEL_YAML, read_model_yaml
from common.conversion.weights import (
    NO_SCALE,
    Weight,
    Weights,
    check_tied,
    checked_model,
    checked_run,
    import_names,
    match_name_map,
    padding_of,
    require_moments,
)
from common.errors import CheckpointError, ConfigError
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.training.snapshot import EngineState
from common.training.state import TrainState
from common.weights.names import NAME_MAPS, Fusion, NameMap

_ORDERS: dict[float, Fusion] = {0: Fusion.BLOCKS, 1: Fusion.OUTPUTS, 2: Fusion.HEADS, 3: Fusion.HEADS}
"""Of the rows of query, key and value, by checkpoint_version (``fix_query_key_value_ordering`` in megatron/checkpointing.py)."""
_MODEL = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads", "ffn_hidden_size": "ffn_hidden_size",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
_REST = {
    "seq_length": "seq_length", "embedding_dropout": "hidden_dropout", "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout", "initializer_range": "init_method_std", "vocab_multiple": "make_vocab_size_divisible_by",
}  # fmt: skip
_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "squared_relu": (False,), "apply_layernorm_1p": (False,), "swiglu": (False,),
    "normalization": ("LayerNorm",), "use_rotary_position_embeddings": (False,), "position_embedding_type": ("learned_absolute",),
    "group_query_attention": (False,),
}  # fmt: skip
"""Switches that change what a model computes, some of them no tensor's shape: what GPT-2 has."""
_GPT2_VOCABULARY = 50257
_PARTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def is_here(path: Path, format: str = "megatron") -> bool:
    try:
        folder = find_folder(path)
        files = rank_files(folder) if folder else {}
        if not files:
            return folder is not None and format == "megatron_core"  # its format torch_dist, refused when it is opened
        with open_tensors(files[min(files)]) as file:
            return any(name.startswith("model.language_model.") for name in file) == (format == "megatron")
    except (CheckpointError, ConfigError):  # told when it is opened to be read
        return format == "megatron"


@contextmanager
def open_megatron(path: Path, format: str = "megatron") -> Iterator[Weights]:
    """path: the root, one of its folders iter_... or release, or the file of a single rank. Raises CheckpointError and ConfigError."""
    with open_shards(path) as shards:
        names = [name.removeprefix("model.") for name in shards.first if name.startswith("model.")]
        name_map = _in_version(shards, match_name_map(shards.folder, format, dict.fromkeys(names)))
        saved = [[_read_optimizer(file) for file in stage] for stage in shards.files]
        stored = [[{n: t for n, t in rank.items() if not name_map.ignores(n)} for rank in stage] for stage in model_tensors(shards)]
        weights: RankTensors = stored
        ignored: dict[str, str] = {}
        if all(rank.copies for stage in saved for rank in stage):
            weights = _by_name(shards, stored, [[rank.copies for rank in stage] for stage in saved])
            ignored["model"] = "weights of less precision, of which the optimizer has the float32"
        ignored |= _tied_head(shards.folder, name_map, weights)
        tensors = join(shards.folder, weights, name_map)
        tensors.pop(name_map.head or "", None)
        table = name_map.outside[0].theirs
        model, run, told = _read_config(shards, tensors[table].shape[0] if table in tensors and tensors[table].shape else 0)
        ignored |= told | padding_of(name_map, tensors, model)
        found = import_names(shards.folder, name_map, tensors, model, read=read_joined)
        moments: dict[str, Weight] = {}
        for part in saved[0][0].moments:
            there = _by_name(shards, stored, [[rank.moments.get(part, []) for rank in stage] for stage in saved])
            joined = join(shards.folder, there, name_map)
            joined.pop(name_map.head or "", None)
            moments |= import_names(shards.folder, name_map, joined, model, suffix=f".{part}", read=read_joined)
        step = shards.first.tree.get("iteration", shards.first.tree.get("total_iters", 0))
        if run is not None and step != run["state"]["step"]:
            raise CheckpointError(
                f"{shards.first.path}: its iteration is {step}, and {MODEL_YAML} says step {run['state']['step']}: they are of two runs;"
                f" take the section run out of {MODEL_YAML}, or copy both again"
            )
        if run is None and moments:
            run = _run_of(shards, saved[0][0], step)
        elif run is None:
            ignored |= {"optimizer": saved[0][0].why_not} if saved[0][0].why_not else {}
            ignored |= {"iteration": "where training stood, without the state of the optimizer"} if step else {}
        moments = {} if run is None else require_moments(shards.folder, moments, run, model)
        yield Weights(path=path, format=format, model=model, tensors=found, moments=moments, run=run, ignored=ignored)


def _in_version(shards: Shards, name_map: NameMap) -> NameMap:
    if name_map not in NAME_MAPS["megatron"]:
        return name_map
    version = shards.first.tree.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version not in _ORDERS:
        raise ConfigError(
            f"{shards.first.path}: checkpoint_version is {version!r}, of which the order of query, key and value is unknown;"
            f" expected {', '.join(map(str, _ORDERS))}"
        )
    return name_map.fused(_ORDERS[version])


def _tied_head(folder: Path, name_map: NameMap, ranks: RankTensors) -> dict[str, str]:
    table, head = name_map.outside[0].theirs, name_map.head
    for first, last in zip(ranks[0], ranks[-1], strict=True):
        if head is None or head not in last or table not in first:
            return {}
        check_tied(folder, head, last[head], first[table])
    return {str(head): f"the head, which is {table}"}


def _read_config(shards: Shards, rows: int) -> tuple[ModelConfig, dict[str, Any] | None, dict[str, str]]:
    """The model, where its run stood as far as a model.yaml tells, and what else to tell. rows: of the padded embedding."""
    path, args = shards.first.path, vars(shards.args)
    told = {}
    for name, usual in _OTHERS.items():
        if args.get(name) not in (None, *usual):
            raise ConfigError(
                f"{path}: its args say {name}={args[name]!r}; our model is GPT-2, which has {name}={usual[0]!r} and would compute otherwise"
            )
    if args.get("bias_gelu_fusion") is False and not args.get("openai_gelu"):
        told["args.bias_gelu_fusion=False"] = "the exact gelu, which it was trained with: GPT-2's is the tanh formula, up to 5e-4 away"
    file = next((file for folder in (shards.folder, shards.folder.parent) if (file := folder / MODEL_YAML).is_file()), None)
    if file is not None:
        model, run = read_model_yaml(file)
        for ours, theirs in _MODEL.items():
            if args.get(theirs) not in (None, getattr(model, ours)):
                raise ConfigError(f"{file}: {ours} is {getattr(model, ours)}, and {path} says {theirs}={args[theirs]}; mend the first")
        return model, run, told
    missing = [theirs for ours, theirs in _MODEL.items() if args.get(theirs) is None and ours != "ffn_hidden_size"]
    if missing:
        raise ConfigError(
            f"{path}: its args lack {', '.join(missing)}; put the section model of the config beside {shards.folder.name} as {MODEL_YAML}"
        )
    section = {ours: args[theirs] for ours, theirs in (_MODEL | _REST).items() if args.get(theirs) is not None}
    epsilon = args.get("layernorm_epsilon") or args.get("norm_epsilon")  # newer versions have the second
    section |= {} if epsilon is None else {"layer_norm_epsilon": epsilon}
    multiple = section.setdefault("vocab_multiple", 128)
    # transformers' converter writes the first; with NullTokenizer the second leaves out the end of a document, which it puts after all
    vocabulary = args.get("orig_vocab_size") or args.get("vocab_size")
    if isinstance(vocabulary, int):
        vocabulary += args.get("tokenizer_type") == "NullTokenizer"
    else:
        limit = multiple * shards.tensor if type(multiple) is int else 0  # of another type it is refused below
        is_gpt2 = args.get("tokenizer_type") == "GPT2BPETokenizer" and 0 <= rows - _GPT2_VOCABULARY < limit
        vocabulary = _GPT2_VOCABULARY if is_gpt2 else rows
        if not is_gpt2:
            told["padded_vocab_size"] = f"the true vocabulary, which args do not tell: all {rows} rows are kept; say it in a {MODEL_YAML}"
    section["vocab_size"] = vocabulary
    return checked_model(path, {"seq_length": section["max_positions"], **section}), None, told


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a rank's file holds of its optimizer, in the order of the optimizer's parameters."""

    moments: Mapping[str, Sequence[FileTensor]]
    copies: Sequence[FileTensor] = ()
    """Float32, of weights that are less precise."""
    steps: int | None = None
    scaler: Mapping[str, Any] | None = None
    why_not: str = ""


def _read_optimizer(file: TensorFile) -> _Saved:
    """Megatron's FP32Optimizer saves what torch's optimizers do; Float16OptimizerWithFloat16Params has that inside (``state_dict`` of
    both in megatron/optimizer/optimizer.py, since then megatron/core/optimizer/optimizer.py)."""
    try:
        outer = file.tree.get("optimizer")
        if outer is None:
            return _Saved(moments={}, why_not="" if file.path.name == FILE else "in a file of each data-parallel rank: weights alone")
        inner = outer.get("optimizer") or outer.get("optimizer_state_dict") or outer
        ids = [number for group in inner["param_groups"] for number in group["params"]]
        if "state" not in inner:
            return _Saved(moments={}, why_not="sharded by the distributed optimizer (distrib_optim.pt): weights alone" if ids else "")
        groups = outer.get("fp32_from_fp16_params", outer.get("fp32_from_fp16", ()))
        copies = [copy for group in groups for copy in group]
        state = inner["state"]
        moments = {part: [state[number][part] for number in ids] for part in _PARTS if state and part in state[ids[0]]}
        steps = inner["param_groups"][0].get("step", state[ids[0]].get("step") if state else None)  # apex's place, and torch's
        whole = [*copies, *(tensor for tensors in moments.values() for tensor in tensors)]
        if not all(isinstance(tensor, FileTensor) for tensor in whole):
            raise TypeError("no tensors")
        steps = int(steps.read().reshape(-1)[0]) if isinstance(steps, FileTensor) else steps
        return _Saved(moments=moments, copies=copies, steps=steps, scaler=outer.get("grad_scaler"))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        return _Saved(moments={}, why_not=f"state of the optimizer: of no form that is known ({error!r}): weights alone")


def _by_name(shards: Shards, names: RankTensors, values: Sequence[Sequence[Sequence[FileTensor]]]) -> RankTensors:
    """What is in the optimizer's order by the names of its parameters, which are in the order of the modules in the file.

    Megatron makes two groups, of parameters with decay (matrices) and without (vectors), each in the order of the modules:
    ``_get_params_for_weight_decay_optimization`` and later ``get_param_groups`` in megatron/optimizer/__init__.py, ``_get_param_groups``
    in megatron/core/optimizer/__init__.py. The first comes first, but in releases of megatron-core whose groups are in the order of their
    first parameters, on all but the first stage: both are read.
    """
    return [
        [_in_order(shards.folder, tensors, there) for tensors, there in zip(*stage, strict=True)]
        for stage in zip(names, values, strict=True)
    ]


def _in_order(folder: Path, names: Mapping[str, FileTensor], values: Sequence[FileTensor]) -> dict[str, FileTensor]:
    found: dict[str, FileTensor] = {}
    for dims in (1, 2):
        named = {name: tensor for name, tensor in names.items() if len(tensor.shape) == dims}
        there = [tensor for tensor in values if len(tensor.shape) == dims]
        if [tensor.shape for tensor in named.values()] != [tensor.shape for tensor in there]:
            raise CheckpointError(f"{folder}: the state of the optimizer is not of these weights: other shapes, or another number of them")
        found.update(zip(named, there, strict=True))
    return {name: found[name] for name in names if name in found}


def _run_of(shards: Shards, saved: _Saved, step: int) -> dict[str, Any]:
    """As far as Megatron's own numbers tell. Raises ConfigError if these are none."""
    try:
        return checked_run(shards.first.path, _counted(shards, saved, step))
    except (TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise ConfigError(f"{shards.first.path}: its counters or its grad_scaler are no numbers ({error}); copy it again") from None


def _counted(shards: Shards, saved: _Saved, step: int) -> dict[str, Any]:
    args, scale = shards.args, dict(NO_SCALE)
    if saved.scaler is not None:
        value = saved.scaler.get("scale", getattr(args, "loss_scale", None))
        value = value.read().reshape(-1)[0] if isinstance(value, FileTensor) else value
        scale |= {"mode": "dynamic" if "scale" in saved.scaler else "static", "value": float(np.float32(value or 1.0))}
        hysteresis = getattr(args, "hysteresis", None) or 2
        scale |= {
            "finite_steps": int(saved.scaler.get("growth_tracker", 0)),
            "overflows": max(0, hysteresis - int(saved.scaler.get("hysteresis_tracker", hysteresis))),
        }
    state = TrainState(step=step, consumed_samples=int(getattr(args, "consumed_train_samples", None) or 0))
    return {
        "state": state.to_dict(),
        "engine": vars(EngineState(optimizer_steps=step if saved.steps is None else int(saved.steps), loss_scale=scale, rng={})),
        "config": {"optimizer": {"name": "sgd" if "momentum_buffer" in saved.moments else "adamw"}},
    }

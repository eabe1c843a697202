"""Writer of checkpoints of Megatron-LM and Megatron-Core: a file for each tensor and pipeline rank,
written as a stream. Values without a place in Megatron's files go into model.yaml.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from common.config.values import STATE_PARTS, RuleName
from common.errors import ConfigError
from common.files import atomic_write, fsync_folder
from common.parallel.batch import batch_sizes, check_divides, pad_vocabulary
from common.parallel.sharding import local_shape, slice_of
from common.systems.megatron.read import FILE, NAME_MAPS, TRACKER
from common.systems.megatron_args import FIXED, MODEL, REST
from common.systems.name_map import NameRow
from common.systems.run_state import write_model_yaml
from common.systems.weights import Weights
from common.tensor_files.arrays import TensorSource
from common.tensor_files.torch_files import TorchName, write_torch
from common.weights.names import EMBEDDING, POSITIONS, decays


@dataclass(kw_only=True)
class _RankFile:
    """Tensors of a rank's file in its order, and the way each is made."""

    weights: Weights
    format: str
    tensor: int
    tensor_rank: int
    stages: int
    stage: int
    tensors: dict[tuple[str, str], TensorSource] = field(default_factory=dict)
    """By name and type: a float32 weight is its own float32 copy."""

    def rows(self) -> list[NameRow]:
        """Return a row for each of its tensors in the order of Megatron's modules, with layers numbered from 0."""
        name_map = NAME_MAPS[self.format][0]
        layers = self.weights.model.num_layers // self.stages
        start = [row for row in name_map.global_rows if row.ours[0] in (EMBEDDING, POSITIONS)]
        blocks = [
            row.in_block(self.stage * layers + layer, layer) for layer in range(layers) for row in name_map.layer_rows
        ]
        end = [row for row in name_map.global_rows if row not in start]
        if self.stage and name_map.head:
            end.append(replace(start[0], theirs=name_map.head))
        return [*(start if self.stage == 0 else ()), *blocks, *(end if self.stage == self.stages - 1 else ())]

    def add(self, row: NameRow, dtype: str | None, part: str = "") -> TensorSource:
        """Add a tensor.

        part: the part of the optimizer's state, empty for the weight. dtype: None keeps that of the source.
        """
        model, tensor = self.weights.model, self.tensor
        given = self.weights.moments if part else self.weights.tensors
        wanted = dtype or given[row.ours[0] + part].dtype
        shapes, makers = {}, []  # a maker for each parameter in the tensor
        for name in row.ours:
            weight = given[name + part]
            whole = weight.shape
            if name == EMBEDDING:
                whole = (pad_vocabulary(model.vocab_size, model.vocab_multiple, tensor), *whole[1:])
            shapes[name] = local_shape(name, whole, tensor)
            piece = slice_of(name, whole, tensor=tensor, tensor_rank=self.tensor_rank)
            makers.append(partial(weight.cut, piece, wanted))
        rows, *columns = row.shape(shapes)

        def load() -> Sequence[NDArray[Any]]:
            parts = row.pieces([make_one() for make_one in makers], model.num_heads // tensor)
            missing = rows - sum(map(len, parts))  # rows of zeros pad the vocabulary
            return [*parts, np.zeros((missing, *columns), parts[0].dtype)] if missing else parts

        source = TensorSource(dtype=wanted, shape=(rows, *columns), load=load)
        return self.tensors.setdefault((row.theirs + part, wanted), source)


def write_megatron(
    folder: Path, weights: Weights, dtype: str | None, tensor: int = 1, stages: int = 1, format: str = "megatron"
) -> dict[str, int]:
    """Write into an empty folder, for ``tensor`` x ``stages`` ranks.

    Raises ConfigError unless they divide heads and layers, and for quick_gelu; OSError is left to the caller. Returns
    no checksums: each record in a file of torch's has its own.
    """
    model = weights.model
    check_divides("--model_parallel", tensor, "model.num_heads", model.num_heads)
    check_divides("--model_parallel", tensor, "model.ffn_hidden_size", model.ffn_hidden_size)
    check_divides("--pipeline_stage", stages, "model.num_layers", model.num_layers)
    if model.activation == "quick_gelu":
        raise ConfigError("model.activation=quick_gelu: Megatron has no name for it; write safetensors or MindFormers'")
    step, precision = 0 if weights.run is None else weights.run["state"]["step"], _precision(weights, dtype)
    checkpoint = folder / (f"iter_{step:07d}" if step else "release")
    for stage, tensor_rank in itertools.product(range(stages), range(tensor)):
        rank = _RankFile(
            weights=weights, format=format, tensor=tensor, tensor_rank=tensor_rank, stages=stages, stage=stage
        )
        name = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        rows = rank.rows()
        flat = {row.theirs: rank.add(row, dtype) for row in rows}
        tree: dict[str, Any] = {
            "args": _model_args(weights, precision, tensor, stages),
            "checkpoint_version": 3.0,
            "iteration": step,
            "model": flat if format == "megatron_core" else _nested(flat),
        }
        if weights.run is not None:
            tree["optimizer"] = _optimizer(rank, rows, mixed=precision != "float32")
            tree |= _scheduler(weights.run)
        (checkpoint / name).mkdir(parents=True)
        write_torch(checkpoint / name / FILE, tree)
        fsync_folder(checkpoint / name)
    fsync_folder(checkpoint)
    write_model_yaml(folder, weights)
    with atomic_write(folder / TRACKER, "w") as file:
        file.write(str(step or "release"))
    return {}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors nested as Megatron-LM's modules save them; encoder layers stay flat."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        module, encoder, rest = name.partition(".encoder.")
        *path, last = [module, "encoder", rest] if encoder else name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = leaf
    return tree


def _precision(weights: Weights, dtype: str | None) -> str:
    """Return the type of the weights in Megatron's computation. Below float32, its optimizer holds
    float32 copies (Float16OptimizerWithFloat16Params); with float32 it holds none (FP32Optimizer).
    """
    run: Any = weights.run or {"config": {}, "engine": {"loss_scale": {}}}
    scaled = run["engine"]["loss_scale"].get("mode", "none") != "none"
    compute = run["config"].get("precision", {}).get("compute", "float16" if scaled else "float32")
    return str(compute if compute != "float32" else dtype or weights.tensors[EMBEDDING].dtype)


def _optimizer(rank: _RankFile, rows: list[NameRow], *, mixed: bool) -> dict[str, Any]:
    """Return the optimizer's state. Parameters are numbered group by group, those with decay first;
    ``open_megatron`` names the source.
    """
    run: Any = rank.weights.run
    engine = run["engine"]
    rows = sorted(rows, key=lambda row: not decays(row.ours[0]))
    groups = {
        decayed: [number for number, row in enumerate(rows) if decays(row.ours[0]) is decayed]
        for decayed in (True, False)
    }
    parts = [part for part in STATE_PARTS if f"{EMBEDDING}.{part}" in rank.weights.moments]
    state = {
        number: {part: rank.add(row, None, f".{part}") for part in parts} for number, row in enumerate(rows) if parts
    }
    config, steps = run["config"]["optimizer"], engine["optimizer_steps"]
    param_groups = [_group(config, steps, decayed, numbers) for decayed, numbers in groups.items()]
    inner = {"state": state, "param_groups": param_groups}
    if not mixed:
        return inner
    outer: dict[str, Any] = {"optimizer": inner}
    scale = engine["loss_scale"]
    if scale.get("mode") == "dynamic":
        value = np.array([scale["value"]], np.float32)
        outer["grad_scaler"] = {
            "scale": TensorSource(dtype="float32", shape=(1,), load=lambda: value),
            "growth_tracker": scale["finite_steps"],
            "hysteresis_tracker": _hysteresis(run) - scale["overflows"],
        }
    elif scale.get("mode") == "static":
        outer["grad_scaler"] = {}
    outer["fp32_from_fp16_params"] = [[rank.add(rows[n], "float32") for n in numbers] for numbers in groups.values()]
    return outer


def _group(config: dict[str, Any], steps: int, decayed: bool, numbers: list[int]) -> dict[str, Any]:
    """Return a group of parameters, with one ``step`` for all as in apex and Transformer Engine."""
    rate = config.get("learning_rate", 0.0)
    group: dict[str, Any] = {
        "lr": rate, "max_lr": rate, "min_lr": config.get("min_learning_rate", 0.0),
        "weight_decay": config.get("weight_decay", 0.0) * decayed, "wd_mult": float(decayed),
        "lr_mult": 1.0,
        "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True,
    }  # fmt: skip
    name: RuleName = config["name"]
    match name:
        case "sgd":
            group |= {"momentum": config.get("momentum", 0.0), "dampening": 0.0, "nesterov": False}
        case "adamw" | "adam":
            group |= {
                "betas": (config.get("beta1", 0.9), config.get("beta2", 0.999)),
                "eps": config.get("epsilon", 1e-8),
                "bias_correction": True, "step": steps,
            }  # fmt: skip
        case _:
            assert_never(name)
    return group | {"params": numbers}


def _scheduler(run: Any) -> dict[str, Any]:
    """Return the state of the schedule, which Megatron counts in samples
    (``OptimizerParamScheduler.state_dict``). It is empty where the run's config is unknown.
    """
    config, train = run["config"]["optimizer"], run["config"].get("train", {})
    batch = train.get("global_batch_size")
    needed = ("learning_rate", "min_learning_rate", "schedule", "weight_decay")
    if batch is None or any(config.get(name) is None for name in needed):
        return {}
    sizes = batch_sizes(batch, train.get("rampup_batch_size"))

    def samples(name: str) -> int | None:
        steps = config.get(f"{name}_steps")
        return config.get(f"{name}_samples") or (steps and sizes.samples_after(steps))

    end, decay = samples("decay"), config["weight_decay"]
    if end is None:
        return {}
    warmup = samples("warmup") or (config.get("warmup_fraction") or 0) * end
    state = run["state"]
    return {
        "opt_param_scheduler": {
            "max_lr": config["learning_rate"], "min_lr": config["min_learning_rate"],
            "lr_decay_style": config["schedule"],
            "lr_warmup_steps": warmup, "lr_decay_steps": end,
            "num_steps": state.get("updated_samples", state["consumed_samples"]),
            "start_wd": decay, "end_wd": decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": 0,
        }
    }  # fmt: skip


def _hysteresis(run: Any) -> int:
    """Return how many overflows a dynamic loss scale tolerates before it shrinks (Megatron's hysteresis)."""
    return int(run["config"].get("loss_scale", {}).get("hysteresis", 2))


def _model_args(weights: Weights, precision: str, tensor: int, stages: int) -> argparse.Namespace:
    """Return the args that describe a model. Megatron's ``check_checkpoint_args`` and
    ``load_args_from_checkpoint`` read them.
    """
    model = weights.model
    run: Any = weights.run or {"state": {"step": 0, "consumed_samples": 0}, "config": {}}
    of_model = {theirs: getattr(model, ours) for ours, theirs in (MODEL | REST).items()}
    return argparse.Namespace(
        **of_model, **{name: values[0] for name, values in FIXED.items()},
        encoder_num_layers=model.num_layers, kv_channels=model.hidden_size // model.num_heads,
        encoder_seq_length=model.seq_length, add_position_embedding=True, rotary_percent=1.0,
        tokenizer_type="GPT2BPETokenizer", vocab_size=model.vocab_size,
        padded_vocab_size=pad_vocabulary(model.vocab_size, model.vocab_multiple, tensor),
        layernorm_epsilon=model.layer_norm_epsilon, norm_epsilon=model.layer_norm_epsilon,
        add_bias_linear=True, bias_gelu_fusion=model.activation == "gelu_new", openai_gelu=False,
        untie_embeddings_and_output_weights=False, num_experts=None,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=None, num_layers_per_virtual_pipeline_stage=None,
        data_parallel_random_init=False, use_distributed_optimizer=False,
        transformer_impl="local", fp16=precision == "float16", bf16=precision == "bfloat16",
        params_dtype=TorchName(f"torch.{precision}"),
        hysteresis=_hysteresis(run), iteration=run["state"]["step"],
        consumed_train_samples=run["state"]["consumed_samples"], consumed_valid_samples=0,
    )  # fmt: skip

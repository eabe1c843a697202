"""Reader of checkpoints of Megatron-LM (``megatron``) and Megatron-Core (``megatron_core``), of any
tensor and pipeline size.

Layout: megatron/checkpointing.py (``get_checkpoint_name``) of Megatron-LM 2.x to 23.x,
megatron/training/checkpointing.py since with ``--ckpt-format torch``:
ROOT/{iter_0000100,release}/mp_rank_TT[_PPP]/model_optim_rng.pt, and beside them the number in
latest_checkpointed_iteration.txt. PPP is there only with pipeline stages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.config.values import STATE_PARTS, rule_keeping
from common.dialects.rules import whole
from common.errors import CheckpointError, ConfigError
from common.structured_files import read_bytes
from common.systems.megatron_args import args_of, in_version, names_of_modules, weights_of_ranks
from common.systems.name_map import (
    Fusion,
    NameMap,
    by_ranks,
    match_name_map,
    name_in_order,
    name_map,
    require_ranks,
    require_same,
)
from common.systems.run_state import NO_SCALE, first_number, new_run
from common.systems.weights import Weights, check_tied
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING, POSITIONS
from common.whole_numbers import whole_number


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Optimizer state in a rank's file, in the order of the optimizer's parameters."""

    moments: Mapping[str, Sequence[FileTensor]] = field(default_factory=dict)
    copies: Sequence[FileTensor] = ()
    """Float32 copies of weights of lower precision."""
    steps: int | None = None
    scaler: Mapping[str, Any] | None = None
    why_not: str = ""


def read_optimizer(file: TensorFile) -> SavedState:
    """Megatron's FP32Optimizer saves what torch's optimizers do; Float16OptimizerWithFloat16Params has that inside
    (``state_dict`` of both in megatron/optimizer/optimizer.py, since then megatron/core/optimizer/optimizer.py).
    """
    try:
        outer = file.tree.get("optimizer")
        if outer is None:
            elsewhere = "in a file of each data-parallel rank: only weights"
            return SavedState(why_not="" if file.path.name == FILE else elsewhere)
        inner = outer.get("optimizer") or outer.get("optimizer_state_dict") or outer
        ids = [number for group in inner["param_groups"] for number in group["params"]]
        if "state" not in inner:
            sharded = "sharded by the distributed optimizer (distrib_optim.pt): only weights"
            return SavedState(why_not=sharded if ids else "")
        groups = outer.get("fp32_from_fp16_params", outer.get("fp32_from_fp16", ()))
        copies = [copy for group in groups for copy in group]
        state = inner["state"]
        moments = {
            part: [state[number][part] for number in ids] for part in STATE_PARTS if state and part in state[ids[0]]
        }
        # the step's place in apex, and in torch
        steps = inner["param_groups"][0].get("step", state[ids[0]].get("step") if state else None)
        stored = [*copies, *(tensor for tensors in moments.values() for tensor in tensors)]
        if not all(isinstance(tensor, FileTensor) for tensor in stored):
            raise TypeError("no tensors")
        steps = None if steps is None else whole(first_number(steps))
        return SavedState(moments=moments, copies=copies, steps=steps, scaler=outer.get("grad_scaler"))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        return SavedState(why_not=f"state of the optimizer: of no form that is known ({error!r}): only weights")


def detects(path: Path, format: str) -> bool:
    try:
        folder = find_folder(path)
        files = rank_files(folder) if folder else {}
        if not files:
            # Megatron's format torch_dist, which is refused when it is opened
            return folder is not None and format == "megatron_core"
        file = open_tensors(files[min(files)])
        return any(name.startswith("model.language_model.") for name in file) == (format == "megatron")
    except (CheckpointError, ConfigError):  # reported when the files are opened
        return format == "megatron"


def open_megatron(path: Path, format: str) -> Weights:
    """Open a checkpoint.

    path: the root, one of its folders iter_... or release, or the file of a single rank. Raises
    CheckpointError and ConfigError.
    """
    files, tensor_ranks = open_shards(path)
    first = files[0]
    folder = first.path.parents[1]
    name_map = match_name_map(folder, format, NAME_MAPS[format], _weights_in(first))
    if format == "megatron":
        name_map = in_version(first.path, first.tree.get("checkpoint_version", 0), name_map)
    stored = [
        {name: tensor for name, tensor in _weights_in(file).items() if not name_map.ignores(name)} for file in files
    ]
    saved = [read_optimizer(file) for file in files]

    def named(values: Iterable[Sequence[FileTensor]]) -> list[dict[str, FileTensor]]:
        """Name tensors that are in the optimizer's order. The names in the file are in the order of the modules.

        Megatron makes two groups, of parameters with decay (matrices) and without (vectors), each in the order of
        the modules: ``_get_params_for_weight_decay_optimization`` and later ``get_param_groups`` in
        megatron/optimizer/__init__.py, ``_get_param_groups`` in megatron/core/optimizer/__init__.py. The first
        comes first, but in releases of megatron-core whose groups are in the order of their first parameters, on
        all but the first stage: both are read.
        """
        try:
            found = [
                name_in_order({name: weights[name].shape for name in weights}, tensors)
                for weights, tensors in zip(stored, values, strict=True)
            ]
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        return join_stages(found, tensor_ranks)

    ranks, state = join_stages(stored, tensor_ranks), saved[0]
    masters = named(one.copies for one in saved) if all(one.copies for one in saved) else []
    moments = {part: named([one.moments.get(part, ()) for one in saved]) for part in state.moments}
    why = "weights of less precision, of which the optimizer has the float32"
    notes = {"model": why} if masters else {}
    table, head = name_map.table, name_map.head or ""
    if all({head, table} <= rank.keys() for rank in masters or ranks):
        for rank in masters or ranks:
            check_tied(folder, head, rank[head], rank[table])
        notes[head] = f"tied to {table}"
    for rank in (*ranks, *masters, *itertools.chain(*moments.values())):
        rank.pop(head, None)
    step = first.tree.get("iteration", first.tree.get("total_iters", 0))
    return weights_of_ranks(
        path, format, first, folder, name_map, ranks,
        masters=masters, moments=moments, notes=notes, counter="iteration", step=step,
        new_run=lambda: _run_of(first, state, step),
        without_run={"optimizer": state.why_not} if state.why_not else {},
    )  # fmt: skip


def _weights_in(file: TensorFile) -> dict[str, FileTensor]:
    return {name.removeprefix("model."): file[name] for name in file if name.startswith("model.")}


def _run_of(first: TensorFile, saved: SavedState, step: Any) -> dict[str, Any]:
    """Return the state of the run, as far as Megatron's own numbers hold it."""
    args, scale = args_of(first), dict(NO_SCALE)
    if saved.scaler is not None:
        value = first_number(saved.scaler.get("scale", args.get("loss_scale")))
        hysteresis = args.get("hysteresis") or 2
        left = whole(saved.scaler.get("hysteresis_tracker", hysteresis))
        scale |= {
            "mode": "dynamic" if "scale" in saved.scaler else "static",
            "value": float(np.float32(value or 1.0)),
            "finite_steps": whole(saved.scaler.get("growth_tracker", 0)),
            "overflows": max(0, hysteresis - left),
        }
    scheduler = first.tree.get("opt_param_scheduler")  # it counts samples of updates
    counted = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    return new_run(
        rule_keeping(saved.moments),
        step=step,
        updates=step if saved.steps is None else saved.steps,
        scale=scale,
        consumed_samples=whole(args.get("consumed_train_samples") or 0),
        updated_samples=None if counted is None else whole(counted),
    )


_EMBEDDING = "language_model.embedding."
_HEAD = "word_embeddings_for_head.weight"


def _megatron_core(norm_1: str, norm_2: str) -> NameMap:
    """Return Megatron-Core's table of names. norm_1, norm_2: names of a block's norms, which some
    fused modules contain.
    """
    block = "decoder.layers.{layer}."
    return name_map(
        {
            EMBEDDING: "embedding.word_embeddings.weight",
            POSITIONS: "embedding.position_embeddings.weight",
            "ln_f": "decoder.final_layernorm",
            "ln_1": block + norm_1,
            # its optimizer numbers the modules in the order of their creation
            "attn.c_proj": f"{block}self_attention.linear_proj",
            "attn.qkv_proj": f"{block}self_attention.linear_qkv",
            "ln_2": block + norm_2,
            "mlp.c_fc": f"{block}mlp.linear_fc1",
            "mlp.c_proj": f"{block}mlp.linear_fc2",
        },
        fusion=Fusion.HEADS,
        head="output_layer.weight",
        ignored=r".*\._extra_state",
    )


_INSIDE = "layer_norm_weight|layer_norm_bias"

NAME_MAPS = {
    "megatron": (
        names_of_modules(_EMBEDDING, "language_model.encoder.", head=_HEAD),
        names_of_modules(_EMBEDDING, "language_model.transformer.", "attention", head=_HEAD),
    ),
    "megatron_core": (
        _megatron_core("input_layernorm", "pre_mlp_layernorm"),
        _megatron_core(f"self_attention.linear_qkv.{_INSIDE}", f"mlp.linear_fc1.{_INSIDE}"),
    ),
}
"""Names that are written, then others that are read, by format."""


TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_FILES = (FILE, "model_rng.pt")
"""Names of a rank's file. With the second, each data-parallel rank's optimizer has its own file."""
_MAX_RANKS = 1000
_OF_ALL = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "padded_vocab_size",
    "max_position_embeddings", "iteration",
    "consumed_train_samples", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "params_dtype",
)  # fmt: skip
"""Args that are the same on all ranks. None is a rank's own, so swapped ones are not found."""
_NEW_FORMAT = (".metadata", "common.pt")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def find_folder(path: Path) -> Path | None:
    """Return the folder that holds the ranks' folders, None where ``path`` is not Megatron's.

    path: the folder, the root above it, a rank's folder or its file. Raises CheckpointError for a
    tracker file that names no folder.
    """
    if path.is_file():
        return path.parent.parent if path.name in _FILES else None
    if any((path / name).is_file() for name in _FILES):
        return path.parent
    tracker = path / TRACKER
    if not tracker.is_file():
        return path if rank_files(path) or any((path / name).is_file() for name in _NEW_FORMAT) else None
    word = read_bytes(tracker, limit=1000, error=CheckpointError).decode(errors="replace").strip()
    number = whole_number(word)
    name = word if number is None else f"iter_{number:07d}"
    if (number is None and word != "release") or not (path / name).is_dir():
        raise CheckpointError(
            f"{tracker}: names {name[:60]!r}, and no such folder is beside it; copy it there, or give another one"
        )
    return path / name


def rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """Return the files by (tensor rank, pipeline stage)."""
    # mp_rank_00_003/optim.pt is a data-parallel rank's
    files = {file.parent: file for name in reversed(_FILES) for file in folder.glob(f"mp_rank_*/{name}")}
    return {ranks: files[path] for ranks, path in by_ranks(files, _RANK).items()}


def open_shards(path: Path) -> tuple[Sequence[TensorFile], int]:
    """Open the files of all ranks, by stage x tensor ranks + tensor rank, and return the number of tensor ranks.
    Raises CheckpointError unless there is one for each rank of the training, and ConfigError for Megatron's newer
    format.
    """
    folder = find_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{path}: nothing of Megatron-LM here; expected {TRACKER}, or folders mp_rank_00 with {FILE}"
        )
    if not (paths := rank_files(folder)):
        if any((folder / name).is_file() for name in _NEW_FORMAT):
            raise ConfigError(
                f"{folder}: is of Megatron's format torch_dist, whose pieces only its own program"
                " puts together; save it with --ckpt-format torch, or turn it with Megatron's"
                " --ckpt-convert-format torch --ckpt-convert-save FOLDER"
            )
        raise CheckpointError(f"{folder}: no mp_rank_00/{FILE} here; copy the whole folder again")
    opened = {ranks: open_tensors(file) for ranks, file in paths.items()}
    args = args_of(next(iter(opened.values())))
    most_ranks, most_stages = (max(numbers) + 1 for numbers in zip(*paths, strict=True))
    tensor = args.get("tensor_model_parallel_size", args.get("model_parallel_size", most_ranks))
    stages = args.get("pipeline_model_parallel_size", most_stages if tensor == most_ranks else 1)
    if any(type(size) is not int or not 0 < size < _MAX_RANKS for size in (stages, tensor)):
        raise CheckpointError(
            f"{folder}: training had {tensor} tensor x {stages} pipeline ranks; copy the whole folder again"
        )
    require_ranks(
        folder, paths, itertools.product(range(tensor), range(stages)),
        lambda place: f"mp_rank_{place[0]:02d}" + f"_{place[1]:03d}" * (stages > 1),
    )  # fmt: skip
    for file in opened.values():
        if any(name.startswith("model0.") for name in file):
            raise ConfigError(
                f"{file.path}: holds the parts of an interleaved pipeline (model0, model1,"
                " ...); save it with Megatron without --num-layers-per-virtual-pipeline-stage"
            )
    told = {}
    for file in opened.values():
        tree = file.tree if isinstance(file.tree, dict) else {}
        told[file.path] = {name: args_of(file).get(name) for name in _OF_ALL} | {
            "checkpoint_version": tree.get("checkpoint_version"),
            "iteration in the file": tree.get("iteration", tree.get("total_iters")),
        }
    require_same(told, lambda path: path.parent.name)
    return [opened[rank, stage] for stage in range(stages) for rank in range(tensor)], tensor


def join_stages(files: Sequence[Mapping[str, FileTensor]], tensor_ranks: int) -> list[dict[str, FileTensor]]:
    """Return the tensors of each tensor rank by their names in the whole model. files: in the order of ``open_shards``
    and by names in the stage, whose layers count from 0.
    """
    ranks: list[dict[str, FileTensor]] = [{} for _ in range(tensor_ranks)]
    first_layer, last = 0, -1
    for number, found in enumerate(files):
        if number % tensor_ranks == 0:
            first_layer = last + 1
        for name in found:
            parts = _LAYER.split(name, maxsplit=1)
            if len(parts) == 3:
                last = max(last, first_layer + int(parts[1]))
                parts[1] = f"layers.{first_layer + int(parts[1])}."
            ranks[number % tensor_ranks]["".join(parts)] = found[name]
    return ranks

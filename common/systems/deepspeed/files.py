"""The files of a DeepSpeed checkpoint, by rank and layer.

Layout: ``save_checkpoint`` in deepspeed/runtime/engine.py and ``ckpt_layer_path`` in deepspeed/runtime/pipe/module.py.
ROOT/latest names a folder such as global_step100. It has mp_rank_MM_model_states.pt for each model-parallel rank (stage
x tensor ranks + tensor rank). A pipeline has layer_NN-model_TT-model_states.pt too.
zero_pp_rank_DD_mp_rank_MM_optim_states.pt has each data rank's partition of the optimizer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.structured_files import read_bytes
from common.systems.megatron_args import args_of, names_of_modules
from common.systems.name_map import by_ranks, require_ranks, require_same
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors

NAME_MAP = names_of_modules()
"""Names without the modules that hold the parameter, as ``short_name`` makes them."""

_RULES = (
    (r"^(module\.|model\.)+", ""),
    (r"^(language_model\.embedding|tied_modules\.embed)\.", ""),
    (r"^language_model\.(encoder|transformer)\.", ""),
    (r"\.attention\.", ".self_attention."),
)
"""Prefixes of a name in GPTModel and GPTModelPipe, and an older word for the attention."""


def short_name(name: str, blocks: Sequence[int] = ()) -> str:
    """Return a name in the form of NAME_MAP.

    blocks: the numbers of the pipeline's layers that are blocks, in ascending order.
    """
    for pattern, shorter in _RULES:
        name = re.sub(pattern, shorter, name)
    layer = re.fullmatch(r"(\d+)\.(.+)", name)
    if not layer:
        return name
    number, rest = int(layer[1]), layer[2]
    if number in blocks:
        return f"layers.{blocks.index(number)}.{rest}"
    return f"final_layernorm.{rest}" if rest in ("weight", "bias") else rest


_LATEST = "latest"
_MEGATRONS = "latest_checkpointed_iteration.txt"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MAX_RANKS = 10_000
_OF_ALL = ("global_steps", "skipped_steps", "mp_world_size", "dp_world_size", "iteration",
    "checkpoint_version", "ds_version")  # fmt: skip
_ARGS_OF_ALL = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size",
    "max_position_embeddings", "tensor_model_parallel_size",
    "pipeline_model_parallel_size")  # fmt: skip
"""Values that are the same in the files of all ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    folder: Path
    models: Sequence[TensorFile]
    """Model states by model-parallel rank."""
    layers: Sequence[Sequence[Mapping[str, FileTensor]]]
    """Weights by [tensor rank][layer of a pipeline] and name; the whole model as one layer without a pipeline."""
    blocks: Sequence[int]
    """Numbers of the pipeline's layers that are transformer blocks."""
    optimizers: Sequence[Sequence[TensorFile]]
    """Optimizer states as [model-parallel rank][data rank]. Empty where they are in ``models`` or were not saved."""


def find_folder(path: Path) -> Path | None:
    """Return the folder that holds the files, None where ``path`` is not DeepSpeed's.

    path: the folder, the root above it, or a file in it. Raises CheckpointError and ConfigError
    where several folders could be meant.
    """
    if path.is_file():
        return path.parent if _MODEL.fullmatch(path.name) or _LAYER.fullmatch(path.name) else None
    states = (*path.glob("*_states.pt"), *path.glob("*/*_states.pt"))
    kinds = (_MODEL, _LAYER, _OPTIMIZER)
    folders = sorted({file.parent for file in states if any(kind.fullmatch(file.name) for kind in kinds)})
    if path in folders:
        return path
    if not folders:
        return None
    for tracker, prefix in ((path / _LATEST, ""), (path / _MEGATRONS, "global_step")):
        if tracker.is_file():
            word = read_bytes(tracker, limit=1000, error=CheckpointError).decode(errors="replace")
            named = path / (prefix + word.strip())
            if named in folders:
                return named
            raise CheckpointError(
                f"{tracker}: names {named.name[:60]!r}, and no such checkpoint is beside it, but"
                f" {', '.join(folder.name for folder in folders[:4])}; give one of them"
            )
    if len(folders) > 1:
        raise ConfigError(
            f"{path}: holds {', '.join(folder.name for folder in folders[:4])} and no file"
            f" {_LATEST} that says which; give one of them"
        )
    return folders[0]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the files of all ranks. Raises CheckpointError unless all are there and of one checkpoint."""
    folder = find_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{path}: nothing of DeepSpeed here; expected {_LATEST} and global_stepN, or files like"
            " mp_rank_00_model_states.pt"
        )
    models, layers, optimizers = (by_ranks(folder.glob("*.pt"), pattern) for pattern in (_MODEL, _LAYER, _OPTIMIZER))

    def opened(path: Path) -> TensorFile:
        file = open_tensors(path)
        if not isinstance(file.tree, dict):
            raise CheckpointError(f"{path}: holds no table of tensors; copy it again")
        return file

    first_data = {mp: (data, mp) for data, mp in sorted(models, reverse=True)}
    files = {mp: opened(models[key]) for mp, key in sorted(first_data.items())}
    if not files:
        raise CheckpointError(
            f"{folder}: no mp_rank_00_model_states.pt here, which says how the parts fit"
            " together; copy the whole folder again"
        )
    first = next(iter(files.values()))
    ranks = _world(first, "mp_world_size", max(files) + 1)
    require_ranks(folder, files, range(ranks), "mp_rank_{:02d}_model_states.pt".format)
    told = {
        file.path: {name: file.tree.get(name) for name in _OF_ALL}
        | {name: args_of(file).get(name) for name in _ARGS_OF_ALL}
        for file in files.values()
    }
    require_same(told, lambda path: path.name)
    numbers = sorted({number for number, _ in layers})
    tensor = max((rank for _, rank in layers), default=ranks - 1) + 1
    require_ranks(
        folder, layers, itertools.product(numbers, range(tensor)),
        lambda place: "layer_{:02d}-model_{:02d}-model_states.pt".format(*place),
    )  # fmt: skip
    if ranks % tensor:
        raise CheckpointError(
            f"{folder}: {ranks} model-parallel ranks, and {tensor} tensor ranks of each layer:"
            " these files are of several checkpoints; copy one whole"
        )
    pipeline = {place: opened(layers[place]) for place in sorted(layers)}
    # every layer that is a block has this one, and no other layer
    blocks = [number for number in numbers if "input_layernorm.weight" in pipeline[number, 0]]
    data = _world(first, "dp_world_size", max((rank for rank, _ in optimizers), default=0) + 1)
    if optimizers:
        require_ranks(
            folder, optimizers, itertools.product(range(data), range(ranks)),
            lambda place: "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt".format(*place),
        )  # fmt: skip
    return Checkpoint(
        folder=folder,
        models=[files[rank] for rank in range(ranks)],
        layers=[
            [_named(pipeline[number, rank], f"{number}.", blocks) for number in numbers] or [_named(files[rank])]
            for rank in range(tensor)
        ],
        blocks=blocks,
        optimizers=[[opened(optimizers[rank, mp]) for rank in range(data)] for mp in range(ranks if optimizers else 0)],
    )


def _named(file: TensorFile, layer: str = "", blocks: Sequence[int] = ()) -> dict[str, FileTensor]:
    """Return the weights in the file of a layer, or in the model states without a pipeline."""
    start = "" if layer else "module."
    return {short_name(layer + name, blocks): file[name] for name in file if name.startswith(start)}


def _world(first: TensorFile, name: str, fallback: int) -> int:
    size = first.tree.get(name, fallback)
    if type(size) is not int or not 0 < size <= _MAX_RANKS:
        raise CheckpointError(f"{first.path}: {name} is {size!r}; copy it again")
    return size

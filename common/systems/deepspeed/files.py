"""The files of a DeepSpeed checkpoint, by rank and layer.

Layout: ``save_checkpoint`` in deepspeed/runtime/engine.py and ``ckpt_layer_path`` in
deepspeed/runtime/pipe/module.py. ROOT/latest names a folder such as global_step100. It has
mp_rank_MM_model_states.pt for each model-parallel rank (stage x tensor ranks + tensor rank). A
pipeline has layer_NN-model_TT-model_states.pt too. With ZeRO 3 the first kind of name begins with
the data rank, and the file has a piece of each weight. The optimizer's files are not read.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from common.structured_files import read_bytes
from common.systems.rank_parts import require_ranks, require_same
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors

_LATEST = "latest"
_MEGATRONS = "latest_checkpointed_iteration.txt"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_RULES = (
    (r"^(module\.|model\.)+", ""),
    (r"^(language_model\.embedding|tied_modules\.embed)\.", ""),
    (r"^language_model\.(encoder|transformer)\.", ""),
    (r"\.attention\.", ".self_attention."),
)
"""Prefixes of a name in GPTModel and GPTModelPipe, and an older word for the attention."""
_FIRST_OF_BLOCK = "input_layernorm.weight"
"""Parameter of every layer that is a block, and of no other layer of a pipeline."""
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
    layers: Mapping[int, Sequence[TensorFile]]
    """Layers of a pipeline by number and tensor rank."""
    tensor: int

    @property
    def first(self) -> TensorFile:
        return self.models[0]

    @property
    def blocks(self) -> list[int]:
        """Numbers of the pipeline's layers that are transformer blocks."""
        return [number for number, ranks in self.layers.items() if _FIRST_OF_BLOCK in ranks[0]]

    def weights(self, tensor: int) -> dict[str, FileTensor]:
        """Return the weights that a tensor rank has, in the order of the modules."""
        prefix = "module."
        found = {
            _short_name(name.removeprefix(prefix)): self.models[tensor][name]
            for name in self.models[tensor]
            if name.startswith(prefix)
        }
        for number, ranks in self.layers.items():
            found |= self._layer(number, ranks[tensor])
        return found

    def _layer(self, number: int, file: TensorFile) -> dict[str, FileTensor]:
        return {_short_name(f"{number}.{name}", self.blocks): file[name] for name in file}


def args_of(file: TensorFile) -> dict[str, Any]:
    """Return Megatron's args in the file of a rank, where it has them."""
    args = file.tree.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _of_all(file: TensorFile) -> dict[str, Any]:
    """Return the values that are the same in the files of all ranks."""
    args = args_of(file)
    return {name: file.tree.get(name) for name in _OF_ALL} | {
        name: args.get(name) for name in _ARGS_OF_ALL
    }


def has_files(folder: Path) -> bool:
    return any(folder.glob("*_states.pt"))


def find_folder(path: Path) -> Path | None:
    """Return the folder that holds the files, None where ``path`` is not DeepSpeed's.

    path: the folder, the root above it, or a file in it. Raises CheckpointError and ConfigError
    where several folders could be meant.
    """
    if path.is_file():
        return path.parent if any(p.fullmatch(path.name) for p in (_MODEL, _LAYER)) else None
    if has_files(path):
        return path
    folders = sorted(folder for folder in path.glob("*/") if has_files(folder))
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


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open the files of all ranks. Raises CheckpointError unless all are there and of one
    checkpoint.
    """
    folder = find_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{path}: nothing of DeepSpeed here; expected {_LATEST} and global_stepN, or files like"
            " mp_rank_00_model_states.pt"
        )
    names = [file.name for file in folder.glob("*.pt")]
    if parts := [name for name in sorted(names) if (match := _MODEL.fullmatch(name)) and match[1]]:
        raise ConfigError(
            f"{folder / parts[0]}: ZeRO-3, whose weights lie in pieces of each; save the checkpoint"
            " with zero_optimization.stage 1, or make a universal one of it and load that"
        )
    models = _by_ranks(folder, _MODEL, names)
    layers = _by_ranks(folder, _LAYER, names)
    with ExitStack() as stack:

        def opened(path: Path) -> TensorFile:
            file = stack.enter_context(open_tensors(path))
            if not isinstance(file.tree, dict):
                raise CheckpointError(f"{path}: holds no table of tensors; copy it again")
            return file

        files = {rank: opened(path) for (_, rank), path in sorted(models.items())}
        if not files:
            raise CheckpointError(
                f"{folder}: no mp_rank_00_model_states.pt here, which says how the parts fit"
                " together; copy the whole folder again"
            )
        first = next(iter(files.values()))
        ranks = _world(first, "mp_world_size", max(files) + 1)
        require_ranks(folder, files, range(ranks), "mp_rank_{:02d}_model_states.pt".format)
        one = _of_all(first)
        for file in files.values():
            require_same(file.path, _of_all(file), first.path.name, one)
        tensor, by_layer = ranks, {}
        if layers:
            numbers = sorted({number for number, _ in layers})
            tensor = max(rank for _, rank in layers) + 1
            require_ranks(
                folder, layers, itertools.product(numbers, range(tensor)),
                lambda place: "layer_{:02d}-model_{:02d}-model_states.pt".format(*place),
            )  # fmt: skip
            by_layer = {
                number: [opened(layers[number, rank]) for rank in range(tensor)]
                for number in numbers
            }
        if ranks % tensor:
            raise CheckpointError(
                f"{folder}: {ranks} model-parallel ranks, and {tensor} tensor ranks of each layer:"
                " these files are of several checkpoints; copy one whole"
            )
        yield Checkpoint(
            folder=folder,
            models=[files[rank] for rank in range(ranks)],
            layers=by_layer,
            tensor=tensor,
        )


def _by_ranks(
    folder: Path, pattern: re.Pattern[str], names: Iterable[str]
) -> dict[tuple[int, int], Path]:
    found: dict[tuple[int, int], Path] = {}
    for name in sorted(names):
        if match := pattern.fullmatch(name):
            ranks = (int(match[1] or 0), int(match[2] or 0))
            if ranks in found:
                raise CheckpointError(
                    f"{folder}: {found[ranks].name} and {name} are of one rank: these files are of"
                    " several checkpoints; copy one whole"
                )
            found[ranks] = folder / name
    return found


def _world(first: TensorFile, name: str, fallback: int) -> int:
    size = first.tree.get(name, fallback)
    if type(size) is not int or not 0 < size <= _MAX_RANKS:
        raise CheckpointError(f"{first.path}: {name} is {size!r}; copy it again")
    return size


def _short_name(name: str, blocks: Sequence[int] = ()) -> str:
    """Return a name without the modules that hold the parameter, and a block's own number.

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

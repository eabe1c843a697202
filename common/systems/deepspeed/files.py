"""The files of a DeepSpeed checkpoint, by rank and layer.

Layout: ``save_checkpoint`` in deepspeed/runtime/engine.py and ``ckpt_layer_path`` in
deepspeed/runtime/pipe/module.py. ROOT/latest names a folder such as global_step100. It has
mp_rank_MM_model_states.pt for each model-parallel rank (stage x tensor ranks + tensor rank). A
pipeline has layer_NN-model_TT-model_states.pt too. zero_pp_rank_DD_mp_rank_MM_optim_states.pt has
each data rank's partition of the optimizer.
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
from common.systems.name_map import Fusion, name_map
from common.systems.rank_parts import require_ranks, require_same
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING, POSITIONS

_BLOCK = "layers.{layer}."
NAME_MAP = name_map(
    {
        EMBEDDING: "word_embeddings.weight",
        POSITIONS: "position_embeddings.weight",
        "ln_f": "final_layernorm",
        "ln_1": f"{_BLOCK}input_layernorm",
        "attn.qkv_proj": f"{_BLOCK}self_attention.query_key_value",
        "attn.c_proj": f"{_BLOCK}self_attention.dense",
        "ln_2": f"{_BLOCK}post_attention_layernorm",
        "mlp.c_fc": f"{_BLOCK}mlp.dense_h_to_4h",
        "mlp.c_proj": f"{_BLOCK}mlp.dense_4h_to_h",
    },
    fusion=Fusion.HEADS,
)
"""Names without the modules that hold the parameter, as ``short_name`` makes them."""

_RULES = (
    (r"^(module\.|model\.)+", ""),
    (r"^(language_model\.embedding|tied_modules\.embed)\.", ""),
    (r"^language_model\.(encoder|transformer)\.", ""),
    (r"\.attention\.", ".self_attention."),
)
"""Prefixes of a name in GPTModel and GPTModelPipe, and an older word for the attention."""
FIRST_OF_BLOCK = "input_layernorm.weight"
"""Parameter of every layer that is a block, and of no other layer of a pipeline."""


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
    layers: Mapping[int, Sequence[TensorFile]]
    """Layers of a pipeline by number and tensor rank."""
    optimizers: Sequence[Sequence[TensorFile]]
    """Optimizer states as [model-parallel rank][data rank]. Empty where they are in ``models`` or
    were not saved.
    """
    tensor: int

    @property
    def first(self) -> TensorFile:
        return self.models[0]

    @property
    def blocks(self) -> list[int]:
        """Numbers of the pipeline's layers that are transformer blocks."""
        return [number for number, ranks in self.layers.items() if FIRST_OF_BLOCK in ranks[0]]

    def weights(self, tensor: int) -> dict[str, FileTensor]:
        """Return the weights that a tensor rank has, in the order of the modules."""
        prefix = "module."
        found = {
            short_name(name.removeprefix(prefix)): self.models[tensor][name]
            for name in self.models[tensor]
            if name.startswith(prefix)
        }
        for number, ranks in self.layers.items():
            found |= self._layer(number, ranks[tensor])
        return found

    def parameters(self, tensor: int) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of a tensor rank's layers, or of the one file without a pipeline."""
        layers = [self._layer(number, ranks[tensor]) for number, ranks in self.layers.items()]
        return [
            {name: part.shape for name, part in layer.items()}
            for layer in layers or [self.weights(tensor)]
        ]

    def _layer(self, number: int, file: TensorFile) -> dict[str, FileTensor]:
        return {short_name(f"{number}.{name}", self.blocks): file[name] for name in file}


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
    return any(
        pattern.fullmatch(path.name)
        for path in folder.glob("*_states.pt")
        for pattern in (_MODEL, _LAYER, _OPTIMIZER)
    )


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
    models = _by_ranks(folder, _MODEL, names)
    layers = _by_ranks(folder, _LAYER, names)
    optimizers = _by_ranks(folder, _OPTIMIZER, names)
    with ExitStack() as stack:

        def opened(path: Path) -> TensorFile:
            file = stack.enter_context(open_tensors(path))
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
        parts = _open_optimizers(folder, optimizers, opened, ranks, first)
        yield Checkpoint(
            folder=folder,
            models=[files[rank] for rank in range(ranks)],
            layers=by_layer,
            optimizers=parts,
            tensor=tensor,
        )


def _open_optimizers(
    folder: Path, paths: Mapping[tuple[int, int], Path], opened: Any, ranks: int, first: TensorFile
) -> list[list[TensorFile]]:
    if not paths:
        return []
    data = _world(first, "dp_world_size", max(rank for rank, _ in paths) + 1)
    require_ranks(
        folder, paths, itertools.product(range(data), range(ranks)),
        lambda place: "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt".format(*place),
    )  # fmt: skip
    return [[opened(paths[rank, mp]) for rank in range(data)] for mp in range(ranks)]


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

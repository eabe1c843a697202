"""The files of a Megatron-LM checkpoint, one for each tensor and pipeline rank, and what they hold
of each tensor, joined when it is read.

Layout: megatron/checkpointing.py (``get_checkpoint_name``) of Megatron-LM 2.x to 23.x,
megatron/training/checkpointing.py since with ``--ckpt-format torch``:
ROOT/{iter_0000100,release}/mp_rank_TT[_PPP]/model_optim_rng.pt, and beside them the number in
latest_checkpointed_iteration.txt. PPP is there only with pipeline stages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from common.structured_files import read_bytes
from common.systems.megatron_args import args_of, names_of_modules
from common.systems.name_map import Fusion, NameMap, name_map
from common.systems.rank_parts import by_ranks, require_ranks, require_same
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING, POSITIONS
from common.whole_numbers import whole_number

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

    def files_in(path: Path) -> list[Path]:
        return [path / name for name in _FILES if (path / name).is_file()]

    # mp_rank_00_003/optim.pt is a data-parallel rank's
    folders = by_ranks(filter(files_in, folder.glob("mp_rank_*")), _RANK)
    return {ranks: files_in(path)[0] for ranks, path in folders.items()}


@contextmanager
def open_shards(path: Path) -> Iterator[Sequence[Sequence[TensorFile]]]:
    """Open the files of all ranks, by [stage][tensor rank]. Raises CheckpointError unless there is
    one for each rank of the training, and ConfigError for Megatron's newer format.
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
    with ExitStack() as stack:
        opened = {ranks: stack.enter_context(open_tensors(file)) for ranks, file in paths.items()}
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
        told = {file.path: _of_all(file) for file in opened.values()}
        require_same(told, lambda path: path.parent.name)
        yield [[opened[rank, stage] for rank in range(tensor)] for stage in range(stages)]


def _of_all(file: TensorFile) -> dict[str, Any]:
    """Return values that are the same on all ranks. None is a rank's own, so swapped ones are not
    found.
    """
    args, tree = args_of(file), file.tree if isinstance(file.tree, dict) else {}
    return {name: args.get(name) for name in _OF_ALL} | {
        "checkpoint_version": tree.get("checkpoint_version"),
        "iteration in the file": tree.get("iteration", tree.get("total_iters")),
    }


def join_stages(stages: Sequence[Sequence[Mapping[str, FileTensor]]]) -> list[dict[str, FileTensor]]:
    """Return the tensors of each tensor rank by their names in the whole model. stages: by [stage]
    [tensor rank] and by names in the stage, whose layers count from 0.
    """
    ranks: list[dict[str, FileTensor]] = [{} for _ in stages[0]]
    first_layer = 0
    for stage in stages:
        for rank, found in zip(ranks, stage, strict=True):
            rank |= {_in_whole(name, first_layer): found[name] for name in found}
        first_layer += _layers(stage)
    return ranks


def _in_whole(name: str, first_layer: int) -> str:
    """Return the name in the whole model of a tensor of a stage."""
    return _LAYER.sub(lambda found: f"layers.{int(found[1]) + first_layer}.", name, count=1)


def _layers(stage: Sequence[Mapping[str, Any]]) -> int:
    found = (_LAYER.search(name) for rank in stage for name in rank)
    return max((int(layer[1]) for layer in found if layer), default=-1) + 1

"""The files of a Megatron-LM checkpoint, one for each tensor and pipeline rank, and what they hold
of each tensor, joined when it is read.

Layout: megatron/checkpointing.py (``get_checkpoint_name``) of Megatron-LM 2.x to 23.x,
megatron/training/checkpointing.py since with ``--ckpt-format torch``:
ROOT/{iter_0000100,release}/mp_rank_TT[_PPP]/model_optim_rng.pt, and beside them the number in
latest_checkpointed_iteration.txt. PPP is there only with pipeline stages.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from common.structured_files import read_bytes
from common.systems.name_map import Fusion, NameMap, name_map
from common.systems.rank_parts import Joined, join_ranks, require_ranks, require_same
from common.systems.weights import MAX_LAYERS
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING, POSITIONS
from common.whole_numbers import whole_number


def _megatron(encoder: str, attention: str) -> NameMap:
    block = f"language_model.{encoder}.layers.{{layer}}."
    return name_map(
        {
            EMBEDDING: "language_model.embedding.word_embeddings.weight",
            POSITIONS: "language_model.embedding.position_embeddings.weight",
            "ln_f": f"language_model.{encoder}.final_layernorm",
            "ln_1": f"{block}input_layernorm",
            "attn.qkv_proj": f"{block}{attention}.query_key_value",
            "attn.c_proj": f"{block}{attention}.dense",
            "ln_2": f"{block}post_attention_layernorm",
            "mlp.c_fc": f"{block}mlp.dense_h_to_4h",
            "mlp.c_proj": f"{block}mlp.dense_4h_to_h",
        },
        fusion=Fusion.HEADS,
        head="word_embeddings_for_head.weight",
    )


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
    "megatron": (_megatron("encoder", "self_attention"), _megatron("transformer", "attention")),
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

RankTensors = Sequence[Sequence[Mapping[str, FileTensor]]]
"""Tensors by [stage][tensor rank] and name, without the prefix before the model's names."""


def find_folder(path: Path) -> Path | None:
    """Return the folder that holds the ranks' folders, None where ``path`` is not Megatron's.

    path: the folder, the root above it, a rank's folder or its file. Raises ConfigError for a
    tracker file that names no folder.
    """
    if path.is_file():
        return path.parent.parent if path.name in _FILES else None
    if any((path / name).is_file() for name in _FILES):
        return path.parent
    tracker = path / TRACKER
    if not tracker.is_file():
        return (
            path
            if rank_files(path) or any((path / name).is_file() for name in _NEW_FORMAT)
            else None
        )
    word = read_bytes(tracker, limit=1000, error=CheckpointError).decode(errors="replace").strip()
    if word != "release" and whole_number(word) is None:
        raise ConfigError(
            f"{tracker}: {word[:40]!r} is neither a number nor release; fix it, or give the folder"
            " iter_... itself"
        )
    folder = path / (word if word == "release" else f"iter_{int(word):07d}")
    if not folder.is_dir():
        raise CheckpointError(
            f"{tracker}: names {folder.name}, and no such folder is beside it; copy it there, or"
            " give another one"
        )
    return folder


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files by (pipeline stage, tensor rank)."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        ranks = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name)
        files = [path / name for name in _FILES if (path / name).is_file()]
        if ranks and files:  # mp_rank_00_003/optim.pt is a data-parallel rank's
            found[int(ranks[2] or 0), int(ranks[1])] = files[0]
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    folder: Path
    files: Sequence[Sequence[TensorFile]]
    """Files by [stage][tensor rank]."""

    @property
    def first(self) -> TensorFile:
        return self.files[0][0]

    @property
    def args(self) -> argparse.Namespace:
        return _args_of(self.first)

    @property
    def tensor(self) -> int:
        return len(self.files[0])


@contextmanager
def open_shards(path: Path) -> Iterator[Shards]:
    """Open the files of all ranks. Raises CheckpointError unless there is one for each rank of the
    training, and ConfigError for Megatron's newer format.
    """
    folder = find_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{path}: nothing of Megatron-LM here; expected {TRACKER}, or folders mp_rank_00 with"
            f" {FILE}"
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
        args = _args_of(next(iter(opened.values())))
        largest = (max(stage for stage, _ in paths) + 1, max(rank for _, rank in paths) + 1)
        tensor = getattr(
            args, "tensor_model_parallel_size", getattr(args, "model_parallel_size", largest[1])
        )
        stages = getattr(
            args, "pipeline_model_parallel_size", largest[0] if tensor == largest[1] else 1
        )
        if any(type(size) is not int or not 0 < size < _MAX_RANKS for size in (stages, tensor)):
            raise CheckpointError(
                f"{folder}: training had {tensor} tensor x {stages} pipeline ranks; copy the whole"
                " folder again"
            )
        require_ranks(
            folder, paths, itertools.product(range(stages), range(tensor)),
            lambda place: f"mp_rank_{place[1]:02d}" + f"_{place[0]:03d}" * (stages > 1),
        )  # fmt: skip
        one = _of_all(opened[0, 0])
        for file in opened.values():
            if any(name.startswith("model0.") for name in file):
                raise ConfigError(
                    f"{file.path}: holds the parts of an interleaved pipeline (model0, model1,"
                    " ...); save it with Megatron without --num-layers-per-virtual-pipeline-stage"
                )
            require_same(file.path, _of_all(file), paths[0, 0].parent.name, one)
        yield Shards(
            folder=folder,
            files=[[opened[stage, rank] for rank in range(tensor)] for stage in range(stages)],
        )


def _of_all(file: TensorFile) -> dict[str, Any]:
    """Return values that are the same on all ranks. None is a rank's own, so swapped ones are not
    found.
    """
    args, tree = vars(_args_of(file)), file.tree if isinstance(file.tree, dict) else {}
    return {name: args.get(name) for name in _OF_ALL} | {
        "checkpoint_version": tree.get("checkpoint_version"),
        "iteration in the file": tree.get("iteration", tree.get("total_iters")),
    }


def _args_of(file: TensorFile) -> argparse.Namespace:
    args = file.tree.get("args") if isinstance(file.tree, dict) else None
    return args if isinstance(args, argparse.Namespace) else argparse.Namespace()


def model_tensors(shards: Shards) -> RankTensors:
    return [
        [
            {
                name.removeprefix("model."): tensor
                for name, tensor in file.items()
                if name.startswith("model.")
            }
            for file in stage
        ]
        for stage in shards.files
    ]


def join(path: Path, ranks: RankTensors, name_map: NameMap) -> dict[str, Joined]:
    """Join the ranks: return each tensor of the model, under its name in the whole model. Raises
    CheckpointError where ranks do not fit together.
    """
    rows = {row.theirs: row for row in name_map.rows(sum(map(_layers, ranks)))}
    if name_map.head is not None:
        rows[name_map.head] = name_map.global_rows[0]
    joined: dict[str, Joined] = {}
    first_layer = 0
    for stage in ranks:
        whole = [{_in_whole(name, first_layer): rank[name] for name in rank} for rank in stage]
        joined |= join_ranks(path, whole, rows)
        first_layer += _layers(stage)
    return joined


def _in_whole(name: str, first_layer: int) -> str:
    """Return the name of a tensor of a stage in the whole model."""
    before, layers, number, after = re.fullmatch(
        r"(.*?)(?:(\blayers\.)(\d+)(\..*))?", name
    ).groups()  # type: ignore[union-attr]
    return f"{before}{layers}{int(number) + first_layer}{after}" if layers else name


def _layers(stage: Sequence[Mapping[str, Any]]) -> int:
    numbers = [
        int(found[1])
        for rank in stage
        for name in rank
        if (found := re.search(r"\blayers\.(\d+)\.", name))
    ]
    layers = max(numbers, default=-1) + 1
    if layers > MAX_LAYERS:
        raise CheckpointError(
            f"a stage with {layers} layers is none of a GPT-2; use another checkpoint"
        )
    return layers

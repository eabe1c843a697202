"""Writer of weights for Megatron-LM and Megatron-Core: a file for each tensor and pipeline rank,
written as a stream. Values without a place in Megatron's files go into model.yaml.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.files import atomic_write, fsync_folder
from common.parallel.batch import check_divides, pad_vocabulary
from common.parallel.sharding import local_shape, slice_of
from common.systems.megatron.names import NAME_MAPS
from common.systems.megatron.shards import FILE, TRACKER
from common.systems.model_yaml import write_model_yaml
from common.systems.name_map import NameRow
from common.systems.weights import Weight, Weights, to_type
from common.tensor_files.arrays import prefetch_arrays
from common.tensor_files.torch_pickle import TorchName
from common.tensor_files.torch_writer import Parts, TensorLeaf, stream_torch
from common.weights.names import EMBEDDING

_RELEASE = "release"
"""Folder of weights without a run, and the word for it in TRACKER."""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Rank that a file belongs to."""

    weights: Weights
    format: str
    tensor: int
    tensor_rank: int
    stages: int
    stage: int

    @property
    def name(self) -> str:
        return f"mp_rank_{self.tensor_rank:02d}" + (f"_{self.stage:03d}" if self.stages > 1 else "")

    def rows(self) -> list[NameRow]:
        """Return a row for each of its tensors in the order of Megatron's modules, with layers
        numbered from 0.
        """
        name_map = NAME_MAPS[self.format][0]
        layers = self.weights.model.num_layers // self.stages
        start = [row for row in name_map.global_rows if row.ours[0] in (EMBEDDING, "wpe.weight")]
        blocks = [
            replace(
                row,
                ours=tuple(name.format(layer=self.stage * layers + layer) for name in row.ours),
                theirs=row.theirs.format(layer=layer),
            )
            for layer in range(layers)
            for row in name_map.layer_rows
        ]
        end = [row for row in name_map.global_rows if row not in start]
        if self.stage and name_map.head:
            end.append(replace(start[0], theirs=name_map.head))
        return [
            *(start if self.stage == 0 else ()),
            *blocks,
            *(end if self.stage == self.stages - 1 else ()),
        ]


def write_megatron(
    folder: Path,
    weights: Weights,
    dtype: str | None,
    tensor: int = 1,
    stages: int = 1,
    format: str = "megatron",
) -> dict[str, int]:
    """Write into an empty folder, for ``tensor`` x ``stages`` ranks.

    Raises ConfigError unless they divide heads and layers; OSError is left to the caller. Returns
    no checksums: each record in a file of torch's has its own.
    """
    model = weights.model
    inner = model.ffn_hidden_size or 4 * model.hidden_size
    check_divides("--model_parallel", tensor, "model.num_heads", model.num_heads)
    check_divides("--model_parallel", tensor, "model.ffn_hidden_size", inner)
    check_divides("--pipeline_stage", stages, "model.num_layers", model.num_layers)
    checkpoint = folder / _RELEASE
    for stage, tensor_rank in itertools.product(range(stages), range(tensor)):
        rank = _Rank(
            weights=weights,
            format=format,
            tensor=tensor,
            tensor_rank=tensor_rank,
            stages=stages,
            stage=stage,
        )
        (checkpoint / rank.name).mkdir(parents=True)
        _write_rank(checkpoint / rank.name / FILE, rank, dtype)
        fsync_folder(checkpoint / rank.name)
    fsync_folder(checkpoint)
    write_model_yaml(folder, weights)
    with atomic_write(folder / TRACKER, "w") as file:
        file.write(_RELEASE)
    return {}


@dataclass(kw_only=True)
class _Leaves:
    """Tensors of a file in its order, and the way each is made."""

    rank: _Rank
    makers: dict[str, Callable[[], Parts]] = field(default_factory=dict)

    def add(self, row: NameRow, dtype: str | None) -> TensorLeaf:
        """Add a tensor. dtype: None keeps that of the source."""
        model, tensor, source = self.rank.weights.model, self.rank.tensor, self.rank.weights.tensors
        wanted = dtype or source[row.ours[0]].dtype
        shapes, makers = {}, []
        for name in row.ours:
            whole = _padded_shape(name, source[name].shape, model, tensor)
            shapes[name] = local_shape(name, whole, tensor)
            makers.append(_piece(name, source[name], whole, wanted, self.rank))
        leaf = TensorLeaf(dtype=wanted, shape=row.shape(shapes), name=row.theirs)
        self.makers[leaf.name] = lambda: _padded(
            row.pieces([make() for make in makers], model.num_heads // tensor), leaf
        )
        return leaf


def _padded_shape(
    name: str, shape: tuple[int, ...], model: ResolvedModel, tensor: int
) -> tuple[int, ...]:
    return (
        (pad_vocabulary(model.vocab_size, model.vocab_multiple, tensor), *shape[1:])
        if name == EMBEDDING
        else shape
    )


def _piece(
    name: str, weight: Weight, whole: tuple[int, ...], dtype: str, rank: _Rank
) -> Callable[[], NDArray[Any]]:
    piece = slice_of(name, whole, tensor=rank.tensor, tensor_rank=rank.tensor_rank)
    spans = tuple(slice(*span) for span in (piece.rows, piece.columns) if span is not None)
    return lambda: to_type(weight.load()[spans], weight.dtype, dtype)


def _padded(parts: Parts, leaf: TensorLeaf) -> Parts:
    """Add rows of zeros, which pad the vocabulary."""
    missing = leaf.shape[0] - sum(map(len, parts))
    padding = np.zeros((missing, *leaf.shape[1:]), parts[0].dtype)
    return [*parts, padding] if missing else parts


def _write_rank(path: Path, rank: _Rank, dtype: str | None) -> None:
    weights, leaves = rank.weights, _Leaves(rank=rank)
    precision = dtype or weights.tensors[EMBEDDING].dtype
    flat = {row.theirs: leaves.add(row, dtype) for row in rank.rows()}
    tree: dict[str, Any] = {
        "args": _model_args(weights, precision, rank.tensor, rank.stages),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "model": flat if rank.format == "megatron_core" else _nested(flat),
    }
    stream_torch(path, tree, prefetch_arrays(leaves.makers.values()))


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors nested as Megatron-LM's modules save them; encoder layers stay flat."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        encoder = "language_model.encoder."
        path = (
            ["language_model", "encoder", name.removeprefix(encoder)]
            if name.startswith(encoder)
            else name.split(".")
        )
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = leaf
    return tree


def _model_args(weights: Weights, precision: str, tensor: int, stages: int) -> argparse.Namespace:
    """Return the args that describe a model. Megatron's ``check_checkpoint_args`` and
    ``load_args_from_checkpoint`` read them.
    """
    model = weights.model
    return argparse.Namespace(
        num_layers=model.num_layers, encoder_num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size, num_attention_heads=model.num_heads,
        kv_channels=model.hidden_size // model.num_heads,
        group_query_attention=False, seq_length=model.seq_length,
        encoder_seq_length=model.seq_length,
        max_position_embeddings=model.max_positions, add_position_embedding=True,
        position_embedding_type="learned_absolute",
        use_rotary_position_embeddings=False, rotary_percent=1.0, tokenizer_type="GPT2BPETokenizer",
        vocab_size=model.vocab_size,
        make_vocab_size_divisible_by=model.vocab_multiple,
        padded_vocab_size=pad_vocabulary(model.vocab_size, model.vocab_multiple, tensor),
        layernorm_epsilon=model.layer_norm_epsilon, norm_epsilon=model.layer_norm_epsilon,
        normalization="LayerNorm",
        apply_layernorm_1p=False, apply_residual_connection_post_layernorm=False,
        add_bias_linear=True, bias_gelu_fusion=True,
        openai_gelu=False, squared_relu=False, swiglu=False,
        untie_embeddings_and_output_weights=False, num_experts=None,
        hidden_dropout=model.hidden_dropout, attention_dropout=model.attention_dropout,
        init_method_std=model.initializer_range,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None, data_parallel_random_init=False,
        use_distributed_optimizer=False,
        transformer_impl="local", fp16=precision == "float16", bf16=precision == "bfloat16",
        params_dtype=TorchName(f"torch.{precision}"),
        iteration=0, consumed_train_samples=0, consumed_valid_samples=0,
    )  # fmt: skip

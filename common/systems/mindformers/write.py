"""Writer of MindFormers' ``.ckpt`` as a stream, with a model.yaml for what it cannot hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.checkpoint.folders import surplus
from common.checkpoint.manifest import read_manifest
from common.checkpoint.snapshot import MODEL_FILE, OPTIMIZER_FILE, TrainState
from common.config.resolved import ResolvedModel
from common.errors import StorageError
from common.files import fsync_folder, temporary_folder
from common.parallel.batch import place_in_epochs
from common.parallel.run import Run
from common.parallel.sharding import split_dim
from common.parallel.topology import Topology
from common.systems.mindformers.read import MOMENTS, NAME_MAPS
from common.systems.name_map import NameRow
from common.systems.run_state import write_model_yaml
from common.systems.weights import Weight, Weights, arrays_of, export_names
from common.tensor_files.mindspore_ckpt import stream_mindspore
from common.tensor_files.mindspore_strategy import Layout, write_strategy
from common.weights.names import EMBEDDING, POSITIONS, parameter_shapes
from common.weights.pieces import ShardedReader, open_stored

FILE = "gpt2.ckpt"


def write_mindformers(folder: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> dict[str, int]:
    """Write into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    checksum = write_file(folder / FILE, weights, dtype, format)
    write_model_yaml(folder, weights)
    return {FILE: checksum}


def write_file(path: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> int:
    """Write one file; returns its CRC-32. OSError is left to the caller."""
    name_map = NAME_MAPS[format][0]
    tensors = export_names(name_map, weights.tensors, weights.model, dtype)
    for part, prefix in MOMENTS.items():
        if f"{EMBEDDING}.{part}" in weights.moments:
            tensors |= export_names(name_map, weights.moments, weights.model, None, prefix=prefix, suffix=f".{part}")
    if weights.run is not None:
        tensors |= counters_of(weights.run)
    return stream_mindspore(path, tensors, arrays_of(tensors))


def counters_of(run: Mapping[str, Any], *, epoch: int | None = None) -> dict[str, Weight]:
    """Return the counters of a run under MindSpore's names. run: in the form of ``Weights.run``."""
    engine = run["engine"]
    counters = {
        "global_step": np.array([engine["optimizer_steps"]], np.int32),
        "step_num": np.array(run["state"]["step"]),
    }
    if epoch is not None:
        counters["epoch_num"] = np.array(epoch)
    if "value" in engine["loss_scale"]:
        counters["loss_scale"] = np.array(engine["loss_scale"]["value"], np.float32)
    return {
        name: Weight(dtype=str(array.dtype), shape=array.shape, load=array.copy) for name, array in counters.items()
    }


STRATEGY_FILE = "ckpt_strategy.ckpt"
_NAME_MAP = NAME_MAPS["mindformers"][0]


def epoch_and_step(config: Run, samples_per_epoch: int, state: TrainState) -> tuple[int, int]:
    """Return the epoch and the step in it, both from 1, as MindSpore counts them."""
    samples_per_epoch = config.train.num_samples or samples_per_epoch
    if config.batch_sizes.grows and samples_per_epoch:
        epoch, within, _ = place_in_epochs(state.step, config.batch_sizes, samples_per_epoch)
    else:
        epoch, within = divmod(state.step - 1, max(1, samples_per_epoch // config.train.global_batch_size))
    return epoch + 1, within + 1


def write_rank_file(config: Run, place: tuple[int, int], rank: int, is_split: bool, checkpoint: Path) -> None:
    """Write the file of a rank, and on rank 0 the strategy, beside a complete checkpoint.

    place: epoch and step in it. is_split: whether ranks hold different parts; else one file has all
    of them. The newest ``checkpoint.keep`` files of this name are kept (0: all). Raises
    StorageError and CheckpointError; an older file of the same name then stays.
    """
    folder = checkpoint.parent / f"rank_{rank}"
    name = f"{config.checkpoint.ckpt_prefix}_rank_{rank}"
    target = folder / f"{name}-{place[0]}_{place[1]}.ckpt"
    topology = config.topology if is_split else Topology()
    rows = -(-config.model.vocab_size // topology.tensor) * topology.tensor  # each tensor rank has as many
    shapes = parameter_shapes(config.model) | {EMBEDDING: (rows, config.model.hidden_size)}
    shards = config.parallel.shards if is_split else 1
    layouts = [
        {row: _layout(row, row.shape(shapes), topology, shards) for row in _rows_of(stage, config.model, topology)}
        for stage in range(topology.pipeline)
    ]
    try:
        if is_split and rank == 0:
            prefixes = ["", *(MOMENTS[part] for part in config.optimizer.rule.parts)]
            strategy = (
                {prefix + row.theirs: layout for prefix in prefixes for row, layout in rows.items()} for rows in layouts
            )
            write_strategy(checkpoint.parent / STRATEGY_FILE, dict(enumerate(strategy)))
        stage, local_rank = divmod(rank, topology.data * topology.tensor)
        manifest = read_manifest(checkpoint, checksums=False)
        model, optimizer = (open_stored(checkpoint, file, manifest) for file in (MODEL_FILE, OPTIMIZER_FILE))
        stored = [(model, "", "")]
        stored += [(optimizer, MOMENTS[part], f".{part}") for part in config.optimizer.rule.parts if optimizer]
        tensors = {
            prefix + row.theirs: _part(reader, row, suffix, layout, local_rank, row.shape(shapes))
            for reader, prefix, suffix in stored
            for row, layout in layouts[stage].items()
        } | counters_of(manifest, epoch=place[0])
        with temporary_folder(folder / name) as temporary:
            stream_mindspore(temporary / target.name, tensors, arrays_of(tensors))
            os.replace(temporary / target.name, target)
            fsync_folder(folder)
    except OSError as error:
        raise StorageError(
            f"{target}: cannot be written: {error.strerror}; the checkpoint beside it is whole,"
            " checkpoint.resume=auto resumes it"
        ) from None
    matches = ((path, re.fullmatch(rf"{re.escape(name)}-(\d+)_(\d+)\.ckpt", path.name)) for path in folder.glob("*"))
    numbers = {path: (int(match[1]), int(match[2])) for path, match in matches if match}
    for older in surplus(numbers, target, config.checkpoint.keep, numbers.__getitem__):
        older.unlink(missing_ok=True)


# ---- who holds what ----


def _rows_of(place: int, model: ResolvedModel, topology: Topology) -> Iterator[NameRow]:
    layers = {f"h.{layer}" for layer in topology.layers_of(place, model.num_layers)}
    last = topology.place_of_stage(topology.stages - 1)
    places = {EMBEDDING: topology.embedding_places, POSITIONS: (0,)}
    for row in _NAME_MAP.rows(model.num_layers):
        block = ".".join(row.ours[0].split(".")[:2])
        if block in layers or (not block.startswith("h.") and place in places.get(row.ours[0], (last,))):
            yield row


def _layout(row: NameRow, shape: tuple[int, ...], topology: Topology, shards: int) -> Layout:
    """Return how the ranks of a stage split a tensor: tensor ranks one dimension, ZeRO's dimension 0 if it divides."""
    devices = (topology.data, topology.tensor)
    dim = split_dim(row.ours[0]) if topology.tensor > 1 else None
    if dim is not None and row.transposed:
        dim = 1 - dim
    axes = tuple((1,) if dim == place else () for place in range(len(shape)))
    layout = Layout(devices=devices, axes=axes)
    divides = shape[0] % (layout.parts()[0] * shards) == 0
    # where tensor ranks hold copies, MindSpore would give shards to them too
    if divides and (dim is not None or topology.tensor == 1):
        layout = replace(layout, shards=shards)
    return layout


def _part(
    stored: ShardedReader, row: NameRow, suffix: str, layout: Layout, rank: int, whole: tuple[int, ...]
) -> Weight:
    """Return the part of a rank, which is read when it is written."""
    shape = tuple(size // parts for size, parts in zip(whole, layout.parts(), strict=True))
    spans = layout.spans(rank, shape)
    piece = spans[::-1] if row.transposed else spans
    name = row.ours[0] + suffix

    def load() -> NDArray[Any]:
        array = stored.read(name, piece)
        return array.T if row.transposed else array

    return Weight(dtype="float32", shape=shape, load=load)

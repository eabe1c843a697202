"""Reader of checkpoints of distributed runs: a ``.ckpt`` of each rank with its part of the
parameters, and the strategy files that describe the parts.

    rank_N/checkpoint/PREFIX_rank_N-EPOCH_STEP.ckpt     or rank_N/PREFIX_rank_N-EPOCH_STEP.ckpt
    ckpt_strategy.ckpt, strategy/ckpt_strategy_rank_N.ckpt, merged_ckpt_strategy.ckpt

Before a tensor is requested, only the headers of the files are read.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.files import open_input, reading
from common.tensor_files.arrays import NUMPY_TYPES, FileTensor
from common.tensor_files.containers import open_tensors
from common.tensor_files.mindspore_ckpt import is_checkpoint
from common.tensor_files.mindspore_strategy import Layout, Strategy, read_strategy

_NAME = re.compile(r"(?P<prefix>.+)_rank_(?P<rank>\d{1,6})(_\d+)?-(?P<at>\d{1,18}_\d{1,18})\.ckpt")
_RANK = re.compile(r"rank_(?P<rank>\d{1,6})")
_DEPTH = 4
"""Depth of folders that is searched for files."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Files of a distributed run at one step."""

    root: Path
    """Folder that holds the ranks' folders."""
    at: str
    """EPOCH_STEP."""
    files: Mapping[int, Path]
    strategies: Sequence[Path]

    def tensors(self) -> dict[str, FileTensor]:
        """Return all tensors, joined. Raises CheckpointError for a missing part, or a strategy of another run."""
        merged: dict[int, dict[str, Layout]] = defaultdict(dict)
        for path in self.strategies:
            for stage, layouts in read_strategy(path).items():
                strange = [name for name, layout in layouts.items() if merged[stage].get(name, layout) != layout]
                if strange:
                    others = " and ".join(str(other) for other in self.strategies if other != path)
                    raise CheckpointError(
                        f"{path}: says something else of {strange[0]} than {others[:300]}; leave the strategy files of"
                        " one run there"
                    )
                merged[stage] |= layouts
        return _merge(self, dict(sorted(merged.items())))


def strategy_file(path: Path) -> bool:
    """Tell whether a file has the name of a strategy and is not a checkpoint. Its content is
    checked when it is read.
    """
    if "strategy" not in path.name or path.suffix not in (".ckpt", ".json") or not path.is_file():
        return False
    with open_input(path, CheckpointError) as file, reading(path, CheckpointError):
        return not is_checkpoint(file.read(1))


def find_slices(path: Path) -> Slices | Path | None:
    """Return the ranks' files that ``path`` names, the file of a single rank, or None.

    path: a folder above the ranks' files or a rank's folder, whose newest files are taken; or the
    file of one rank, which holds everything where there is no strategy file. Raises CheckpointError
    for files of several runs, and for several ranks without a strategy file.
    """
    file, wanted, prefix = path if path.is_file() else None, None, None
    if file is not None:
        rank, path, prefix, wanted = _named(file)
        if rank is None:
            return file
    elif ranked := [folder for folder in (path, path.parent) if _RANK.fullmatch(folder.name)]:
        path = ranked[0].parent
    found, strategies = _look(path)
    if prefix is not None:
        found = {(path, prefix): found[path, prefix]}
    if len(found) > 1:
        shown = ", ".join(f"{folder}/rank_N/{prefix}" for folder, prefix in sorted(found)[:4])
        raise CheckpointError(
            f"{path}: holds the ranks' files of {len(found)} runs ({shown}); give the path of a file of rank 0"
        )
    if not found:
        return None
    for folder in (path.parent, path.parent.parent):
        strategies = strategies or [
            file for place in (folder, folder / "strategy") for file in sorted(place.glob("*")) if strategy_file(file)
        ]
    [((root, _), by_moment)] = found.items()
    newest = max(by_moment, key=lambda at: [int(number) for number in at.split("_") if number])
    at = wanted if wanted in by_moment else newest
    if not strategies:
        if file is not None or len(by_moment[at]) == 1:
            return file or next(iter(by_moment[at].values()))
        raise CheckpointError(
            f"{path}: the files of {len(by_moment[at])} ranks, and no strategy file that says how they are split; put"
            " ckpt_strategy.ckpt there, or, where each rank has the whole model, give the path of one file"
        )
    return Slices(root=root, at=at, files=by_moment[at], strategies=strategies)


_Found = dict[tuple[Path, str], dict[str, dict[int, Path]]]
"""Files by (folder of the ranks, prefix), EPOCH_STEP and rank."""


def _look(folder: Path) -> tuple[_Found, list[Path]]:
    found: _Found = defaultdict(lambda: defaultdict(dict))
    strategies: list[Path] = []
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if depth < _DEPTH and not name.startswith((".", "step_")))
        for file in (Path(place) / name for name in sorted(names)):
            if strategy_file(file):
                strategies.append(file)
            elif file.suffix == ".ckpt":
                rank, root, prefix, at = _named(file)
                if rank is not None:
                    found[root, prefix][at][rank] = file
    return found, strategies


def _named(file: Path) -> tuple[int | None, Path, str, str]:
    """Return the rank of a file by its name or that of a folder above it, None for no rank's; the
    folder of the ranks, the prefix and EPOCH_STEP.
    """
    name = _NAME.fullmatch(file.name)
    folder = next((at for at in (file.parent, file.parent.parent) if _RANK.fullmatch(at.name)), None)
    ranked = name or (folder and _RANK.fullmatch(folder.name))
    rank = int(ranked["rank"]) if ranked else None
    return (rank, folder.parent if folder else file.parent, name["prefix"] if name else "", name["at"] if name else "")


def _merge(slices: Slices, strategy: Strategy) -> dict[str, FileTensor]:
    where = f"{slices.root}{f': files of {slices.at}' if slices.at else ''}"
    said = " and ".join(map(str, slices.strategies[:2]))
    ranks = {layout.ranks for layouts in strategy.values() for layout in layouts.values()}
    stage_ranks, stages = max(ranks), max(strategy) + 1
    beyond = [rank for rank in slices.files if rank >= stage_ranks * stages]
    if len(ranks) > 1 or beyond or len(strategy) < stages:
        raise CheckpointError(
            f"{said}: describes the stages {', '.join(map(str, strategy))} of {sorted(ranks)}"
            f" ranks, and here are the files of rank{'s' * (len(slices.files) > 1)}"
            f" {_listed(slices.files)}; give the strategy files of all stages of this run"
        )
    whole: dict[str, FileTensor] = {}
    unknown: list[str] = []
    absent: dict[int, list[str]] = defaultdict(list)
    for stage, layouts in strategy.items():
        files = {
            rank - stage * stage_ranks: path for rank, path in slices.files.items() if rank // stage_ranks == stage
        }
        stored: dict[int, Mapping[str, FileTensor]] = {}
        # those of other ranks are copies
        needed = {rank for layout in {*layouts.values()} for rank in layout.first_ranks(sorted(files))}
        for rank in sorted(needed | ({min(files)} if files else set())):
            stored[rank] = open_tensors(files[rank])
        for name in dict.fromkeys(name for tensors in stored.values() for name in tensors):
            if name in whole:
                continue  # an earlier stage holds the same
            held = {rank: tensors[name] for rank, tensors in stored.items() if name in tensors}
            layout = layouts.get(name)
            if layout is None:
                first = held[min(held)]
                if first.nbytes > NUMPY_TYPES[first.dtype].itemsize:
                    unknown.append(name)
                layout = Layout(devices=(stage_ranks,), axes=((),) * len(first.shape))
            whole[name] = _joined(slices, said, name, layout, held)
            for rank in layout.first_ranks(range(layout.ranks), without=held):
                absent[stage * stage_ranks + rank].append(name)
        if not files:
            absent |= {stage * stage_ranks: list(layouts)[:1]}
    if absent:
        rank = min(absent)
        raise CheckpointError(
            f"{where}: the file of rank {rank} is missing, or lacks {absent[rank][0]}, of which it"
            f" has a part; here are those of {_listed(slices.files)}, and {said} describes"
            f" {stage_ranks * stages} ranks: copy the folders of all ranks, give the strategy"
            " files of this run, or the path of a file of an earlier step"
        )
    if unknown:
        raise CheckpointError(
            f"{said}: says nothing of {', '.join(unknown[:3])}"
            f"{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}, which"
            f" {slices.root} holds: it is the strategy of another run; give that of this one"
        )
    return whole


def _joined(slices: Slices, said: str, name: str, layout: Layout, held: Mapping[int, FileTensor]) -> FileTensor:
    first = held[min(held)]
    kinds = {(tensor.dtype, tensor.shape) for tensor in held.values()}
    if len(kinds) > 1 or len(layout.axes) not in (0, len(first.shape)):
        shapes = " and ".join(f"{kind} {list(shape)}" for kind, shape in sorted(kinds)[:3])
        raise CheckpointError(
            f"{slices.root}: {name} is {shapes} on its ranks, and {said} describes equal parts of"
            f" {len(layout.axes)} dims: they are of two runs; give the strategy files of this one"
        )
    shape = tuple(
        size * parts for size, parts in zip(first.shape, layout.parts() or (1,) * len(first.shape), strict=True)
    )
    parts = {
        layout.spans(rank, first.shape) if layout.axes else tuple((0, size) for size in shape): tensor
        for rank, tensor in sorted(held.items(), reverse=True)
    }

    def load() -> NDArray[Any]:
        if len(parts) == 1:
            return next(iter(parts.values())).read()
        whole: NDArray[Any] = np.empty(shape, NUMPY_TYPES[first.dtype])
        for spans, part in parts.items():
            whole[tuple(slice(*span) for span in spans)] = part.read()
        return whole

    return FileTensor(dtype=first.dtype, shape=shape, load=load)


def _listed(files: Mapping[int, Path]) -> str:
    return ", ".join(map(str, sorted(files)[:16])) + (", ..." if len(files) > 16 else "")

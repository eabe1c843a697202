"""The parts of a PaddleFleetX checkpoint: a folder for each rank of a run.

Layout: ``save`` in ppfleetx/core/engine/eager_engine.py. epoch_E_step_S holds
mp_MM_sharding_SS_pp_PP with model.pdparams and meta_state.pdopt. Each sharding rank has all
parameters of its tensor rank (mp) and stage (pp).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError
from common.systems.name_map import LINEAR, POSITIONS, Fusion, NameMap, name_map
from common.systems.rank_parts import require_ranks, require_same
from common.systems.weights import check_tied
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING

FILE = "model.pdparams"
_META = "meta_state.pdopt"
_RANK = re.compile(r"mp_(\d\d)_sharding_(\d\d)_pp_(\d\d)")
_EMBEDDINGS = "gpt.embeddings."
_TABLE = f"{_EMBEDDINGS}word_embeddings.weight"
_NAME = "mp_{:02d}_sharding_{:02d}_pp_{:02d}"


# ---- names of the parameters ----

_BLOCK = "gpt.decoder.layers.{layer}."
_SEPARATE = ("attn.q_proj", "attn.k_proj", "attn.v_proj")


def _names(attention: dict[str, str]) -> NameMap:
    return name_map(
        {
            EMBEDDING: "gpt.embeddings.word_embeddings.weight",
            POSITIONS: "gpt.embeddings.position_embeddings.weight",
            "ln_f": "gpt.decoder.norm",
            "ln_1": f"{_BLOCK}norm1",
            **attention,
            "attn.c_proj": f"{_BLOCK}self_attn.out_proj",
            "ln_2": f"{_BLOCK}norm2",
            "mlp.c_fc": f"{_BLOCK}linear1",
            "mlp.c_proj": f"{_BLOCK}linear2",
        },
        transposed=(*LINEAR, *_SEPARATE),
        fusion=Fusion.HEADS,
    )


NAME_MAPS = (
    _names({"attn.qkv_proj": f"{_BLOCK}self_attn.qkv_proj"}),
    _names({ours: f"{_BLOCK}self_{ours}" for ours in _SEPARATE}),
)
"""Paddle's linear weights are (in, out). ``fuse_attn_qkv`` joins query, key and value."""


def name_in_whole(name: str) -> str:
    """Return the name in the whole model of a parameter of a part.

    A pipeline (Paddle's PipelineLayer) numbers its layers, from the embedding on.
    """
    name = re.sub(r"^_layers?\.", "", name)  # wrapper of fleet.distributed_model around a model
    if embedding := re.fullmatch(r"(?:shared_layers\.embed|0(?:\.0)?)\.(.+)", name):
        return f"gpt.embeddings.{embedding[1]}"
    # an interleaved pipeline names the first layer of the chunk, and the index in it
    layer = re.fullmatch(r"(\d+)(?:\.(\d+))?\.(.+)", name)
    if layer is None:
        return name
    number, rest = int(layer[1]) + int(layer[2] or 0), layer[3]
    if rest.startswith("norm."):
        return f"gpt.decoder.{rest}"
    return f"gpt.decoder.layers.{number - 1}.{rest}"


# ---- files of the ranks ----


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    files: Sequence[Sequence[TensorFile]]
    """Files by [tensor rank][stage]."""

    @property
    def first(self) -> Path:
        return self.files[0][0].path

    def weights(self) -> list[dict[str, FileTensor]]:
        """Return the tensors of each tensor rank by their names in the whole model.

        Raises CheckpointError where two stages hold one block, or different embeddings.
        """
        ranks = []
        for files in self.files:
            found: dict[str, FileTensor] = {}
            for file in files:
                for name in file:
                    whole = name_in_whole(name)
                    if whole == _TABLE and whole in found:  # head of the last stage
                        check_tied(file.path, name, file[name], found[whole])
                    elif whole in found and not whole.startswith(_EMBEDDINGS):
                        raise CheckpointError(
                            f"{file.path}: {name} is in another stage too: these parts are of"
                            " several checkpoints; copy one whole"
                        )
                    # positions of the last stage are not used; the first stage has them too
                    found.setdefault(whole, file[name])
            ranks.append(found)
        return ranks


def is_rank(folder: Path) -> bool:
    return _RANK.fullmatch(folder.name) is not None


def rank_folders(folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return the folders of ranks by (mp, sharding, pp)."""
    found = {}
    for path in sorted(folder.glob("mp_*")):
        ranks = _RANK.fullmatch(path.name)
        if ranks and (path / FILE).is_file():
            found[int(ranks[1]), int(ranks[2]), int(ranks[3])] = path
    return found


@contextmanager
def open_parts(path: Path) -> Iterator[Parts]:
    """path: model.pdparams, its folder, or epoch_E_step_S with the folders of ranks.

    Raises CheckpointError unless the parts of all ranks are there and of one step.
    """
    file = path if path.is_file() else path / FILE
    if file.is_file():
        with open_tensors(file) as opened:
            yield Parts(files=[[opened]])
        return
    folders = rank_folders(path)
    if not folders:
        raise CheckpointError(
            f"{path}: no {FILE} here, nor in folders like {_NAME.format(0, 0, 0)}; give another"
            " path"
        )
    tensor, sharding, stages = (max(ranks) + 1 for ranks in zip(*folders, strict=True))
    require_ranks(
        path, folders, itertools.product(range(tensor), range(sharding), range(stages)),
        lambda place: _NAME.format(*place),
    )  # fmt: skip
    _check_steps(list(folders.values()))
    with ExitStack() as stack:
        yield Parts(
            files=[
                [
                    stack.enter_context(open_tensors(folders[rank, 0, stage] / FILE))
                    for stage in range(stages)
                ]
                for rank in range(tensor)
            ]
        )


def _check_steps(folders: Sequence[Path]) -> None:
    """Check that the meta_state.pdopt of every rank, where it exists, has one epoch and step."""
    told: dict[Path, dict[str, object]] = {}
    for folder in folders:
        if (folder / _META).is_file():
            with open_tensors(folder / _META) as file:
                told[folder / _META] = {name: file.plain.get(name) for name in ("epoch", "step")}
    for path, state in told.items():
        first, known = next(iter(told.items()))
        require_same(path, state, first.parent.name, known)

"""PaddleFleetX's ``model.pdparams``, whole or in the parts of a run's ranks, with its YAML beside
it, or with a model.yaml that says more: the vocabulary without its padding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.dialects.fleetx import DEFAULTS, TABLE
from common.dialects.rules import MapTo
from common.errors import CheckpointError, ConfigError
from common.systems.name_map import (
    LINEAR,
    Fusion,
    NameMap,
    by_ranks,
    join_ranks,
    match_name_map,
    name_map,
    require_ranks,
    require_same,
)
from common.systems.run_state import MODEL_YAML, read_model_yaml
from common.systems.weights import Weights, check_tied, checked_model, weights_from
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING, POSITIONS
from common.yaml_files import read_yaml_mapping

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
            EMBEDDING: _TABLE,
            POSITIONS: f"{_EMBEDDINGS}position_embeddings.weight",
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
        return _EMBEDDINGS + embedding[1]
    # an interleaved pipeline names the first layer of the chunk, and the index in it
    layer = re.fullmatch(r"(\d+)(?:\.(\d+))?\.(.+)", name)
    if layer is None:
        return name
    number, rest = int(layer[1]) + int(layer[2] or 0), layer[3]
    if rest.startswith("norm."):
        return f"gpt.decoder.{rest}"
    return f"gpt.decoder.layers.{number - 1}.{rest}"


# ---- files of the ranks ----


def _weights_of(files: Sequence[TensorFile]) -> dict[str, FileTensor]:
    """Return the tensors in the stages of a tensor rank by their names in the whole model.

    Raises CheckpointError where two stages hold one block, or different embeddings.
    """
    found: dict[str, FileTensor] = {}
    for file in files:
        for name in file:
            whole = name_in_whole(name)
            if whole == _TABLE and whole in found:  # head of the last stage
                check_tied(file.path, name, file[name], found[whole])
            elif whole in found and not whole.startswith(_EMBEDDINGS):
                raise CheckpointError(
                    f"{file.path}: {name} is in another stage too: these parts are of several"
                    " checkpoints; copy one whole"
                )
            # positions of the last stage are not used; the first stage has them too
            found.setdefault(whole, file[name])
    return found


def rank_folders(folder: Path) -> dict[tuple[int, ...], Path]:
    """Return the folders of ranks by (mp, sharding, pp)."""
    return by_ranks((path for path in folder.glob("mp_*") if (path / FILE).is_file()), _RANK)


def open_parts(path: Path) -> Sequence[Sequence[TensorFile]]:
    """Open the files of all ranks, by [tensor rank][stage].

    path: model.pdparams, its folder, or epoch_E_step_S with the folders of ranks. Raises
    CheckpointError unless the parts of all ranks are there and of one step.
    """
    file = path if path.is_file() else path / FILE
    if file.is_file():
        return [[open_tensors(file)]]
    folders = rank_folders(path)
    if not folders:
        raise CheckpointError(f"{path}: no {FILE} here, nor in folders like {_NAME.format(0, 0, 0)}; give another path")
    tensor, sharding, stages = (max(ranks) + 1 for ranks in zip(*folders, strict=True))
    require_ranks(
        path, folders, itertools.product(range(tensor), range(sharding), range(stages)),
        lambda place: _NAME.format(*place),
    )  # fmt: skip
    states = [open_tensors(folder / _META) for folder in folders.values() if (folder / _META).is_file()]
    told: dict[Path, dict[str, object]] = {}
    for state in states:
        values = state.tree if isinstance(state.tree, dict) else {}
        told[state.path] = {name: None if name in state else values.get(name) for name in ("epoch", "step")}
    require_same(told, lambda path: path.parent.name)
    return [[open_tensors(folders[rank, 0, stage] / FILE) for stage in range(stages)] for rank in range(tensor)]


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


def detects(path: Path) -> bool:
    return path.suffix == ".pdparams" or (path / FILE).is_file() or bool(rank_folders(path))


def open_fleetx(path: Path) -> Weights:
    """path: the file, its folder, or epoch_X_step_Y with the folders of ranks. Raises
    CheckpointError and ConfigError.
    """
    parts = open_parts(path)
    file = parts[0][0].path
    where = file if len(parts) == len(parts[0]) == 1 else path
    model = read_config(file)
    ranks = [_weights_of(files) for files in parts]
    name_map = match_name_map(where, "fleetx", NAME_MAPS, ranks[0])
    state = file.with_name("model_state.pdopt")
    ignored = {state.name: "state of the optimizer"} if state.is_file() else {}
    return weights_from(
        where, name_map, join_ranks(where, ranks, name_map, model.num_layers), model,
        format="fleetx", path=path, ignored=ignored,
    )  # fmt: skip


def read_config(file: Path) -> ResolvedModel:
    """Return the model of the weights ``file``.

    It comes from a model.yaml beside it, else from the YAML of FleetX that has a section Model, there or in the folder
    above.

    FleetX's vocab_size is the padded one (50304); the rows of padding stay, unless model.yaml says the true number.
    """
    folders = [file.parent, *([file.parent.parent] if _RANK.fullmatch(file.parent.name) else [])]
    for folder in folders:
        if (folder / MODEL_YAML).is_file():
            return read_model_yaml(folder / MODEL_YAML)[0]
        try:
            sections = {path: read_yaml_mapping(path).get("Model") for path in sorted(folder.glob("*.y*ml"))}
        except ConfigError as error:
            raise ConfigError(f"{error}; fix the file, or move it away from the weights") from None
        found = {path: section for path, section in sections.items() if isinstance(section, dict)}
        if len(found) > 1:
            raise ConfigError(
                f"{folder}: {', '.join(path.name for path in found)} have a section Model; leave one there"
            )
        for path, section in found.items():
            if missing := [name for name in _NEEDED if section.get(name) is None]:
                raise ConfigError(
                    f"{path}: Model lacks {', '.join(missing)}; give the file that the run was started with, not its"
                    " base"
                )
            sizes = {
                rule.key.removeprefix("model."): section.get(key.removeprefix("Model."), DEFAULTS.get(key))
                for key, rule in TABLE.items()
                if key.startswith("Model.") and isinstance(rule, MapTo) and rule.key.startswith("model.")
            }
            return checked_model(path, sizes | {"seq_length": section["max_position_embeddings"]})
    raise ConfigError(
        f"{file.parent}: no YAML with a section Model ({', '.join(_NEEDED)}); heads cannot be read off shapes: put"
        f" FleetX's config, or our section model as {MODEL_YAML}, beside the weights"
    )

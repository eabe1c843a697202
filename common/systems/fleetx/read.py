"""PaddleFleetX's ``model.pdparams``, whole or in the parts of a run's ranks, with its YAML beside
it, or with a model.yaml that says more: the vocabulary without its padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.systems.fleetx.parts import FILE, NAME_MAPS, is_rank, open_parts, rank_folders
from common.systems.model_yaml import MODEL_YAML, read_model_yaml
from common.systems.name_map import match_name_map
from common.systems.rank_parts import join_ranks, read_joined
from common.systems.weights import Weights, checked_model, weights_from
from common.yaml_files import read_yaml_mapping

_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def detects(path: Path) -> bool:
    return path.suffix == ".pdparams" or (path / FILE).is_file() or bool(rank_folders(path))


@contextmanager
def open_fleetx(path: Path) -> Iterator[Weights]:
    """path: the file, its folder, or epoch_X_step_Y with the folders of ranks. Raises
    CheckpointError and ConfigError.
    """
    with open_parts(path) as parts:
        file = parts.first
        where = file if len(parts.files[0]) == len(parts.files) == 1 else path
        model = read_config(file)
        ranks = parts.weights()
        name_map = match_name_map(where, "fleetx", NAME_MAPS, ranks[0])
        rows = {row.theirs: row for row in name_map.rows(model.num_layers)}
        yield weights_from(
            where, name_map, join_ranks(where, ranks, rows), model,
            format="fleetx", path=path, ignored=_left_out(file), read=read_joined,
        )  # fmt: skip


def _left_out(file: Path) -> dict[str, str]:
    state = file.with_name("model_state.pdopt")
    return {state.name: "state of the optimizer"} if state.is_file() else {}


def read_config(file: Path) -> ResolvedModel:
    """Return the model of the weights ``file``.

    It comes from a model.yaml beside it, else from the YAML of FleetX that has a section Model,
    there or in the folder above.

    FleetX's vocab_size is the padded one (50304); the rows of padding stay, unless model.yaml says
    the true number.
    """
    folders = [file.parent, *([file.parent.parent] if is_rank(file.parent) else [])]
    for folder in folders:
        if (folder / MODEL_YAML).is_file():
            return read_model_yaml(folder / MODEL_YAML)[0]
        found = {
            path: section
            for path in sorted(folder.glob("*.y*ml"))
            if (section := _section(path)) is not None
        }
        if len(found) > 1:
            raise ConfigError(
                f"{folder}: {', '.join(path.name for path in found)} have a section Model; leave"
                " one there"
            )
        for path, section in found.items():
            return _model(path, section)
    raise ConfigError(
        f"{file.parent}: no YAML with a section Model ({', '.join(_NEEDED)}); heads cannot be read"
        f" off shapes: put FleetX's config, or our section model as {MODEL_YAML}, beside the"
        " weights"
    )


def _section(path: Path) -> dict[str, Any] | None:
    """Return the section Model of a YAML file, where it has one. Raises ConfigError."""
    try:
        section = read_yaml_mapping(path).get("Model")
    except ConfigError as error:
        raise ConfigError(f"{error}; fix the file, or move it away from the weights") from None
    return section if isinstance(section, dict) else None


def _model(path: Path, section: dict[str, Any]) -> ResolvedModel:
    if missing := [name for name in _NEEDED if section.get(name) is None]:
        raise ConfigError(
            f"{path}: Model lacks {', '.join(missing)}; give the file that the run was started"
            " with, not its base"
        )
    dropout = section.get("hidden_dropout_prob", 0.1)
    sizes = {
        "num_layers": section["num_layers"], "hidden_size": section["hidden_size"],
        "num_heads": section["num_attention_heads"],
        "vocab_size": section["vocab_size"], "seq_length": section["max_position_embeddings"],
        "ffn_hidden_size": section.get("ffn_hidden_size"),
        "embedding_dropout": dropout, "hidden_dropout": dropout,
        "attention_dropout": section.get("attention_probs_dropout_prob", 0.1),
        "initializer_range": section.get("initializer_range", 0.02),
    }  # fmt: skip
    return checked_model(path, sizes)

"""PaddleFleetX's ``model.pdparams`` with its YAML beside it, or with a model.yaml that says more:
the vocabulary without its padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, ConfigError
from common.systems.fleetx.names import NAME_MAPS
from common.systems.model_yaml import MODEL_YAML, read_model_yaml
from common.systems.name_map import match_name_map
from common.systems.weights import Weights, checked_model, weights_from
from common.tensor_files.containers import open_tensors
from common.yaml_files import read_yaml_mapping

FILE = "model.pdparams"
_RANKS = "mp_??_sharding_??_pp_??"
_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def detects(path: Path) -> bool:
    return (
        path.suffix == ".pdparams" or (path / FILE).is_file() or any(path.glob(f"{_RANKS}/{FILE}"))
    )


@contextmanager
def open_fleetx(path: Path) -> Iterator[Weights]:
    """path: the file, its folder, or epoch_X_step_Y with the folders of ranks. Raises
    CheckpointError and ConfigError.
    """
    file = path if path.is_file() else _find(path)
    model = read_config(file)
    with open_tensors(file) as stored:
        name_map = match_name_map(file, "fleetx", NAME_MAPS, stored)
        yield weights_from(file, name_map, stored, model, format="fleetx", path=path, ignored={})


def _find(folder: Path) -> Path:
    if (folder / FILE).is_file():
        return folder / FILE
    ranks = sorted(path.parent for path in folder.glob(f"{_RANKS}/{FILE}"))
    if not ranks:
        raise CheckpointError(
            f"{folder}: no {FILE} here, nor in folders like mp_00_sharding_00_pp_00; give another"
            " path"
        )
    # every rank of a sharding group saves all that it computes with
    parts = [rank.name for rank in ranks if "_sharding_00_" in rank.name]
    if len(parts) != 1:
        raise CheckpointError(
            f"{folder}: the model is in {len(parts)} parts ({', '.join(parts)}), and only a whole"
            " one is read; load it in FleetX with mp_degree=1 and pp_degree=1, and save it there"
        )
    return folder / parts[0] / FILE


def read_config(file: Path) -> ResolvedModel:
    """Return the model of the weights ``file``.

    It comes from a model.yaml beside it, else from the YAML of FleetX that has a section Model,
    there or in the folder above.

    FleetX's vocab_size is the padded one (50304); the rows of padding stay, unless model.yaml says
    the true number.
    """
    if (file.parent / MODEL_YAML).is_file():
        return read_model_yaml(file.parent / MODEL_YAML)[0]
    folders = [file.parent, *([file.parent.parent] if file.parent.match(_RANKS) else [])]
    for folder in folders:
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
        raise ConfigError(f"{error}; mend the file, or take it away from the weights") from None
    if isinstance(section, dict) and "<<" in section:
        raise ConfigError(
            f"{path}: Model: YAML merge keys (<<) are not supported; write the keys out"
        )
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

"""Finder of the model of a ``.ckpt``, in a file beside it: a model.yaml of ours, MindFormers' own
YAML, or the config.yaml of our run that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.config.load import read_yaml
from common.config.resolved import ResolvedModel
from common.dialects.mindformers import BASE
from common.errors import ConfigError
from common.systems.bases import read_with_bases
from common.systems.mindformers.config import translate
from common.systems.model_yaml import MODEL_YAML, read_model_yaml
from common.systems.weights import checked_model

_CONFIG = "config.yaml"
"""Name of the resolved config in a run folder of ours."""


def find_model(
    file: Path, folders: Iterable[Path]
) -> tuple[ResolvedModel, dict[str, Any] | None] | None:
    """Return the model and the state of its run, from the first of ``folders`` that has them, else
    None. file: the weights, whose name chooses among several YAML files. Raises ConfigError.
    """
    for folder in dict.fromkeys(folders):
        ours = folder / MODEL_YAML
        if ours.is_file() and not _is_theirs(ours):
            return read_model_yaml(ours)
        found = [path for path in sorted(folder.glob("*.y*ml")) if _is_theirs(path)]
        found = [path for path in found if path.stem == file.stem] or found
        if len(found) > 1:
            raise ConfigError(
                f"{folder}: {', '.join(path.name for path in found)} have a model of MindFormers;"
                f" leave one there, or name it as {file.name}"
            )
        if found:
            return _read(found[0]), None
        if (folder / _CONFIG).is_file():
            return read_model_yaml(folder / _CONFIG)[0], None
    return None


def _is_theirs(path: Path) -> bool:
    """Tell whether a YAML file has MindFormers' section model, or a base that may have it. Raises
    ConfigError.
    """
    try:
        tree, _ = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; fix the file, or move it away from the weights") from None
    model = tree.get("model")
    return BASE in tree or (isinstance(model, dict) and "model_config" in model)


def _read(path: Path) -> ResolvedModel:
    tree, sources = read_with_bases(path, BASE)
    section = tree.get("model")
    if not isinstance(section, dict) or "model_config" not in section:
        raise ConfigError(
            f"{path}: has no model.model_config, nor have the files of its {BASE}; put the YAML"
            " with the model beside the weights"
        )
    ours = translate({"model": section}, sources)
    return checked_model(path, ours.tree["model"])

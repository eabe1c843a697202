"""The section model of a config, and its tokenizer, taken from the checkpoint that the run uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.aliases import Sources
from common.config.load import model_readers
from common.errors import ConfigError
from common.inference.source import Source, find_source, tokenizer_files
from common.systems.direct import accept_foreign_weights
from common.training.checkpoint import find_checkpoint
from common.training.fits import multiple_for

_DROPOUTS = ("embedding_dropout", "attention_dropout", "hidden_dropout")


def accept_models_of_checkpoints() -> None:
    """Let configurations leave their model to the checkpoint from now on, and let
    checkpoint.init_from, load and resume take other systems' weights.
    """
    accept_foreign_weights()
    if _fill_model not in model_readers:
        model_readers.append(_fill_model)


def _fill_model(tree: dict[str, Any], sources: Sources) -> None:
    """Fill in what ``tree`` does not say of its model. Nothing is done where no checkpoint is
    named. Raises CheckpointError and ConfigError where one is named that cannot be read.
    """
    path = _checkpoint(tree)
    if path is None:
        if tree.get("model") is not None:
            raise ConfigError(
                "model: its sizes are left to the checkpoint, and none is named; give"
                " checkpoint.load or checkpoint.init_from, an output_dir that holds a run, or the"
                " sizes"
            )
        return
    source = find_source(path)
    given = tree.get("model") or {}
    section = source.model.model_dump(exclude_none=True)
    section["vocab_multiple"] = multiple_for(section["vocab_size"], section["vocab_multiple"])
    if given.get("dropout") is not None:
        section = {key: value for key, value in section.items() if key not in _DROPOUTS}
    for key in section.keys() - given.keys():
        sources[("model", key)] = str(source.path)
    tree["model"] = section | given
    _fill_tokenizer(tree, source)


def _checkpoint(tree: Mapping[str, Any]) -> Path | None:
    """Return what the config names: checkpoint.load or resume, a run in output_dir, else
    checkpoint.init_from.
    """
    section = tree.get("checkpoint")
    settings = section if isinstance(section, Mapping) else {}
    resume = settings.get("resume")
    named = [settings.get("load"), None if resume in ("auto", "latest", "never") else resume]
    for name in named:
        if isinstance(name, str):
            return Path(name)
    folder, init_from = tree.get("output_dir"), settings.get("init_from")
    if isinstance(folder, str) and find_checkpoint(Path(folder)) is not None:
        return Path(folder)
    return Path(init_from) if isinstance(init_from, str) else None


def _fill_tokenizer(tree: dict[str, Any], source: Source) -> None:
    data = tree.setdefault("data", {})
    if isinstance(data, dict) and not data.get("tokenizer"):
        data["tokenizer"] = tokenizer_files(source)

"""The configuration of a run: a file of any system, the command line, and the model of the checkpoint named there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.checkpoint.folders import find_checkpoint
from common.config.aliases import Sources
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.inference.source import find_source, tokenizer_files
from common.systems.config import ConfigFile
from common.training.start import multiple_for


def fill_model(tree: dict[str, Any], sources: Sources) -> None:
    """Fill in the keys of the model that ``tree`` leaves out, if it names a checkpoint.

    Raises CheckpointError and ConfigError when the checkpoint cannot be read.
    """
    path = _checkpoint(tree)
    if path is None:
        if tree.get("model") is not None:
            raise ConfigError(
                "model: its sizes come from the checkpoint, and none is named; give"
                " checkpoint.load or checkpoint.init_from, an output_dir that holds a run, or the sizes"
            )
        return
    source = find_source(path)
    given = tree.get("model") or {}
    section = source.model.model_dump(exclude_none=True)
    if source.run:  # a run of ours without a tokenizer has trained all rows of a padded table
        section["vocab_multiple"] = multiple_for(section["vocab_size"], section["vocab_multiple"])
    if given.get("dropout") is not None:
        section = {key: value for key, value in section.items() if not key.endswith("_dropout")}
    for key in section.keys() - given.keys():
        sources[("model", key)] = str(source.path)
    tree["model"] = section | given
    data = tree.setdefault("data", {})
    if isinstance(data, dict) and not data.get("tokenizer"):
        data["tokenizer"] = tokenizer_files(source)


def _checkpoint(tree: Mapping[str, Any]) -> Path | None:
    """Return the first of checkpoint.load, checkpoint.resume, a run in output_dir, and
    checkpoint.init_from that the config names.
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


def read_config(path: str | Path) -> ConfigFile:
    """Read a configuration file and those that it extends. Raises ConfigError."""
    return ConfigFile.read(Path(path), fill_model)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, and apply words ``section.key=value``. Raises ConfigError."""
    return read_config(path).open(overrides).config

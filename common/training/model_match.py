"""Comparison of a checkpoint's model section with the config's, before any tensor is read.

Differences are named as overrides for the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.folders import MANIFEST
from common.config.resolved import ResolvedModel
from common.config.schema import ModelConfig
from common.errors import CheckpointError
from common.parallel.run import Run

_DECISIVE = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "ffn_hidden_size",
    "max_positions",
    "vocab_size",
    "layer_norm_epsilon",
)
"""Keys that change shapes or the computed function. The window (seq_length) may be any up to
max_positions.
"""


def require_same_model(manifest: Mapping[str, Any], config: Run, checkpoint: Path, *, may_move: bool = False) -> None:
    """Raise CheckpointError if the models of checkpoint and config differ, listing the keys to set.

    may_move: the message offers another output_dir.
    """
    trained = _sizes(manifest["config"].get("model", {}), checkpoint)
    model = config.model
    differ = {key: trained[key] for key in _DECISIVE if trained[key] != getattr(model, key)}
    if not differ:
        return
    found = ", ".join(
        f"{key} is {value} there and {getattr(model, key)} in the config" for key, value in differ.items()
    )
    words = " ".join(f"model.{key}={value}" for key, value in _overrides(differ, model).items())
    say = (
        f"{checkpoint}: holds another model than the config: {found}. To use it, add: model=from_checkpoint, or {words}"
    )
    if may_move:
        say += (
            ". To train the model of the config instead, begin in another folder:"
            f" output_dir={_free_folder(config.output_dir)}"
        )
    raise CheckpointError(say)


def _sizes(section: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the decisive keys with their defaults. Raises CheckpointError for a missing key."""
    sizes = {key: section[key] for key in _DECISIVE if section.get(key) is not None}
    sizes.setdefault("layer_norm_epsilon", ModelConfig.model_fields["layer_norm_epsilon"].default)
    if "max_positions" not in sizes:
        sizes["max_positions"] = section.get("seq_length")
    if "ffn_hidden_size" not in sizes and isinstance(sizes.get("hidden_size"), int):
        sizes["ffn_hidden_size"] = 4 * sizes["hidden_size"]
    wrong = [key for key in _DECISIVE if type(sizes.get(key)) not in (int, float)]
    if wrong:
        raise CheckpointError(f"{checkpoint / MANIFEST}: has no number for model.{wrong[0]}; use another checkpoint")
    return sizes


def _overrides(differ: Mapping[str, Any], model: ResolvedModel) -> dict[str, Any]:
    """Return the overrides that turn the config's model into that of the checkpoint."""
    words = dict(differ)
    if model.seq_length > words.get("max_positions", model.seq_length):
        words["seq_length"] = words["max_positions"]
    vocabulary = words.get("vocab_size", 0)
    if vocabulary > model.vocab_size and vocabulary % model.vocab_multiple == 0:
        words["vocab_multiple"] = multiple_that_keeps(vocabulary)
    return words


def multiple_for(vocabulary: int, multiple: int) -> int:
    """Return the vocab_multiple, or another one if the size would be taken for a padded one."""
    return multiple if vocabulary % multiple else multiple_that_keeps(vocabulary)


def multiple_that_keeps(vocabulary: int) -> int:
    """Return a vocab_multiple with which a size is not taken for a padded one."""
    return next(number for number in range(2, vocabulary + 2) if vocabulary % number)


def _free_folder(folder: str) -> str:
    return next(name for number in range(2, 10_000) if not Path(name := f"{folder.rstrip('/')}_{number}").exists())

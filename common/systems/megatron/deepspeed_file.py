"""Translation of a ds_config.json beside Megatron-DeepSpeed's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.dialects.megatron import DEEPSPEED, DEEPSPEED_DEFAULTS, DEEPSPEED_FLAGS
from common.dialects.rules import To, Without, number
from common.errors import ConfigError
from common.structured_files import read_json_mapping
from common.systems.dialect import Theirs, Translation, apply

_OF_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def read_deepspeed_file(path: str, where: str, flags: Theirs, ours: Translation) -> None:
    """Set keys of ours to the values of the file. where: the flag that names it. Raises ConfigError
    for a file that cannot be read, and for a value that contradicts a flag.

    flags: Megatron's. Those that DeepSpeed does not read are taken where the file leaves them out.
    """
    try:
        tree = read_json_mapping(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    places: dict[tuple[str | int, ...], str] = {(key,): f"{path} ({where})" for key in tree}
    theirs = Theirs("DeepSpeed", _without_auto(tree), places, DEEPSPEED_DEFAULTS)
    table = dict(DEEPSPEED)
    scale = theirs.peek("fp16.loss_scale")
    if not theirs.peek("fp16.enabled", False):
        table |= {name: Without("fp16 is off") for name in DEEPSPEED if name.startswith("fp16.")}
    elif scale:
        table |= {f"fp16.{name}": Without("the scale is static") for name in _OF_DYNAMIC}
        table["fp16.loss_scale"] = To("loss_scale.initial", number)
        ours.set("loss_scale.mode", "static", theirs.where("fp16"), "fp16.loss_scale")
    left_out = [flag for flag, key in DEEPSPEED_FLAGS.items() if theirs.is_left_out(key)]
    apply(table, theirs, ours)
    for flag in left_out:
        if not flags.is_left_out(flag):
            flags.take(flag)
            ours.note(flag, f"DeepSpeed reads {DEEPSPEED_FLAGS[flag]} of {path}")


def _without_auto(tree: dict[str, Any]) -> dict[str, Any]:
    """Remove values "auto", which stand for those of the flags."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value != "auto"
    }

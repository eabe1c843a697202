"""Translation of a ds_config.json beside Megatron-DeepSpeed's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.structured_files import read_json_mapping
from common.systems.dialect import (
    Defaults,
    Table,
    Theirs,
    To,
    Translation,
    Without,
    apply,
    number,
    whole,
)

TABLE: Table = {
    "train_batch_size": To("train.global_batch_size"),
    "train_micro_batch_size_per_gpu": To("train.micro_batch_size"),
    "gradient_accumulation_steps": To("train.accumulation_steps"),
    "gradient_clipping": To("optimizer.clip_grad", number),
    "zero_optimization.stage": To("parallel.zero_stage"),
    "fp16.loss_scale": To("loss_scale.mode", lambda scale: "static" if scale else "dynamic"),
    "fp16.initial_scale_power": To("loss_scale.initial", lambda power: 2.0 ** whole(power)),
    "fp16.loss_scale_window": To("loss_scale.window", whole),
    "fp16.hysteresis": To("loss_scale.hysteresis"),
    "fp16.min_loss_scale": To("loss_scale.minimum", number),
}
"""Keys with one of ours. The engine compares all others with the run."""

DEFAULTS: Defaults = {
    "gradient_clipping": 1.0,
    "zero_optimization.stage": 0,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}
"""Values of keys that are left out: DeepSpeed 0.19.8, deepspeed/runtime/constants.py,
precision_config.py and zero/config.py. The sizes of batches follow from the flags.
"""

FLAGS = {
    "clip_grad": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "loss_scale": "fp16.loss_scale",
    "initial_loss_scale": "fp16.initial_scale_power",
    "loss_scale_window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "min_loss_scale": "fp16.min_loss_scale",
}
"""Megatron's flags that DeepSpeed does not read, with the key of the file that says the same."""

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
    theirs = Theirs(
        "DeepSpeed", _without_auto(tree), {(key,): f"{path} ({where})" for key in tree}, DEFAULTS
    )
    table = dict(TABLE)
    scale = theirs.peek("fp16.loss_scale")
    if not theirs.peek("fp16.enabled", False):
        table |= {name: Without("fp16 is off") for name in TABLE if name.startswith("fp16.")}
    elif scale:
        table |= {f"fp16.{name}": Without("the scale is static") for name in _OF_DYNAMIC}
        table["fp16.loss_scale"] = To("loss_scale.initial", number)
        ours.set("loss_scale.mode", "static", theirs.where("fp16"), "fp16.loss_scale")
    left_out = [flag for flag, key in FLAGS.items() if theirs.is_left_out(key)]
    apply(table, theirs, ours)
    for flag in left_out:
        if not flags.is_left_out(flag):
            flags.take(flag)
            ours.note(flag, f"DeepSpeed reads {FLAGS[flag]} of {path}")


def _without_auto(tree: dict[str, Any]) -> dict[str, Any]:
    """Remove values "auto", which stand for those of the flags."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value != "auto"
    }

"""The systems whose files we read and write: a new one is a folder beside this file, and a line
here.

This package is above all that a system has a part in. A lower package that needs something of each
system (names of config keys, a style of log lines) defines the type of it. A system's folder makes
one, ``System`` gets a field for it, and an entry script hands it down. The folders do not import
each other.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.systems import (
    deepspeed,
    fleetx,
    gguf,
    hugging_face,
    megatron,
    mindformers,
    oneflow,
    onnx,
    openai,
    own_folder,
)
from common.systems.weight_format import System, WeightFormat

SYSTEMS: dict[str, System] = {
    "hugging_face": hugging_face.SYSTEM,
    "own": own_folder.SYSTEM,
    "mindformers": mindformers.SYSTEM,
    "openai": openai.SYSTEM,
    "fleetx": fleetx.SYSTEM,
    # before Megatron-LM, whose file of the last iteration it writes too
    "deepspeed": deepspeed.SYSTEM,
    "megatron": megatron.SYSTEM,
    "oneflow": oneflow.SYSTEM,
    "onnx": onnx.SYSTEM,
    "gguf": gguf.SYSTEM,
}
"""A path is compared with them in this order."""

FORMATS: dict[str, WeightFormat] = {
    name: format for system in SYSTEMS.values() for name, format in system.weight_formats.items()
}
FORMATS["mindspore"] = FORMATS["torch_gpt2"]  # both backends share our own folder


def detect(path: Path) -> str:
    """Return the format of the weights at ``path``. Raises ConfigError for none."""
    for name, format in FORMATS.items():
        if format.detects(path):
            return name
    raise ConfigError(
        f"{path}: no weights of a known format here; say --from, one of {', '.join(FORMATS)}, or"
        " give another path"
    )

"""Table of the systems whose files this project reads and writes. A new one is a folder beside this
file, and a line here.

This package stands above all packages that use a part of a system. Such a lower package (names of
config keys, a style of log lines) defines the type of the part. A system's folder makes one,
``System`` has a field for it, and an entry script passes it down. The folders do not import each
other.
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
from common.systems.strangers import stranger_at
from common.systems.weight_format import System, WeightFormat

SYSTEMS: dict[str, System] = {
    "hugging_face": hugging_face.SYSTEM,
    "own": own_folder.SYSTEM,
    "mindformers": mindformers.SYSTEM,
    "openai": openai.SYSTEM,
    "fleetx": fleetx.SYSTEM,
    # before Megatron-LM, since it writes Megatron-LM's file of the last iteration too
    "deepspeed": deepspeed.SYSTEM,
    "megatron": megatron.SYSTEM,
    "oneflow": oneflow.SYSTEM,
    "onnx": onnx.SYSTEM,
    "gguf": gguf.SYSTEM,
}
"""Systems in the order in which a path is compared with them."""

FORMATS: dict[str, WeightFormat] = {
    name: format for system in SYSTEMS.values() for name, format in system.weight_formats.items()
}
FORMATS["mindspore"] = FORMATS["torch_gpt2"]  # both backends share our own folder


def detect(path: Path) -> str:
    """Return the format of the weights at ``path``. Raises ConfigError for none."""
    for name, format in FORMATS.items():
        if format.detects(path):
            return name
    reason = stranger_at(path) or (
        f"no weights of a known format here; say --from, one of {', '.join(FORMATS)}, or give"
        " another path"
    )
    raise ConfigError(f"{path}: {reason}")

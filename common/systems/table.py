"""Table of the formats of weights that this project reads and writes. A new system is a folder
beside this file, and an entry here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.checkpoint.folders import find_checkpoint
from common.errors import ConfigError, UserError
from common.paths import looked_in
from common.systems import gguf, own_folder
from common.systems.deepspeed import read as deepspeed
from common.systems.fleetx import read as fleetx
from common.systems.hugging_face import weights as hugging_face
from common.systems.megatron import read as megatron, write as to_megatron
from common.systems.mindformers import read as mindformers, write as to_mindformers
from common.systems.oneflow import read as oneflow
from common.systems.onnx import folder as to_onnx
from common.systems.strangers import stranger_at
from common.systems.weights import FLOATS, Weights


@dataclass(frozen=True)
class WeightFormat:
    title: str
    """Name in messages, such as "a Hugging Face folder"."""
    detects: Callable[[Path], bool]
    """Tells whether a path looks like this format."""
    open: Callable[..., Weights] | None = None
    """Opens weights. Raises CheckpointError and ConfigError. None: the format is written only."""
    write: Callable[..., dict[str, int]] | None = None
    """Writes weights: (empty folder, weights, dtype) -> the CRC-32 of each file by its name. None:
    the format is read only.
    """
    has_ranks: bool = False
    """Whether ``write`` takes numbers of tensor and pipeline ranks too, with a file for each."""
    dtypes: tuple[str, ...] = FLOATS
    """Types of weights that ``write`` can write."""
    holds_run: bool = True
    """Whether the format holds the optimizer's state and the position of training."""
    hugging_face_config: bool = False
    """Whether transformers' config.json belongs beside what ``write`` writes."""
    takes_model: bool = False
    """Whether ``open`` takes the config's model too, for files that do not describe theirs."""
    open_again: Callable[[Path], Weights] | None = None
    """Opens weights that were just written, without checksums of large files. None: ``open`` does."""


_QUANTIZED = ("float32", "float16", "int8", "int4")


FORMATS: dict[str, WeightFormat] = {
    "hf": WeightFormat(
        "a Hugging Face folder", hugging_face.detects, hugging_face.open_hugging_face,
        hugging_face.write_hugging_face,
        takes_model=True, holds_run=False,
    ),
    "torch_gpt2": WeightFormat(
        "torch_gpt2", lambda path: find_checkpoint(path) is not None,
        own_folder.open_project, own_folder.write_project,
        open_again=partial(own_folder.open_project, checksums=False),
        dtypes=(*FLOATS, "int8"),
    ),
    **{
        name: WeightFormat(
            f"a checkpoint of MindFormers{release} (.ckpt)",
            partial(mindformers.detects, format=name),
            partial(mindformers.open_mindformers, format=name),
            partial(to_mindformers.write_mindformers, format=name),
            takes_model=True,
        )
        for name, release in (("mindformers", ""), ("mindformers_r0.3", " before 0.6"))
    },
    "fleetx": WeightFormat(
        "a checkpoint of PaddleFleetX", fleetx.detects, fleetx.open_fleetx, holds_run=False
    ),
    # before Megatron-LM, since it writes Megatron-LM's file of the last iteration too
    "deepspeed": WeightFormat(
        "a checkpoint of Megatron-DeepSpeed", deepspeed.detects, deepspeed.open_deepspeed
    ),
    **{
        name: WeightFormat(
            f"a checkpoint of {title}",
            partial(megatron.detects, format=name),
            partial(megatron.open_megatron, format=name),
            partial(to_megatron.write_megatron, format=name),
            has_ranks=True,
        )
        for name, title in (("megatron", "Megatron-LM"), ("megatron_core", "Megatron-Core"))
    },
    "oneflow": WeightFormat(
        "a snapshot of OneFlow's GPT", lambda path: oneflow.find_snapshot(path) is not None, oneflow.open_oneflow
    ),
    "onnx": WeightFormat(
        "an ONNX folder",
        lambda path: path.suffix == ".onnx" or (path / to_onnx.GRAPH_FILE).is_file(),
        write=to_onnx.write_onnx, dtypes=_QUANTIZED, holds_run=False, hugging_face_config=True,
    ),
    "gguf": WeightFormat(
        "a GGUF file for llama.cpp",
        lambda path: path.suffix == ".gguf" or any(path.glob("*.gguf")),
        write=gguf.write_gguf, dtypes=_QUANTIZED, holds_run=False,
    ),
}  # fmt: skip
"""Formats by their names for ``--from`` and ``--to`` of tools/convert_weight.py, in the order in
which a path is compared with them.
"""
FORMATS["mindspore"] = FORMATS["torch_gpt2"]  # both backends share our own folder


def detect(path: Path) -> str:
    """Return the format of the weights at ``path``. Raises ConfigError for none."""
    for name, format in FORMATS.items():
        if format.detects(path):
            return name
    reason = stranger_at(path) or (
        f"no weights of a known format here; say --from, one of {', '.join(FORMATS)}, or give another path"
    )
    raise ConfigError(f"{path}: {reason}")


def explain(where: Path, why: str) -> str:
    """Return a sentence on what is at ``where``, which holds no checkpoint, and what to do. why:
    the key that names the path, or its purpose.
    """
    key = re.match(r"checkpoint\.(init_from|load|resume)", why)
    if not where.exists():
        say = f"there is no such file or folder{looked_in(where)}"
        if key is None or where.is_absolute() or where.suffix or len(where.parts) != 1:
            return say
        return f"{say}; a model of the Hugging Face hub is named as hf://OWNER/NAME, such as hf://openai-community/gpt2"
    try:
        if where.is_file() and where.suffix in (".safetensors", ".bin", ".json"):
            if FORMATS["torch_gpt2"].detects(where.parent):
                return f"it is a file of a checkpoint; give the folder {where.parent}"
            if FORMATS["hf"].detects(where.parent):
                where = where.parent
        format = FORMATS[detect(where)]
    except (UserError, OSError):
        return stranger_at(where) or "expected a run folder, its checkpoints folder or a step_... folder"
    if format.open is None:
        return f"it is {format.title}, which is written only; give the weights that it was made of"
    return f"it is {format.title}; give {key[0] if key else 'checkpoint.load'}={where}"

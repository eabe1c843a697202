"""Reader of folders of Hugging Face's GPT-2: config.json, weights in safetensors or
pytorch_model.bin, in shards or not, and the tokenizer's files. GPT2-Chinese's folders have
vocab.txt besides. Its later train.py leaves PyTorch Lightning's .ckpt, with the model among the
state of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.errors import CheckpointError
from common.systems.hugging_face.config import CONFIG, read_config
from common.systems.hugging_face.names import NAME_MAPS
from common.systems.name_map import NameMap, match_name_map
from common.systems.weights import Weights, check_tied, checked_model, weights_from
from common.tensor_files.arrays import TensorFile
from common.tensor_files.containers import open_tensors
from common.tensor_files.torch_reader import ZIP_MAGIC
from common.weights.names import EMBEDDING

FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def detects(path: Path) -> bool:
    return _is_lightning(path) or (
        (path / CONFIG).is_file() and any((path / name).is_file() for name in FILES)
    )


def _is_lightning(path: Path) -> bool:
    """Tell a .ckpt of torch.save from MindSpore's."""
    if path.suffix != ".ckpt" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC


@contextmanager
def open_hugging_face(path: Path, model: ResolvedModel | None = None) -> Iterator[Weights]:
    """Open a folder.

    path: the folder, or a file of weights beside its config.json. model: that of a Lightning .ckpt
    which has no config.json. Raises CheckpointError and ConfigError.
    """
    folder = path if path.is_dir() else path.parent
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise CheckpointError(
            f"{path}: no weights here; expected a file, or a folder with {' or '.join(FILES)}"
        )
    if model is None or not _is_lightning(file) or (folder / CONFIG).is_file():
        model = read_config(folder / CONFIG)
    with open_tensors(file) as stored:
        if any(name.startswith(_STATE) for name in stored):
            stored = _model_of(stored)
        yield _weights(path, stored, match_name_map(file, "hf", NAME_MAPS, stored), model)


_STATE = "state_dict."
"""Beginning of the names of a Lightning module's weights."""


def _model_of(stored: TensorFile) -> TensorFile:
    """Return the module ``model`` of a Lightning .ckpt."""
    inside = {
        name.removeprefix(_STATE).removeprefix("model."): tensor
        for name, tensor in stored.items()
        if name.startswith(_STATE)
    }
    return TensorFile(path=stored.path, tensors=inside, plain={}, tree=inside)


@contextmanager
def open_without_config(file: Path, layers: int) -> Iterator[Weights]:
    """Open a file without a config. Its shapes give all sizes but the number of heads. Raises
    CheckpointError.
    """
    with open_tensors(file) as stored:
        name_map = match_name_map(file, "hf", NAME_MAPS, stored)
        there = 1 + max(
            (int(found[1]) for name in stored if (found := re.search(r"\bh\.(\d{1,9})\.", name))),
            default=layers - 1,
        )
        if there != layers:
            raise CheckpointError(
                f"{file}: has {there} blocks, and --layers says {layers}; say --layers {there}"
            )
        table, positions, inner = (
            # refused below
            stored[row.theirs].shape
            if row.theirs in stored and len(stored[row.theirs].shape) == 2
            else (1, 1)
            for row in name_map.rows(1)
            if row.ours in ((EMBEDDING,), ("wpe.weight",), ("h.0.mlp.c_fc.weight",))
        )
        sizes = {
            "num_layers": layers, "hidden_size": table[1], "num_heads": 1, "vocab_size": table[0],
            "seq_length": positions[0],
            "ffn_hidden_size": inner[1],
        }  # fmt: skip
        model = checked_model(file, sizes)
        yield _weights(file, stored, name_map, model)


def _weights(path: Path, stored: TensorFile, name_map: NameMap, model: ResolvedModel) -> Weights:
    table = name_map.global_rows[0].theirs
    ignored = {name: "causal mask of an old file" for name in stored if name_map.ignores(name)}
    tensors = {name: tensor for name, tensor in stored.items() if name not in ignored}
    if name_map.head in tensors and table in tensors:
        ignored[name_map.head] = f"tied to {table}"
        check_tied(stored.path, name_map.head, tensors.pop(name_map.head), tensors[table])
    return weights_from(
        stored.path, name_map, tensors, model, format="hf", path=path, ignored=ignored
    )

"""Reader of folders of Hugging Face's GPT-2: config.json, weights in safetensors or
pytorch_model.bin, in shards or not, and the tokenizer's files. GPT2-Chinese's folders have
vocab.txt besides. Its later train.py leaves PyTorch Lightning's .ckpt, with the model among the
state of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.errors import CheckpointError
from common.systems.hugging_face.config import CONFIG, read_config
from common.systems.hugging_face.names import NAME_MAPS
from common.systems.name_map import NameMap, match_name_map
from common.systems.strangers import NANOGPT, OTHER_HEAD, beside_model, wrapper_of
from common.systems.weights import Weights, check_tied, checked_model, weights_from
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.tensor_files.torch_files import ZIP_MAGIC
from common.weights.names import EMBEDDING, POSITIONS

FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def detects(path: Path) -> bool:
    folder = _snapshot(path)
    return _is_lightning(path) or (
        (folder / CONFIG).is_file() and any((folder / name).is_file() for name in FILES)
    )


def _snapshot(path: Path) -> Path:
    """Return the newest snapshot in a folder of the hub's cache (models--OWNER--NAME), as its
    refs/main says; any other path as it is.
    """
    with suppress(OSError, UnicodeDecodeError):
        return path / "snapshots" / (path / "refs" / "main").read_text(encoding="utf-8").strip()
    return path


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
    path = _snapshot(path)
    folder = path if path.is_dir() else path.parent
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise CheckpointError(
            f"{path}: no weights here; expected a file, or a folder with {' or '.join(FILES)}"
        )
    if model is None or not _is_lightning(file) or (folder / CONFIG).is_file():
        model = read_config(folder / CONFIG)
    with open_tensors(file) as stored:
        tensors, ignored, name_map = _model_in(stored)
        # transformers does not open the folder of a wrapped model
        where = path if tensors.keys() <= stored.keys() | {name_map.rows(0)[0].theirs} else file
        yield weights_from(file, name_map, tensors, model, format="hf", path=where, ignored=ignored)


def _model_in(stored: TensorFile) -> tuple[dict[str, FileTensor], dict[str, str], NameMap]:
    """Return the tensors of a model without what wrappers put before their names, what is left out
    and why, and the names. Raises CheckpointError where they are not transformers'.
    """
    if any(name.startswith("model_args.") for name in stored.plain):
        raise CheckpointError(f"{stored.path}: {NANOGPT}")
    tensors, ignored = dict(stored), {}
    if prefix := wrapper_of(stored, POSITIONS):
        outside = [name for name in stored if not name.startswith(prefix)]
        ignored = dict.fromkeys(outside, "beside the model")
        ignored[prefix] = "names of wrappers around the model"
        tensors = {
            name.removeprefix(prefix): stored[name] for name in stored if name not in ignored
        }
    name_map = match_name_map(stored.path, "hf", NAME_MAPS, tensors)
    table = name_map.rows(0)[0].theirs
    mask = "causal mask of an old file"
    for name in [*tensors]:
        if name in (name_map.head, OTHER_HEAD):
            ignored[name] = f"tied to {table}"
            head = tensors.pop(name)
            check_tied(stored.path, name, head, tensors.setdefault(table, head))
        elif why := mask if name_map.ignores(name) else beside_model(name):
            ignored[name] = why
            del tensors[name]
    return tensors, ignored, name_map


@contextmanager
def open_without_config(file: Path, layers: int) -> Iterator[Weights]:
    """Open a file without a config. Its shapes give all sizes but the number of heads. Raises
    CheckpointError.
    """
    with open_tensors(file) as stored:
        tensors, ignored, name_map = _model_in(stored)
        there = 1 + max(
            (int(found[1]) for name in tensors if (found := re.search(r"\bh\.(\d{1,9})\.", name))),
            default=layers - 1,
        )
        if there != layers:
            raise CheckpointError(
                f"{file}: has {there} blocks, and --layers says {layers}; say --layers {there}"
            )
        table, positions, inner = (
            # refused below
            tensors[row.theirs].shape
            if row.theirs in tensors and len(tensors[row.theirs].shape) == 2
            else (1, 1)
            for row in name_map.rows(1)
            if row.ours in ((EMBEDDING,), (POSITIONS,), ("h.0.mlp.c_fc.weight",))
        )
        sizes = {
            "num_layers": layers, "hidden_size": table[1], "num_heads": 1, "vocab_size": table[0],
            "seq_length": positions[0],
            "ffn_hidden_size": inner[1],
        }  # fmt: skip
        model = checked_model(file, sizes)
        yield weights_from(file, name_map, tensors, model, format="hf", path=file, ignored=ignored)

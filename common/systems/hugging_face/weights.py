"""Writer of folders for transformers: config.json and safetensors, in shards where they are large,
or pytorch_model.bin as before its release 4.0.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.dialects.hugging_face import DEFAULTS, TABLE, activation
from common.dialects.rules import Fixed, MapTo
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write
from common.structured_files import read_json_mapping, shown
from common.systems.hugging_face.tokenizer import special_ids
from common.systems.name_map import LINEAR, NameMap, match_name_map, name_map
from common.systems.strangers import NANOGPT, OTHER_HEAD, beside_model, wrapper_of
from common.systems.weights import Weights, check_tied, checked_model, export_names, weights_from
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors
from common.tensor_files.safetensors_file import stream_shards
from common.tensor_files.torch_files import ZIP_MAGIC, write_torch
from common.weights.names import EMBEDDING, POSITIONS


def _names(prefix: str) -> NameMap:
    block = prefix + "h.{layer}."
    return name_map(
        {
            EMBEDDING: f"{prefix}wte.weight",
            POSITIONS: f"{prefix}wpe.weight",
            "ln_f": f"{prefix}ln_f",
            "ln_1": f"{block}ln_1",
            "attn.qkv_proj": f"{block}attn.c_attn",
            "attn.c_proj": f"{block}attn.c_proj",
            "ln_2": f"{block}ln_2",
            "mlp.c_fc": f"{block}mlp.c_fc",
            "mlp.c_proj": f"{block}mlp.c_proj",
        },
        transposed=LINEAR,
        head="lm_head.weight",
        ignored=re.escape(prefix) + r"h\.\d+\.attn\.(masked_)?bias",  # causal masks of old files
    )


NAME_MAPS = (_names("transformer."), _names(""))
"""Names that are written, then others that are read."""


CONFIG = "config.json"
_FIELDS = {name: rule.key.removeprefix("model.") for name, rule in TABLE.items() if isinstance(rule, MapTo)}
"""Their field -> our key."""
_SIZES = ("n_layer", "n_embd", "n_head", "vocab_size")
_RATES = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "layer_norm_epsilon", "initializer_range")


def read_config(path: Path) -> ResolvedModel:
    """Return the sizes and settings of config.json. Raises ConfigError unless it describes a GPT-2
    that computes what ours does.
    """
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: no such file; heads and vocabulary cannot be read off shapes: put config.json beside the weights"
        )
    fields = read_json_mapping(path)
    positions = fields.get("n_positions") or fields.get("n_ctx")
    missing = [name for name in _SIZES if fields.get(name) is None] + ([] if positions else ["n_positions"])
    if missing:
        raise ConfigError(
            f"{path}: no config of a GPT-2: {', '.join(missing)} missing; expected n_layer, n_embd,"
            " n_head, n_positions, vocab_size"
        )
    for name, rule in TABLE.items():
        if isinstance(rule, Fixed) and rule.values and fields.get(name, rule.values[0]) not in rule.values:
            raise ConfigError(f"{path}: {name}={shown(fields[name])}; {rule.instead}")
    names = (*_SIZES, *_RATES)
    section = {_FIELDS[name]: fields.get(name, DEFAULTS.get(name)) for name in names}
    try:
        section["activation"] = activation(fields.get("activation_function", "gelu_new"))
    except ValueError as error:
        raise ConfigError(f"{path}: activation_function={shown(fields['activation_function'])}: {error}") from None
    section |= {"seq_length": positions, "max_positions": positions, "ffn_hidden_size": fields.get("n_inner") or None}
    return checked_model(path, section)


def write_config(folder: Path, weights: Weights, dtype: str = "float32", window: int | None = None) -> None:
    """Write config.json. window: n_ctx, by default the number of positions."""
    model = weights.model
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": model.activation,
        "tie_word_embeddings": True,
        **{name: getattr(model, _FIELDS[name]) for name in _SIZES},
        "n_positions": model.max_positions,
        "n_ctx": window or model.max_positions,
        "n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size,
        **{name: getattr(model, _FIELDS[name]) for name in _RATES},
        "torch_dtype": dtype,
        **special_ids(weights),  # transformers would take 50256 for any vocabulary
    }
    with atomic_write(folder / CONFIG, "w") as file:
        json.dump(fields, file, indent=2)
        file.write("\n")


FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def detects(path: Path) -> bool:
    folder = _snapshot(path)
    return _is_lightning(path) or ((folder / CONFIG).is_file() and any((folder / name).is_file() for name in FILES))


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


def open_hugging_face(path: Path, model: ResolvedModel | None = None) -> Weights:
    """Open a folder.

    path: the folder, or a file of weights beside its config.json. model: that of a Lightning .ckpt
    which has no config.json. Raises CheckpointError and ConfigError.
    """
    path = _snapshot(path)
    folder = path if path.is_dir() else path.parent
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise CheckpointError(f"{path}: no weights here; expected a file, or a folder with {' or '.join(FILES)}")
    if model is None or not _is_lightning(file) or (folder / CONFIG).is_file():
        model = read_config(folder / CONFIG)
    stored = open_tensors(file)
    tensors, ignored, name_map = _model_in(stored)
    # transformers does not open the folder of a wrapped model
    where = path if tensors.keys() <= stored.keys() | {name_map.table} else file
    return weights_from(file, name_map, tensors, model, format="hf", path=where, ignored=ignored)


def _model_in(stored: TensorFile) -> tuple[dict[str, FileTensor], dict[str, str], NameMap]:
    """Return the tensors of a model without what wrappers put before their names, what is left out
    and why, and the names. Raises CheckpointError where they are not transformers'.
    """
    if isinstance(stored.tree, dict) and "model_args" in stored.tree:
        raise CheckpointError(f"{stored.path}: {NANOGPT}")
    tensors, ignored = dict(stored), {}
    if prefix := wrapper_of(stored, POSITIONS):
        outside = [name for name in stored if not name.startswith(prefix)]
        ignored = dict.fromkeys(outside, "beside the model")
        ignored[prefix] = "names of wrappers around the model"
        tensors = {name.removeprefix(prefix): stored[name] for name in stored if name not in ignored}
    name_map = match_name_map(stored.path, "hf", NAME_MAPS, tensors)
    table = name_map.table
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


def open_without_config(file: Path, layers: int) -> Weights:
    """Open a file without a config. Its shapes give all sizes but the number of heads. Raises CheckpointError."""
    tensors, ignored, name_map = _model_in(open_tensors(file))
    there = 1 + max(
        (int(found[1]) for name in tensors if (found := re.search(r"\bh\.(\d{1,9})\.", name))), default=layers - 1
    )
    if there != layers:
        raise CheckpointError(f"{file}: has {there} blocks, and --layers says {layers}; say --layers {there}")
    table, positions, inner = (
        # refused below
        tensors[row.theirs].shape if row.theirs in tensors and len(tensors[row.theirs].shape) == 2 else (1, 1)
        for row in name_map.rows(1)
        if row.ours in ((EMBEDDING,), (POSITIONS,), ("h.0.mlp.c_fc.weight",))
    )
    sizes = {
        "num_layers": layers, "hidden_size": table[1], "num_heads": 1, "vocab_size": table[0],
        "seq_length": positions[0],
        "ffn_hidden_size": inner[1],
    }  # fmt: skip
    model = checked_model(file, sizes)
    return weights_from(file, name_map, tensors, model, format="hf", path=file, ignored=ignored)


def write_hugging_face(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    tensors = export_names(NAME_MAPS[0], weights.tensors, weights.model, dtype)
    sums = stream_shards(folder, tensors, limit=5 * 10**9)
    write_config(folder, weights, next(iter(tensors.values())).dtype)
    return sums


def write_with_pickle(folder: Path, weights: Weights) -> None:
    """Write config.json and pytorch_model.bin into an empty folder, as save_pretrained of
    transformers 2 did. The output layer is written beside the table that it is tied to, and n_ctx
    is the window of training. OSError is left to the caller.
    """
    name_map = NAME_MAPS[0]
    tensors = export_names(name_map, weights.tensors, weights.model, None)
    table = tensors[name_map.table]
    write_torch(folder / "pytorch_model.bin", tensors | {name_map.head: table})
    write_config(folder, weights, table.dtype, weights.model.seq_length)

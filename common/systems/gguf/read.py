"""Read the weights of a GGUF file that holds a GPT-2: in float32, float16 or bfloat16, or to
compute with, in any type that the ``gguf`` library can turn into float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, ConfigError
from common.packages import require_package
from common.systems.name_map import name_map
from common.systems.weights import Weights, check_tied, checked_model, weights_from
from common.tensor_files.arrays import FileTensor
from common.weights.names import EMBEDDING, POSITIONS

_BLOCK = "blk.{layer}."

NAME_MAP = name_map(
    {
        EMBEDDING: "token_embd.weight",
        POSITIONS: "position_embd.weight",
        "ln_f": "output_norm",
        "ln_1": f"{_BLOCK}attn_norm",
        "attn.qkv_proj": f"{_BLOCK}attn_qkv",
        "attn.c_proj": f"{_BLOCK}attn_output",
        "ln_2": f"{_BLOCK}ffn_norm",
        "mlp.c_fc": f"{_BLOCK}ffn_up",
        "mlp.c_proj": f"{_BLOCK}ffn_down",
    },
    head="output.weight",
)
"""llama.cpp's names. Weights are (out, in); without a head, the embedding serves as one."""
_SIZES = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "ffn_hidden_size": "feed_forward_length",
    "max_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
"""Our key -> theirs, which follows the name of the architecture."""
_TABLE = "token_embd.weight"
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def detects(path: Path) -> bool:
    """Return whether ``path`` is a file of this format, or a folder with one."""
    return path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Quantized(FileTensor):
    """Quantized tensor, which is read as the float32 values that it stands for."""

    kind: Any
    """Type of the blocks: a gguf.GGMLQuantizationType."""
    rows: NDArray[np.uint8]
    """Blocks of the tensor, in gguf's shape."""

    def read(self, rectangle: Sequence[Sequence[int]] | None = None) -> NDArray[Any]:
        from gguf import quants

        whole: NDArray[Any] = quants.dequantize(self.rows, self.kind).reshape(self.shape)
        return whole if rectangle is None else whole[tuple(slice(*span) for span in rectangle)]


def open_to_compute(path: Path) -> AbstractContextManager[Weights]:
    """Open a file as ``open_gguf`` does, quantized weights included."""
    return open_gguf(path, quantized=True)


@contextmanager
def open_gguf(path: Path, *, quantized: bool = False) -> Iterator[Weights]:
    """Open a file.

    path: the file, or a folder with one. quantized: read quantized tensors as float32. Raises
    CheckpointError and ConfigError.
    """
    require_package("gguf", extra="export", purpose="which reads GGUF")
    file = _file(path)
    fields, stored = _read(file, quantized=quantized)
    model = _model(file, fields, stored)
    ignored = {}
    if kinds := {each.kind.name for each in stored.values() if isinstance(each, _Quantized)}:
        ignored["precision"] = f"the weights are {' and '.join(sorted(kinds))}, read as float32"
    if NAME_MAP.head in stored:
        ignored[NAME_MAP.head] = f"tied to {_TABLE}"
        check_tied(file, NAME_MAP.head, stored.pop(NAME_MAP.head), stored[_TABLE])
    yield weights_from(file, NAME_MAP, stored, model, format="gguf", path=path, ignored=ignored)


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(
            f"{path}: {len(files)} files .gguf here; expected one: give the name of the file"
        )
    return files[0]


def _read(file: Path, *, quantized: bool) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """Return the fields that are not lists, and the tensors by name."""
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if gguf.GGUFValueType.ARRAY not in field.types
        }
        tensors = {tensor.name: _tensor(tensor, quantized=quantized) for tensor in reader.tensors}
    except Exception as error:  # errors of any type: the library's reader does not check its file
        raise CheckpointError(
            f"{file}: not a whole GGUF file ({str(error) or type(error).__name__}); fetch or write"
            " it again"
        ) from None
    return fields, tensors


def _tensor(tensor: Any, *, quantized: bool) -> FileTensor:
    name = tensor.tensor_type.name
    described: dict[str, Any] = {
        "name": tensor.name,
        "dtype": _TYPES.get(name, name),
        "shape": tuple(int(size) for size in reversed(tensor.shape)),
        "segments": (tensor.data.view(np.uint8).reshape(-1),),
    }
    if name in _TYPES or not quantized:
        return FileTensor(**described)
    described["dtype"] = "float32"
    return _Quantized(**described, kind=tensor.tensor_type, rows=tensor.data)


def _model(file: Path, fields: dict[str, Any], stored: dict[str, FileTensor]) -> ResolvedModel:
    if fields.get("general.architecture") != "gpt2":
        raise ConfigError(
            f"{file}: general.architecture is {fields.get('general.architecture')!r}; expected gpt2"
        )
    missing = [theirs for theirs in _SIZES.values() if f"gpt2.{theirs}" not in fields]
    if missing or _TABLE not in stored or len(stored[_TABLE].shape) != 2:
        lacking = ", ".join([*(f"gpt2.{name}" for name in missing), *([] if missing else [_TABLE])])
        raise ConfigError(f"{file}: lacks {lacking}, which a GPT-2 has; fetch or write it again")
    section = {ours: fields[f"gpt2.{theirs}"] for ours, theirs in _SIZES.items()}
    # The file stores float32. The shortest number that rounds to it is the original.
    section["layer_norm_epsilon"] = float(str(np.float32(section["layer_norm_epsilon"])))
    section |= {"vocab_size": stored[_TABLE].shape[0], "seq_length": section["max_positions"]}
    return checked_model(file, section)

"""Write an ONNX folder: the graph, its weights in a file that is mapped, and the model's sizes."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.packages import require_package
from common.systems.weights import Weights
from common.tensor_files.checksummed import ChecksummedFile

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
BLOCK = 32


def write_onnx(
    folder: Path, weights: Weights, dtype: str | None, *, cache: bool = True
) -> dict[str, int]:
    """Write into an empty folder, a tensor at a time; returns the CRC-32 of each file.

    dtype: float32 when left out, float16, int8 or int4. cache: whether the graph takes and returns
    keys and values. Raises ConfigError where the sizes do not suit the dtype; OSError is left to
    the caller.
    """
    require_package("onnx", extra="export", purpose="which writes ONNX")
    from common.systems.onnx.model import BITS, GPT2Graph

    model, dtype = weights.model, dtype or "float32"
    if dtype in BITS and (model.hidden_size % BLOCK or model.ffn_hidden_size % BLOCK):
        raise ConfigError(
            f"{dtype}: weights share a scale in blocks of {BLOCK}, which must divide"
            f" model.hidden_size={model.hidden_size} and"
            f" model.ffn_hidden_size={model.ffn_hidden_size}; write float32 or float16"
        )
    tensors = weights.tensors
    graph = GPT2Graph(model, lambda name: tensors[name].load_as("float32"), dtype, cache=cache)
    with ChecksummedFile(folder / DATA_FILE) as data:
        content = graph.write(data, DATA_FILE)
    with ChecksummedFile(folder / GRAPH_FILE) as file:
        file.write(content)
    return {GRAPH_FILE: file.checksum, DATA_FILE: data.checksum}

"""Writer of an ONNX folder: the graph, its weights in a file that can be mapped, and the model's
sizes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.packages import require_package
from common.systems.weights import Weights, require_blocks
from common.tensor_files.checksummed import ChecksummedFile

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"


def write_onnx(
    folder: Path, weights: Weights, dtype: str | None, *, cache: bool = True
) -> dict[str, int]:
    """Write into an empty folder, a tensor at a time; returns the CRC-32 of each file.

    dtype: float32 when left out, float16, int8 or int4; int8 of weights that come with a scheme
    keeps its scales. cache: whether the graph takes and returns keys and values. Raises ConfigError
    where the sizes do not suit the dtype; OSError is left to the caller.
    """
    require_package("onnx", extra="export", purpose="which writes ONNX")
    from common.systems.onnx.model import BITS, BLOCK, GPT2Graph

    model, dtype = weights.model, dtype or "float32"
    scheme = weights.scheme if dtype == "int8" else None
    if scheme:
        dtype = "float32"
    if dtype in BITS:
        require_blocks(model, dtype, BLOCK)
    tensors = weights.tensors

    def read(name: str) -> NDArray[np.float32]:
        return tensors[name].load_as("float32")

    graph = GPT2Graph(model, read, dtype, cache=cache, scheme=scheme)
    with ChecksummedFile(folder / DATA_FILE) as data:
        content = graph.write(data, DATA_FILE)
    with ChecksummedFile(folder / GRAPH_FILE) as file:
        file.write(content)
    return {GRAPH_FILE: file.checksum, DATA_FILE: data.checksum}

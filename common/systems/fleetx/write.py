"""PaddleFleetX's ``model.pdparams``, written as a stream, with the model.yaml that the file has no
place for.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from common.systems.fleetx.names import NAME_MAPS
from common.systems.fleetx.parts import FILE
from common.systems.model_yaml import write_model_yaml
from common.systems.weights import Weights, arrays_of, export_names
from common.tensor_files.arrays import contiguous
from common.tensor_files.checksummed import ChecksummedFile

_PROTOCOL = 3
"""Pickle protocol with bytes but without frames, so that a table is written item by item."""
_BEGIN = pickle.PROTO + bytes([_PROTOCOL]) + pickle.EMPTY_DICT
_END = pickle.STOP


def write_fleetx(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write into an empty folder; return the CRC-32 of the file of weights.

    A bfloat16 is uint16, as in Paddle. The embedding has the rows of the true vocabulary, which is
    Model.vocab_size then. OSError is left to the caller.
    """
    tensors = export_names(NAME_MAPS[0], weights.tensors, weights.model, dtype)
    with ChecksummedFile(folder / FILE) as file:
        file.write(_BEGIN)
        for name, array in zip(tensors, arrays_of(tensors), strict=True):
            file.write(_pickled(name))
            file.write(_pickled(contiguous(array)))
            file.write(pickle.SETITEM)
        file.write(_END)
    write_model_yaml(folder, weights)
    return {FILE: file.checksum}


def _pickled(value: str | NDArray[Any]) -> bytes:
    """Return the instructions that make a value: a pickle without its beginning and its end. The
    instructions have a memo of their own.
    """
    return pickle.dumps(value, _PROTOCOL)[2:-1]

"""Read Paddle's ``.pdparams`` without Paddle: a pickle of numpy arrays by name. It is read as data
only, and the arrays' bytes stay in the mapped file.

Format: python/paddle/framework/io.py, ``_build_saved_state_dict`` (arrays, and their other names
under StructuredToParameterName@@) and ``_pickle_save`` (pairs of such a name and an array).
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor, TensorFile
from common.tensor_files.pickled_values import KNOWN, PlainTree, foreign_class

STATE = ".pdopt"
_PARAMETER_NAMES = "StructuredToParameterName@@"
# uint16 is Paddle's bfloat16 too
_TYPES = {dtype.name: word for word, dtype in NUMPY_TYPES.items()}
_LONG = 4096
"""Size in bytes from which an array stays in the file."""


def read_paddle(path: Path, content: Bytes) -> TensorFile:
    """Return arrays by name; for a state (.pdopt), other values are in ``plain``.

    Raises CheckpointError if the file names code, and almost any error if it is broken.
    """
    found = PlainTree(_Unpickler(path, content).load()).tree
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    plain: dict[str, Any] = {}
    tensors: dict[str, FileTensor] = {}
    for name, value in found.items():
        # a pair is a name and an array
        array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if path.suffix == STATE and not isinstance(array, np.ndarray):
            plain[str(name)] = value
        elif name != _PARAMETER_NAMES:
            tensors[name] = _tensor(name, array)
    return TensorFile(path=path, tensors=tensors, plain=plain, tree=tensors)


def _tensor(name: Any, array: Any) -> FileTensor:
    if not isinstance(name, str) or not isinstance(array, np.ndarray) or array.dtype.name not in _TYPES:
        raise ValueError(f"{name} is not an array of numbers")
    ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return FileTensor(
        name=name, dtype=_TYPES[array.dtype.name], shape=array.shape, segments=(ordered.reshape(-1).view(np.uint8),)
    )


class _Function:
    """A known function, whose attributes no pickle can set."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function")


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, content: Bytes) -> None:
        super().__init__(io.BytesIO(_without_arrays(path)), encoding="latin1")
        self._path, self._content = path, content

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        known = KNOWN.get(full)
        # a pickle could set the attributes of a function or a class
        return _Function(known) if known is not None else foreign_class(self._path, full)

    def persistent_load(self, identity: Any) -> Bytes:
        first, size = identity
        if not 0 <= first <= first + size <= self._content.size:
            raise ValueError(f"{size} bytes at {first} are not a part of it")
        return self._content[first : first + size]


def _without_arrays(path: Path) -> bytes:
    """Return a pickle in which the place of every long string of bytes stands for it. The result is
    small.
    """
    program = bytearray()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start, frame_end = 0, 0
        # reading stops at the end of the file, however much is asked for
        for opcode, argument, position in pickletools.genops(cast(IO[bytes], mapped)):
            end, size = mapped.tell(), len(argument) if isinstance(argument, bytes) else 0
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > mapped.size():
                raise ValueError("it remembers more objects than it has bytes")
            if opcode.name == "FRAME":
                frame_end = end + int(argument or 0)
            elif (position or 0) < frame_end < end or (opcode.name == "STOP" and end < frame_end):
                raise ValueError("bytes of it are missing or too many: it does not end where its frames do")
            # frames give the size of what follows; they are checked above and left out
            if size < _LONG and opcode.name != "FRAME":
                continue
            program += mapped[start:position]
            if size:
                program += f"(I{end - size}\nI{size}\ntQ".encode()
            start = end
        return bytes(program + mapped[start:])

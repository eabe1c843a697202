"""Objects of pickles as plain data: their names are looked up here, never imported or called.

Paddle's ``.pdparams`` is a pickle of numpy arrays by name. It is read without Paddle, as data only, and the arrays'
bytes stay in the mapped file. Format: python/paddle/framework/io.py, ``_build_saved_state_dict`` (arrays, and their
other names under StructuredToParameterName@@) and ``_pickle_save`` (pairs of such a name and an array).
"""

from __future__ import annotations

import argparse
import io
import itertools
import mmap
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np

from common.errors import CheckpointError
from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor, TensorFile

MAX_VALUES = 1_000_000
"""Beyond any file of weights. A few nested lists, each repeating the one before, could otherwise exceed the memory."""


class Foreign:
    """Content of an object whose class, of this ``name``, is not loaded."""

    __slots__ = ("arguments", "state")
    name = ""
    arguments: tuple[Any, ...]
    state: Any

    # some ways in which a pickle makes an object do not call __init__
    def __new__(cls, *arguments: Any) -> Self:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    # without it, pickle would set attributes by name
    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(Foreign):
    __slots__ = ()


class _Dtype(Foreign):
    __slots__ = ()


def _called(function: Callable[..., Any]) -> type[Foreign]:
    """Return a class whose call is the function's: a pickle can set attributes of a function."""
    return type("_Called", (Foreign,), {"__slots__": (), "__new__": lambda cls, *given: function(*given)})


def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError(f"bytes are encoded as {codec!r}, not latin1")
    return text.encode("latin1")


KNOWN: dict[str, type[Foreign]] = {
    "numpy.dtype": _Dtype,
    "numpy.ndarray": type("_ndarray", (Foreign,), {"__slots__": ()}),
    "_codecs.encode": _called(_encode),
    "builtins.bytes": _called(lambda: b""),
}
for _package in ("numpy.core", "numpy._core"):
    KNOWN[f"{_package}.multiarray._reconstruct"] = _Array
    KNOWN[f"{_package}.multiarray.scalar"] = _called(lambda dtype, data: np.frombuffer(data, _numpy_type(dtype), 1)[0])


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    """Return a type of plain numbers: the bytes of a numpy object would be addresses."""
    if not isinstance(dtype, _Dtype) or not re.fullmatch(r"[biuf][1248]", str(dtype.arguments[0])):
        raise ValueError("a numpy value is of no type of plain numbers")
    big_endian = dtype.state and dtype.state[1] == ">"
    return np.dtype(f"{'>' if big_endian else '<'}{dtype.arguments[0]}")


INERT_PACKAGES = ("megatron", "deepspeed", "paddle", "pytorch_lightning", "lightning")
"""Packages whose files hold objects of their own classes. These become Foreign."""


def foreign_class(path: Path, name: str) -> type[Foreign]:
    """Return a class that stands for a foreign one.

    path: the pickle that names it. Raises CheckpointError unless it is of INERT_PACKAGES.
    """
    if name.partition(".")[0] not in INERT_PACKAGES and name != "_io.BytesIO":
        raise CheckpointError(
            f"{path}: its pickle names {name}, which no file of weights needs: it could run any"
            " code, so nothing of it was executed or loaded; if you trust who made it, load it"
            " there with their program and save the tensors as safetensors"
        )
    return type("_ForeignOf", (Foreign,), {"__slots__": (), "name": name})


_PLAIN = (str, bytes, int, float, complex, type(None), np.generic, np.ndarray, FileTensor, Foreign)


def plain_tree(
    content: Any, leaf_of: Callable[[str, Any], Any] = lambda name, value: value
) -> tuple[Any, dict[str, FileTensor]]:
    """Return content of a pickle as plain Python, and the tensors in it by their path, joined by dots.

    leaf_of: function that returns a leaf (its path, its value) as a FileTensor or a plain value. Raises ValueError for
    a value that is neither, and RecursionError for one that contains itself.
    """
    tensors: dict[str, FileTensor] = {}
    numbers = itertools.count(1)

    def plain(value: Any, path: tuple[str, ...], is_leaf: bool = True) -> Any:
        if next(numbers) > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        if isinstance(value, argparse.Namespace):
            return argparse.Namespace(**plain(vars(value), path, is_leaf))
        if isinstance(value, dict):
            names = {key: plain(key, (), is_leaf=False) for key in value}
            return {names[key]: plain(part, (*path, str(names[key])), is_leaf) for key, part in value.items()}
        if isinstance(value, list | tuple | set):
            kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
            return kind(plain(part, (*path, str(number)), is_leaf) for number, part in enumerate(value))
        name = ".".join(path)
        if isinstance(value, _Array):
            _, shape, dtype, by_columns, data = value.state
            array = np.frombuffer(data, _numpy_type(dtype))
            value = array.reshape(shape, order="F" if by_columns else "C")
        elif isinstance(value, _Dtype):
            value = _numpy_type(value).str
        elif isinstance(value, Foreign):
            value.arguments, value.state = (plain(each, path, is_leaf=False) for each in (value.arguments, value.state))
        elif isinstance(value, type) and issubclass(value, Foreign):
            value = value.name
        leaf = leaf_of(name, value)
        if not isinstance(leaf, _PLAIN):
            raise ValueError(f"{name} is a {type(leaf).__name__}, neither a tensor nor a plain value")
        if is_leaf and isinstance(leaf, FileTensor):
            if name in tensors:
                raise ValueError(f"{name} is there twice")
            tensors[name] = leaf
        return leaf

    return plain(content, ()), tensors


STATE = ".pdopt"
_PARAMETER_NAMES = "StructuredToParameterName@@"
# uint16 is Paddle's bfloat16 too
_TYPES = {dtype.name: word for word, dtype in NUMPY_TYPES.items()}
_LONG = 4096
"""Size in bytes from which an array stays in the file."""


def read_paddle(path: Path, content: Bytes) -> TensorFile:
    """Return arrays by name; for a state (.pdopt), other values are in ``tree``.

    Raises CheckpointError if the file names code, and almost any error if it is broken.
    """
    found, _ = plain_tree(_Unpickler(path, content).load())
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
    return TensorFile(path, tensors, tensors | plain)


def _tensor(name: Any, array: Any) -> FileTensor:
    if not isinstance(name, str) or not isinstance(array, np.ndarray) or array.dtype.name not in _TYPES:
        raise ValueError(f"{name} is not an array of numbers")
    word = _TYPES[array.dtype.name]
    ordered = np.ascontiguousarray(array, NUMPY_TYPES[word])
    ordered.flags.writeable = False
    return FileTensor(dtype=word, shape=array.shape, load=lambda: ordered)


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, content: Bytes) -> None:
        super().__init__(io.BytesIO(_without_arrays(path)), encoding="latin1")
        self._path, self._content = path, content

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        return KNOWN.get(full) or foreign_class(self._path, full)

    def persistent_load(self, identity: Any) -> Bytes:
        first, size = identity
        if not 0 <= first <= first + size <= self._content.size:
            raise ValueError(f"{size} bytes at {first} are not a part of it")
        return self._content[first : first + size]


def _without_arrays(path: Path) -> bytes:
    """Return a pickle in which the place of every long string of bytes stands for it. The result is small."""
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

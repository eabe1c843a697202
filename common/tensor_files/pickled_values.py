"""Objects of pickles as plain data: their names are looked up here, never imported or called."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from common.errors import CheckpointError
from common.tensor_files.arrays import FileTensor

MAX_VALUES = 1_000_000
"""Beyond any file of weights. A few nested lists, each repeating the one before, could otherwise
exceed the memory.
"""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Content of an object whose class is not loaded."""

    name: str
    arguments: tuple[Any, ...]
    state: Any


_PLAIN = (str, bytes, int, float, complex, type(None), np.generic, np.ndarray)


class _Record:
    """Object that a pickle makes and fills, of a class of this ``name``."""

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


class _Array(_Record):
    __slots__ = ()


class _Dtype(_Record):
    __slots__ = ()


def _scalar(dtype: Any, data: bytes) -> Any:
    return np.frombuffer(data, _numpy_type(dtype), 1)[0]


def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError(f"bytes are encoded as {codec!r}, not latin1")
    return text.encode("latin1")


KNOWN: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _Dtype,
    "numpy.ndarray": type("_ndarray", (_Record,), {"__slots__": ()}),
    "_codecs.encode": _encode,
    "builtins.bytes": lambda: b"",
}
for _package in ("numpy.core", "numpy._core"):
    KNOWN[f"{_package}.multiarray._reconstruct"] = _Array
    KNOWN[f"{_package}.multiarray.scalar"] = _scalar


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    """Return a type of plain numbers: the bytes of a numpy object would be addresses."""
    if not isinstance(dtype, _Dtype) or not re.fullmatch(r"[biuf][1248]", str(dtype.arguments[0])):
        raise ValueError("a numpy value is of no type of plain numbers")
    big_endian = dtype.state and dtype.state[1] == ">"
    return np.dtype(f"{'>' if big_endian else '<'}{dtype.arguments[0]}")


INERT_PACKAGES = ("megatron", "deepspeed", "paddle", "pytorch_lightning", "lightning")
"""Packages whose files hold objects of their own classes. These become Foreign."""


def foreign_class(path: Path, name: str) -> type[_Record]:
    """Return a class that stands for a foreign one, whose objects PlainTree makes Foreign.

    path: the pickle that names it. Raises CheckpointError unless it is of INERT_PACKAGES.
    """
    if name.partition(".")[0] not in INERT_PACKAGES and name != "_io.BytesIO":
        raise CheckpointError(
            f"{path}: its pickle names {name}, which no file of weights needs: it could run any"
            " code, so nothing of it was executed or loaded; if you trust who made it, load it"
            " there with their program and save the tensors as safetensors"
        )
    return type("_ForeignOf", (_Record,), {"__slots__": (), "name": name})


class PlainTree:
    """Content of a pickle as plain Python. ``tensors`` and ``values`` hold its leaves by their
    path, joined by dots.

    leaf_of: function that returns a leaf (its path, its value) as a FileTensor or a plain value.
    Raises ValueError for a value that is neither, and RecursionError for one that contains itself.
    """

    def __init__(self, content: Any, leaf_of: Callable[[str, Any], Any] = lambda name, value: value) -> None:
        self.tensors: dict[str, FileTensor] = {}
        self.values: dict[str, Any] = {}
        self._leaf_of, self._count = leaf_of, 0
        self.tree = self._plain(content, ())

    def _plain(self, value: Any, path: tuple[str, ...], is_leaf: bool = True) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        if isinstance(value, argparse.Namespace):
            return argparse.Namespace(**self._plain(vars(value), path, is_leaf))
        if isinstance(value, dict):
            names = {key: self._plain(key, (), is_leaf=False) for key in value}
            return {names[key]: self._plain(part, (*path, str(names[key])), is_leaf) for key, part in value.items()}
        if isinstance(value, list | tuple | set):
            kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
            return kind(self._plain(part, (*path, str(number)), is_leaf) for number, part in enumerate(value))
        name = ".".join(path)
        if isinstance(value, _Array):
            _, shape, dtype, by_columns, data = value.state
            array = np.frombuffer(data, _numpy_type(dtype))
            value = array.reshape(shape, order="F" if by_columns else "C")
        elif isinstance(value, _Dtype):
            value = _numpy_type(value).str
        elif isinstance(value, _Record):
            value = Foreign(
                name=type(value).name,
                arguments=self._plain(value.arguments, path, is_leaf=False),
                state=self._plain(value.state, path, is_leaf=False),
            )
        elif isinstance(value, type) and issubclass(value, _Record):
            value = value.name
        leaf = self._leaf_of(name, value)
        if not isinstance(leaf, (*_PLAIN, FileTensor, Foreign)):
            raise ValueError(f"{name} is a {type(leaf).__name__}, neither a tensor nor a plain value")
        if is_leaf:
            if name in self.tensors or name in self.values:
                raise ValueError(f"{name} is there twice")
            leaves: dict[str, Any] = self.tensors if isinstance(leaf, FileTensor) else self.values
            leaves[name] = leaf
        return leaf

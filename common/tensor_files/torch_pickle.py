"""Read the pickles inside torch files as plain data. Names in them are looked up in a table here;
they are never imported or called.

A pickle may name any function. The few names in the table stand for inert records; any other name
stops the reading with an error.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Self, TypeAlias

import numpy as np

from common.errors import CheckpointError
from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor

STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}  # fmt: skip
_WORDS = {storage: word for word, storage in STORAGES.items()} | {"UntypedStorage": "uint8"}
_MAX_VALUES = 1_000_000
"""Limit beyond any file of weights: a few nested lists, each repeating the one before, could
otherwise exceed the memory.
"""


_INERT_PACKAGES = ("megatron", "deepspeed", "paddle", "pytorch_lightning", "lightning")
"""Packages whose files hold objects of their own classes. These become records, as do buffers of
bytes (``_io.BytesIO``). A class itself becomes its name.
"""


class TorchName(str):
    """Name of torch that stands for itself, such as ``torch.float16``."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Content of an object whose class is not loaded: one of _INERT_PACKAGES, or a buffer of
    bytes.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any


class _Sealed:
    """Object that a pickle may not change once it is made."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise ValueError(f"the state of a {type(self).__name__} is set")


@dataclass(kw_only=True, eq=False)
class Storage(_Sealed):
    """Storage: a run of elements, of which tensors are views."""

    dtype: str
    numel: int
    data: Bytes | None = None
    """Set once known: old files have the data after the pickle."""
    check: Callable[[], None] | None = None
    """See ``FileTensor.check``."""

    @property
    def nbytes(self) -> int:
        return self.numel * NUMPY_TYPES[self.dtype].itemsize


StorageOf: TypeAlias = Callable[[str, str, int, Any], Storage]
"""Function that finds the storage of a tensor: (dtype, key, elements, view). view: None, or (key,
offset, elements) of a part of it.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class _View(_Sealed):
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Record:
    """Record that the pickle makes and fills. Its state goes only here: without ``__setstate__``,
    pickle would set attributes by name.
    """

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    # some ways in which a pickle makes an object do not call __init__
    def __new__(cls, *arguments: Any) -> Self:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Namespace(_Record):
    __slots__ = ()


class _Array(_Record):
    __slots__ = ()


class _Dtype(_Record):
    __slots__ = ()


class _Foreign(_Record):
    __slots__ = ()
    name: str


class _Dict(dict[Any, Any]):
    """An OrderedDict. torch attaches the versions of modules to it, which are not needed."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Function(_Sealed):
    """Function that a pickle may call. It is an instance, since pickle can set the attributes of a
    function.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or any(
        type(value) is not int or value < 0 for value in values
    ):
        raise ValueError(f"{values!r} is not a list of sizes")
    return tuple(values)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
    view = _View(
        storage=storage, offset=_sizes([offset])[0], shape=_sizes(shape), strides=_sizes(strides)
    )
    if not isinstance(storage, Storage) or len(view.shape) != len(view.strides):
        raise ValueError(
            f"a tensor {view.shape} with strides {view.strides} is not a view of a storage"
        )
    last = view.offset + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)
    )
    if math.prod(view.shape) and last >= storage.numel:
        raise ValueError(
            f"a tensor {list(view.shape)} ends at element {last} of a storage of {storage.numel}"
        )
    return view


def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError(f"bytes are encoded as {codec!r}, not latin1")
    return text.encode("latin1")


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    """Scalar of numpy, only of plain numbers: the bytes of an object would be addresses."""
    if not isinstance(dtype, _Dtype) or not re.fullmatch(r"[biuf][1248]", str(dtype.arguments[0])):
        raise ValueError("a numpy value is of no type of plain numbers")
    order = dtype.state[1] if dtype.state else "<"
    return np.dtype(f"{'>' if order == '>' else '<'}{dtype.arguments[0]}")


def _scalar(dtype: Any, data: bytes) -> Any:
    return np.frombuffer(data, _numpy_type(dtype), 1)[0]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    # a tensor with attributes, such as Megatron's float32 copies
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, arguments, state: make(*arguments),
    "torch.Size": lambda values=(): _sizes(values),
    "torch.device": lambda kind, index=None: TorchName(
        kind if index is None else f"{kind}:{index}"
    ),
    "_codecs.encode": _encode,
    "numpy.core.multiarray._reconstruct": lambda *arguments: _Array(),
    "numpy.core.multiarray.scalar": _scalar,
    "signal.Signals": lambda number: number,
}
for _module in ("builtins", "__builtin__"):
    _FUNCTIONS |= {
        f"{_module}.bytes": lambda: b"",
        f"{_module}.set": lambda values=(): set(values),
        f"{_module}.tuple": lambda values=(): tuple(values),
    }
_CLASSES = {
    "collections.OrderedDict": _Dict, "numpy.dtype": _Dtype,
    # converters to Megatron's form write the second
    "argparse.Namespace": _Namespace, "types.SimpleNamespace": _Namespace,
}  # fmt: skip
_NAMES = {
    *(f"torch.{word}" for word in NUMPY_TYPES), "torch.Tensor", "torch.nn.parameter.Parameter",
    "numpy.ndarray",
    *(f"{module}.{storage}" for module in ("torch", "torch.storage",
    "torch.cuda") for storage in _WORDS),
}  # fmt: skip


class _RestrictedUnpickler(pickle.Unpickler):
    """Look up a name. Raises CheckpointError unless it is in the tables above."""

    def __init__(self, file: IO[bytes], storage_of: StorageOf, where: str) -> None:
        super().__init__(file, encoding="latin1")  # names in pickles of Python 2
        self._storage_of, self._where = storage_of, where

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full in _FUNCTIONS:
            return _Function(_FUNCTIONS[full])
        if full in _CLASSES:
            return _CLASSES[full]
        if full in _NAMES:
            return TorchName(full)
        if module.partition(".")[0] in _INERT_PACKAGES or full == "_io.BytesIO":
            return type("_ForeignOf", (_Foreign,), {"__slots__": (), "name": full})
        raise CheckpointError(
            f"{self._where}: its pickle names {module}.{name}, which no file of weights needs: it"
            " could run any code, so nothing of it was executed or loaded; if you trust who made"
            " it, load it there with their program and save the tensors as safetensors"
        )

    def persistent_load(self, identity: Any) -> Storage:
        kind, storage, key, _device, numel, *view = identity
        name = storage.rpartition(".")[2]
        if kind != "storage" or not isinstance(storage, TorchName) or name not in _WORDS:
            raise ValueError(f"{identity!r} is not a storage of tensors")
        return self._storage_of(
            _WORDS[name], str(key), _sizes([numel])[0], view[0] if view else None
        )


def load_records(file: IO[bytes], storage_of: StorageOf, where: str) -> Any:
    """Return the next pickle of ``file``, made of records: PlainTree turns them into plain data.
    Raises CheckpointError on code, and almost any error on a broken pickle.
    """
    start = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(start)
    for opcode, argument, _ in pickletools.genops(file):
        # pickle would make a table of that many places
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > size:
            raise ValueError(f"its pickle remembers {argument} objects")
    file.seek(start)
    return _RestrictedUnpickler(file, storage_of, where).load()


class PlainTree:
    """Content of a pickle as plain Python. ``tensors`` and ``values`` hold its leaves by their
    path, joined by dots.

    Raises ValueError for a value that is neither, and RecursionError for one that contains itself.
    """

    def __init__(self, content: Any) -> None:
        self.tensors: dict[str, FileTensor] = {}
        self.values: dict[str, Any] = {}
        self._left = _MAX_VALUES
        self.tree = self._plain(content, ())

    def _plain(self, value: Any, path: tuple[str, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it holds more than {_MAX_VALUES} values")
        if isinstance(value, _Namespace):
            return argparse.Namespace(**self._plain(value.state or {}, path))
        if isinstance(value, dict):
            names = {key: PlainTree(key).tree for key in value}
            return {
                names[key]: self._plain(part, (*path, str(names[key])))
                for key, part in value.items()
            }
        if isinstance(value, type) and issubclass(value, _Foreign):
            value = TorchName(value.name)
        if type(value) in (list, tuple, set):
            return type(value)(
                self._plain(part, (*path, str(number))) for number, part in enumerate(value)
            )
        name = ".".join(path)
        if isinstance(value, _View | Storage):
            return self._new(self.tensors, name, _to_tensor(name, value))
        if isinstance(value, _Array):
            value = _to_array(value)
        elif isinstance(value, _Foreign):
            value = Foreign(
                name=value.name,
                arguments=PlainTree(value.arguments).tree,
                state=PlainTree(value.state).tree,
            )
        elif isinstance(value, _Dtype):
            value = _numpy_type(value).str
        elif not isinstance(value, str | bytes | int | float | complex | np.generic | None):
            raise ValueError(
                f"{name} is a {type(value).__name__}, neither a tensor nor a plain value"
            )
        return self._new(self.values, name, value)

    def _new(self, leaves: dict[str, Any], name: str, leaf: Any) -> Any:
        if name in self.tensors or name in self.values:
            raise ValueError(f"{name} is there twice")
        leaves[name] = leaf
        return leaf


def _to_array(record: _Array) -> Any:
    _, shape, dtype, by_columns, data = record.state
    if isinstance(data, Storage):  # its bytes are stored elsewhere
        if data.check is not None:
            data.check()
        data = data.data
    return np.frombuffer(data, _numpy_type(dtype)).reshape(
        _sizes(shape), order="F" if by_columns else "C"
    )


def _to_tensor(name: str, view: _View | Storage) -> FileTensor:
    if isinstance(view, Storage):
        view = _View(storage=view, offset=0, shape=(view.numel,), strides=(1,))
    storage = view.storage
    assert storage.data is not None, "the reader finds the data of every storage"
    item = NUMPY_TYPES[storage.dtype].itemsize
    numel = math.prod(view.shape)
    data = storage.data[view.offset * item : storage.nbytes]
    dense = row_major(view.shape)
    is_dense = not numel or all(
        size == 1 or stride == natural
        for size, stride, natural in zip(view.shape, view.strides, dense, strict=True)
    )
    return FileTensor(
        name=name,
        dtype=storage.dtype,
        shape=view.shape,
        segments=(data[: numel * item] if is_dense else data,),
        strides=None if is_dense else view.strides,
        check=storage.check,
    )


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor without gaps."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

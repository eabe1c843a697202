"""Token files that are mapped into memory: the interface of all formats."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.dataset.metadata import METADATA_EXTENSION, Metadata, read_metadata
from common.errors import DataError
from common.files import reading

CHUNK = 1 << 20
"""Entries of an index that are checked at once."""


def with_extension(prefix: Path, extension: str) -> Path:
    """Return ``prefix`` + ``extension``. Dots inside the prefix are part of the name;
    ``with_suffix`` would cut them.
    """
    return prefix.with_name(prefix.name + extension)


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Owner of mapped memory, which numpy keeps as the base of an array."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
        # not at the exit, when other threads may still read
        weakref.finalize(self, _LIBC.munmap, address, size).atexit = False


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file for reading. Returns (bytes,). Raises DataError.

    Unlike np.memmap it leaves no descriptor open: a process may have 1,024 of them, and a blend
    thousands of files.
    """
    with reading(path, DataError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return np.zeros(0, np.uint8)
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return np.asarray(_Mapping(address, size))


class TokenFiles(ABC):
    """Files opened for reading. Only one offset per document is copied.

    prefix: beginning of the files' names. tokens: (token_count,) integers of all documents, mapped.
    content_key: 16 hex digits, equal for equal data.
    """

    prefix: Path
    tokens: npt.NDArray[Any]
    content_key: str

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    @abstractmethod
    def document_count(self) -> int:
        """Return the number of documents, empty ones included."""

    @abstractmethod
    def document_offsets(self) -> npt.NDArray[np.int64]:
        """Return (documents + 1,) int64. Document d is ``tokens[offsets[d]:offsets[d + 1]]``."""

    def metadata(self) -> Metadata | None:
        """Return the record of the files' origin, or None without one.

        Raises DataError if it describes other files.
        """
        path = with_extension(self.prefix, METADATA_EXTENSION)
        metadata = read_metadata(path)
        if metadata is not None and metadata.tokens != self.token_count:
            raise DataError(
                f"{path}: describes {metadata.tokens} tokens, but {self.prefix.name} holds"
                f" {self.token_count}; it was left by another run, delete it or preprocess again"
            )
        return metadata


def content_key(index: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> str:
    """Return 16 hex digits that are equal for equal data.

    To be cheap, they cover the whole index, the size of the tokens and their two ends. The ends
    matter: two vocabularies of one word per character give the same lengths for a text.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(index.data)
    digest.update(struct.pack("<Q", tokens.nbytes))
    digest.update(tokens[: 1 << 14].tobytes())
    digest.update(tokens[-(1 << 14) :].tobytes())
    return digest.hexdigest()

"""Token files that are mapped into memory: the interface of all formats."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from common.dataset.metadata import METADATA_EXTENSION
from common.errors import DataError
from common.files import reading

CHUNK = 1 << 20
"""Entries of an index that are held at once."""
_PART, _PARTS = 1 << 11, 64
"""Entries that are looked at together in an index of more than CHUNK, and how often."""
_LONG = 1 << 30
"""Bytes of a file of which only the pages in use are read. Of a shorter one the system may read
megabytes around a window, which is good for what fits in memory.
"""


def with_extension(prefix: Path, extension: str) -> Path:
    """Return ``prefix`` + ``extension``. Dots inside the prefix stay, which ``with_suffix`` would cut."""
    return prefix.parent / f"{prefix.name}{extension}"


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file for reading, as a plain ndarray: slices of a memmap are several times slower.

    Returns (bytes,). Raises DataError.
    """
    with reading(path, DataError), path.open("rb") as file:
        if not (size := path.stat().st_size):
            return np.zeros(0, np.uint8)  # an empty file cannot be mapped
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    if size > _LONG:
        memory.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(memory, np.uint8)


class Column:
    """Numbers of an index, read when a slice is asked for.

    They are not mapped: around each place the system would read up to 8 MB, and count them as memory of the process.
    """

    def __init__(self, file: BinaryIO, dtype: npt.DTypeLike, count: int, begin: int) -> None:
        self._file, self._dtype = file, np.dtype(dtype)
        self._count, self._begin = count, begin

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: slice) -> npt.NDArray[Any]:
        start, stop, _ = at.indices(self._count)
        size = self._dtype.itemsize
        place = self._begin + size * start
        data = os.pread(self._file.fileno(), size * max(0, stop - start), place)
        return np.frombuffer(data, self._dtype)


def spread(length: int) -> list[slice]:
    """Return parts of an index that are looked at when it is opened: all of it, or both ends and
    parts between them where it has more than a million entries.
    """
    if length <= CHUNK:
        return [slice(0, length)] if length else []
    starts = ((length - _PART) * part // (_PARTS - 1) for part in range(_PARTS))
    return [slice(start, start + _PART) for start in starts]


class TokenFiles(ABC):
    """Files opened for reading, whose documents lie one after the other.

    prefix: beginning of the files' names. tokens: (token_count,) integers of all documents, mapped.
    content_key: 16 hex digits, equal for equal data. document_count: empty documents included.
    """

    prefix: Path
    tokens: npt.NDArray[Any]
    content_key: str
    document_count: int

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @abstractmethod
    def tokens_before(self, document: int) -> int:
        """Return the number of tokens before a document, or all for ``document_count``."""


class TokenWriter(ABC):
    """Context manager of token files: they appear on normal exit; an exception leaves nothing.

    prefix: beginning of the files' names. dtype: of the tokens on disk.
    Memory: a block, and an index where its format has it whole. Sizes and boundaries wait in files without a name.
    Raises StorageError if the disk fails.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self.token_count = self.sequence_count = self.document_count = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._tokens = stack.enter_context(ExitStack())
            self._file = self._tokens.enter_context(self._tokens_file())
            self._sizes, self._documents = (
                stack.enter_context(TemporaryFile(dir=self.prefix.parent)) for _ in range(2)
            )
            self._stack = stack.pop_all()
        return self

    @abstractmethod
    def _tokens_file(self) -> AbstractContextManager[IO[bytes]]:
        """Return the file of tokens, which appears under its name when it is closed."""

    @abstractmethod
    def _publish(self) -> None:
        """Close the file of tokens, and write the others."""

    def append(
        self, tokens: npt.NDArray[Any], sizes: npt.NDArray[Any], documents: npt.NDArray[Any] | None = None
    ) -> None:
        """Append whole documents.

        tokens: (sum of sizes,) integers. sizes: (sequences,) tokens per sequence.
        documents: (documents,) sequences per document; None: each sequence is a document.
        Raises DataError when a token does not fit the dtype.
        """
        sizes = np.asarray(sizes, dtype="<i4")
        documents = np.asarray(np.ones(len(sizes)) if documents is None else documents, "<i4")
        assert int(sizes.sum()) == len(tokens) and int(documents.sum()) == len(sizes)
        if len(tokens) and tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token id {low if low < limits.min else high} does not fit {self.dtype.name}; the"
                    " tokenizer's vocab_size is smaller than its ids, check the vocabulary files"
                )
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._sizes.write(sizes.tobytes())
        self._documents.write(documents.tobytes())
        self.token_count += len(tokens)
        self.sequence_count += len(sizes)
        self.document_count += len(documents)

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            self._stack.__exit__(*error)
            return
        with self._stack:  # an error leaves the files of before
            self._publish()

    def _close(self, *old: str) -> None:
        """Publish the file of tokens. The ``old`` files go first: a crash between the renames then
        leaves no set of files, never a wrong one.
        """
        self._file.flush()  # a full disk shows while the old files are there
        for extension in (*old, METADATA_EXTENSION):
            with_extension(self.prefix, extension).unlink(missing_ok=True)
        self._tokens.close()


def running_sums(file: IO[bytes]) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    """Yield the numbers that a writer has put by, CHUNK at a time, and their inclusive running
    sum.
    """
    total = 0
    file.seek(0)
    while data := file.read(4 * CHUNK):
        numbers = np.frombuffer(data, "<i4")
        ends = np.cumsum(numbers, dtype=np.int64) + total
        total = int(ends[-1])
        yield numbers, ends


def content_key(tokens: npt.NDArray[Any], *index: npt.NDArray[Any] | Column) -> str:
    """Return 16 hex digits that are equal for equal data.

    To be cheap, they cover the sizes, parts of a long index (``spread``) and both ends of the tokens. The ends matter:
    two vocabularies of one word per character give the same lengths for a text.
    """
    digest = hashlib.blake2b(digest_size=8)
    for array in index:
        digest.update(struct.pack("<Q", len(array)))
        for part in spread(len(array)):
            digest.update(np.ascontiguousarray(array[part]).data)
    digest.update(struct.pack("<Q", tokens.nbytes))
    digest.update(tokens[: 1 << 14].tobytes())
    digest.update(tokens[-(1 << 14) :].tobytes())
    return digest.hexdigest()

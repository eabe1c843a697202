"""Write a .bin/.idx pair in one pass and bounded memory. The final names appear only when the pair
is complete.

The bytes equal those of megatron-core 0.16.1's IndexedDatasetBuilder for the same tokens and
boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from common.dataset.indexed import CODES, HEADER, MAGIC, VERSION, strip_extension
from common.dataset.metadata import METADATA_EXTENSION
from common.dataset.token_files import with_extension
from common.errors import DataError
from common.files import atomic_write


class IndexedWriter:
    """Context manager that publishes the pair on normal exit, and leaves nothing after an
    exception.

    prefix: path without extension; its folder is created if absent. dtype: see
    ``indexed.token_dtype``.
    Memory: 4 bytes per sequence and 4 per document; tokens go to disk at once.
    Raises StorageError if the disk fails.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = strip_extension(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"dtype {self.dtype} has no code in the .idx format")
        self.token_count = 0
        self.sequence_count = 0
        self.document_count = 0
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int32]] = []
        self._stack = ExitStack()
        self._bin: IO[bytes]

    def __enter__(self) -> IndexedWriter:
        self._bin = self._stack.enter_context(atomic_write(with_extension(self.prefix, ".bin")))
        return self

    def append(
        self,
        tokens: npt.NDArray[Any],
        sizes: npt.NDArray[Any],
        documents: npt.NDArray[Any] | None = None,
    ) -> None:
        """Append whole documents.

        tokens: (sum of sizes,) integers. sizes: (sequences,) tokens per sequence.
        documents: (documents,) sequences per document; None: each sequence is a document.
        Raises DataError when a token does not fit the dtype.
        """
        sizes = np.asarray(sizes, dtype=np.int32)
        documents = (
            np.ones(len(sizes), dtype=np.int32)
            if documents is None
            else np.asarray(documents, dtype=np.int32)
        )
        assert int(sizes.sum()) == len(tokens) and int(documents.sum()) == len(sizes)
        if len(tokens):
            self._bin.write(self._cast(tokens).data)
        self._sizes.append(sizes)
        self._documents.append(documents)
        self.token_count += len(tokens)
        self.sequence_count += len(sizes)
        self.document_count += len(documents)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        # The old index goes first: a crash between the renames then leaves no pair, never a wrong
        # one.
        with_extension(self.prefix, ".idx").unlink(missing_ok=True)
        with_extension(self.prefix, METADATA_EXTENSION).unlink(missing_ok=True)
        self._stack.close()
        with atomic_write(with_extension(self.prefix, ".idx")) as file:
            self._write_index(file)

    def _cast(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token id {low if low < limits.min else high} does not fit"
                    f" {self.dtype.name}; the tokenizer's vocab_size is smaller than its ids, check"
                    " the vocabulary files"
                )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def _write_index(self, file: IO[bytes]) -> None:
        file.write(
            HEADER.pack(
                MAGIC, VERSION, CODES[self.dtype], self.sequence_count, self.document_count + 1
            )
        )
        for sizes in self._sizes:
            file.write(sizes.astype("<i4").tobytes())
        for ends, sizes in zip(_running_ends(self._sizes), self._sizes, strict=True):
            file.write(((ends - sizes) * self.dtype.itemsize).astype("<i8").tobytes())
        file.write(np.zeros(1, dtype="<i8").tobytes())
        for ends in _running_ends(self._documents):
            file.write(ends.astype("<i8").tobytes())


def _running_ends(chunks: Iterable[npt.NDArray[np.int32]]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the inclusive running sum over all chunks, one chunk at a time.

    The whole list would double the memory.
    """
    total = 0
    for chunk in chunks:
        ends = np.cumsum(chunk, dtype=np.int64) + total
        total = int(ends[-1]) if len(ends) else total
        yield ends

"""Write a .bin/.idx pair in one pass and bounded memory. The final names appear only when the pair
is complete.

The bytes equal those of megatron-core 0.16.1's IndexedDatasetBuilder for the same tokens and
boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from common.dataset.indexed import CODES, HEADER, MAGIC, VERSION, strip_extension
from common.dataset.token_files import TokenWriter, with_extension
from common.files import atomic_write


class IndexedWriter(TokenWriter):
    """Writer of a pair. prefix: path without extension; its folder is created if absent. dtype: see
    ``indexed.token_dtype``.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        super().__init__(strip_extension(prefix), dtype)
        if self.dtype not in CODES:
            raise ValueError(f"dtype {self.dtype} has no code in the .idx format")

    def __enter__(self) -> Self:
        self._file = self._stack.enter_context(atomic_write(with_extension(self.prefix, ".bin")))
        return self

    def _publish(self) -> None:
        self._close(".idx")
        with atomic_write(with_extension(self.prefix, ".idx")) as file:
            self._write_index(file)

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

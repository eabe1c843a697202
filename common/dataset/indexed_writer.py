"""Write a .bin/.idx pair in one pass and bounded memory. The final names appear only when the pair
is complete.

The bytes equal those of megatron-core 0.16.1's IndexedDatasetBuilder for the same tokens and
boundaries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from common.dataset.indexed import CODES, HEADER, MAGIC, VERSION, strip_extension
from common.dataset.token_files import TokenWriter, running_sums, with_extension
from common.files import atomic_write


class IndexedWriter(TokenWriter):
    """Writer of a pair. prefix: path without extension; its folder is created if absent. dtype: see
    ``indexed.token_dtype``.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        super().__init__(strip_extension(prefix), dtype)
        if self.dtype not in CODES:
            raise ValueError(f"dtype {self.dtype} has no code in the .idx format")

    def _tokens_file(self) -> AbstractContextManager[IO[bytes]]:
        return atomic_write(with_extension(self.prefix, ".bin"))

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
        for sizes, _ in running_sums(self._sizes):
            file.write(sizes.tobytes())
        for sizes, ends in running_sums(self._sizes):
            file.write(((ends - sizes) * self.dtype.itemsize).astype("<i8").tobytes())
        file.write(np.zeros(1, dtype="<i8").tobytes())
        for _, ends in running_sums(self._documents):
            file.write(ends.astype("<i8").tobytes())

"""Megatron's .bin/.idx pair, read by memory map and written in one pass.

    PREFIX.idx   b"MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code | u64 sequences n
                 | u64 boundaries m | int32 sizes[n] in tokens | int64 pointers[n] in bytes
                 | int64 document_index[m] (0 ... n)
    PREFIX.bin   the tokens of all sequences, one after the other

All numbers are little endian. Source: megatron-core 0.16.1,
megatron/core/datasets/indexed_dataset.py, whose IndexedDatasetBuilder writes the same bytes.

What Megatron-LM wrote until 2023 with --dataset-impl lazy or cached is read too:

    PREFIX.idx   b"TNTIDX\\0\\0" | u64 version = 1 | u64 dtype code | u64 bytes of a token
                 | u64 sequences n | u64 dimensions d | u64 boundaries m
                 | int64 dimension_offsets[n + 1] | int64 data_offsets[n + 1] in tokens
                 | int64 sizes[d] | int64 document_index[m]

Source: Megatron-LM v2.0, megatron/data/indexed_dataset.py.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import struct
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.dataset.token_files import (
    CHUNK,
    Column,
    TokenFiles,
    TokenWriter,
    content_key,
    map_file,
    running_sums,
    spread,
    with_extension,
)
from common.errors import DataError
from common.files import atomic_write, open_input, reading
from common.paths import looked_in

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPES.items()}
OLD_MAGIC = b"TNTIDX\x00\x00"
OLD_HEADER = struct.Struct("<8sQQQQQQ")
_COPIED_AT_ONCE = 16 << 20
_ENDING = re.compile(r"(_text)?((_document|_sentence)s?)?$")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's token type: uint16 for vocabularies below 65,500 entries, else int32.

    Source: ``DType.optimal_dtype``.
    """
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def strip_extension(prefix: str | Path) -> Path:
    """Return the prefix of a pair, given with or without ``.bin`` or ``.idx``."""
    path = Path(prefix)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


class IndexedDataset(TokenFiles):
    """A pair opened for reading.

    prefix: path without extension (``.bin``/``.idx`` are accepted and cut off).
    sizes: (sequences,) tokens of each. offsets: (sequences,) place of each in the .bin, in
    ``unit`` bytes. document_index: (documents + 1,) sequences before each.
    Of an index of more than a million entries, parts are read, whatever its size. Training needs
    no others: a split is what lies between two places of the .bin.
    Raises DataError when a file is missing, is not of this format, or the two files contradict each
    other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = strip_extension(prefix)
        self.bin_path = with_extension(self.prefix, ".bin")
        self.idx_path = with_extension(self.prefix, ".idx")
        with reading(self.prefix, DataError):
            require_pair(self.prefix)
        header = self._read_index()
        index, n = self.document_index, len(self.sizes)
        found = [*index[:1].tolist(), *index[-1:].tolist()]
        if len(index) < 2 or found != [0, n]:
            ends = " ... ".join(map(str, found)) or "nothing"
            raise DataError(
                f"{self.idx_path}: the document index must run from 0 to the {n} sequences, found {ends} ({len(index)}"
                " entries); end each document when writing (Megatron: end_document), or preprocess again"
            )
        total = self._place(n - 1) + int(self.sizes[-1:][0])
        size, wanted = self.bin_path.stat().st_size, total * self.dtype.itemsize
        if size != wanted:
            word = "smaller (cut short?)" if size < wanted else "larger"
            raise DataError(
                f"{self.bin_path}: is {word} than {self.idx_path.name} says: {size} bytes found,"
                f" {wanted} expected ({total} tokens of {self.dtype.name}); the two files do not"
                " belong together, copy or preprocess both again"
            )
        self.document_count = len(index) - 1
        self.check(spread)
        self.tokens = map_file(self.bin_path).view(self.dtype)
        self.content_key = content_key(self.tokens, np.frombuffer(header, np.uint8), self.sizes, self.document_index)

    def __len__(self) -> int:
        """Return the number of sequences: documents, or sentences in a ``_sentence`` pair."""
        return len(self.sizes)

    def tokens_before(self, document: int) -> int:
        self._check_documents(max(0, document - 1), document + 2)
        (sequence,) = self.document_index[document : document + 1].tolist()
        self._check_sequences(max(0, sequence - 1), sequence + 1)
        return self.token_count if sequence == len(self.sizes) else self._place(sequence)

    def _place(self, sequence: int) -> int:
        """Return the number of tokens before a sequence."""
        return int(self.offsets[sequence : sequence + 1][0]) * self.unit // self.dtype.itemsize

    def check(self, parts_of: Callable[[int], list[slice]]) -> None:
        """Raise DataError unless sequences and documents lie one after the other, in these parts of an index."""
        for part in parts_of(len(self.sizes)):
            self._check_sequences(part.start, part.stop)
        for part in parts_of(len(self.document_index)):
            self._check_documents(part.start, part.stop)

    def _check_sequences(self, start: int, stop: int) -> None:
        """Check that each of these sequences begins where the one before it ends."""
        first = max(0, start - 1)
        sizes = self.sizes[first:stop].astype(np.int64)
        begins = self.offsets[first:stop]
        wrong = (sizes < 0) | (sizes > 2**31 - 1)  # 32 bits in the present format
        wrong[1:] |= np.diff(begins) * self.unit != sizes[:-1] * self.dtype.itemsize
        if first == 0 and len(begins):
            wrong[0] |= begins[0] != 0
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{self.idx_path}: is damaged: sequence {first + at} of {int(sizes[at])} tokens is at byte"
                f" {int(begins[at]) * self.unit}, not where the one before it ends; copy or preprocess it again"
            )

    def _check_documents(self, start: int, stop: int) -> None:
        falls = np.diff(self.document_index[start : stop + 1]) < 0
        if falls.any():
            at = start + int(np.argmax(falls)) + 1
            raise DataError(
                f"{self.idx_path}: is damaged: document {at} begins before the one before it; copy"
                " or preprocess it again"
            )

    def _read_index(self) -> bytes:
        """Find the columns of the .idx. Returns its header.

        Raises DataError unless header and length of the file fit together.
        """
        path = self.idx_path
        with open_input(path, DataError) as opened:
            number = os.dup(opened.fileno())
            file = open(number, "rb", closefd=False)  # noqa: SIM115
            weakref.finalize(file, os.close, number)
        size, start = path.stat().st_size, os.pread(number, OLD_HEADER.size, 0)
        is_old = start.startswith(OLD_MAGIC)
        header = OLD_HEADER.size if is_old else HEADER.size
        if len(start) < header or not (is_old or start.startswith(MAGIC)):
            raise DataError(
                f"{path}: is not a whole index of Megatron's .bin/.idx format, which begins with {MAGIC!r}: it has"
                f" {size} bytes, and begins with {start[:9]!r}; copy or preprocess it again"
            )
        start, width = start[:header], 1
        if is_old:
            _, version, code, width, n, dimensions, m = OLD_HEADER.unpack(start)
        else:
            _, version, code, n, m = HEADER.unpack(start)
        if version != VERSION or code not in DTYPES or (is_old and (width, dimensions) != (DTYPES[code].itemsize, n)):
            known = ", ".join(f"{number} {dtype.name}" for number, dtype in DTYPES.items())
            more = f", {width} bytes a token and {dimensions} dimensions for {n} sequences" if is_old else ""
            raise DataError(
                f"{path}: has format version {version}, dtype code {code}{more}; expected version {VERSION} and an"
                f" integer type ({known}) of one dimension; preprocess again with this toolkit"
            )
        if n == 0:
            raise DataError(f"{path}: holds no sequences; preprocess a corpus that has text")
        self.dtype, self.unit = DTYPES[code], width
        boundaries = header + (8 * (3 * n + 2) if is_old else 12 * n)
        if size != (expected := boundaries + 8 * m):
            word = "ends early" if size < expected else "is too long"
            raise DataError(
                f"{path}: {word}: {size} bytes found, {expected} expected for the {n} sequences"
                f" and {m} document boundaries in its header; copy or preprocess it again"
            )
        self.sizes = Column(file, "<i8" if is_old else "<i4", n, header + 16 * (n + 1) if is_old else header)
        self.offsets = Column(file, "<i8", n, header + (8 * (n + 1) if is_old else 4 * n))
        self.document_index = Column(file, "<i8", m, boundaries)
        return start


class IndexedWriter(TokenWriter):
    """Writer of a pair, whose final names appear only when it is complete.

    prefix: path without extension; its folder is created if absent. dtype: see ``token_dtype``.
    """

    def _tokens_file(self) -> AbstractContextManager[IO[bytes]]:
        return atomic_write(with_extension(self.prefix, ".bin"))

    def append_pair(self, data: IndexedDataset) -> None:
        """Append the documents of another pair of this dtype, in constant memory."""
        with data.bin_path.open("rb") as source:
            shutil.copyfileobj(source, self._file, _COPIED_AT_ONCE)
        for start in range(0, len(data), CHUNK):
            self._sizes.write(data.sizes[start : start + CHUNK].astype("<i4").tobytes())
        for start in range(0, data.document_count, CHUNK):
            counts = np.diff(data.document_index[start : start + CHUNK + 1])
            self._documents.write(counts.astype("<i4").tobytes())
        self.token_count += data.token_count
        self.sequence_count += len(data)
        self.document_count += data.document_count

    def _publish(self) -> None:
        self._close(".idx")
        with atomic_write(with_extension(self.prefix, ".idx")) as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequence_count, self.document_count + 1))
            for sizes, _ in running_sums(self._sizes):
                file.write(sizes.tobytes())
            for sizes, ends in running_sums(self._sizes):
                file.write(((ends - sizes) * self.dtype.itemsize).astype("<i8").tobytes())
            file.write(np.zeros(1, dtype="<i8").tobytes())
            for _, ends in running_sums(self._documents):
                file.write(ends.astype("<i8").tobytes())


def require_pair(prefix: str | Path) -> None:
    """Raise DataError unless both files of a pair are there and can be read.

    The message has similar names that are on disk.
    """
    prefix = strip_extension(prefix)
    for path in (with_extension(prefix, ".idx"), with_extension(prefix, ".bin")):
        if path.exists():
            open_input(path, DataError).close()
            continue
        text = f"{path}: not found{looked_in(path)}"
        if not prefix.parent.is_dir():
            raise DataError(
                f"{text}: the folder {prefix.parent} does not exist; give the prefix that preprocess_data.py wrote"
            )
        other = with_extension(prefix, ".idx" if path.suffix == ".bin" else ".bin")
        if other.is_file():
            raise DataError(
                f"{text}, although {other.name} is there; the pair belongs together, copy or preprocess both again"
            )
        pairs = (strip_extension(entry) for entry in prefix.parent.glob("*.idx"))
        names = sorted(pair.name for pair in pairs if with_extension(pair, ".bin").is_file())
        # without what all names end with, which makes any two of them alike
        asked, *stems = (_ENDING.sub("", name) for name in (prefix.name, *names))
        near = difflib.get_close_matches(asked, stems, n=3, cutoff=0.75)
        choices = [name for name in names if _ENDING.sub("", name) in near or name.startswith(f"{asked}_")]
        if choices:
            raise DataError(f"{text}; did you mean {' or '.join(str(prefix.parent / name) for name in choices)}?")
        raise DataError(
            f"{text}, and {prefix.parent} holds {', '.join(names[:5]) or 'no .bin/.idx pair'}; write"
            " one with tools/preprocess_data.py, or give data.train"
        )

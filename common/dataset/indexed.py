"""Megatron's .bin/.idx pair, read by memory map and checked when it is opened.

    PREFIX.idx   b"MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code | u64 sequences n | u64 boundaries m
                 | int32 sizes[n] in tokens | int64 pointers[n] in bytes | int64 document_index[m] (0 ... n)
    PREFIX.bin   the tokens of all sequences, one after the other

All numbers are little endian. Source: megatron-core 0.16.1, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import difflib
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.dataset.metadata import METADATA_EXTENSION, Metadata, read_metadata
from common.errors import DataError
from common.files import open_input, reading
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
_FAIRSEQ_MAGIC = b"TNTIDX\x00\x00"
_SUFFIXES = ("_document", "_sentence")
_CHUNK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 for vocabularies below 65,500 entries, else int32: Megatron's rule (``DType.optimal_dtype``)."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def strip_extension(prefix: str | Path) -> Path:
    """The prefix of a pair, given with or without ``.bin`` or ``.idx``."""
    path = Path(prefix)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def with_extension(prefix: Path, extension: str) -> Path:
    """``prefix`` + ``extension``; dots inside the prefix are part of the name (``with_suffix`` would cut them)."""
    return prefix.with_name(prefix.name + extension)


@dataclass(frozen=True, kw_only=True)
class _Header:
    dtype: np.dtype[Any]
    sequences: int
    boundaries: int


class IndexedDataset:
    """A pair opened for reading; nothing is copied but one offset per document.

    prefix: path without extension (``.bin``/``.idx`` are accepted and cut off).
    Raises DataError when a file is missing, is not of this format, or the two files contradict each other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = strip_extension(prefix)
        self.bin_path = with_extension(self.prefix, ".bin")
        self.idx_path = with_extension(self.prefix, ".idx")
        with reading(self.prefix, DataError):
            require_pair(self.prefix)
            header = _read_header(self.idx_path)
            index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        self.dtype = header.dtype
        n, m = header.sequences, header.boundaries
        at = HEADER.size
        self.sizes: npt.NDArray[np.int32] = np.frombuffer(index, "<i4", n, at)
        self._pointers: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", n, at + 4 * n)
        self.document_index: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", m, at + 12 * n)
        self.token_count = self._check_sequences()
        self._check_documents()
        self.tokens = self._map_tokens()
        self.content_key = self._content_key(index)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (str(self.prefix),)

    def __len__(self) -> int:
        """The number of sequences: documents, or sentences in a ``_sentence`` pair."""
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """The tokens of one sequence, a view of shape (sizes[sequence],)."""
        start = int(self._pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[sequence])]

    @property
    def document_count(self) -> int:
        return len(self.document_index) - 1

    def metadata(self) -> Metadata | None:
        """What made the pair, or None when nothing says so. Raises DataError when it describes another pair."""
        path = with_extension(self.prefix, METADATA_EXTENSION)
        metadata = read_metadata(path)
        if metadata is not None and metadata.tokens != self.token_count:
            raise DataError(
                f"{path}: describes {metadata.tokens} tokens, but {self.bin_path.name} holds {self.token_count}; "
                "it was left by another run, delete it or preprocess again"
            )
        return metadata

    def document_offsets(self) -> npt.NDArray[np.int64]:
        """(documents + 1,) int64: document d is ``tokens[offsets[d]:offsets[d + 1]]``."""
        offsets = np.full(len(self.document_index), self.token_count, dtype=np.int64)
        for start in range(0, len(offsets), _CHUNK):
            first = self.document_index[start : start + _CHUNK]
            inside = first < len(self.sizes)
            offsets[start : start + _CHUNK][inside] = self._pointers[first[inside]] // self.dtype.itemsize
        return offsets

    def _map_tokens(self) -> npt.NDArray[Any]:
        """A plain ndarray view: the memmap subclass makes every slice and gather several times slower."""
        if self.token_count == 0:
            return np.zeros(0, dtype=self.dtype)  # an empty file cannot be mapped
        return np.asarray(np.memmap(self.bin_path, dtype=self.dtype, mode="r", shape=(self.token_count,)))

    def _content_key(self, index: npt.NDArray[np.uint8]) -> str:
        """16 hex digits, equal for equal data and cheap: all of the .idx, the .bin's size and its two ends.

        The ends are in it because two vocabularies of one word per character give the same lengths for a text.
        """
        digest = hashlib.blake2b(digest_size=8)
        digest.update(index.data)
        digest.update(struct.pack("<Q", self.token_count * self.dtype.itemsize))
        digest.update(self.tokens[: 1 << 14].tobytes())
        digest.update(self.tokens[-(1 << 14) :].tobytes())
        return digest.hexdigest()

    def _check_sequences(self) -> int:
        """The token count, after the sizes, the pointers and the .bin's length have been found to agree."""
        total = 0
        for start in range(0, len(self.sizes), _CHUNK):
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            if int(sizes.min()) < 0:
                at = start + int(np.argmax(sizes < 0))
                raise DataError(f"{self.idx_path}: sequence {at} has the size {int(self.sizes[at])}; the file is corrupt, preprocess again")
            ends = np.cumsum(sizes) + total
            expected = (ends - sizes) * self.dtype.itemsize
            wrong = self._pointers[start : start + _CHUNK] != expected
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"{self.idx_path}: the pointer of sequence {start + at} is {int(self._pointers[start + at])}, but the sizes before it "
                    f"add up to {int(expected[at])} bytes; the file is corrupt, preprocess again"
                )
            total = int(ends[-1])
        found, wanted = self.bin_path.stat().st_size, total * self.dtype.itemsize
        if found != wanted:
            word = "smaller (cut short?)" if found < wanted else "larger"
            raise DataError(
                f"{self.bin_path}: is {word} than {self.idx_path.name} says: {found} bytes found, {wanted} expected "
                f"({total} tokens of {self.dtype.name}); the two files do not belong together, copy or preprocess both again"
            )
        return total

    def _check_documents(self) -> None:
        index, n = self.document_index, len(self.sizes)
        if len(index) < 2 or int(index[0]) != 0 or int(index[-1]) != n:
            ends = f"{int(index[0])} ... {int(index[-1])}" if len(index) else "nothing"
            raise DataError(
                f"{self.idx_path}: the document index must run from 0 to the {n} sequences, found {ends} ({len(index)} entries); "
                "end each document when writing (Megatron: end_document), or preprocess again"
            )
        for start in range(0, len(index) - 1, _CHUNK):
            falls = np.diff(index[start : start + _CHUNK + 1]) < 0
            if falls.any():
                at = start + int(np.argmax(falls))
                raise DataError(
                    f"{self.idx_path}: the document index falls from {int(index[at])} to {int(index[at + 1])} at entry {at + 1}; "
                    "the file is corrupt, preprocess again"
                )


def _read_header(path: Path) -> _Header:
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if raw.startswith(_FAIRSEQ_MAGIC):
        raise DataError(f"{path}: is a 'lazy' or 'cached' index (magic TNTIDX), expected 'mmap' (magic MMIDIDX); preprocess again as mmap")
    if not raw.startswith(MAGIC[: len(raw)]) or not raw:
        raise DataError(f"{path}: starts with {raw[:9]!r}, expected {MAGIC!r}; this is not an index of Megatron's .bin/.idx format")
    if len(raw) < HEADER.size:
        raise DataError(f"{path}: ends after {size} bytes, inside its header of {HEADER.size}; copy or preprocess it again")
    _, version, code, sequences, boundaries = HEADER.unpack(raw)
    if version != VERSION:
        raise DataError(f"{path}: has format version {version}, expected {VERSION}; preprocess again with this toolkit")
    if code not in DTYPES:
        known = ", ".join(f"{number} {dtype.name}" for number, dtype in DTYPES.items())
        raise DataError(f"{path}: has dtype code {code}, expected an integer type ({known}); tokens are integers, is this a token file?")
    if sequences == 0:
        raise DataError(f"{path}: holds no sequences; preprocess a corpus that has text")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        word = "ends early" if size < expected else "is too long"
        raise DataError(
            f"{path}: {word}: {size} bytes found, {expected} expected for the {sequences} sequences and {boundaries} document "
            "boundaries in its header; copy or preprocess it again"
        )
    return _Header(dtype=DTYPES[code], sequences=sequences, boundaries=boundaries)


def require_pair(prefix: str | Path) -> None:
    """Raise DataError unless both files of a pair are there and can be read."""
    prefix = strip_extension(prefix)
    for path in (with_extension(prefix, ".idx"), with_extension(prefix, ".bin")):
        if not path.exists():
            raise DataError(_missing(prefix, path))
        open_input(path, DataError).close()


def _missing(prefix: Path, path: Path) -> str:
    """The message for a missing file, with the names on disk that the user may have meant."""
    text = f"{path}: not found{looked_in(path)}"
    if not prefix.parent.is_dir():
        return f"{text}: the folder {prefix.parent} does not exist; give the prefix that preprocess_data.py wrote"
    other = with_extension(prefix, ".idx" if path.suffix == ".bin" else ".bin")
    if other.is_file():
        return f"{text}, although {other.name} is there; the pair belongs together, copy or preprocess both again"
    pairs = (strip_extension(entry) for entry in prefix.parent.glob("*.idx"))
    names = sorted(pair.name for pair in pairs if with_extension(pair, ".bin").is_file())
    base = prefix.name
    for suffix in _SUFFIXES:
        base = base.removesuffix(suffix)
    related = [name for name in names if name.startswith(base) and name.endswith(_SUFFIXES)]
    choices = related or difflib.get_close_matches(prefix.name, names, n=3) or names[:5]
    if choices:
        return f"{text}; did you mean {' or '.join(str(prefix.parent / name) for name in choices)}?"
    return f"{text}, and {prefix.parent} holds no .bin/.idx pair; write one with tools/preprocess_data.py"

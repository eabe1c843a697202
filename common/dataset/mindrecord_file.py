"""One MindRecord file, read by memory map and without MindSpore. NAME holds the rows, NAME.db
(sqlite) says where they are.

NAME      u64 length
          | JSON header (header_size, page_size, version, schema, page, shard_addresses)
          | padding up to header_size
          | pages of page_size bytes: some hold arrays ("BLOB_DATA"), some numbers and strings
            ("RAW_DATA", not read here)
NAME.db   SHARD_NAME(NAME): the name of its file. INDEXES: ROW_ID, PAGE_ID_BLOB,
          PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END, ...
row       u64 length | the arrays of schema.blob_fields; several arrays have a big-endian u64
          length before each
integers  big-endian u32 count | 2 bits for each, highest first: log2 of its bytes
          | signed numbers of 1, 2, 4 or 8 bytes

Numbers are little endian unless stated. Source: files of MindSpore 2.10, and its
minddata/mindrecord (shard_header, shard_column).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.dataset.token_files import map_file, with_extension
from common.errors import DataError
from common.files import open_input, reading
from common.structured_files import MAX_JSON_BYTES, parse_json

COLUMN = "input_ids"
MASKS = ("attention_mask", "input_mask")
"""Columns that MindFormers reads beside it: 0 where a row is padded."""
_LOOKED_AT = 1024
"""Rows whose masks are looked at when a file is opened."""
INDEX_EXTENSION = ".db"
VERSION = "3.0"
# Tokens decoded in one round: the position arrays then stay in the processor's cache.
_ROUND = 1 << 16
_CODES = ((np.arange(256)[:, None] >> np.array([6, 4, 2, 0])) & 3).astype(np.int8)
# A number of 1, 2 or 4 bytes is cut out of the four bytes that start with it, with its sign.
_SHIFTS = np.array([24, 16, 0, 0], dtype=np.int32)
_RENEW = "copy the file again, or write it again"

Ids = npt.NDArray[np.int64]


class Header(NamedTuple):
    """Header of a MindRecord file.

    fields: the arrays of a row, in order. masks: those that are masks. type: of ``input_ids``. end:
    bytes that the pages need. shards: all files of the set.
    """

    header_size: int
    page_size: int
    fields: tuple[str, ...]
    masks: tuple[str, ...]
    type: str
    rows: int
    end: int
    shards: tuple[str, ...]


class MindRecordFile:
    """Rows of ``input_ids``. Memory: 16 bytes a row.

    padded: accept rows whose mask has a 0. Raises DataError if the file or its index is missing or damaged, if the
    index belongs to another file, if there is no such column of integers, or for a padded row.
    """

    def __init__(self, path: str | Path, *, padded: bool = False) -> None:
        self.path, self._padded = Path(path), padded
        index = with_extension(self.path, INDEX_EXTENSION)
        with reading(self.path, DataError):
            if self.path.exists() and not index.exists():
                raise DataError(
                    f"{index}: not found, although {self.path.name} is there; a MindRecord is two"
                    " files that belong together, copy both"
                )
        self.header = read_header(self.path)
        self._bytes = map_file(self.path)
        if len(self._bytes) < self.header.end:
            raise DataError(
                f"{self.path}: is cut short: {len(self._bytes)} bytes found, its pages end at"
                f" {self.header.end}; {_RENEW}"
            )
        open_input(index, DataError).close()
        self._begin, self._end = self._read_index(index)
        self.width = 0
        """Tokens of a row; 0 without rows."""
        if len(self):
            zero = np.array([0])
            data, at, size = self._rows(zero)
            counts = _numbers(data, at, 4, big=True)
            self._require(counts < size, zero)
            self.width = int(counts[0])
            self.read(np.array([0, len(self) - 1]))
            places = np.linspace(0, len(self) - 1, min(len(self), _LOOKED_AT))
            self._require_whole(np.unique(places.astype(np.int64)))
        # 16 hex digits, equal for equal data; to be cheap, of the places of the rows and both ends of the data
        digest = hashlib.blake2b(repr((self.header.fields, self.header.type)).encode(), digest_size=8)
        for part in (self._begin, self._end):
            digest.update(part.data)
        if len(self):
            first, last = int(self._begin[0]), int(self._end[-1])
            digest.update(self._bytes[first : first + (1 << 14)].tobytes())
            digest.update(self._bytes[max(0, last - (1 << 14)) : last].tobytes())
        self.content_key = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._begin)

    def read(self, rows: Ids) -> npt.NDArray[np.int32]:
        """Return the tokens (n, width) of rows (n,). Raises DataError for a row that is damaged or of another width."""
        out = np.empty((len(rows), self.width), dtype=np.int32)
        self._require_whole(rows)
        step = max(1, _ROUND // max(1, self.width))
        for start in range(0, len(rows), step):
            out[start : start + step] = self._decode(rows[start : start + step])
        return out

    def _decode(self, rows: Ids) -> npt.NDArray[np.int32]:
        data, at, size = self._rows(rows)
        counts, at = _numbers(data, at, 4, big=True), at + 4
        self._require(
            counts == self.width,
            rows,
            lambda n: f"has {counts[n]} tokens, the first row {self.width}; all need as many",
        )
        codes_size = (self.width + 3) // 4
        self._require(size - 4 >= codes_size, rows)
        codes = _CODES[data[at[:, None] + np.arange(codes_size)]].reshape(len(rows), -1)[:, : self.width]
        sizes = np.left_shift(1, codes, dtype=np.int64)
        ends = np.cumsum(sizes, axis=1)
        self._require(ends[:, -1] + codes_size + 4 == size, rows)
        self._require((codes < 3).all(axis=1), rows, lambda n: "holds a number beyond 32 bits, expected token ids")
        # a view of any four adjacent bytes as a number, because numbers are not aligned
        words: npt.NDArray[np.int32] = np.ndarray((len(data) - 3,), dtype="<i4", buffer=data.data, strides=(1,))
        shifts = _SHIFTS[codes]
        tokens: npt.NDArray[np.int32] = words[(at + codes_size)[:, None] + ends - sizes] << shifts >> shifts
        return tokens

    def _require_whole(self, rows: Ids) -> None:
        """Raise DataError for a row with a 0 in a mask, unless padded rows are accepted."""
        for mask in () if self._padded else self.header.masks:
            data, at, size = self._rows(rows, mask)
            for row, first, length in zip(rows.tolist(), at.tolist(), size.tolist(), strict=True):
                count = int.from_bytes(data[first : first + 4].tobytes(), "big")
                numbers = data[first + length - count : first + length]  # a byte each
                if count + 4 + (count + 3) // 4 == length and not numbers.all():
                    raise DataError(
                        f"{self.path}: row {row} is padded: its {mask} has a 0, and the loss would count the padding;"
                        " write full rows, or, if the padding is the end-of-text token, set data.eod_mask_loss=targets"
                    )

    def _rows(self, rows: Ids, column: str = COLUMN) -> tuple[npt.NDArray[np.uint8], Ids, Ids]:
        """Return the bytes of rows in sequence, and where an array of theirs begins in them (n,),
        and its bytes (n,).
        """
        begin, end = self._begin[rows], self._end[rows]
        parts = [self._bytes[first:last] for first, last in zip(begin.tolist(), end.tolist(), strict=True)]
        data = np.concatenate([*parts, np.zeros(8, dtype=np.uint8)])
        lengths = end - begin
        stop = np.cumsum(lengths)
        at = stop - lengths
        self._require(_numbers(data, at, 8, big=False) == lengths - 8, rows)
        at, size = at + 8, lengths - 8
        if len(self.header.fields) > 1:
            for field in self.header.fields:
                size = _numbers(data, at, 8, big=True)
                self._require((size >= 0) & (size <= stop - at - 8), rows)
                at = at + 8
                if field == column:
                    break
                at = np.minimum(at + size, stop - 8)
        return data, at, size

    def _require(
        self, good: npt.NDArray[np.bool_], rows: Ids, problem: Callable[[int], str] = lambda n: "is damaged"
    ) -> None:
        if not good.all():
            n = int(np.argmin(good))
            raise DataError(f"{self.path}: row {int(rows[n])} {problem(n)}; {_RENEW}, with its {INDEX_EXTENSION} file")

    def _read_index(self, path: Path) -> tuple[Ids, Ids]:
        """Return where each row (rows,) begins and ends in the file."""
        query = "SELECT PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY ROW_ID"
        try:
            # immutable: no lock files, which a read-only disk would refuse
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
                if connection.execute("SELECT 1 FROM sqlite_master WHERE type='view'").fetchone():
                    raise ValueError("it has views, whose rows may have no end")
                names = [name for (name,) in connection.execute("SELECT NAME FROM SHARD_NAME")]
                places: Any = np.fromiter(connection.execute(query), dtype=np.dtype((np.int64, 3)))
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{path}: is not the index of a MindRecord ({error}); {_RENEW}") from None
        if self.path.name not in names:
            raise DataError(
                f"{path}: is the index of {names[0] if names else 'no file'}, not of {self.path.name}; put the right"
                " one beside it, or undo the renaming (MindSpore does not read a renamed MindRecord either)"
            )
        header = self.header
        start = header.header_size + places[:, 0] * header.page_size
        begin, end = start + places[:, 1], start + places[:, 2]
        wrong = (begin < header.header_size) | (end > header.end) | (end - begin < 8)
        if len(places) != header.rows or wrong.any():
            raise DataError(
                f"{path}: does not name the {header.rows} rows of {self.path.name}; the two do not"
                " belong together, copy both again"
            )
        return begin, end


def looks_like_mindrecord(path: Path) -> bool:
    """Return whether a file begins like a MindRecord. Use it when the name does not tell."""
    with reading(path, DataError):
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _header_of(file) is not None


def _header_of(file: IO[bytes]) -> bytes | None:
    """Return the JSON at the beginning of a MindRecord, None for other files."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if 0 < length <= MAX_JSON_BYTES else b""
    return text if text.startswith(b'{"') else None


def read_header(path: Path) -> Header:
    """Return the header. Raises DataError unless the file is a MindRecord with integer arrays ``input_ids``."""
    with open_input(path, DataError) as file, reading(path, DataError):
        text = _header_of(file)
    try:
        if text is None:
            raise ValueError("no length with JSON behind it at the beginning")
        raw = parse_json(text)
        schema, pages = raw["schema"][0], raw["page"] or []
        columns, fields = schema["schema"], tuple(schema["blob_fields"])
        kinds = {name: column["type"] for name, column in columns.items()}
        header_size, page_size = (int(np.int64(raw[name])) for name in ("header_size", "page_size"))
        header = Header(
            header_size=header_size,
            page_size=page_size,
            fields=fields,
            masks=tuple(name for name in MASKS if name in fields and kinds[name] in ("int32", "int64")),
            type=str(kinds.get(COLUMN)),
            rows=max((int(page["end_row_id"]) for page in pages if page["page_type"] == "BLOB_DATA"), default=0),
            end=max((header_size + page["page_id"] * page_size + page["page_size"] for page in pages), default=0),
            shards=tuple(path.with_name(Path(name).name).name for name in raw["shard_addresses"]),
        )
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path}: is not a MindRecord file, or an encrypted one: its header is not a MindRecord's"
            f" ({type(error).__name__}: {error}); copy it again, or write it without encryption"
        ) from None
    if raw.get("version") != VERSION:
        raise DataError(
            f"{path}: has format version {raw.get('version')}, expected {VERSION}; write it again"
            " with a newer MindSpore"
        )
    if COLUMN not in fields or header.type not in ("int32", "int64"):
        held = ", ".join(f"{name} of {kind}" for name, kind in sorted(kinds.items()))
        raise DataError(
            f"{path}: has no array {COLUMN!r} of int32 or int64, only {held}; write the token ids"
            f' as {COLUMN}: {{"type": "int32", "shape": [-1]}}'
        )
    return header


def _numbers(data: npt.NDArray[np.uint8], at: Ids, size: int, *, big: bool) -> Ids:
    """Return unsigned numbers (n,) of ``size`` bytes at the places ``at``. Values beyond int64 turn negative."""
    picked = np.ascontiguousarray(data[at[:, None] + np.arange(size)])
    return picked.view(f"{'>' if big else '<'}u{size}")[:, 0].astype(np.int64)

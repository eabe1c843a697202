"""Whole data files, and readers of them that use no code of the project."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 9
"""Tokens of a MindRecord's row."""
TEXTS = (
    "hello there, the first document.",
    "the second\ndocument: caf\u00e9 \u4e2d\u6587 \U0001f600",
    "a third one 123",
    "x",
    "hell hello he" * 5,
)


def _blob(row: list[int]) -> bytes:
    """A count, two bits for each number that say how many bytes it has, and the numbers."""
    codes = [0 if -128 <= n < 128 else 1 if -(2**15) <= n < 2**15 else 2 for n in row]
    padded = codes + [0] * (-len(codes) % 4)
    packed = bytes(
        a << 6 | b << 4 | c << 2 | d for a, b, c, d in zip(*[iter(padded)] * 4, strict=True)
    )
    numbers = [
        n.to_bytes(2**code, "little", signed=True) for n, code in zip(row, codes, strict=True)
    ]
    blob = len(row).to_bytes(4, "big") + packed + b"".join(numbers)
    return len(blob).to_bytes(8, "little") + blob


def with_header(header: dict[str, Any] | str, pages: bytes, size: int = 2048) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode(
        errors="surrogatepass"
    )
    size = max(size, -(-(len(text) + 8) // 1024) * 1024)
    return (len(text).to_bytes(8, "little") + text).ljust(size, b"\0") + pages


def write_mindrecord(path: Path, rows: np.ndarray, page_size: int = 256) -> None:
    """Write as MindSpore's FileWriter does: rows in pages of blobs. The index says where
    they lie.
    """
    pages, places = [b""], []
    for blob in map(_blob, rows.tolist()):
        if len(pages[-1]) + len(blob) > page_size:
            pages.append(b"")
        places.append((len(pages) - 1, len(pages[-1]), len(pages[-1]) + len(blob)))
        pages[-1] += blob
    records, first = [], 0
    for n, content in enumerate(pages):
        end = first + sum(place[0] == n for place in places)
        records.append({"page_id": n, "page_size": len(content), "page_type": "BLOB_DATA",
                        "page_type_id": n, "shard_id": 0, "start_row_id": first,
                        "end_row_id": end, "row_group_ids": []})  # fmt: skip
        first = end
    schema = {"desc": "test", "schema": {"input_ids": {"type": "int32", "shape": [-1]}},
              "schema_id": 0, "blob_fields": ["input_ids"]}  # fmt: skip
    header = {"header_size": 4096, "page_size": page_size, "version": "3.0", "index_fields": [],
              "shard_addresses": [path.name], "shard_id": 0, "page": records, "schema": [schema],
              "statistics": [], "compression_size": 0}  # fmt: skip
    body = b"".join(content.ljust(page_size, b"\0") for content in pages)
    path.write_bytes(with_header(header, body, 4096))
    with closing(sqlite3.connect(f"{path}.db")) as database, database:
        database.execute("CREATE TABLE SHARD_NAME(NAME TEXT NOT NULL)")
        database.execute("INSERT INTO SHARD_NAME VALUES (?)", (path.name,))
        database.execute(
            "CREATE TABLE INDEXES(ROW_ID INT NOT NULL, PAGE_ID_RAW INT, PAGE_OFFSET_RAW INT,"
            " PAGE_OFFSET_RAW_END INT, ROW_GROUP_ID INT, PAGE_ID_BLOB INT, PAGE_OFFSET_BLOB INT,"
            " PAGE_OFFSET_BLOB_END INT, PRIMARY KEY(ROW_ID))"
        )
        statement = "INSERT INTO INDEXES VALUES (?,0,0,0,0,?,?,?)"
        database.executemany(statement, [(n, *place) for n, place in enumerate(places)])


def read_rows(path: Path) -> list[list[int]]:
    """Decode every row as the format says, a number at a time."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    query = (
        "SELECT PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY ROW_ID"
    )
    address = f"{path.with_name(path.name + '.db').as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True)) as database:
        places = database.execute(query).fetchmany(1000)
    rows = []
    for page, first, end in places:
        start = int(header["header_size"]) + page * int(header["page_size"])
        blob = data[start + first : start + end]
        assert int.from_bytes(blob[:8], "little") == len(blob) - 8
        count = int.from_bytes(blob[8:12], "big")
        at, row = 12 + (count + 3) // 4, []
        for n in range(count):
            size = 1 << (blob[12 + n // 4] >> (6 - 2 * (n % 4)) & 3)
            row.append(int.from_bytes(blob[at : at + size], "little", signed=True))
            at += size
        assert at == len(blob)
        rows.append(row)
    return rows


def read_pair(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """Read sequences and document bounds with only the struct module."""
    index = prefix.with_suffix(".idx").read_bytes()
    magic, version, code, count, bounds = struct.unpack_from("<9sQBQQ", index)
    assert magic == b"MMIDIDX\0\0" and version == 1
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    sizes = struct.unpack_from(f"<{count}i", index, 34)
    pointers = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    documents = struct.unpack_from(f"<{bounds}q", index, 34 + 12 * count)
    tokens = prefix.with_suffix(".bin").read_bytes()
    places = zip(sizes, pointers, strict=True)
    return [list(struct.unpack_from(f"<{n}{letter}", tokens, at)) for n, at in places], [*documents]


def bare(text: str) -> str:
    return "".join(text.replace("<|endoftext|>", "").replace("\ufeff", "").split())


def expected_text(data: bytes, name: str) -> str | None:
    """Return the text of a corpus, None where its name says another form than its content."""
    text = data.decode("utf-8")
    start = text.lstrip("\ufeff \t\r\n")[:1]
    try:
        if name == "corpus.txt":
            return None if start in ("{", "[") else text
        if start != ("[" if name == "corpus.json" else "{"):
            return None
        lines = [text] if name == "corpus.json" else [s for s in text.split("\n") if s.strip()]
        items = [json.loads(line) for line in lines]
        items = items[0] if name == "corpus.json" else items
        text = "".join(item if isinstance(item, str) else item["text"] for item in items)
        # half a character has no UTF-8, and becomes the sign for that
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None

"""Whole data files, and readers of them that use no code of the project."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np

WIDTH = 9
"""Tokens of a MindRecord's row."""


SCHEMA = {"input_ids": {"type": "int32", "shape": [-1]}}


def write_mindrecord(
    path: Path, rows: np.ndarray, page_size: int = 256, header_size: int = 1024
) -> None:
    """Write as MindSpore's FileWriter does: rows in pages of blobs. The index says where
    they lie.
    """
    pages, places, page = [b""], [], 0
    for row in rows.tolist():
        codes, numbers = [], b""
        for token in row:
            code = next(
                code
                for code in range(3)
                if -(2 ** (8 * 2**code - 1)) <= token < 2 ** (8 * 2**code - 1)
            )
            codes.append(code)
            numbers += token.to_bytes(2**code, "little", signed=True)
        codes += [0] * (-len(codes) % 4)
        packed = bytes(
            codes[n] << 6 | codes[n + 1] << 4 | codes[n + 2] << 2 | codes[n + 3]
            for n in range(0, len(codes), 4)
        )
        blob = len(row).to_bytes(4, "big") + packed + numbers
        blob = len(blob).to_bytes(8, "little") + blob
        if len(pages[page]) + len(blob) > page_size:
            pages.append(b"")
            page += 1
        places.append((page, len(pages[page]), len(pages[page]) + len(blob)))
        pages[page] += blob
    first = 0
    records = []
    for number, content in enumerate(pages):
        count = sum(place[0] == number for place in places)
        records.append({
            "page_id": number, "page_size": len(content), "page_type": "BLOB_DATA",
            "page_type_id": number, "shard_id": 0,
            "start_row_id": first,
            "end_row_id": first + count, "row_group_ids": [],
        })  # fmt: skip
        first += count
    header = {
        "header_size": header_size, "page_size": page_size, "version": "3.0", "index_fields": [],
        "shard_addresses": [path.name],
        "shard_id": 0, "page": records,
        "schema": [{"desc": "test", "schema": SCHEMA, "schema_id": 0,
        "blob_fields": ["input_ids"]}], "statistics": [],
        "compression_size": 0,
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little") + text
    header_size = max(header_size, -(-len(start) // 1024) * 1024)
    if header_size != header["header_size"]:
        write_mindrecord(path, rows, page_size, header_size)
        return
    path.write_bytes(
        start.ljust(header_size, b"\0")
        + b"".join(content.ljust(page_size, b"\0") for content in pages)
    )
    with closing(sqlite3.connect(path.with_name(path.name + ".db"))) as database, database:
        database.execute("CREATE TABLE SHARD_NAME(NAME TEXT NOT NULL)")
        database.execute("INSERT INTO SHARD_NAME VALUES (?)", (path.name,))
        database.execute(
            "CREATE TABLE INDEXES(ROW_ID INT NOT NULL, PAGE_ID_RAW INT, PAGE_OFFSET_RAW INT,"
            " PAGE_OFFSET_RAW_END INT, ROW_GROUP_ID INT, PAGE_ID_BLOB INT, PAGE_OFFSET_BLOB INT,"
            " PAGE_OFFSET_BLOB_END INT, PRIMARY KEY(ROW_ID))"
        )
        database.executemany(
            "INSERT INTO INDEXES VALUES (?,0,0,0,0,?,?,?)",
            [(n, *place) for n, place in enumerate(places)],
        )


def write_vocabulary(folder: Path) -> tuple[Path, Path]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + n) for n, byte in enumerate(hidden)
    }
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 t"]
    tokens = [
        *(table[byte] for byte in range(256)),
        *(merge.replace(" ", "") for merge in merges),
        "<|endoftext|>",
    ]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8"
    )
    return folder / "vocab.json", folder / "merges.txt"


TEXTS = [
    "hello there, the first document.",
    "the second\ndocument: caf\u00e9 \u4e2d\u6587 \U0001f600",
    "a third one 123",
    "x",
    "hell hello he" * 5,
]


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
    return [
        list(struct.unpack_from(f"<{size}{letter}", tokens, at))
        for size, at in zip(sizes, pointers, strict=True)
    ], list(documents)


def read_rows(path: Path) -> list[list[int]]:
    """Decode every row as the format says, a number at a time."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    with closing(
        sqlite3.connect(
            f"{path.with_name(path.name + '.db').as_uri()}?mode=ro&immutable=1", uri=True
        )
    ) as database:
        places = database.execute(
            "SELECT PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY"
            " ROW_ID"
        ).fetchmany(1000)
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


def bare(text: str) -> str:
    return "".join(text.replace("<|endoftext|>", "").replace("\ufeff", "").split())


def expected_text(data: bytes, name: str) -> str | None:
    text = data.decode("utf-8")
    try:
        if name == "corpus.txt":
            return None if text.lstrip("\ufeff \t\r\n")[:1] in ("{", "[") else text
        if text.lstrip("\ufeff \t\r\n")[:1] != ("[" if name == "corpus.json" else "{"):
            return None
        items = (
            json.loads(text)
            if name == "corpus.json"
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
        text = "".join(item if isinstance(item, str) else item["text"] for item in items)
        # half a character has no UTF-8, and becomes the sign for that
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None

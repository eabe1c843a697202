"""Readers of files that use no code of the project: struct, json, torch, protobuf by hand."""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


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


def read_corpus(data: bytes, name: str) -> str | None:
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


def read_torch(path: Path) -> Arrays:
    import torch

    def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
        if isinstance(tree, torch.Tensor):
            bits = tree.view(torch.uint16) if tree.dtype is torch.bfloat16 else tree.detach()
            yield prefix, bits.numpy()
        for key, value in tree.items() if isinstance(tree, dict) else ():
            yield from flat(value, f"{prefix}/{key}")

    with torch.serialization.safe_globals([argparse.Namespace]):  # which Megatron's files hold
        return dict(flat(torch.load(path, map_location="cpu", weights_only=True)))


def _protobuf(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7:  # of which value was the length
            assert key & 7 == 2 and at + value <= len(data)
            at, value = at + value, data[at : at + value]
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def read_mindspore(path: Path) -> Arrays:
    """Checkpoint: repeated value = 1 {tag = 1, tensor = 2 {dims = 1, type = 2, content = 3}}."""
    types = {b"Float32": "<f4", b"Float16": "<f2", b"Int32": "<i4", b"Int64": "<i8"}
    found: Arrays = {}
    for _, message in _protobuf(path.read_bytes()):
        record = dict(_protobuf(message))
        fields = list(_protobuf(record[2]))
        dims = [value for number, value in fields if number == 1 and value]
        name, words = record[1].decode(), dict(fields)
        array = np.frombuffer(words.get(3, b""), types[words[2]])
        array = np.concatenate([found[name].reshape(-1), array]) if name in found else array
        found[name] = array.reshape(dims if array.size == np.prod(dims) else -1)
    return found

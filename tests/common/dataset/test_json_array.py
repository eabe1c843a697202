"""The incremental JSON array reader gives what json.loads gives, at any chunk size, and places its
errors.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from common.dataset import json_array
from common.dataset.json_array import JsonArrayReader
from common.errors import DataError

ITEMS = st.lists(
    st.one_of(
        st.text(),
        st.dictionaries(st.text(), st.text(), max_size=3),
        st.lists(st.text(), max_size=3),
    ),
    max_size=8,
)


def read(text: str | bytes, chunk: int = 1 << 20) -> list[object]:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK_BYTES", chunk)
        return list(JsonArrayReader(io.BytesIO(data), Path("a.json")))


@settings(max_examples=150, deadline=None)
@given(
    items=ITEMS,
    chunk=st.integers(1, 40),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
)
def test_equals_json_loads(items, chunk, ascii_only, indent) -> None:
    assert read(json.dumps(items, ensure_ascii=ascii_only, indent=indent), chunk) == items


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["a"\n "b"]', "line 2, column 2: found '\"', expected ',' or ']'"),
        ('["a",\n]', r"line 2, column 1: .*Expecting value"),
        ('["a",\n  "b\nc"]', r"line 2, column 5: Invalid control character"),
        ('["a",\n  "bcd', r"line 2, column 3: .*cut short"),
        ('["a",\n', r"line 2, column 1: the file ends inside the array"),
        ('["a"', r"line 1, column 5: found the end of the file"),
        ('["a"]\n["b"]', r"line 2, column 1: found '\[' after the array's end"),
        ('{"a": 1}', r"line 1, column 1: found '\{', expected '\['"),
        ('["甲乙", "\\x"]', r"line 1, column \d+: Invalid \\escape"),
        (b'["ab",\n "\xe7\x94\xb2\xff"]', r"line 2, column 4: byte 12 is not UTF-8"),
        (b'["ab",\n "\xe7\x94', r"line 2, column 3: byte 9 is not UTF-8"),
    ],
)
def test_errors_are_placed(text, message, chunk) -> None:
    with pytest.raises(DataError, match=r"a\.json: " + message):
        read(text, chunk)


def test_line_and_column_of_an_item() -> None:
    reader = JsonArrayReader(io.BytesIO('\ufeff[\n "a",\n\n   {"b": 1}]'.encode()), Path("a.json"))
    assert [(item, reader.line, reader.column) for item in reader] == [
        ("a", 2, 2),
        ({"b": 1}, 4, 4),
    ]

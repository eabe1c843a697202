"""Items of an array are those of json.loads, whatever is read at once; an error names its item."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from common.dataset import json_array
from common.dataset.json_array import array_items
from common.errors import DataError

PATH = Path("a.json")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ITEMS = st.lists(
    st.one_of(TEXT, st.dictionaries(TEXT, TEXT, max_size=3), st.lists(TEXT, max_size=3)), max_size=8
)


@settings(max_examples=100, deadline=None)
@given(items=ITEMS, size=st.integers(1, 40), ascii_only=st.booleans(), indent=st.booleans())
def test_equals_json_loads(items, size, ascii_only, indent) -> None:
    text = json.dumps(items, ensure_ascii=ascii_only, indent=2 if indent else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_READ_BYTES", size)
        file = io.BytesIO(b"\xef\xbb\xbf" * (size > 3) + text.encode())
        assert list(array_items(file, PATH)) == list(enumerate(items, 1))


PARTS = [r"\ud83d\ude00", r"\ud83d", r"\uDC00", r"\\", r"\u0041", r"\n", "a", "漢", " , ] ", "[{"]
VALUES = st.sampled_from(["12e3", "-1.5", "true", "null", "-Infinity", '{"a": [1e5, "x"]}'])


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(VALUES | st.lists(st.sampled_from(PARTS)).map(lambda p: f'"{"".join(p)}"')),
    size=st.integers(1, 40),
)
def test_values_and_escapes_may_be_cut_anywhere(items, size) -> None:
    text = f"[{' ,'.join(items)}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_READ_BYTES", size)
        found = array_items(io.BytesIO(text.encode()), PATH)
        assert [item for _, item in found] == json.loads(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('["a"\n "b"]', "after 1 items: expected ',' or ']'"),
        ('["a",\n]', "after 1 items: Expecting value"),
        ('["a", "b\nc"]', "after 1 items: Invalid control character;"),
        ('["a", "bcd', "after 1 items: Unterminated string; .* if it was cut short"),
        ('["a"]\n["b"]', "after 1 items: the array has ended, and more text follows"),
        ('["a", ' + "[" * 200_000, "after 1 items: nested deeper than 64 levels"),
        ('["a", ' + "9" * 5000 + "]", "after 1 items: a number of more digits than Python"),
        ('{"a": 1}', "expected a JSON array"),
        (b'["ab",\n "\xe7\x94\xb2\xff"]', "byte 12 is not UTF-8 .*; give its --encoding"),
        ('["a", "' + "b" * 200_000 + '"]', r"item 2 has more than .* MiB, .*--max-document-mib"),
    ],
)
def test_an_error_names_its_item(
    data: str | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_READ_BYTES", 16)
    file = io.BytesIO(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(DataError, match=r"a\.json: .*" + message):
        list(array_items(file, PATH, 100_000))

"""Items of an array are those of json.loads, whatever is read at once; an error names its item."""

from __future__ import annotations

import io
import json
import sys
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


PARTS = [r"\ud83d\ude00", r"\ud83d", r"\uDC00", r"\\", r"\\\\ud83d", r"\u0041", r"\n", "a", "漢"]


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=30), size=st.integers(1, 40))
def test_half_of_a_pair_is_the_replacement_character(parts, size) -> None:
    text = f'"{"".join(parts)}"'
    whole = "".join("\ufffd" if "\ud800" <= c < "\ue000" else c for c in json.loads(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_READ_BYTES", size)
        found = array_items(io.BytesIO(f"[{text}, {text}]".encode()), PATH)
        assert [item for _, item in found] == [whole, whole]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('["a"\n "b"]', "after 1 items: .*I expect ',' or ']'"),
        ('["a",\n]', "after 1 items: parse error: unallowed token"),
        ('["a", "b\nc"]', "after 1 items: lexical error: invalid character inside string"),
        ('["a", "bcd', "after 1 items: parse error: premature EOF; .* if it was cut short"),
        ('["a"]\n["b"]', "after 1 items: parse error: trailing garbage"),
        ('{"a": 1}', "expected a JSON array"),
        (b'["ab",\n "\xe7\x94\xb2\xff"]', "after 1 items: .* UTF8 string.; give its --encoding"),
        ('["a", "' + "b" * 200 + '"]', r"item 2 has more than .* MiB, .*--max-document-mib"),
    ],
)
def test_an_error_names_its_item(
    data: str | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_READ_BYTES", 16)
    file = io.BytesIO(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(DataError, match=r"a\.json: .*" + message):
        list(array_items(file, PATH, 100))


@pytest.mark.parametrize("before", ["", r"\\", r"\"", "]]"])
def test_brackets_of_a_text_are_no_depth_and_those_of_items_are(before: str) -> None:
    text = f'["a{before}", "{before}{"[{" * 20_000}", {{"text": "{"[0,1)" * 20_000}"}}]'
    assert list(array_items(io.BytesIO(text.encode()), PATH)) == [*enumerate(json.loads(text), 1)]
    deep = f'["a{before}", {"[" * 70_000}'
    with pytest.raises(DataError, match=r"a\.json: item \d is nested too deeply"):
        list(array_items(io.BytesIO(deep.encode()), PATH))


def test_the_limit_of_digits_holds_between_the_items() -> None:
    before = sys.get_int_max_str_digits()
    items = array_items(io.BytesIO(f"[1{'0' * 9000}, 2]".encode()), PATH)
    assert next(items) == (1, 10**9000) and sys.get_int_max_str_digits() == before

"""The one reader of JSON and YAML: every malformed text is one exception, within a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, DataError
from common.structured_files import (
    MalformedError,
    parse_json,
    parse_json_item,
    read_json_mapping,
    read_text,
)
from common.yaml_files import dump_yaml, parse_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{below}'] * 20)}]}}\n"
    for below, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1', "line 1, column 8"),
        ('{"a": 1,\n "a": 2}', "'a' is given twice"),
        ("[" * 200_000, "nested too deep"),
        ("9" * 5000, "digits"),
        (b"\xff", "byte 0 is not UTF-8"),
        ('["\\uD800"]', "ud800 is half of a pair"),
        ("", "line 1, column 1"),
    ],
)
def test_malformed_json_is_one_exception(text: str | bytes, problem: str) -> None:
    with pytest.raises(MalformedError, match=problem):
        parse_json(text)
    if any(word in problem for word in ("column 8", "nested", "digits")):
        for read in (lambda text: parse_json(text, strict=False), parse_json_item):
            with pytest.raises(MalformedError):
                read(text)  # type: ignore[operator]


def test_json_within_the_limits() -> None:
    tree = {"a": [1, 2.5, None, True, "x"], "b": {}}
    assert parse_json('{"a": [1, 2.5, null, true, "x"], "b": {}}') == tree
    assert parse_json('["\\ud83d\\ude00"]') == ["😀"]
    assert parse_json('{"a": 1, "a": 2}', strict=False) == {"a": 2}
    assert parse_json_item('x {"a": 1}, rest', 2) == ({"a": 1}, 10)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((bomb, "more than 100,000 values") for bomb in (BOMB, MERGE_BOMB)),
        ('a: "\\U00110000"', r"not in range\(0x110000\)"),
        ('a: "\\UFFFFFFFF"', "too large to convert"),
        ("a: !!null 5", "'5' does not fit its tag !!null .line 1, column 4"),
        ("a: &a {<<: *a}", "nested too deep"),
        ("a: &a [1]\nb: {<<: *a}", r"<<: expected a mapping, or a list of them \(line 2"),
        ("a: {<<: {}, <<: {}}", "the key 'a.<<' is given twice"),
        ("a: &a 1\nb: &a 2", "an anchor is defined twice"),
        ("[" * 300 + "]" * 300, "nested deeper"),
        ("seed: !!python/object:os.system x", "python/object"),
        ("a: [1, 2", "line 1"),
        ("a: 1\n\tb: 2", "line 2"),
        ("a: " + "9" * 5000, "does not fit"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a" * (2**20 + 1), "longer than 1 MiB"),
        ("a: [{b: 1,\n b: 2}]",
            r"'a\.0\.b' is given twice \(first in line 1\); keep one \(line 2, column 2\)"),
    ],
)  # fmt: skip
def test_malformed_yaml_is_one_exception(text: str, problem: str) -> None:
    # torch and MindSpore let Python call itself deeper, for the whole process.
    limit = sys.getrecursionlimit()
    for each in (limit, 20_000):
        sys.setrecursionlimit(each)
        try:
            with pytest.raises(MalformedError, match=problem):
                parse_yaml(text)
        finally:
            sys.setrecursionlimit(limit)


def test_yaml_scalars_are_those_of_yaml_1_2_both_ways() -> None:
    text = "a: 6e-4\nb: yes\nc: ~\nd: true\ne: 010\nf: -.inf\ng: 2020-01-01\nh: &h [1]\ni: *h"
    values = {
        "a": 6e-4, "b": "yes", "c": None, "d": True, "e": 10, "f": float("-inf"),
        "g": "2020-01-01", "h": [1], "i": [1],
    }  # fmt: skip
    assert parse_yaml(text) == values
    assert parse_yaml(dump_yaml(values)) == values
    assert parse_yaml("") is None
    assert parse_yaml("1: a\ntrue: b\n~: c") == {"1": "a", "true": "b", "~": "c"}
    value = parse_yaml("a: &x {k: 1}\nb: *x")
    value["a"]["k"] = 2
    assert value == {"a": {"k": 2}, "b": {"k": 1}}, "an alias is a copy"


def test_files_that_cannot_be_read_are_the_callers_error(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    (tmp_path / "mark.json").write_bytes(b"\xef\xbb\xbf{}")
    for name, problem in {
        "absent": "no such file",
        ".": "Is a directory",
        "latin.json": "byte 1 is not UTF-8",
    }.items():
        with pytest.raises(DataError, match=problem):
            read_json_mapping(tmp_path / name, error=DataError)
    with pytest.raises(ConfigError, match="expected keys and values, found a list"):
        read_json_mapping(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="larger than"):
        read_text(tmp_path / "list.json", limit=2)
    assert read_json_mapping(tmp_path / "mark.json") == {}, "a byte order mark is not a fault"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{<<: *a, x: 3, y: {w: 4}}", {"x": 3, "y": {"w": 4}}),
        ("{y: 5, <<: *a}", {"x": 1, "y": 5}),
        ("{<<: [*a, *b], v: 0}", {"x": 1, "y": {"z": 2}, "u": 7, "v": 0}),
        ("{<<: [*b, *a]}", {"x": 6, "y": {"z": 2}, "u": 7}),
        ("{<<: {<<: *b, x: 9}}", {"x": 9, "u": 7}),
        ("{'<<': 5, k: *b}", {"<<": 5, "k": {"x": 6, "u": 7}}),
    ],
)
def test_merge_keys_are_those_of_yaml_org(text: str, expected: dict[str, object]) -> None:
    """An own key wins, and of a list the first mapping that has it."""
    found = parse_yaml(f"a: &a {{x: 1, y: {{z: 2}}}}\nb: &b {{x: 6, u: 7}}\nc: {text}")
    assert found["c"] == expected
    assert parse_yaml("x: &x {a: 1}\n<<: *x\nb: 2") == {"x": {"a": 1}, "a": 1, "b": 2}


def test_lines_of_keys_and_of_merged_ones() -> None:
    lines: dict[tuple[str | int, ...], int] = {}
    carriers: set[str] = set()
    parse_yaml("a: &a\n  x: 1\n  y: 2\nb:\n  <<: *a\n  y: 3\nc: &c 1", lines=lines, carriers=carriers)
    assert (lines["b", "x"], lines["b", "y"]) == (2, 6)
    assert carriers == {"a"}
    lines.clear()
    parse_yaml("a:\n  - b: 1\n    c: {d: 2}", lines=lines)
    assert lines == {("a",): 1, ("a", 0, "b"): 2, ("a", 0, "c"): 3, ("a", 0, "c", "d"): 3}


def test_a_long_line_loses_its_middle() -> None:
    text = "data.json: found " + "9" * 5000 + ", expected a number; fix the file"
    shown = str(DataError(f"{text}\na second line"))
    assert shown.startswith("data.json: found 999")
    assert shown.endswith("fix the file\na second line")
    assert len(shown) < 1000 and f"({len(text) - 900} characters left out)" in shown
    assert str(DataError("x" * 1000)) == "x" * 1000

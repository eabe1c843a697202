"""Faults of bytes, of files, and of trees of keys and values, as data that hypothesis draws.

A ``Fault`` names what happens and carries numbers that choose where: they fit any content.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Fault:
    """``at`` chooses the place, ``number`` how much or which, and ``value`` is put there."""

    kind: str
    at: int = 0
    number: int = 0
    value: Any = None


@dataclass(frozen=True)
class Raw:
    """Text that is written into JSON or YAML as it is."""

    text: str


class Pairs(list[tuple[Any, Any]]):
    """A mapping that may hold a key twice."""


# ---- bytes and files ----

EDGES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
BYTES = ("flipped bit", "cut short", "random bytes", "inserted bytes", "deleted bytes",
         "edge number", "bytes behind the end")  # fmt: skip
FILES: dict[str, Callable[[Path], None]] = {
    "empty file": Path.touch,
    "missing file": lambda path: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file of 16 GiB": lambda path: (path.touch(), os.truncate(path, 2**34))[1],
}


def changed_bytes(data: bytes, fault: Fault) -> bytes:
    """Favour the start, where headers are. An edge number is mostly an aligned word."""
    number, size = fault.number, 4 + 4 * (fault.number % 2)
    at = fault.at % max(1, min(len(data), 64) if number % 3 == 0 else len(data))
    if fault.kind == "edge number" and number % 4:
        at = at // size * size
    edge = (EDGES[number % len(EDGES)] % 2 ** (8 * size)).to_bytes(size, "little")
    noise = random.Random(number).randbytes((1, 2, 4, 8, 64, 100)[number % 6])
    start, rest = data[:at], data[at:]
    return {
        "flipped bit": start + bytes(byte ^ 1 << number % 8 for byte in rest[:1]) + rest[1:],
        "cut short": start,
        "random bytes": start + noise[: len(rest)] + rest[len(noise) :],
        "inserted bytes": start + noise + rest,
        "deleted bytes": start + rest[len(noise) :],
        "edge number": start + edge[: len(rest)] + rest[size:],
        "bytes behind the end": data + noise,
    }[fault.kind]


# ---- trees ----

VALUES: tuple[Any, ...] = (
    None, [], {}, [[]], [{}], {"": {}}, True, False, "true", "1", 1, 1.5, ["x"], {"a": 1}, [1, 2],
    -1, -(2**63), -0.5, 0, 0.0, -0.0, "0", 2**31, 2**40 + 1, 2**53 + 1, 2**63, 2**64, 10**30,
    1e308, 1e39, 1e-46, 5e-324, "nan", "inf", "", " ", "\n",
    *map(Raw, ("NaN", "Infinity", "1e999", '"\\ud800"')), "a\0b", "x" * 5000, "x/" * 3000,
    *map(Raw, ("9" * 5000, "1" + "0" * 5000 + ".0", "[" * 100 + "]" * 100,
    '{"a":' * 2000 + "1" + "}" * 2000, "[" * 50_000)), "../x", "/etc/passwd", ".", "..",
    "\u202ex", "\u0663\u0663", "\ud83d\ude00", "-x", "%s", "{rank}", "a\nb", "~",
)  # fmt: skip
YAML_VALUES = (*VALUES, *map(Raw, (
    "!!timestamp x", "!!bool maybe", "!!float ''", "!!int zz", "!!binary '*'", "!!set {a, b}",
    "!!python/object/apply:os.system ['true']", "!other x", "!!map [1]", "&a [*a]",
    "&b {x: *b}", "*unknown", "&c 1", "2020-01-01", "0x10", "0o17", "1_000", "1:30", ".inf",
    "6e-4", "{", "'", "@x", "a: b: c", "|", "? [1]", "\t- x",
)))  # fmt: skip
TREES = ("value", "nearby value", "key renamed", "key removed", "key twice", "list repeated",
         "value moved", "key added")  # fmt: skip


def to_json(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, (dict, Pairs)):
        pairs = tree.items() if isinstance(tree, dict) else tree
        return "{" + ", ".join(f"{to_json(key)}: {to_json(value)}" for key, value in pairs) + "}"
    return "[" + ", ".join(map(to_json, tree)) + "]" if isinstance(tree, list) else json.dumps(tree)


def to_yaml(tree: Any) -> str:
    """Return a mapping with a key a line, and what is below in flow style."""
    if not isinstance(tree, (dict, Pairs)):
        return to_json(tree) + "\n"
    pairs = tree.items() if isinstance(tree, dict) else tree
    return "".join(f"{to_json(key)}: {to_json(value)}\n" for key, value in pairs)


def _keys(tree: Any) -> list[Any]:
    return [*tree] if isinstance(tree, dict) else [*range(len(tree))] if type(tree) is list else []


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the keys that lead to every value, and it."""
    for key in _keys(tree):
        yield (*path, key), tree[key]
        yield from _paths(tree[key], (*path, key))


def changed_tree(tree: Any, *faults: Fault) -> Any:
    """Return a tree with each fault at one of its values. Each depth is hit as often."""
    for fault in faults:
        found = list(_paths(tree))
        if not isinstance(tree, dict) or not found:
            break
        level = 1 + fault.at % max(len(path) for path, _ in found)
        paths = [path for path, _ in found if len(path) == level]
        path = paths[fault.at // 10 % len(paths)]
        alike = [value for other, value in found if other[-1] == path[-1]]
        tree = _changed(tree, path, fault, alike[fault.number % len(alike)])
    return tree


def _changed(parent: Any, path: tuple[Any, ...], fault: Fault, alike: Any) -> Any:
    """alike: value of a key of the same name."""
    key, *rest = path
    value, number = parent[key], fault.number
    name = (f"{key}x", str(key)[1:], str(key).upper(), "", "x.y", "a\0b", Raw("1"))[number % 7]
    new = {
        "value": [(key, fault.value)],
        "nearby value": [(key, _nearby(value, fault))],
        "key renamed": [(name, value)],
        "key removed": [],
        "key twice": [(key, value), (key, value if number % 2 else fault.value)],
        "list repeated": [(key, value * 3 if isinstance(value, list) else [value] * 2)],
        "value moved": [(key, alike)],
        "key added": [(("extra", "base", "", "<<", "x y")[number % 5], fault.value), (key, value)],
    }[fault.kind]
    if rest:
        new = [(key, _changed(value, tuple(rest), fault, alike))]
    pairs = [pair for k in _keys(parent) for pair in (new if k == key else [(k, parent[k])])]
    if not isinstance(parent, dict):
        return [value for _, value in pairs]
    return Pairs(pairs) if fault.kind == "key twice" and not rest else dict(pairs)


def _nearby(value: Any, fault: Fault) -> Any:
    """Return a value of the same type, which may be as good."""
    near: tuple[Any, ...] = (fault.value,)
    if isinstance(value, bool) or value is None:
        near = (True, False, None)
    elif isinstance(value, int | float):
        near = (value + 1, value - 1, 2 * value, value // 2, 4 * value, -value)
    elif isinstance(value, str):
        near = (f"{value}x", f" {value} ", value.upper(), value[1:], f"{value}1")
    return near[fault.number % len(near)]


# ---- strategies, and a fault put into a file ----

NUMBERS = st.integers(0, 2**31 - 1)


def faults(*kinds: str, values: tuple[Any, ...] = VALUES) -> st.SearchStrategy[Fault]:
    return st.builds(Fault, st.sampled_from(kinds), NUMBERS, NUMBERS, st.sampled_from(values))


FAULTS = st.one_of(faults(*BYTES), faults(*BYTES), faults(*FILES))
TREE_FAULTS = faults("value", "nearby value", *TREES)
YAML_FAULTS = faults("value", "nearby value", *TREES, values=YAML_VALUES)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def changed_json(content: bytes, fault: Fault) -> bytes:
    return to_json(changed_tree(json.loads(content), fault)).encode("utf-8", "surrogatepass")


def spoil(path: Path, fault: Fault | None, change: Callable[[bytes, Fault], bytes] = changed_json) -> None:
    """Put the fault into the file. change: what a fault of a tree does with the content."""
    if fault is None:
        return
    if fault.kind in FILES:
        path.unlink()
        FILES[fault.kind](path)
    else:
        new = changed_bytes if fault.kind in BYTES else change
        path.write_bytes(new(path.read_bytes(), fault))

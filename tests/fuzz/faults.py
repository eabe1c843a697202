"""Faults of bytes, of files, and of trees of keys and values, as data that hypothesis draws.

A ``Fault`` names what happens and carries numbers that choose where: they fit any content.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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

    def __repr__(self) -> str:
        return f"Raw({self.text[:40]!r}, {len(self.text)} characters)"


class Pairs(list[tuple[Any, Any]]):
    """A mapping that may hold a key twice."""


# ---- bytes ----

EDGES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def _flip(data: bytes, at: int, number: int) -> bytes:
    changed = bytearray(data)
    for place in [at] if number % 5 else range(at, len(data), 1 + number % 1000):
        if changed:
            changed[place] ^= 1 << number % 8
    return bytes(changed)


def _over(data: bytes, at: int, fill: bytes) -> bytes:
    return data[:at] + fill[: len(data) - at] + data[at + len(fill) :]


def _length(number: int) -> int:
    return (1, 2, 4, 8, 64, 100)[number % 6]


def _random(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def _edge(data: bytes, at: int, number: int) -> bytes:
    """Replace a word of 4 or 8 bytes, mostly an aligned one, by a number at the edge of a type."""
    size = 4 + 4 * (number % 2)
    at = at if number % 4 == 0 else at // size * size
    value = EDGES[number % len(EDGES)] % 2 ** (8 * size)
    return _over(data, at, value.to_bytes(size, "little"))


BYTES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "flipped bits": _flip,
    "cut short": lambda data, at, number: data[:at],
    "front cut off": lambda data, at, number: data[at + 1 :],
    "doubled": lambda data, at, number: data + data,
    "swapped blocks": lambda data, at, number: data[at:] + data[:at],
    "zeros": lambda data, at, number: _over(data, at, bytes(_length(number))),
    "ones": lambda data, at, number: _over(data, at, b"\xff" * _length(number)),
    "random bytes": lambda data, at, number: _over(data, at, _random(number, _length(number))),
    "inserted bytes": lambda data, at, n: data[:at] + _random(n, _length(n)) + data[at:],
    "deleted bytes": lambda data, at, number: data[:at] + data[at + _length(number) :],
    "edge number": _edge,
    "bytes behind the end": lambda data, at, number: data + _random(number, 1 + number % 1000),
    "all zeros": lambda data, at, number: bytes(len(data)),
    "all random": lambda data, at, number: _random(number, min(len(data), 10_000)),
}


def changed_bytes(data: bytes, fault: Fault) -> bytes:
    """Favour the start, where headers are."""
    end = min(len(data), 64) if fault.number % 3 == 0 else len(data)
    return BYTES[fault.kind](data, fault.at % max(1, end), fault.number)


# ---- files ----


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**34)


FILES: dict[str, Callable[[Path], None]] = {
    "empty file": Path.touch,
    "missing file": lambda path: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/null": lambda path: path.symlink_to("/dev/null"),
    "a link to nothing": lambda path: path.symlink_to("nothing-here"),
    "a sparse file of 16 GiB": _huge,
}
UNREADABLE = {
    "permission denied": errno.EACCES,
    "an error of the disk": errno.EIO,
    "a stale network file": errno.ESTALE,
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def unreadable(number: int, path: Path) -> Iterator[None]:
    """Let every attempt of Python code to open ``path``, or to list it, fail."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(name, (str, bytes, os.PathLike)) and os.fsdecode(name) == str(path):
                raise OSError(number, os.strerror(number), str(path))
            return original(name, *arguments, **options)

        return call

    places = ((builtins, "open"), (io, "open"), (os, "open"), (os, "scandir"), (os, "listdir"))
    patches = [mock.patch.object(o, name, refusing(getattr(o, name))) for o, name in places]
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()


# ---- trees ----

VALUES: tuple[Any, ...] = (
    None, [], {}, [[]], [{}], {"": {}}, True, False, "true", "1", 1, 1.5, ["x"], {"a": 1}, [1, 2],
    [None], -1, -(2**31), -(2**63), -0.5, 0, 0.0, -0.0, "0", 2**31, 2**40, 2**40 + 1, 2**53 + 1,
    2**63, 2**64, 10**30, 1e308, -1e308, 1e39, 1e-46, 1e-320, 5e-324, "nan", "inf", "", " ", "\n",
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"')), "a\0b", "\0",
    "x" * 5000, "x/" * 3000, "9" * 5000, *map(Raw, ("9" * 5000, "-" + "1" * 5000,
    "1" + "0" * 5000 + ".0", "[" * 100 + "]" * 100, "[" * 3000 + "]" * 3000,
    '{"a":' * 2000 + "1" + "}" * 2000, "[" * 50_000)), "../x", "/etc/passwd", "a/b", ".", "..",
    "\u202ex", "\u0663\u0663", "\ud83d\ude00", "-x", "%s", "{rank}", "a\nb", "~",
)  # fmt: skip
YAML_VALUES = (*VALUES, *map(Raw, (
    "!!timestamp x", "!!bool maybe", "!!float ''", "!!int zz", "!!int ''", "!!binary '*'",
    "!!set {a, b}", "!!omap [a]", "!!null x", "!!python/object/apply:os.system ['true']",
    "!!python/name:os.system", "!other x", "!!str 5", "!!map [1]", "!!seq {a: 1}", "&a [*a]",
    "&b {x: *b}", "*unknown", "&c 1", "2020-01-01", "0x10", "0o17", "1_000", "1:30", ".inf",
    ".nan", "6e-4", "{", "]", "'", "@x", "a: b: c", "|", "? [1]", "\t- x",
)))  # fmt: skip
ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
SHAPES = (
    "key renamed", "key removed", "key twice", "list repeated", "value moved", "key added",
    "key of another type",
)  # fmt: skip
TWISTED = ("key twice", "key of another type")
"""A tree with one of these can be written, and not changed further."""
TREES = ("value", "nearby value", *SHAPES)


def to_json(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, (dict, Pairs)):
        pairs = tree.items() if isinstance(tree, dict) else tree
        return "{" + ", ".join(f"{to_json(key)}: {to_json(value)}" for key, value in pairs) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(to_json, tree)) + "]"
    return json.dumps(tree)


def to_yaml(tree: Any) -> str:
    """Return a mapping with a key a line, and what is below in flow style."""
    if not isinstance(tree, (dict, Pairs)):
        return to_json(tree) + "\n"
    pairs = tree.items() if isinstance(tree, dict) else tree
    return "".join(f"{to_json(key)}: {to_json(value)}\n" for key, value in pairs)


def copy_tree(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: copy_tree(value) for key, value in tree.items()}
    return [copy_tree(value) for value in tree] if isinstance(tree, list) else tree


def _places(tree: Any, depth: int = 0) -> Iterator[tuple[int, Any, Any]]:
    """Yield depth, parent and key of every value."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield depth, tree, key
        yield from _places(tree[key], depth + 1)


def changed_tree(tree: Any, fault: Fault) -> Any:
    """Return a tree with the fault at one of its values. Each depth is hit as often."""
    tree = copy_tree(tree)
    places = list(_places(tree))
    level = fault.at % (1 + max(depth for depth, *_ in places))
    places = [place for place in places if place[0] == level]
    _, parent, key = places[fault.at // 10 % len(places)]
    if fault.kind in TWISTED and isinstance(parent, dict):
        return _replaced(tree, parent, _twisted(parent, key, fault))
    if fault.kind == "value":
        parent[key] = fault.value
    elif fault.kind == "nearby value":
        parent[key] = _nearby(parent[key], fault)
    elif fault.kind == "key removed":
        del parent[key]
    elif fault.kind == "list repeated":
        times = (2, 3, 100)[fault.number % 3]
        parent[key] = parent[key] * times if isinstance(parent[key], list) else [parent[key]] * 2
    elif fault.kind == "value moved":
        alike = [place for place in places if place[2] == key]
        _, other, _ = alike[fault.number % len(alike)]
        parent[key] = copy_tree(other[key])
    elif not isinstance(parent, dict):
        parent.insert(key, fault.value)
    elif fault.kind == "key renamed":
        names = (f"{key}x", str(key)[1:], str(key).upper(), "", "x.y", "a\0b", "__class__")
        parent[names[fault.number % len(names)]] = parent.pop(key)
    else:
        parent[("extra", "base", "", "<<", "x y")[fault.number % 5]] = fault.value
    return tree


def _twisted(parent: dict[Any, Any], key: Any, fault: Fault) -> Pairs:
    if fault.kind == "key twice":
        again = parent[key] if fault.number % 2 else fault.value
        return Pairs([*parent.items(), (key, again)])
    odd = Raw(("1", "null", "[1]", "1.5", "true")[fault.number % 5])
    return Pairs((odd if old == key else old, item) for old, item in parent.items())


def _replaced(tree: Any, parent: Any, new: Any) -> Any:
    if tree is parent:
        return new
    if isinstance(tree, dict):
        return {key: _replaced(value, parent, new) for key, value in tree.items()}
    return [_replaced(v, parent, new) for v in tree] if isinstance(tree, list) else tree


def _nearby(value: Any, fault: Fault) -> Any:
    """Return a value of the same type, which may be as good."""
    near: tuple[Any, ...]
    if isinstance(value, bool) or value is None:
        near = (True, False, None)
    elif isinstance(value, int):
        near = (value + 1, value - 1, 2 * value, value // 2, 4 * value, -value)
    elif isinstance(value, float):
        near = (2 * value, value / 2, value + 1, -value, value / 1000)
    elif isinstance(value, str):
        near = (f"{value}x", f" {value} ", value.upper(), value[1:], f"{value}1")
    else:
        near = (fault.value,)
    return near[fault.number % len(near)]


# ---- strategies, and a fault put into a file ----

NUMBERS = st.integers(0, 2**31 - 1)


def faults(*kinds: str, values: tuple[Any, ...] = VALUES) -> st.SearchStrategy[Fault]:
    return st.builds(Fault, st.sampled_from(kinds), NUMBERS, NUMBERS, st.sampled_from(values))


BYTE_FAULTS = faults(*BYTES)
FILE_FAULTS = faults(*FILES, *UNREADABLE)
SMALL_FILE_FAULTS = faults(*[kind for kind in FILES if "GiB" not in kind], *UNREADABLE)
FAULTS = st.one_of(BYTE_FAULTS, BYTE_FAULTS, FILE_FAULTS)


def tree_faults(values: tuple[Any, ...] = VALUES) -> st.SearchStrategy[Fault]:
    return faults("value", "value", "value", *TREES, "nearby value", values=values)


TREE_FAULTS = st.one_of(tree_faults(), tree_faults(), FAULTS)
"""Faults of files that hold a tree."""


def changed_json(content: bytes, fault: Fault) -> bytes:
    tree = changed_tree(json.loads(content), fault)
    return to_json(tree).encode("utf-8", "surrogatepass")


@contextmanager
def spoiled(
    path: Path, fault: Fault, change: Callable[[bytes, Fault], bytes] = changed_json
) -> Iterator[None]:
    """Put the fault into the file; one that cannot be read is so within the context.

    change: what a fault of a tree does with the content.
    """
    if fault.kind in UNREADABLE:
        with unreadable(UNREADABLE[fault.kind], path):
            yield
        return
    if fault.kind in FILES:
        remove(path)
        FILES[fault.kind](path)
    else:
        path.write_bytes(
            (changed_bytes if fault.kind in BYTES else change)(path.read_bytes(), fault)
        )
    yield

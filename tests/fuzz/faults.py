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
from contextlib import ExitStack, contextmanager
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


def _over(data: bytes, at: int, fill: bytes) -> bytes:
    return data[:at] + fill[: len(data) - at] + data[at + len(fill) :]


def _random(number: int) -> bytes:
    return random.Random(number).randbytes((1, 2, 4, 8, 64, 100)[number % 6])


def _flip(data: bytes, at: int, number: int) -> bytes:
    return _over(data, at, bytes([data[at] ^ 1 << number % 8])) if data else data


def _edge(data: bytes, at: int, number: int) -> bytes:
    """Replace a word of 4 or 8 bytes, mostly an aligned one, by a number at the edge of a type."""
    size = 4 + 4 * (number % 2)
    at = at if number % 4 == 0 else at // size * size
    value = EDGES[number % len(EDGES)] % 2 ** (8 * size)
    return _over(data, at, value.to_bytes(size, "little"))


BYTES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "flipped bit": _flip,
    "cut short": lambda data, at, number: data[:at],
    "swapped blocks": lambda data, at, number: data[at:] + data[:at],
    "zeros": lambda data, at, number: _over(data, at, bytes(len(_random(number)))),
    "random bytes": lambda data, at, number: _over(data, at, _random(number)),
    "inserted bytes": lambda data, at, number: data[:at] + _random(number) + data[at:],
    "deleted bytes": lambda data, at, number: data[:at] + data[at + len(_random(number)) :],
    "edge number": _edge,
    "bytes behind the end": lambda data, at, number: data + _random(number),
    "all zeros": lambda data, at, number: bytes(len(data)),
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
    "a sparse file of 16 GiB": _huge,
}
UNREADABLE = {"permission denied": errno.EACCES, "a stale network file": errno.ESTALE}


@contextmanager
def _unreadable(number: int, path: Path) -> Iterator[None]:
    """Let every attempt of Python code to open ``path``, or to list it, fail."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(name, (str, bytes, os.PathLike)) and os.fsdecode(name) == str(path):
                raise OSError(number, os.strerror(number), str(path))
            return original(name, *arguments, **options)

        return call

    places = ((builtins, "open"), (io, "open"), (os, "open"), (os, "scandir"), (os, "listdir"))
    with ExitStack() as stack:
        for place, name in places:
            refused = refusing(getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, refused))
        yield


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
ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
TREES = ("value", "value", "value", "nearby value", "nearby value", "key renamed", "key removed",
         "key twice", "list repeated", "value moved", "key added")  # fmt: skip


def _pairs(tree: Any) -> Any:
    return tree.items() if isinstance(tree, dict) else tree


def to_json(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, (dict, Pairs)):
        pairs = (f"{to_json(key)}: {to_json(value)}" for key, value in _pairs(tree))
        return "{" + ", ".join(pairs) + "}"
    return "[" + ", ".join(map(to_json, tree)) + "]" if isinstance(tree, list) else json.dumps(tree)


def to_yaml(tree: Any) -> str:
    """Return a mapping with a key a line, and what is below in flow style."""
    if not isinstance(tree, (dict, Pairs)):
        return to_json(tree) + "\n"
    return "".join(f"{to_json(key)}: {to_json(value)}\n" for key, value in _pairs(tree))


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


def changed_tree(tree: Any, *faults: Fault) -> Any:
    """Return a tree with each fault at one of its values. Each depth is hit as often."""
    tree = copy_tree(tree)
    for fault in faults:
        places = list(_places(tree))
        if not isinstance(tree, dict) or not places:
            break
        level = fault.at % (1 + max(depth for depth, *_ in places))
        places = [place for place in places if place[0] == level]
        _, parent, key = places[fault.at // 10 % len(places)]
        if fault.kind == "key twice" and isinstance(parent, dict):
            again = parent[key] if fault.number % 2 else fault.value
            return _replaced(tree, parent, Pairs([*parent.items(), (key, again)]))
        _change(parent, key, fault, places)
    return tree


def _change(parent: Any, key: Any, fault: Fault, places: list[tuple[int, Any, Any]]) -> None:
    value = copy_tree(fault.value)
    if fault.kind == "value":
        parent[key] = value
    elif fault.kind == "nearby value":
        parent[key] = _nearby(parent[key], fault)
    elif fault.kind == "key removed":
        del parent[key]
    elif fault.kind == "list repeated":
        parent[key] = parent[key] * 3 if isinstance(parent[key], list) else [parent[key]] * 2
    elif fault.kind == "value moved":
        alike = [place for place in places if place[2] == key]
        _, other, _ = alike[fault.number % len(alike)]
        parent[key] = copy_tree(other[key])
    elif not isinstance(parent, dict):
        parent.insert(key, value)
    elif fault.kind == "key renamed":
        names = (f"{key}x", str(key)[1:], str(key).upper(), "", "x.y", "a\0b", Raw("1"))
        parent[names[fault.number % len(names)]] = parent.pop(key)
    else:
        parent[("extra", "base", "", "<<", "x y")[fault.number % 5]] = value


def _replaced(tree: Any, parent: Any, new: Any) -> Any:
    if tree is parent:
        return new
    if isinstance(tree, dict):
        return {key: _replaced(value, parent, new) for key, value in tree.items()}
    return [_replaced(v, parent, new) for v in tree] if isinstance(tree, list) else tree


def _nearby(value: Any, fault: Fault) -> Any:
    """Return a value of the same type, which may be as good."""
    near: tuple[Any, ...] = (copy_tree(fault.value),)
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


FAULTS = st.one_of(faults(*BYTES), faults(*BYTES), faults(*FILES, *UNREADABLE))
TREE_FAULTS = faults(*TREES)
YAML_FAULTS = faults(*TREES, values=YAML_VALUES)


def changed_json(content: bytes, fault: Fault) -> bytes:
    return to_json(changed_tree(json.loads(content), fault)).encode("utf-8", "surrogatepass")


@contextmanager
def spoiled(
    path: Path, fault: Fault | None, change: Callable[[bytes, Fault], bytes] = changed_json
) -> Iterator[None]:
    """Put the fault into the file; one that cannot be read is so within the context.

    change: what a fault of a tree does with the content.
    """
    if fault is None:
        yield
    elif fault.kind in UNREADABLE:
        with _unreadable(UNREADABLE[fault.kind], path):
            yield
    elif fault.kind in FILES:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        FILES[fault.kind](path)
        yield
    else:
        new = changed_bytes if fault.kind in BYTES else change
        path.write_bytes(new(path.read_bytes(), fault))
        yield

"""The classes of faulty input that all areas share: faults of bytes, of files, and of trees of keys
and values.

``BYTES``, ``FILES`` and ``VALUES`` name them; ``python -m tests.fuzz --list`` prints them.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fuzz.dice import Dice

# ---- bytes ----


def _place(dice: Dice, data: bytes) -> int:
    """Favour the start, where headers are."""
    return (
        dice.below(min(len(data), 64))
        if data and dice.chance(0.3)
        else dice.below(max(1, len(data)))
    )


def _flip(dice: Dice, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.pick((1, 1, 1, 2, 8))):
        if changed:
            changed[_place(dice, data)] ^= 1 << dice.below(8)
    return bytes(changed)


def _cut(dice: Dice, data: bytes) -> bytes:
    return data[: dice.below(max(1, len(data)))]


def _cut_front(dice: Dice, data: bytes) -> bytes:
    return data[1 + dice.below(max(1, len(data))) :]


def _swap(dice: Dice, data: bytes) -> bytes:
    first, second, third = sorted(dice.below(len(data) + 1) for _ in range(3))
    return data[:first] + data[second:third] + data[first:second] + data[third:]


def _over(fill: Callable[[Dice, int], bytes]) -> Callable[[Dice, bytes], bytes]:
    def change(dice: Dice, data: bytes) -> bytes:
        at, length = _place(dice, data), dice.pick((1, 2, 4, 8, 64))
        length = min(length, len(data) - at)
        return data[:at] + fill(dice, length) + data[at + length :]

    return change


def _insert(dice: Dice, data: bytes) -> bytes:
    at = _place(dice, data)
    return data[:at] + dice.data(dice.pick((1, 4, 8, 100))) + data[at:]


def _delete(dice: Dice, data: bytes) -> bytes:
    at = _place(dice, data)
    return data[:at] + data[at + dice.pick((1, 4, 8, 100)) :]


def _number(dice: Dice, data: bytes) -> bytes:
    """Replace an aligned word of 4 or 8 bytes by a number at the edge of a type."""
    size = dice.pick((4, 8))
    at = _place(dice, data) // size * size
    value = dice.pick(
        (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
    ) % 2 ** (8 * size)
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


BYTES: dict[str, Callable[[Dice, bytes], bytes]] = {
    "flipped bits": _flip,
    "cut short": _cut,
    "front cut off": _cut_front,
    "doubled": lambda dice, data: data + data,
    "swapped blocks": _swap,
    "zeros": _over(lambda dice, length: bytes(length)),
    "ones": _over(lambda dice, length: b"\xff" * length),
    "random bytes": _over(lambda dice, length: dice.data(length)),
    "inserted bytes": _insert,
    "deleted bytes": _delete,
    "edge number": _number,
    "bytes behind the end": lambda dice, data: data + dice.data(dice.pick((1, 8, 1000))),
    "all zeros": lambda dice, data: bytes(len(data)),
    "all random": lambda dice, data: dice.data(min(len(data), 10_000)),
}


# ---- files ----


def _folder(path: Path) -> None:
    path.mkdir()


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**34)


FILES: dict[str, Callable[[Path], None]] = {
    "empty file": Path.touch,
    "missing file": lambda path: None,
    "a folder": _folder,
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/null": lambda path: path.symlink_to("/dev/null"),
    "a link to nothing": lambda path: path.symlink_to("nothing-here"),
    "a sparse file of 16 GiB": _huge,
}


def spoil_file(kind: str, path: Path) -> None:
    """Put a special file in the place of ``path``."""
    remove(path)
    FILES[kind](path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


UNREADABLE = {
    "permission denied": errno.EACCES,
    "an error of the disk": errno.EIO,
    "a stale network file": errno.ESTALE,
}


@contextmanager
def unreadable(kind: str, path: Path) -> Iterator[None]:
    """Let every attempt of Python code to open ``path``, or to list it, fail."""
    number, wanted = UNREADABLE[kind], str(path)

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(name, (str, bytes, os.PathLike)) and os.fsdecode(name) == wanted:
                raise OSError(number, os.strerror(number), wanted)
            return original(name, *arguments, **options)

        return call

    with (
        mock.patch.object(builtins, "open", refusing(builtins.open)),
        mock.patch.object(io, "open", refusing(io.open)),
        mock.patch.object(os, "open", refusing(os.open)),
        mock.patch.object(os, "scandir", refusing(os.scandir)),
        mock.patch.object(os, "listdir", refusing(os.listdir)),
    ):
        yield


# ---- trees ----


@dataclass(frozen=True)
class Raw:
    """Text that is written into JSON or YAML as it is."""

    text: str


class Pairs(list[tuple[Any, Any]]):
    """A mapping that may hold a key twice."""


VALUES: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "an empty list or mapping": ([], {}, [[]], [{}], {"": {}}),
    "another type": (True, False, "true", "1", 1, 1.5, ["x"], {"a": 1}, [1, 2], [None]),
    "a negative number": (-1, -(2**31), -(2**63), -0.5),
    "zero": (0, 0.0, -0.0, "0"),
    "a large number": (2**31, 2**40, 2**40 + 1, 2**53 + 1, 2**63, 2**64, 10**30),
    "an extreme float": (1e308, -1e308, 1e39, 1e-46, 1e-320, 5e-324),
    "NaN or infinity": (Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), "nan", "inf"),
    "an empty text": ("", " ", "\n"),
    "a text with NUL": ("a\0b", "\0"),
    "a long text": ("x" * 5000, "x/" * 3000),
    "5,000 digits": (
        Raw("9" * 5000),
        "9" * 5000,
        Raw("-" + "1" * 5000),
        Raw("1" + "0" * 5000 + ".0"),
    ),
    "deep nesting": (
        Raw("[" * 100 + "]" * 100),
        Raw("[" * 3000 + "]" * 3000),
        Raw('{"a":' * 2000 + "1" + "}" * 2000),
        Raw("[" * 50_000),
    ),
    "an odd text": (
        "../x",
        "/etc/passwd",
        "a/b",
        ".",
        "..",
        "\u202ex",
        "\u0663\u0663",
        "\ud83d\ude00",
        "-x",
        "%s",
        "{rank}",
        "a\nb",
        "~",
    ),
    "a lone surrogate": (Raw('"\\ud800"'),),
}

YAML_VALUES: dict[str, tuple[Any, ...]] = {
    "an explicit tag": tuple(
        Raw(text)
        for text in (
            "!!timestamp x", "!!bool maybe", "!!float ''", "!!int zz", "!!int ''", "!!binary '*'",
            "!!set {a, b}", "!!omap [a]", "!!null x",
            "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!other x",
            "!!str 5", "!!map [1]", "!!seq {a: 1}",
        )
    ),
    "an alias": (Raw("&a [*a]"), Raw("&b {x: *b}"), Raw("*unknown"), Raw("&c 1")),
    "a date or number of YAML 1.1": (Raw("2020-01-01"), Raw("0x10"), Raw("0o17"), Raw("1_000"),
    Raw("1:30"), Raw(".inf"), Raw(".nan"),
    Raw("6e-4")),
    "not YAML": (Raw("{"), Raw("]"), Raw("'"), Raw("@x"), Raw("a: b: c"), Raw("|"), Raw("? [1]"),
    Raw("\t- x")),
}  # fmt: skip

SHAPES = (
    "a key renamed",
    "a key removed",
    "a duplicate key",
    "a list repeated",
    "a value moved",
    "a key added",
    "a key of another type",
)


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


def _paths(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def hostile_value(dice: Dice, *, yaml: bool = False) -> tuple[str, Any]:
    """Return a class and a value of it."""
    classes = [*VALUES.items(), *(YAML_VALUES.items() if yaml else ())]
    kind, values = dice.pick(classes)
    return kind, dice.pick(values)


def spoil_tree(dice: Dice, tree: Any, *, yaml: bool = False) -> tuple[Any, str, str]:
    """Return a tree with one fault, the class of the fault, and the key where it is."""
    tree = copy_tree(tree)
    # each depth gets the same share, as the leaves of a large table would else get all
    by_depth: dict[int, list[tuple[Any, ...]]] = {}
    for path in _paths(tree):
        by_depth.setdefault(len(path), []).append(path)
    path = dice.pick(by_depth[dice.pick(list(by_depth))])
    parent, key = _at(tree, path[:-1]), path[-1]
    if not isinstance(parent[key], (dict, list)) and dice.chance(0.3):
        parent[key] = _nearby(dice, parent[key])
        return tree, NEARBY, str(key)
    if dice.chance(0.65):
        kind, value = hostile_value(dice, yaml=yaml)
        parent[key] = value
        return tree, kind, str(key)
    return _reshape(dice, tree, path, dice.pick(SHAPES))


NEARBY = "a nearby value"


def _nearby(dice: Dice, value: Any) -> Any:
    """Return a value of the same type, which may be as good."""
    if isinstance(value, bool) or value is None:
        return dice.pick((True, False, None))
    if isinstance(value, int):
        return dice.pick((value + 1, value - 1, 2 * value, value // 2, 4 * value, -value))
    if isinstance(value, float):
        return dice.pick((2 * value, value / 2, value + 1, -value, value / 1000))
    return dice.pick(
        (f"{value}x", f" {value} ", str(value).upper(), str(value)[1:], f"{value}1", str(value))
    )


def _reshape(dice: Dice, tree: Any, path: tuple[Any, ...], kind: str) -> tuple[Any, str, str]:
    parent, key = _at(tree, path[:-1]), path[-1]
    value = parent[key]
    if kind == "a key removed":
        del parent[key]
    elif kind == "a list repeated":
        parent[key] = value * dice.pick((2, 3, 100)) if isinstance(value, list) else [value, value]
    elif kind == "a value moved":
        other = dice.pick(list(_paths(tree)))
        if other[: len(path)] != path:
            parent[key] = copy_tree(_at(tree, other))
    elif not isinstance(parent, dict):
        parent.insert(dice.below(len(parent) + 1), hostile_value(dice)[1])
    elif kind == "a key renamed":
        name = dice.pick(
            (f"{key}x", str(key)[1:], str(key).upper(), "", "x.y", "a\0b", "__class__")
        )
        replaced = {name if old == key else old: item for old, item in parent.items()}
        parent.clear()
        parent.update(replaced)
    elif kind == "a key added":
        parent[dice.pick(("extra", "base", "", "<<", "x y"))] = hostile_value(dice)[1]
    elif kind == "a duplicate key":
        pairs = Pairs([*parent.items(), (key, dice.pick((value, hostile_value(dice)[1])))])
        tree = _with(tree, path[:-1], pairs)
    else:
        pairs = Pairs(
            (Raw(dice.pick(("1", "null", "[1]", "1.5", "true"))) if old == key else old, item)
            for old, item in parent.items()
        )
        tree = _with(tree, path[:-1], pairs)
    return tree, kind, str(key)


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    _at(tree, path[:-1])[path[-1]] = value
    return tree


ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


# ---- one file of a folder ----


def spoil_one(
    dice: Dice,
    path: Path,
    *,
    structured: Callable[[Dice, bytes], tuple[bytes, str, str]] | None = None,
    huge: bool = True,
) -> str:
    """Put a fault of bytes, of the file or, with ``structured``, of its tree into ``path``. Return
    the class.
    """
    if structured is not None and dice.chance(0.6):
        content, kind, _ = structured(dice, path.read_bytes())
        path.write_bytes(content)
        return kind
    if dice.chance(0.12):
        kind = dice.pick([kind for kind in FILES if huge or kind != "a sparse file of 16 GiB"])
        spoil_file(kind, path)
        return kind
    kind = dice.pick(list(BYTES))
    path.write_bytes(BYTES[kind](dice, path.read_bytes()))
    return kind


def spoil_json(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
    tree, kind, key = spoil_tree(dice, json.loads(content))
    return to_json(tree).encode("utf-8", "surrogatepass"), kind, key

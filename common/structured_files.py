"""JSON and YAML that come from outside, read within limits: the one reader of the project.

A file may be cut short, deeply nested, endless or hostile. Every way in which its text can be at fault is one exception,
``MalformedError``, whose message says what was found and in which line. The ``read_`` functions add the path and raise the caller's
own error. What is returned is plain data: dict with str keys, list, str, int, float, bool, None; nothing in it is shared.

Limits that no honest file reaches: size, nesting (64), digits of an integer (40), values (100,000 in YAML, with aliases followed).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, UserError
from common.files import open_input, reading

MAX_JSON_BYTES = 32 * 2**20
MAX_YAML_BYTES = 2**20
MAX_DEPTH = 64
MAX_DIGITS = 40
MAX_YAML_NODES = 100_000

Place = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


class MalformedError(ValueError):
    """Text that is not what its format allows, or beyond the limits. ``line`` and ``column`` count from 1; 0 where unknown.

    position: characters before the fault, where a JSON text was parsed.
    """

    def __init__(self, problem: str, line: int = 0, column: int = 0, position: int = 0) -> None:
        super().__init__(f"{problem} (line {line}, column {column})" if line else problem)
        self.problem, self.line, self.column, self.position = problem, line, column, position

    def at(self, path: Path | str) -> str:
        """Return ``path:line:column``, or the path alone where the line is unknown."""
        return f"{path}:{self.line}:{self.column}" if self.line else str(path)


class DuplicateKeyError(MalformedError):
    """A JSON object that names ``key`` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {_shown(key)} is given twice in one object")
        self.key = key


# ---- files ----


def read_bytes(path: Path, *, limit: int, error: type[UserError] = ConfigError) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises ``error`` with the path, the reason and a remedy."""
    with open_input(path, error) as file, reading(path, error):
        if os.fstat(file.fileno()).st_size <= limit:
            content: bytes = file.read(limit + 1)
            if len(content) <= limit:
                return content
    raise error(f"{path}: is larger than {limit / 2**20:g} MiB, the limit for a file of this kind; give the right file")


def read_text(path: Path, *, limit: int, error: type[UserError] = ConfigError) -> str:
    """Return the UTF-8 text of a regular file without its byte order mark. Raises ``error``."""
    content = read_bytes(path, limit=limit, error=error)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: byte {reason.start} is not UTF-8; convert the file to UTF-8") from None


def read_json(
    path: Path, *, error: type[UserError] = ConfigError, limit: int = MAX_JSON_BYTES, unique: bool = True, finite: bool = True
) -> Any:
    """Return what a JSON file holds. Raises ``error`` with path, line and reason."""
    text = read_text(path, limit=limit, error=error)
    try:
        return parse_json(text, unique=unique, finite=finite)
    except MalformedError as reason:
        raise error(f"{path}: not valid JSON: {reason}; the file is damaged or of another kind") from None


def read_json_mapping(
    path: Path, *, error: type[UserError] = ConfigError, limit: int = MAX_JSON_BYTES, finite: bool = True
) -> dict[str, Any]:
    """Return what a JSON file with an object at its top holds. Raises ``error``."""
    return require_mapping(read_json(path, error=error, limit=limit, finite=finite), str(path), error=error)


def read_yaml_mapping(path: Path, *, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """Return what a YAML file with keys at its top holds; an empty file holds none. Raises ``error``."""
    return read_yaml_lines(path, error=error)[0]


def read_yaml_lines(path: Path, *, error: type[UserError] = ConfigError) -> tuple[dict[str, Any], dict[Place, int]]:
    """Return what a YAML file with keys at its top holds, and the line of each key. Raises ``error``."""
    lines: dict[Place, int] = {}
    try:
        found = parse_yaml(read_text(path, limit=MAX_YAML_BYTES, error=error), lines)
    except MalformedError as reason:
        raise error(f"{reason.at(path)}: not valid YAML: {reason.problem}") from None
    return require_mapping({} if found is None else found, str(path), error=error), lines


def require_mapping(value: Any, where: str, *, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """Return ``value`` if it is a dict. Raises ``error``."""
    if not isinstance(value, dict):
        raise error(f"{where}: expected keys and values, found {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """Return the word for the type of a parsed value."""
    names: dict[type, str] = {dict: "keys and values", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# ---- JSON ----


def parse_json(text: str | bytes, *, unique: bool = True, finite: bool = True) -> Any:
    """Return the value of a JSON text. Raises MalformedError.

    unique: refuse an object that names a key twice. finite: refuse NaN, Infinity and numbers that overflow a float.
    """
    if len(text) > MAX_JSON_BYTES:
        raise MalformedError(f"longer than {MAX_JSON_BYTES / 2**20:g} MiB")
    try:
        value = json.loads(
            _decoded(text),
            object_pairs_hook=_unique_keys if unique else None,
            parse_int=_integer,
            parse_float=_finite_float if finite else None,
            parse_constant=_no_constant if finite else None,
        )
        _check_depth(value)
    except json.JSONDecodeError as error:
        raise _malformed(error) from None
    except RecursionError:
        raise MalformedError(f"nested deeper than {MAX_DEPTH} levels") from None
    return value


def parse_json_line(line: str | bytes) -> Any:
    """Return the value of one line of a corpus. Raises MalformedError.

    Fast: keys given twice, NaN, and nesting that the parser can follow are not refused.
    """
    try:
        return _FAST.decode(line if isinstance(line, str) else _decoded(line))
    except json.JSONDecodeError as error:
        raise _malformed(error) from None
    except ValueError as error:  # a number of more digits than Python converts
        raise error if isinstance(error, MalformedError) else MalformedError(str(error).partition(";")[0]) from None
    except RecursionError:
        raise MalformedError("nested too deeply") from None


def parse_json_item(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the value that begins at ``start``, and where it ends; what follows may be anything. Raises MalformedError.

    As fast as parse_json_line, and as lenient.
    """
    try:
        return _FAST.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _malformed(error) from None
    except ValueError as error:
        raise MalformedError(str(error).partition(";")[0]) from None
    except RecursionError:
        raise MalformedError("nested too deeply") from None


_FAST = json.JSONDecoder()


def _decoded(text: str | bytes) -> str:
    try:
        return text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"byte {error.start} is not UTF-8") from None


def _malformed(error: json.JSONDecodeError) -> MalformedError:
    return MalformedError(error.msg, error.lineno, error.colno, error.pos)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise MalformedError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedError(f"the number {text[:40]} is beyond the range of a float")
    return value


def _no_constant(name: str) -> float:
    raise MalformedError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for parent in level:
            children = parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ()
            below += [child for child in children if isinstance(child, (dict, list))]
        level = below
        if not level:
            return
    raise MalformedError(f"nested deeper than {MAX_DEPTH} levels")


# ---- YAML ----


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars: 6e-4 is a number, and yes, no, on, off are text. It composes nodes only."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Count the nodes, so that a text of many is given up early: PyYAML takes 15 s for a MiB of them."""
        self._nodes += 1
        if self._nodes > MAX_YAML_NODES:
            raise MalformedError(f"more than {MAX_YAML_NODES:,} values", *_line(self.peek_event()))  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


YamlLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):
    YamlLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""] if _tag == "null" else list(_first)
    )


class YamlDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes what YamlLoader would not read as text."""


YamlDumper.yaml_implicit_resolvers = YamlLoader.yaml_implicit_resolvers


def dump_yaml(value: Any) -> str:
    """Return YAML text that parse_yaml reads back to an equal value."""
    return yaml.dump(value, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, lines: dict[Place, int] | None = None) -> Any:
    """Return the value of a YAML text of one document; None where it is empty. Raises MalformedError.

    Keys become text. A key that is given twice is refused. lines: is filled with the line of each key.
    """
    if len(text) > MAX_YAML_BYTES:
        raise MalformedError(f"longer than {MAX_YAML_BYTES / 2**20:g} MiB")
    loader = None
    try:
        loader = YamlLoader(text)
        root = loader.get_single_node()
        return None if root is None else _Plain(lines).value(root, ())
    except yaml.MarkedYAMLError as error:
        problem = "an anchor is defined twice" if error.problem == "second occurrence" else error.problem or "not YAML"
        raise MalformedError(problem, *_line(error)) from None
    except RecursionError:
        raise MalformedError(f"nested deeper than {MAX_DEPTH} levels") from None
    except yaml.YAMLError as error:
        raise MalformedError(str(error).partition("\n")[0]) from None
    finally:
        if loader is not None:
            loader.dispose()


class _Plain:
    """Plain data of composed nodes. Aliases are followed, and each place gets a copy of its own."""

    def __init__(self, lines: dict[Place, int] | None) -> None:
        self._lines = lines
        self._seen = 0

    def value(self, node: yaml.Node, place: Place) -> Any:
        self._seen += 1
        if self._seen > MAX_YAML_NODES:
            raise MalformedError(f"more than {MAX_YAML_NODES:,} values once aliases are followed", *_line(node))
        if len(place) >= MAX_DEPTH and isinstance(node, yaml.CollectionNode):
            raise MalformedError(f"nested deeper than {MAX_DEPTH} levels", *_line(node))
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in _READERS and kind not in ("seq", "map"):
            raise MalformedError(f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not supported", *_line(node))
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(child, (*place, index)) for index, child in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode) or kind in ("seq", "map"):
            raise MalformedError(f"the tag !!{kind} does not fit its value", *_line(node))
        try:
            return _READERS[kind](node.value)
        except MalformedError as error:
            raise MalformedError(error.problem, *_line(node)) from None
        except (ValueError, KeyError):
            raise MalformedError(f"{_shown(node.value)} does not fit its tag !!{kind}", *_line(node)) from None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise MalformedError("a key is a list or a mapping; expected text", *_line(key))
            here = (*place, key.value)
            if key.value in found:
                dotted = _shown(".".join(map(str, here)))
                raise MalformedError(f"the key {dotted} is given twice (first in line {first[key.value]}); keep one", *_line(key))
            first[key.value] = key.start_mark.line + 1
            if self._lines is not None:
                self._lines[here] = first[key.value]
            found[key.value] = self.value(child, here)
        return found


def _yaml_float(text: str) -> float:
    special = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
    return special[text.lower()] if text.lower() in special else _finite_float(text)


def _yaml_null(text: str) -> None:
    return {"": None, "~": None, "null": None}[text.lower()]


_READERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": _integer,
    "float": _yaml_float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "null": _yaml_null,
}  # fmt: skip


def _line(found: Any) -> tuple[int, int]:
    """Return line and column of a node, an event or an error of PyYAML; zeros where it has none."""
    mark = getattr(found, "problem_mark", None) or getattr(found, "start_mark", None)
    return (mark.line + 1, mark.column + 1) if mark else (0, 0)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."

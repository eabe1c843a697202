"""JSON and YAML that come from outside, read within limits: the one reader of the project.

A file may be cut short, deeply nested, endless or hostile. Every way in which its text can be at fault is one exception,
``MalformedError``, whose message says what was found and in which line. The ``read_`` functions add the path and raise the caller's
own error. What is returned is plain data: dict with str keys (JSON) or scalar keys (YAML), list, str, int, float, bool, None.

Limits that no honest file reaches: size, nesting (64), digits of an integer (40), nodes after aliases are followed (100,000 in YAML).
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from common.errors import ConfigError, UserError

MAX_JSON_BYTES = 256 * 2**20
MAX_YAML_BYTES = 2**20
MAX_DEPTH = 64
MAX_DIGITS = 40
MAX_YAML_NODES = 100_000

Fault = TypeVar("Fault", bound=UserError)


class MalformedError(ValueError):
    """Text that is not what its format allows, or beyond the limits. ``line`` and ``column`` count from 1; 0 where unknown."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"{problem} (line {line}, column {column})" if line else problem)
        self.problem, self.line, self.column = problem, line, column


# ---- files ----


def read_bytes(path: Path, *, limit: int, error: type[UserError] = ConfigError) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises ``error`` with the path, the reason and a remedy."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise error(f"{path}: is a folder, expected a file")
        if not stat.S_ISREG(mode):
            raise error(f"{path}: is a device, a pipe or a socket, expected a regular file; write its content to a file first")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except PermissionError:
        raise error(f"{path}: cannot be read: permission denied; allow this user to read it (chmod, chown)") from None
    except (OSError, ValueError) as reason:  # ValueError: a null byte in the name
        raise error(f"{path}: cannot be read: {getattr(reason, 'strerror', None) or reason}") from None
    if len(content) > limit:
        raise error(f"{path}: is larger than {limit / 2**20:g} MiB, the limit for a file of this kind; give the right file")
    return content


def read_text(path: Path, *, limit: int, error: type[UserError] = ConfigError) -> str:
    """Return the UTF-8 text of a regular file. Raises ``error``."""
    content = read_bytes(path, limit=limit, error=error)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: byte {reason.start} is not UTF-8; convert the file to UTF-8") from None


def read_json(path: Path, *, error: type[UserError] = ConfigError, limit: int = MAX_JSON_BYTES, unique: bool = True) -> Any:
    """Return what a JSON file holds. Raises ``error`` with path, line and reason."""
    text = read_text(path, limit=limit, error=error)
    try:
        return parse_json(text, unique=unique)
    except MalformedError as reason:
        raise error(f"{path}: not valid JSON: {reason}; the file is damaged or of another kind") from None


def read_json_mapping(path: Path, *, error: type[UserError] = ConfigError, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return what a JSON file with an object at its top holds. Raises ``error``."""
    return require_mapping(read_json(path, error=error, limit=limit), str(path), error=error)


def read_yaml_mapping(path: Path, *, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """Return what a YAML file with keys at its top holds; an empty file holds none. Raises ``error``."""
    try:
        found = parse_yaml(read_text(path, limit=MAX_YAML_BYTES, error=error))
    except MalformedError as reason:
        raise error(f"{path}: not valid YAML: {reason}") from None
    return require_mapping({} if found is None else found, str(path), error=error)


def require_mapping(value: Any, where: str, *, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """Return ``value`` if it is a dict whose keys are text. Raises ``error``."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise error(f"{where}: expected keys and values at the top, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "keys that are not text", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# ---- JSON ----


def parse_json(text: str | bytes, *, unique: bool = True, finite: bool = True) -> Any:
    """Return the value of a JSON text. Raises MalformedError.

    unique: refuse an object that names a key twice. finite: refuse NaN, Infinity and numbers that overflow a float.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys if unique else None,
            parse_int=_integer,
            parse_float=_finite_float if finite else None,
            parse_constant=_no_constant if finite else None,
        )
        _check_depth(value)
    except json.JSONDecodeError as error:
        raise MalformedError(error.msg, error.lineno, error.colno) from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise MalformedError(f"nested deeper than {MAX_DEPTH} levels") from None
    return value


def parse_json_line(line: str | bytes) -> Any:
    """Return the value of one line of a corpus: as parse_json, but fast, without checks of keys, digits and depth. Raises
    MalformedError."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise MalformedError(error.msg, error.lineno, error.colno) from None
    except ValueError as error:  # a number of more digits than Python converts, bytes that are not UTF-8
        raise MalformedError(str(error)) from None
    except RecursionError:
        raise MalformedError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MalformedError(f"the key {twice[:60]!r} is given twice in one object")
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
    for _ in range(MAX_DEPTH + 1):
        level = [child for parent in level if isinstance(parent, (dict, list)) for child in _children(parent)]
        if not level:
            return
    raise MalformedError(f"nested deeper than {MAX_DEPTH} levels")


def _children(parent: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return (child for child in (parent.values() if isinstance(parent, dict) else parent) if isinstance(child, (dict, list)))


# ---- YAML ----


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars: 6e-4 is a number, and yes, no, on, off are text."""


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
YamlLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _integer(node.value))


class YamlDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes what YamlLoader would not read as text."""


YamlDumper.yaml_implicit_resolvers = YamlLoader.yaml_implicit_resolvers

_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge", "value")}


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text of one document; None where it is empty. Raises MalformedError."""
    return construct_yaml(compose_yaml(text))


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the root node of a YAML document, whose marks tell lines; None where it is empty. Raises MalformedError.

    Nesting, aliases and tags are within the limits, so that a walk over the nodes ends.
    """
    if len(text) > MAX_YAML_BYTES:
        raise MalformedError(f"longer than {MAX_YAML_BYTES / 2**20:g} MiB")
    loader = None
    try:
        loader = YamlLoader(text)
        root = loader.get_single_node()
        if root is not None:
            _check_nodes(root)
        return root  # type: ignore[no-any-return]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise MalformedError(error.problem or "not YAML", mark.line + 1 if mark else 0, mark.column + 1 if mark else 0) from None
    except RecursionError:
        raise MalformedError(f"nested deeper than {MAX_DEPTH} levels") from None
    except yaml.YAMLError as error:
        raise MalformedError(str(error).partition("\n")[0]) from None
    finally:
        if loader is not None:
            loader.dispose()


def construct_yaml(root: yaml.Node | None) -> Any:
    """Return the plain data of a node that compose_yaml has returned. Raises MalformedError."""
    if root is None:
        return None
    loader = YamlLoader("")
    try:
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise MalformedError(error.problem or "not YAML", mark.line + 1 if mark else 0, mark.column + 1 if mark else 0) from None
    except MalformedError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        # PyYAML's constructors let these through for an explicit tag whose text does not fit, such as !!bool maybe
        raise MalformedError(f"a value does not fit its tag ({error})", root.start_mark.line + 1, 1) from None
    finally:
        loader.dispose()


def _check_nodes(root: yaml.Node) -> None:
    """Follow aliases as a reader would, and stop at the limits."""
    seen = 1
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        below: list[yaml.Node] = []
        for node in level:
            mark = node.start_mark
            if node.tag not in _TAGS:
                tag = node.tag.replace("tag:yaml.org,2002:", "!!")
                raise MalformedError(f"the tag {tag} is not supported", mark.line + 1, mark.column + 1)
            seen += len(node.value) if isinstance(node, yaml.CollectionNode) else 0
            if seen > MAX_YAML_NODES:  # before they are gathered: a list may hold as many aliases of a list as wide
                raise MalformedError(f"more than {MAX_YAML_NODES:,} values once aliases are followed", mark.line + 1, mark.column + 1)
            if isinstance(node, yaml.MappingNode):
                below += [child for pair in node.value for child in pair]
            elif isinstance(node, yaml.SequenceNode):
                below += node.value
        level = below
        if not level:
            return
    mark = level[0].start_mark
    raise MalformedError(f"nested deeper than {MAX_DEPTH} levels", mark.line + 1, mark.column + 1)

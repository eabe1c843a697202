"""Reader of YAML from outside, within limits.

It is separate from ``structured_files`` because PyYAML takes 50 ms to load. Results are plain data without shared
parts. Merge keys (``<<: *anchor``) are those of yaml.org/type/merge.

Limits that no honest file reaches: size, nesting (64 levels), values (100,000, with aliases followed).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.structured_files import (
    MAX_DEPTH,
    MalformedError,
    read_text,
    require_mapping,
    require_text,
    shown,
)

MAX_YAML_BYTES = 2**20
MAX_YAML_NODES = 100_000

KeyPath = tuple[str | int, ...]
"""The keys and positions that lead to a value."""
IsText = Callable[[KeyPath, str], bool]
"""Tells whether a word without quotation marks is text there, even one such as 42 or true."""


def read_yaml_mapping(path: Path, text: str | None = None, **wishes: Any) -> dict[str, Any]:
    """Return the content of a YAML file with keys at its top; an empty file has none.

    text: the file's, if it has been read. wishes: of ``parse_yaml``. Raises ConfigError.
    """
    text = read_text(path, limit=MAX_YAML_BYTES) if text is None else text
    try:
        found = parse_yaml(text, **wishes)
    except MalformedError as reason:
        raise ConfigError(f"{reason.at(path)}: not valid YAML: {reason.problem}") from None
    return require_mapping({} if found is None else found, str(path))


_SCALARS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "null": r"~|null|Null|NULL|",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_RESOLVERS: dict[Any, Any] = {
    None: [(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$")) for name, pattern in _SCALARS.items()]
}
"""Kinds of words without quotation marks, in PyYAML's form: of any first character."""


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars: 6e-4 is a number, and yes, no, on, off are text.

    ``plain`` makes data of the composed nodes, and counts them and their levels as it follows aliases.
    """

    yaml_implicit_resolvers = _RESOLVERS

    def __init__(self, text: str, lines: dict[KeyPath, int], is_text: IsText | None) -> None:
        super().__init__(text)
        self._lines, self._is_text, self._seen = lines, is_text, 0
        self.aliased: list[yaml.Node] = []
        """Nodes that aliases stand for."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.aliased += [node] if is_alias and node is not None else []
        return node

    def plain(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        """Return the data of a composed node. Aliases are followed, and each place gets its own copy."""
        self._seen += 1
        if self._seen > MAX_YAML_NODES:
            raise MalformedError(f"more than {MAX_YAML_NODES:,} values once aliases are followed", *_line(node))
        if len(path) > MAX_DEPTH:
            raise MalformedError(f"nested deeper than {MAX_DEPTH} levels", *_line(node))
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        if isinstance(node, yaml.MappingNode) and tag == "!!map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "!!seq":
            return [self.plain(child, (*path, index)) for index, child in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode) or tag not in _READERS:
            raise MalformedError(f"the tag {tag} is not supported here", *_line(node))
        if node.style is None and self._is_text is not None and self._is_text(path, node.value):
            tag = "!!str"
        return _read_scalar(node, tag)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        own: dict[str, int] = {}
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise MalformedError("a key is a list or a mapping; expected text", *_line(key))
            name = _read_scalar(key, "!!str")
            if name in own:
                dotted = shown(".".join(map(str, (*path, name))))
                raise MalformedError(
                    f"the key {dotted} is given twice (first in line {own[name]}); keep one", *_line(key)
                )
            own[name] = key.start_mark.line + 1
            if name == "<<" and key.style is None:
                # of several mappings the first wins
                several = isinstance(child, yaml.SequenceNode)
                for part in reversed(child.value) if several else [child]:
                    if not isinstance(part, yaml.MappingNode):
                        raise MalformedError("<<: expected a mapping, or a list of them", *_line(key))
                    found |= self.plain(part, path)
        for key, child in node.value:
            if key.value != "<<" or key.style is not None:
                here = (*path, key.value)
                self._lines[here] = key.start_mark.line + 1
                found[key.value] = self.plain(child, here)
        return found


class YamlDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that YamlLoader would read otherwise."""

    yaml_implicit_resolvers = _RESOLVERS


def dump_yaml(value: Any) -> str:
    """Return YAML text that parse_yaml reads back to an equal value."""
    return yaml.dump(value, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def parse_yaml(
    text: str, lines: dict[KeyPath, int] | None = None, carriers: set[str] | None = None, is_text: IsText | None = None
) -> Any:
    """Return the value of a YAML text of one document; None if it is empty. Raises MalformedError.

    Keys become text. A repeated key is rejected. lines: filled with the line of each key. carriers:
    filled with the keys at the top whose value has an anchor that an alias uses. is_text: of words
    that would be numbers, booleans or null.
    """
    if len(text) > MAX_YAML_BYTES:
        raise MalformedError(f"longer than {MAX_YAML_BYTES / 2**20:g} MiB")
    try:
        loader = YamlLoader(text, {} if lines is None else lines, is_text)
        root = loader.get_single_node()
        if carriers is not None and isinstance(root, yaml.MappingNode):
            keys = [key for key, _ in root.value]
            starts = [key.start_mark.index for key in keys]
            carriers |= {
                owner.value
                for node in loader.aliased
                if (owner := keys[bisect_right(starts, node.start_mark.index) - 1]) is not node
            }
        return None if root is None else loader.plain(root)
    except yaml.MarkedYAMLError as error:
        problem = (error.problem or "not YAML").replace("second occurrence", "an anchor is defined twice")
        raise MalformedError(problem, *_line(error)) from None
    except RecursionError:
        raise MalformedError("nested too deep") from None
    except yaml.YAMLError as error:
        raise MalformedError(str(error).partition("\n")[0]) from None


_READERS: dict[str, Callable[[str], Any]] = {
    "!!str": require_text,
    "!!int": int,
    "!!float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "!!bool": lambda text: {"true": True, "false": False}[text.lower()],
    "!!null": lambda text: {"": None, "~": None, "null": None}[text.lower()],
}


def _read_scalar(node: yaml.ScalarNode, tag: str) -> Any:
    try:
        return _READERS[tag](node.value)
    except MalformedError as error:
        raise MalformedError(error.problem, *_line(node)) from None
    except (ValueError, KeyError):
        raise MalformedError(f"{shown(node.value)} does not fit its tag {tag}", *_line(node)) from None


def _line(found: Any) -> tuple[int, int]:
    """Return line and column of a node, an event or an error of PyYAML; zeros if it has none."""
    mark = getattr(found, "problem_mark", None) or getattr(found, "start_mark", None)
    return (mark.line + 1, mark.column + 1) if mark else (0, 0)

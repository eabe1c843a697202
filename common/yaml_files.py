"""Reader of YAML from outside, within limits.

It is separate from ``structured_files`` because PyYAML takes 50 ms to load. Results are plain data without shared
parts. Merge keys (``<<: *anchor``) are those of yaml.org/type/merge.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.structured_files import MAX_DEPTH, MalformedError, read_text, require_mapping, shown

MAX_YAML_BYTES = 2**20
MAX_YAML_NODES = 100_000

KeyPath = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


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


_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "null": r"~|null|Null|NULL|",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_READERS: dict[str, Callable[[str], Any]] = {
    "!!bool": lambda text: {"true": True, "false": False}[text.lower()],
    "!!null": lambda text: {"": None, "~": None, "null": None}[text.lower()],
    "!!int": int,
    "!!float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "!!str": str,
}
_RESOLVERS: dict[Any, Any] = {
    None: [(_TAG + name, re.compile(f"^(?:{pattern})$")) for name, pattern in _SCALARS.items()]
}
"""Kinds of words without quotation marks, in PyYAML's form: of any first character."""


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars: 6e-4 is a number, and yes, no, on, off are text."""

    yaml_implicit_resolvers = _RESOLVERS

    def __init__(
        self,
        text: str,
        lines: dict[KeyPath, int] | None = None,
        carriers: set[Any] | None = None,
        is_text: Callable[[KeyPath, str], bool] = lambda path, word: False,
    ) -> None:
        super().__init__(text)
        self._lines = {} if lines is None else lines
        self._carriers: set[Any] = set() if carriers is None else carriers
        self._is_text = is_text
        self._tops: dict[int, KeyPath] = {}
        """Key at the top of each node, by id."""
        self._seen = 0

    def plain(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        """Return the data of a composed node. Aliases are followed, and each place gets its own copy."""
        self._seen += 1
        if self._seen > MAX_YAML_NODES:
            raise _fault(f"more than {MAX_YAML_NODES:,} values once aliases are followed", node)
        if len(path) > MAX_DEPTH:
            raise _fault(f"nested deeper than {MAX_DEPTH} levels", node)
        if (top := self._tops.setdefault(id(node), path[:1])) != path[:1]:
            self._carriers.update(top)
        tag = node.tag.replace(_TAG, "!!")
        if isinstance(node, yaml.MappingNode) and tag == "!!map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "!!seq":
            return [self.plain(child, (*path, index)) for index, child in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode) or tag not in _READERS:
            raise _fault(f"the tag {tag} is not supported here", node)
        try:
            return _READERS["!!str" if node.style is None and self._is_text(path, node.value) else tag](node.value)
        except (ValueError, KeyError):
            raise _fault(f"{shown(node.value)} does not fit its tag {tag}", node) from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        own: dict[str, int] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _fault("a key is a list or a mapping; expected text", key)
            here = (*path, key.value)
            if key.value in own:
                dotted = shown(".".join(map(str, here)))
                raise _fault(f"the key {dotted} is given twice (first in line {own[key.value]}); keep one", key)
            own[key.value] = key.start_mark.line + 1
            if key.value == "<<" and key.style is None:
                merged += [(key, part) for part in (child.value if isinstance(child, yaml.SequenceNode) else [child])]
            else:
                self._lines.setdefault(here, own[key.value])
                found[key.value] = self.plain(child, here)
        for key, part in merged:  # the first wins
            if not isinstance(part, yaml.MappingNode):
                raise _fault("<<: expected a mapping, or a list of them", key)
            found = self.plain(part, path) | found
        return found


class YamlDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that YamlLoader would read otherwise."""

    yaml_implicit_resolvers = _RESOLVERS


def dump_yaml(value: Any) -> str:
    """Return YAML text that parse_yaml reads back to an equal value."""
    return yaml.dump(value, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, **wishes: Any) -> Any:
    """Return the value of a YAML text of one document; None if it is empty. Raises MalformedError.

    Keys become text. A repeated key is rejected. wishes, each optional: lines, a dict to fill with the line of each
    key; carriers, a set to fill with the keys at the top whose values aliases under other keys use; is_text, which
    tells whether a word without quotation marks is text there, even one such as 42 or true.
    """
    if len(text) > MAX_YAML_BYTES:
        raise MalformedError(f"longer than {MAX_YAML_BYTES / 2**20:g} MiB")
    try:
        loader = YamlLoader(text, **wishes)
        root = loader.get_single_node()
        return None if root is None else loader.plain(root)
    except MalformedError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # the last two of chr() for an escape
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        problem = "nested too deep" if isinstance(error, RecursionError) else problem
        raise _fault(problem.replace("second occurrence", "an anchor is defined twice"), error) from None


def _fault(problem: str, found: Any) -> MalformedError:
    """Return the error with the place of a node or of an error of PyYAML."""
    mark = getattr(found, "problem_mark", None) or getattr(found, "start_mark", None)
    return MalformedError(problem, mark.line + 1, mark.column + 1) if mark else MalformedError(problem)

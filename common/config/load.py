"""From YAML files and ``section.key=value`` words to a RunConfig, with errors that name file, line and key."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.config.hints import explain
from common.config.mindformers import Path_, Sources, rename, rename_keys
from common.config.schema import RunConfig, expand_precision, expand_tokenizer
from common.errors import ConfigError
from common.files import atomic_write


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars: 6e-4 is a number, and yes, no, on, off are text."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""] if _tag == "null" else list(_first)
    )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would not read as text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

# Text that stands for a mapping, so that ``precision.softmax=...`` refines ``precision: bf16`` instead of replacing it.
_SHORTHANDS: dict[Path_, Callable[[Any], Any]] = {("precision",): expand_precision, ("data", "tokenizer"): expand_tokenizer}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path`` and the files of its ``base:`` list (the main file wins), then apply overrides.

    Raises ConfigError naming file, line and key of each fault.
    """
    tree, sources = _read_with_bases(Path(path), ())
    for word in overrides:
        _override(tree, sources, word)
    return build_config(tree, sources)


def build_config(tree: Mapping[str, Any], sources: Sources | None = None) -> RunConfig:
    """Validate a plain mapping. ``sources`` says where each key was read, for error messages."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [explain(fault, sources or {}) for fault in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def dump_config(config: RunConfig) -> str:
    """YAML text that load_config reads back to an equal config."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def save_config(config: RunConfig, path: Path) -> None:
    with atomic_write(path, "w") as file:
        file.write(dump_config(config))


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys and values of a nested mapping, in order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_scalar(text: str, where: str) -> Any:
    """A YAML value from the command line. Text that is no number, boolean, null, list or mapping stays text."""
    if text.lstrip()[:1] not in ("[", "{") and not re.fullmatch(r"[-+.\w~]*", text):
        return text
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: {text[:60]!r} is not valid YAML: {getattr(error, 'problem', error)}") from None


# ---- files ----


def _read_with_bases(path: Path, parents: tuple[Path, ...]) -> tuple[dict[str, Any], Sources]:
    if path.resolve() in parents:
        raise ConfigError(f"{path}: base files include each other: {' -> '.join(str(p) for p in (*parents, path))}")
    own, own_sources = read_yaml(path)
    rename_keys(own, own_sources)
    bases = own.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{own_sources.get(('base',), path)}: base: expected a list of files, found {bases!r}")
    tree: dict[str, Any] = {}
    sources: Sources = {}
    for base in bases:
        base_tree, base_sources = _read_with_bases(path.parent / base, (*parents, path.resolve()))
        _merge(tree, base_tree)
        sources |= base_sources
    _merge(tree, own)
    return tree, sources | own_sources


def read_yaml(path: Path) -> tuple[dict[str, Any], Sources]:
    """The mapping in a YAML file, and ``file:line`` of every key. Duplicate keys are refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1) if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file" + (f"; did you mean {path.parent / near[0]}?" if near else "")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    sources: Sources = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, sources
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: expected keys and values at the top, found something else")
        _record_sources(node, (), path, sources)
        return loader.construct_document(node), sources
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).partition(chr(10))[0]}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _record_sources(node: yaml.Node, prefix: Path_, path: Path, sources: Sources) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _record_sources(child, (*prefix, index), path, sources)
        return
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*prefix, str(key.value))
        if here in sources:
            dotted = ".".join(map(str, here))
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: {dotted} is given twice (first at {sources[here]}); keep one")
        sources[here] = f"{path}:{key.start_mark.line + 1}"
        _record_sources(value, here, path, sources)


def _merge(target: dict[str, Any], other: Mapping[str, Any], path: Path_ = ()) -> None:
    for key, value in other.items():
        here = (*path, str(key))
        old = _expanded(here, target.get(str(key)))
        if isinstance(old, dict) and isinstance(value, dict):
            target[str(key)] = old
            _merge(old, value, here)
        else:
            target[str(key)] = value


def _expanded(path: Path_, value: Any) -> Any:
    """A copy of the mapping that a shorthand stands for; any other value as it is."""
    if isinstance(value, str) and path in _SHORTHANDS:
        try:
            return dict(_SHORTHANDS[path](value))
        except ValueError as error:
            raise ConfigError(f"{'.'.join(map(str, path))}: {error}") from None
    return value


# ---- the command line ----


def _override(tree: dict[str, Any], sources: Sources, word: str) -> None:
    dotted, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", dotted):
        raise ConfigError(f"command line: {word!r}: expected section.key=value")
    path: Path_ = tuple(dotted.split("."))
    value = text if _takes_text(path, text) else parse_scalar(text, f"command line: {dotted}")
    renamed = rename(path, value, "command line")
    if renamed is None:
        return
    path, value = renamed
    at = tree
    for depth, key in enumerate(path[:-1], 1):
        below = _expanded(path[:depth], at.get(str(key)))
        at[str(key)] = below if isinstance(below, dict) else {}
        at = at[str(key)]
    at[str(path[-1])] = value
    sources[path] = "command line"


def _takes_text(path: Path_, text: str) -> bool:
    """True for fields of text (or one text of a list), so that a prompt of ``42`` or ``Once: upon`` arrives as it was typed."""
    annotation = _annotation(path)
    options = set(typing.get_args(annotation)) if isinstance(annotation, types.UnionType) else {annotation}
    options = {typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option for option in options}
    if text in ("null", "~") or not options <= {str, list[str], type(None)}:
        return False
    return list[str] not in options or not text.lstrip().startswith("[")


def _annotation(path: Path_) -> Any:
    model: Any = RunConfig
    annotation: Any = None
    for key in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or key not in model.model_fields:
            return None
        annotation = model.model_fields[str(key)].annotation
        model = annotation
    return annotation

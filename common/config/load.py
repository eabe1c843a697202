"""Load a RunConfig from YAML files and ``section.key=value`` overrides.

Errors name file, line and key.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config.aliases import Sources, merge_aliases, rename, rename_keys
from common.config.hints import explain_all, schema_keys, types_of
from common.config.schema import RunConfig, expand_model, expand_tokenizer
from common.config.values import expand_precision
from common.errors import ConfigError
from common.files import atomic_write, reading
from common.paths import ROOT, looked_in
from common.structured_files import MAX_DEPTH, MalformedError, read_text
from common.yaml_files import MAX_YAML_BYTES, KeyPath, dump_yaml, parse_yaml, read_yaml_mapping

# Text that stands for a mapping, so that ``precision.softmax=...`` refines ``precision: bf16`` instead of replacing it.
_SHORTHANDS: dict[KeyPath, Callable[[Any], Any]] = {
    ("precision",): expand_precision,
    ("data", "tokenizer"): expand_tokenizer,
    ("model",): expand_model,
}

_LENGTHS = {"train": ("max_steps", "max_epochs", "max_tokens"), "validation": ("max_samples", "max_batches")}
"""Keys that set the length of a run and of a validation; each has one of them."""

_PROSE: set[KeyPath] = {("predict", "prompt"), ("predict", "stop"), ("predict", "bad_words")}
"""Keys that take a text or a list. A text may begin with a bracket, such as [CLS]."""
_FILES: set[KeyPath] = {("data", "train"), ("data", "validation"), ("data", "tokenizer")}
"""Keys that take the name of a file or a folder, or a list or a mapping."""
_ITEM = r'(?:"(?:[^"\\]|\\.)*"|\'[^\']*\'|-?\d+|\[[-\d\s,]*\])'
_LIST = re.compile(rf"\s*\[\s*(?:{_ITEM}\s*(?:,\s*{_ITEM}\s*)*)?\]\s*", re.S)
"""A list of texts in quotation marks, ids and lists of ids."""

_Read = tuple[dict[str, Any], Sources]

Fill = Callable[[dict[str, Any], Sources], None]
"""Function that fills in a model without sizes from the checkpoint that its configuration names."""
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size")


def read_own_config(path: Path, text: str | None = None) -> _Read:
    """Read a file with our own keys and the files of its ``base:`` list, of which it wins.

    Returns the values, not yet checked, and the source of each key. text: content of ``path``, if it has been read.
    Raises ConfigError.
    """

    def read(file: Path) -> _Read:
        own, sources = read_yaml(file, is_text=_takes_text, text=text if file is path else None)
        rename_keys(own, sources)
        return own, sources

    tree, sources = read_with_bases(path, "base", read, _merge)
    data = tree.get("data")
    if isinstance(data, dict):
        data |= {name: _found(data[name]) for name in ("train", "validation", "tokenizer") if name in data}
    return tree, sources


def apply_overrides(tree: dict[str, Any], sources: Sources, words: Sequence[str]) -> None:
    """Apply ``section.key=value`` overrides to a plain mapping. Raises ConfigError.

    A length from the command line replaces another one from a file.
    """
    for word in words:
        _override(tree, sources, word)
    for section, names in _LENGTHS.items():
        values = tree.get(section)
        if not isinstance(values, dict):
            continue
        said = [name for name in names if sources.get((section, name)) == "command line"]
        if all(values[name] is None for name in said):
            continue
        for name in set(names) - set(said):
            values.pop(name, None)
        counted = sources.get(("train", "num_samples")) == "command line"
        if section == "train" and values.get("max_epochs") is None and not counted:
            values.pop("num_samples", None)


def _found(value: Any) -> Any:
    """Return the path in the project's folder if only that one exists, else ``value``; of a list or mapping, each.

    The working directory comes first. A preset thus works from any directory.
    """
    if isinstance(value, list):
        return [_found(each) for each in value]
    if isinstance(value, dict):
        return {
            key: _found(each) if key in ("folder", "vocab_file", "merge_file") else each for key, each in value.items()
        }
    if not isinstance(value, str) or not value or "\0" in value or Path(value).is_absolute() or _is_there(Path(value)):
        return value
    return str(ROOT / value) if _is_there(ROOT / value) else value


def _is_there(path: Path) -> bool:
    """Tell whether a path exists, or is the prefix of a file that does."""
    try:
        return path.exists() or any(
            entry.name.startswith(f"{path.name}{mark}") for entry in path.parent.iterdir() for mark in "._"
        )
    except OSError:
        return False


def build_config(tree: Mapping[str, Any], sources: Sources | None = None, fill: Fill | None = None) -> RunConfig:
    """Validate a plain mapping. sources: where each key was read, for error messages. fill: gives
    sizes to a model that has none.
    """
    whole, places = copy.deepcopy(dict(tree)), dict(sources or {})
    merge_aliases(whole, places)
    model = _expanded(("model",), whole.get("model"))
    is_empty = model is None or (isinstance(model, dict) and not any(model.get(key) for key in _SIZES))
    if is_empty and fill is not None:
        if model is not None:
            whole["model"] = model
        fill(whole, places)
    try:
        return RunConfig.model_validate(whole)
    except ValidationError as error:
        raise ConfigError("\n".join(explain_all(error.errors(), places))) from None


def dump_config(config: RunConfig) -> str:
    """Return YAML text that load_config reads back to an equal config."""
    return dump_yaml(config.model_dump())


def save_config(config: RunConfig, path: Path, remark: str = "") -> None:
    """Write a config as YAML. remark: comment at its end."""
    with atomic_write(path, "w") as file:
        file.write(dump_config(config) + remark)


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a nested mapping, in order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- files ----


def read_with_bases(
    path: Path, base: str, read: Callable[[Path], _Read], merge: Callable[[dict[str, Any], Mapping[str, Any]], None]
) -> _Read:
    """Return the values of a file merged over those of the files that its key ``base`` names, and
    the place of each key. Raises ConfigError.

    read: returns the content of a file. merge: merges the second mapping into the first.
    """
    known: dict[str, _Read] = {}

    def whole(path: Path, parents: tuple[str, ...], where: str) -> _Read:
        real = os.path.realpath(path) if "\0" not in str(path) else str(path)  # read rejects it
        if real in parents:
            raise ConfigError(
                f"{where}{path}: files include each other: {' -> '.join((*parents, real))}; take one of them out"
            )
        if real in known:
            return known[real]
        if len(parents) > MAX_DEPTH:
            raise ConfigError(f"{where}{path}: files are nested deeper than {MAX_DEPTH} levels; put keys into fewer")
        own, own_sources = read(path)
        names = own.pop(base, None)
        names = [] if names in (None, "") else [names] if isinstance(names, str) else names
        where = f"{own_sources.pop((base,), path)}: {base}: "
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_list or len(names) > MAX_DEPTH:
            found = f"{len(names)} entries" if is_list else repr(names)[:80]
            raise ConfigError(
                f"{where}expected the name of a file or a list of at most {MAX_DEPTH} files, found {found}"
            )
        tree: dict[str, Any] = {}
        sources: Sources = {}
        for file in (path.parent / name for name in names):
            if "\0" not in str(file) and not os.path.lexists(file):
                raise ConfigError(f"{where}{_absent(file)}")
            base_tree, base_sources = whole(file, (*parents, real), where)
            merge(tree, base_tree)
            sources |= base_sources
        merge(tree, own)
        known[real] = tree, sources | own_sources
        return known[real]

    return whole(path, (), "")


def read_yaml_text(path: Path) -> str:
    """Return the content of a YAML file. Raises ConfigError."""
    if "\0" not in str(path) and not os.path.lexists(path):
        raise ConfigError(_absent(path))
    return read_text(path, limit=MAX_YAML_BYTES)


def read_yaml(path: Path, text: str | None = None, **wishes: Any) -> _Read:
    """Return the keys and values of a YAML file, and ``file:line`` of every key.

    text: content of the file, if it has been read. wishes: of ``parse_yaml``. Raises ConfigError, also for a key given
    twice.
    """
    text = read_yaml_text(path) if text is None else text
    lines: dict[KeyPath, int] = {}
    tree = read_yaml_mapping(path, text, lines=lines, **wishes)
    return tree, {key: f"{path}:{line}" for key, line in lines.items()}


def _absent(path: Path) -> str:
    """Return the message for a config that does not exist, with a similar name if there is one."""
    with reading(path, ConfigError):  # the name may be too long
        names = [other.name for other in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"{path}: no such file" + (
        f"; did you mean {path.parent / near[0]}?" if near else f"{looked_in(path)}; check the path"
    )


def _merge(target: dict[str, Any], other: Mapping[str, Any], path: KeyPath = ()) -> None:
    for key, value in other.items():
        here = (*path, str(key))
        old = _expanded(here, target.get(str(key)))
        if isinstance(old, dict) and isinstance(value, dict):
            target[str(key)] = old
            _merge(old, value, here)
        else:
            target[str(key)] = copy.deepcopy(value)  # one file may be the base of several


def _expanded(path: KeyPath, value: Any) -> Any:
    """Return a copy of the mapping that a shorthand stands for, and any other value unchanged."""
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
    path: KeyPath = tuple(dotted.split("."))
    value = read_value(text, path, f"command line: {dotted}")
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


def read_value(text: str, path: KeyPath, where: str) -> Any:
    """Return the value of a key from the command line. Raises ConfigError.

    It is read as YAML where the key takes more than text, and the text can be a number, boolean, null, list or mapping.
    """
    is_plain = text.lstrip()[:1] not in ("[", "{") and not re.fullmatch(r"[-+.\w~]*", text)
    if is_plain or _takes_text(path, text):
        return text
    try:
        return parse_yaml(text)
    except MalformedError as error:
        raise ConfigError(f"{where}: {text[:60]!r} is not valid YAML: {error.problem}") from None


def _takes_text(path: KeyPath, text: str) -> bool:
    """Tell whether a value of a key is text as it is written, such as a prompt of ``42``, ``null``
    or ``[CLS]``, or a folder ``2024``. Of other keys, ``null``, ``~`` and nothing are null.
    """
    if path in _PROSE:
        return not _LIST.fullmatch(text)
    field = schema_keys().get(".".join(map(str, path)))
    is_text = field is not None and set(types_of(field.annotation)) <= {str, type(None)}
    is_text |= path in _FILES and text[:1] not in ("[", "{")
    return is_text and text not in ("", "null", "~")

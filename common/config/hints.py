"""Suggestions for wrong keys, and the text of configuration errors."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.config.aliases import ALIASES, Sources
from common.config.schema import RunConfig
from common.dialects import fleetx, gpt2_chinese, hugging_face, megatron, mindformers, oneflow
from common.dialects.others import ABSENT, HERE
from common.dialects.rules import ByHand, Fixed, MapTo, Table
from common.yaml_files import KeyPath

TABLES: tuple[Table, ...] = (
    mindformers.TABLE, {key: rule for key, (rule, _) in mindformers.CALLBACKS.items()},
    fleetx.TABLE, megatron.TABLE, oneflow.TABLE, hugging_face.TABLE, gpt2_chinese.TRAIN,
    gpt2_chinese.GENERATE, gpt2_chinese.EVAL, megatron.DEEPSPEED,
)  # fmt: skip
"""Tables of other systems. The first that knows a name gives the hint."""
_SAME_SECTION, _OTHER_SECTION = 0.75, 0.9
"""Least similarity of two names (difflib's ratio) for a hint, in the same section and in others."""


def explain_all(faults: Sequence[Any], sources: Sources) -> list[str]:
    """Return one line for each key in which pydantic found a fault: where, which key, what was expected and found.

    A key of several types has a fault for each.
    """
    by_key: dict[KeyPath, list[Any]] = {}
    for fault in faults:
        path: KeyPath = tuple(fault["loc"])
        if fault["type"] not in ("extra_forbidden", "missing"):  # pydantic appends the types of the key
            known = (n for n in range(len(path), 0, -1) if ".".join(map(str, path[:n])) in schema_keys())
            length = next(known, len(path))
            path = (*path[:length], *(part for part in path[length:] if isinstance(part, int)))
        by_key.setdefault(path, []).append(fault)
    return list(dict.fromkeys(_explained(path, found, sources) for path, found in by_key.items()))


def _explained(path: KeyPath, faults: Sequence[Any], sources: Sources) -> str:
    fault, dotted = faults[0], ".".join(map(str, path))
    where = next((sources[path[:n]] for n in range(len(path), 0, -1) if path[:n] in sources), None)
    prefix = f"{where}: {dotted}" if where else dotted
    if fault["type"] == "extra_forbidden":
        return f"{prefix}: unknown key{hint(dotted)}"
    if fault["type"] == "missing":
        return f"{prefix}: required, but in no file; add it or give {dotted}=... on the command line"
    first, *others = dict.fromkeys(str(each["msg"]) for each in faults)
    whole = " or ".join([first, *(text.removeprefix("Input should be ") for text in others)])
    message = whole.removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{prefix}: {message}"
    return f"{prefix}: {message[0].lower()}{message[1:]}, found {fault['input']!r}"


def hint(dotted: str) -> str:
    """Return the text that follows "unknown key": a suggestion, advice, or nothing."""
    if (here := key_of_others(dotted)) is not None:
        return f"; did you mean {here}?"
    if advice := _names_of_others()[1].get(dotted.rpartition(".")[2]):
        return f"; {advice}"
    near = nearest_keys(dotted)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def key_of_others(dotted: str) -> str | None:
    """Return what a name of another system is here: a key, several, a key with its value, or an
    option of the command line. None for any other name.
    """
    names = _names_of_others()[0]
    return names.get(dotted) or names.get(dotted.rpartition(".")[2])


@lru_cache(maxsize=1)
def _names_of_others() -> tuple[dict[str, str], dict[str, str]]:
    """Return names of other systems with what they are here, and names without a key here with advice.

    A name is a key of theirs, or its last part where no key of ours ends so.
    """
    keys = schema_keys()
    ends = {key.rpartition(".")[2] for key in keys}
    here, absent = dict(HERE), dict(ABSENT)
    for table in TABLES:
        for key, rule in table.items():
            name = key.removesuffix(".*").rpartition(".")[2]
            target = rule.hint or (rule.key if isinstance(rule, MapTo) else "")
            if target and key not in keys and target.rpartition(".")[2] != key:
                here.setdefault(key, target)
            if name in ends or "*" in name:
                continue
            if target:
                here.setdefault(name, target)
            elif not isinstance(rule, MapTo | ByHand) and ("_" in name or "." not in key[:-2]):
                why = rule.instead.partition("; ")[0] if isinstance(rule, Fixed) else rule.why
                absent.setdefault(name, f"{why}; leave it out")
    return here, absent


def unknown_arguments(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """Name the unknown arguments, and for each the key that it may mean, with the given value.

    argparse also counts the words after an unknown option; those that are overrides are left out.
    """
    keys = schema_keys()
    unknown = [word for word in unknown if word.partition("=")[0] not in keys]
    lines = [f"unrecognized arguments: {' '.join(unknown)}; keys of the configuration are written section.key=value"]
    for argument in unknown:
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals:
            behind = argv[argv.index(argument) + 1 :][:1] if argument in argv else []
            is_value = behind and not behind[0].startswith("-") and "=" not in behind[0]
            value = behind[0] if is_value else "..."
        name = name.replace("-", "_")
        if (found := key_of_others(name)) is not None:
            found += f"={value}" if found in keys and section_of(keys[found]) is None else ""
        elif near := nearest_keys(name):
            found = f"{near[0]}={value}"
        elif why := _names_of_others()[1].get(name):
            lines.append(f"{argument}: {why}")
        if found:
            lines.append(f"{argument}: did you mean {found}?")
    return "\n".join(lines)


def nearest_keys(dotted: str) -> list[str]:
    """Return similar keys: in the same section, else with the same name elsewhere, else nearly equal."""
    keys = [*schema_keys(), *ALIASES]
    section, _, name = dotted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=_SAME_SECTION):
        return [siblings[near[0]]]
    fields = {key: schema_keys().get(key) for key in keys if key.rpartition(".")[2] == name}
    if same := [key for key, field in fields.items() if field is None or section_of(field) is None]:
        return same[:3]
    return difflib.get_close_matches(dotted, keys, n=1, cutoff=_OTHER_SECTION)


@lru_cache(maxsize=1)
def schema_keys() -> dict[str, FieldInfo]:
    """Map every dotted key to its field."""
    return dict(_fields_of(RunConfig))


def _fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if (section := section_of(field)) is not None:
            yield from _fields_of(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, even if optional or in short form."""
    kinds = types_of(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def types_of(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, without their limits."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return types_of(inner[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for each in inner for kind in types_of(each)]
    return [annotation]

"""What a wrong key of the configuration may have meant, and the sentence that a fault in it
becomes.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from common.config.aliases import ALIASES, Path_, Sources
from common.config.foreign_names import ABSENT, HERE, HERE_IN
from common.config.schema import RunConfig

_SAME_SECTION, _OTHER_SECTION = 0.75, 0.9
"""How alike two names must be (difflib's ratio), so that a hint is no guess."""


def explain(fault: Any, sources: Sources) -> str:
    """One line for a fault that pydantic has found: where, which key, what was expected and what
    was found.
    """
    path: Path_ = tuple(fault["loc"])
    dotted = ".".join(map(str, path))
    where = next((sources[path[:n]] for n in range(len(path), 0, -1) if path[:n] in sources), None)
    prefix = f"{where}: {dotted}" if where else dotted
    if path and path[-1] == "<<":
        return f"{prefix}: YAML merge keys are not supported; list the other file under base:"
    if fault["type"] == "extra_forbidden":
        return f"{prefix}: unknown key{hint(dotted)}"
    if fault["type"] == "missing":
        return (
            f"{prefix}: required, and in no file; add it or give {dotted}=... on the command line"
        )
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{prefix}: {message}"
    return f"{prefix}: {message[0].lower()}{message[1:]}, found {fault['input']!r}"


def hint(dotted: str) -> str:
    """What to put behind "unknown key": ``; did you mean KEY?``, ``; `` and what to do instead, or
    nothing.
    """
    name = dotted.rpartition(".")[2]
    here = HERE_IN.get(dotted) or HERE.get(name)
    if here is not None:
        return f"; did you mean {here}?"
    if name in ABSENT:
        return f"; {ABSENT[name]}"
    near = nearest_keys(dotted)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def key_for_flag(name: str, value: str) -> str | None:
    """The word of the command line that ``--name value`` may mean, such as ``train.max_steps=5``;
    None where nothing is like it.
    """
    name = name.replace("-", "_")
    here = HERE_IN.get(name) or HERE.get(name)
    if here is None:
        near = nearest_keys(name)
        return f"{near[0]}={value}" if near else ABSENT.get(name)
    return (
        here
        if "=" in here or " " in here or here.startswith("-") or schema_keys().get(here, True)
        else f"{here}={value}"
    )


def unknown_arguments(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """Name the arguments that nobody knows, and for each the key that it may mean, with the value
    that was given. argparse counts the words behind an unknown option among them; those that are
    keys are left out.
    """
    unknown = [word for word in unknown if word.partition("=")[0] not in schema_keys()]
    lines = [
        f"unrecognized arguments: {' '.join(unknown)}; keys of the configuration are written"
        " section.key=value"
    ]
    for argument in unknown:
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals:
            behind = argv[argv.index(argument) + 1 :][:1] if argument in argv else []
            is_value = behind and not behind[0].startswith("-") and "=" not in behind[0]
            value = behind[0] if is_value else "..."
        if found := key_for_flag(name, value):
            lines.append(f"{argument}: did you mean {found}?")
    return "\n".join(lines)


def nearest_keys(dotted: str) -> list[str]:
    """Keys like this one: in its section, else those of just this name in others, else a whole key
    that differs by a letter or two.
    """
    keys = schema_keys() | dict.fromkeys(ALIASES, False)
    section, _, name = dotted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=_SAME_SECTION):
        return [siblings[near[0]]]
    if same := [
        key for key, is_section in keys.items() if not is_section and key.rpartition(".")[2] == name
    ]:
        return same[:3]
    return difflib.get_close_matches(dotted, keys, n=1, cutoff=_OTHER_SECTION)


@lru_cache(maxsize=1)
def schema_keys() -> dict[str, bool]:
    """Every dotted key, and whether it is a section."""
    return dict(_keys_of(RunConfig))


def _keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        yield f"{prefix}{name}", section is not None
        if section is not None:
            yield from _keys_of(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this annotation holds, also where it may be left out or has a
    short form.
    """
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
        if typing.get_origin(option) is typing.Annotated and (
            found := section_of(typing.get_args(option)[0])
        ):
            return found
    return None

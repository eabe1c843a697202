"""Keys of MindFormers that files of ours may have.

``rename`` moves sections and keys of one file or one override. ``merge_aliases`` combines values
that several places give under two names.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

from common.dialects.mindformers import PARTS, TABLE, TARGETS
from common.dialects.rules import ByHand, Fixed, MapTo, Table, words
from common.errors import ConfigError
from common.structured_files import require_mapping
from common.yaml_files import KeyPath

Sources = dict[KeyPath, str]

_ALONE = words("""
    micro_batch_interleave_num parallel.loss_repeated_mean
    parallel.strategy_ckpt_save_file parallel.strategy_ckpt_load_file
""")
_TAKEN: Table = {
    key: rule for key, rule in TABLE.items() if (key.partition(".")[0] in PARTS or key in _ALONE) and rule != ByHand()
}


def rename(path: KeyPath, value: Any, where: str) -> tuple[KeyPath, Any] | None:
    """Return our path and value for a MindFormers key, and any other key unchanged.

    Returns None for a key whose only supported value is the default, and raises ConfigError for any other value of it.
    """
    match _TAKEN.get(_dotted(path)):
        case MapTo(key, change):
            return tuple(key.split(".")), change(value)
        case ByHand(key):
            return tuple(key.split(".")), value
        case Fixed(values, instead):
            if value not in values:
                raise ConfigError(f"{where}: {_dotted(path)}={value}: {instead}, or leave it out")
            return None
    return path, value


def rename_keys(tree: dict[str, Any], sources: Sources) -> None:
    """Move MindFormers' keys of one file to ours, in place.

    Raises ConfigError where the file gives both names different values.
    """
    for dotted in _TAKEN:
        path = tuple(dotted.split("."))
        section = _section(tree, path[:-1])
        if section is None or path[-1] not in section:
            continue
        where = sources.pop(path, "?")
        found = rename(path, section.pop(path[-1]), where)
        if path[:-1] and not section:
            del tree[path[0]]
        if found is None:
            continue
        name, value = found
        *sections, key = map(str, name)
        target = tree
        for depth, heading in enumerate(sections, 1):
            target = target.setdefault(heading, {})
            require_mapping(target, f"{sources.get(name[:depth], '?')}: {_dotted(name[:depth])}")
        if key in target and target[key] != value:
            raise ConfigError(
                f"{where}: {_dotted(path)}={value} is another name for"
                f" {_dotted(name)}={target[key]} ({sources.get(name, '?')}); keep one of them"
            )
        target[key] = value
        sources[name] = where
    for heading in sorted(PARTS):
        if heading not in tree:
            continue
        known = [key.partition(".")[2] for key in _TAKEN if key.startswith(f"{heading}.")]
        for key in require_mapping(tree[heading], f"{sources.get((heading,), '?')}: {heading}"):
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {heading}.{near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{sources.get((heading, str(key)), '?')}: {heading}.{key}: unknown key; {hint}")


class Alias(NamedTuple):
    """A key whose value is merged into one of ours and then removed."""

    ours: str
    meaning: str
    values: tuple[Any, ...] = ()
    """Accepted values; empty where the checks of our key apply."""


_SWITCH = (True, False)
ALIASES = {
    "parallel.micro_batch_num": Alias("train.accumulation_steps", "Another name for train.accumulation_steps."),
    "parallel.enable_parallel_optimizer": Alias(
        "parallel.zero_stage", "Another name for parallel.zero_stage: true is 1 or higher, false 0.", _SWITCH
    ),
    "parallel.parallel_optimizer_config.gradient_accumulation_shard": Alias(
        "parallel.zero_stage",
        "Split the accumulated gradients too: another name for parallel.zero_stage=2.",
        _SWITCH,
    ),
    "parallel.gradients_mean": Alias(
        "parallel.parallel_mode",
        "Gradients are averaged over the global batch. false is accepted in"
        " parallel.parallel_mode 1 and 2, where it changes nothing.",
        _SWITCH,
    ),
    "context.device_target": Alias("device", "Another name for device.", tuple(TARGETS)),
}
"""Keys that are accepted in files and on the command line but are not in the schema."""


def _merged(key: str, theirs: Any, ours: Any) -> Any:
    """Return the value of our key with that of an alias, whose last part is ``key``.

    ours: None where it is left out. Raises ValueError for a contradiction.
    """
    is_stage = ours is None or type(ours) is int
    match key:
        case "micro_batch_num":
            if ours not in (None, theirs):
                raise ValueError("are two names of one number; make them equal or leave one out")
            return theirs
        case "enable_parallel_optimizer":
            if ours and not theirs:
                raise ValueError("contradict each other; keep one of them")
            return max(ours or 0, int(theirs)) if is_stage else ours
        case "gradient_accumulation_shard":
            if theirs and not ours:
                remedy = "set parallel.enable_parallel_optimizer=true, or leave the second out"
                raise ValueError(f"contradict each other; {remedy}")
            return max(ours, 2) if theirs and is_stage else ours
        case "gradients_mean":
            if not theirs and ours not in (1, 2, "semi_auto_parallel", "auto_parallel"):
                reason = "gradients are averaged over the global batch"
                raise ValueError(f"contradict each other: {reason}; leave the second out")
            return ours
        case _:
            if ours not in (None, "auto", TARGETS[theirs]):
                raise ValueError("differ; keep one of them")
            return TARGETS[theirs]


def merge_aliases(tree: dict[str, Any], sources: Sources) -> None:
    """Merge the aliases of a whole config into our keys, in place.

    Raises ConfigError where an alias contradicts our key.
    """
    for name, alias in ALIASES.items():
        path, ours = tuple(name.split(".")), tuple(alias.ours.split("."))
        section = _section(tree, path[:-1])
        theirs = section.pop(path[-1], None) if section is not None else None
        if theirs is None:
            continue
        if alias.values and not any(type(theirs) is type(value) and theirs == value for value in alias.values):
            raise ConfigError(
                f"{_places(sources, path)}{name}: expected {' or '.join(map(_shown, alias.values))}, found {theirs!r}"
            )
        target = tree.setdefault(ours[0], {}) if len(ours) == 2 else tree
        if not isinstance(target, dict):  # the schema rejects it
            continue
        written = target.get(ours[-1])
        try:
            merged = _merged(path[-1], theirs, written)
        except ValueError as fault:
            said = f"{alias.ours}={_shown(written)}" if written is not None else f"no {alias.ours}"
            raise ConfigError(f"{_places(sources, ours, path)}{said} and {name}={_shown(theirs)} {fault}") from None
        if merged != written:
            target[ours[-1]] = merged
            if path in sources:
                sources[ours] = sources[path]


def _places(sources: Sources, *paths: KeyPath) -> str:
    found = dict.fromkeys(sources[path] for path in paths if path in sources)
    return f"{' and '.join(found)}: " if found else ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _section(tree: Any, path: KeyPath) -> dict[Any, Any] | None:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))

"""Sections and keys of MindFormers' files that have another name here, so that its files are read as they are."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from common.errors import ConfigError
from common.structured_files import require_mapping

Path_ = tuple[str | int, ...]
Sources = dict[Path_, str]


def _recompute(value: Any) -> Any:
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


def _same(value: Any) -> Any:
    return value


_NAMES: dict[Path_, tuple[Path_, Callable[[Any], Any]]] = {
    **{
        ("parallel_config", name): (("parallel", name), _same)
        for name in (
            "data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num", "vocab_emb_dp", "gradient_aggregation_group",
        )
    },
    ("parallel_config", "use_seq_parallel"): (("parallel", "sequence_parallel"), _same),
    ("parallel_config", "optimizer_shard"): (("parallel", "enable_parallel_optimizer"), _same),
    ("parallel", "strategy_ckpt_save_file"): (("parallel", "strategy_ckpt_config", "save_file"), _same),
    ("micro_batch_interleave_num",): (("parallel", "micro_batch_interleave_num"), _same),
    ("recompute_config", "recompute"): (("train", "recompute"), _recompute),
    **{
        ("recompute_config", name): (("train", name), _same)
        for name in ("mp_comm_recompute", "parallel_optimizer_comm_recompute", "recompute_slice_activation")
    },
}  # fmt: skip
"""Their path -> ours, and what the value becomes."""

_FIXED: dict[Path_, Any] = {("parallel_config", "expert_parallel"): 1, ("parallel", "loss_repeated_mean"): True}
"""Keys with one value here, which need no place."""


def rename(path: Path_, value: Any, where: str) -> tuple[Path_, Any] | None:
    """Our path and value of theirs; any other as it is; None for one that says what is so anyway. Raises ConfigError for what is not so."""
    if path in _FIXED:
        if value != _FIXED[path]:
            raise ConfigError(f"{where}: {_dotted(path)}={value}: this version has {_FIXED[path]} alone; set that, or leave the key out")
        return None
    name, change = _NAMES.get(path, (path, _same))
    return name, change(value)


def rename_keys(tree: dict[str, Any], sources: Sources) -> None:
    """Move what one file says under MindFormers' names to ours, in place. Raises ConfigError where it says both and they differ."""
    for path in (*_NAMES, *_FIXED):
        section = _section(tree, path[:-1])
        if section is None or path[-1] not in section:
            continue
        where = sources.pop(path, "?")
        found = rename(path, section.pop(path[-1]), where)
        if path[:-1] and not section:
            del tree[str(path[0])]
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
                f"{where}: {_dotted(path)}={value} is another name for {_dotted(name)}={target[key]}"
                f" ({sources.get(name, '?')}); keep one of them"
            )
        target[key] = value
        sources[name] = where
    for heading in ("parallel_config", "recompute_config"):
        rest = tree.get(heading)
        for key in () if rest is None else require_mapping(rest, f"{sources.get((heading,), '?')}: {heading}"):
            known = [str(path[1]) for path in (*_NAMES, *_FIXED) if path[0] == heading]
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {heading}.{near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{sources.get((heading, str(key)), '?')}: {heading}.{key}: unknown key; {hint}")


def _section(tree: Any, path: Path_) -> dict[Any, Any] | None:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))

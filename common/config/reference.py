"""Page ``docs/config_reference.md``: a table of every key, generated from the schema."""

from __future__ import annotations

from collections.abc import Iterator

from common.config.aliases import ALIASES
from common.config.explain import BASE, SECTIONS, key_facts
from common.config.hints import schema_keys
from common.config.schema import MAX_COUNT
from common.dialects.rules import words

TORCH_ONLY = words("""
    engine precision.float8 precision.float8_head train.compile train.compile_mode
    train.offload_activations parallel.async_tensor_parallel parallel.strategy
    parallel.virtual_stages deepspeed
""")
"""Keys and sections that ``backend=mindspore`` refuses."""

COMPILED_TOO = frozenset({"parallel.sequence_parallel", "parallel.shard_size"})
"""Keys of torch that MindSpore has where its compiler splits the work."""

_NUMBERS = {f", at most {MAX_COUNT}": "", str(2**63): "2^63"}
"""Limits that the page writes differently, or states only once because all counts share them."""

_HEAD = """# Configuration reference · 配置参考

Every key of the configuration, generated from `common/config/schema.py` by
`make golden`. Do not edit it by hand.
[configuration.md](configuration.md) explains how files, bases and overrides work together.

本页由程序从配置定义生成，列出全部配置项；用法说明见 [configuration_zh.md](configuration_zh.md)。
表中各列依次为：键、取值类型与范围、默认值、含义、适用的后端。

A dash as default means that the key is left out. Counts are at most 2^40.
默认值为“—”表示不填；计数类的值不超过 2^40。

| section 部分 | contents | 内容 |
| --- | --- | --- |
"""

_COLUMNS = "| key 键 | type 类型 | default 默认值 | meaning 含义 | backend 后端 |\n" + "| --- " * 5


def config_reference() -> str:
    """Return the page as Markdown."""
    index = "".join(
        f"| [{_title(name)}](#{_title(name).replace(' ', '-')}) | {english} | {chinese} |\n"
        for name, (english, chinese) in SECTIONS.items()
    )
    return f"{_HEAD}{index}\n" + "\n".join(map(_section, SECTIONS)) + _aliases()


def _title(section: str) -> str:
    return section or "top level"


def _section(section: str) -> str:
    rows = [_row("base", "base", BASE | {"default": "left out"})] if not section else []
    rows += [_row(key, key.removeprefix(f"{section}."), key_facts(key)) for key in _keys_of(section)]
    meaning = key_facts(section)["meaning"] if section else ""
    lines = [f"## {_title(section)}", "", *([_cell(meaning), ""] if meaning else [])]
    return "\n".join([*lines, f"{_COLUMNS}|", *rows, ""])


def _keys_of(section: str) -> Iterator[str]:
    for key, is_section in schema_keys().items():
        top, dot, _ = key.partition(".")
        if top == section if dot else not (section or is_section):
            yield key


def _row(key: str, name: str, facts: dict[str, str]) -> str:
    values, allowed = facts["type"], facts.get("allowed")
    numbers = values.removesuffix(" or one of a few values")
    if allowed and numbers != values and "; " in allowed:
        limits, _, words = allowed.rpartition("; ")
        values = f"{numbers} {limits}, or {words}"
    elif allowed:
        values = allowed if values == "one of a few values" else f"{values}; {allowed}"
    for number, shown in _NUMBERS.items():
        values = values.replace(number, shown)
    default = {"left out": "—", "none: it must be given": "must be given"}.get(
        facts["default"], f"`{facts['default']}`"
    )
    cells = (f"`{name}`", _cell(values), default, _cell(facts["meaning"]), _backend(key, facts))
    return f"| {' | '.join(cells)} |"


def _backend(key: str, facts: dict[str, str]) -> str:
    if facts.get("parallel_mode"):
        return "MindSpore, modes 1 and 2"
    if facts.get("backend"):
        return "MindSpore"
    if key in TORCH_ONLY or key.partition(".")[0] in TORCH_ONLY:
        return "PyTorch"
    return "PyTorch; MindSpore in modes 1 and 2" if key in COMPILED_TOO else "both"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _aliases() -> str:
    lines = [
        "",
        "## Other names · 别名",
        "",
        "Keys of MindFormers that are taken as they are. 可直接使用的 MindFormers 键名。",
        "",
        "| name 名称 | key 键 | meaning 含义 |",
        "| --- | --- | --- |",
        *(f"| `{name}` | `{alias.ours}` | {_cell(alias.description)} |" for name, alias in ALIASES.items()),
    ]
    return "\n".join(lines) + "\n"

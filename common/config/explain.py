"""Explain a key of the configuration: its type, default, allowed values and meaning."""

from __future__ import annotations

import json
import re
import textwrap
from functools import lru_cache
from typing import Any

from common.config.aliases import ALIASES
from common.config.hints import hint, key_of_others, nearest_keys, schema_keys
from common.config.schema import RunConfig
from common.errors import ConfigError

_WIDTH = 100
BASE = {
    "type": "text or list",
    "default": "none",
    "meaning": "Files that this one builds on, in order. Its own values override theirs.",
}

SECTIONS = {
    "": ("the whole run", "整个训练"),
    "precision": ("number types", "数据类型与混合精度"),
    "model": ("sizes and dropout", "模型结构"),
    "train": ("length, batch, recomputation", "训练长度、批大小、重计算"),
    "optimizer": ("optimizer and learning rate", "优化器与学习率"),
    "loss_scale": ("loss scaling with float16", "损失缩放"),
    "quantization": ("training with rounded weights", "量化训练"),
    "data": ("data and tokenizer", "数据与分词器"),
    "validation": ("validation during training", "训练中的验证"),
    "parallel": ("layout over processes", "并行布局"),
    "checkpoint": ("saving, resuming, weights to use", "检查点与续训"),
    "evaluation": ("`--run_mode eval`", "评测"),
    "predict": ("`--run_mode predict`", "文本生成"),
    "export": ("`--run_mode export`", "导出"),
    "serve": ("`--run_mode serve`", "服务"),
    "logging": ("log lines, plots, trackers", "日志与曲线"),
    "profile": ("traces of single steps", "性能采集"),
    "deepspeed": ("settings of `engine=deepspeed`", "DeepSpeed"),
    "context": ("use of the device", "设备"),
    "runtime": ("threads and time limits", "线程与时限"),
}
"""The sections in the order of the page, with a clause in English and in Chinese."""


def explain_key(asked: str | None) -> str:
    """Return the text for a key, a section, or another system's name for either; the sections for None.

    Raises ConfigError for any other name.
    """
    if asked is None:
        lines = [f"  {name:<14}{clause}" for name, (clause, _) in SECTIONS.items() if name]
        alone = ", ".join(key for key in schema_keys() if key.partition(".")[0] not in SECTIONS)
        return "\n".join(["sections:", *lines, f"keys of the whole run: {alone}", "--explain NAME says more", ""])
    if asked == "base":
        return _of_key("base", BASE)
    keys = schema_keys()
    if asked in keys:
        return _explained(asked)
    alias = next((alias for key, alias in ALIASES.items() if asked in (key, key.rpartition(".")[2])), None)
    if alias is not None:
        return f"{textwrap.fill(f'{asked}: {alias.meaning}', _WIDTH)}\n\n{_explained(alias.ours)}"
    if (here := key_of_others(asked)) is not None:
        found = [
            word for word in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", re.sub(r"\(.*\)", "", here)) if word in keys
        ]
        return "\n".join([f"{asked} corresponds to {here}", *("\n" + _explained(key).rstrip() for key in found), ""])
    same = nearest_keys(asked) if "." not in asked else []
    if same and all(key.rpartition(".")[2] == asked for key in same):
        return "\n".join(map(_explained, same))
    raise ConfigError(
        f"--explain {asked}: unknown key{hint(asked)}; the sections are {', '.join(filter(None, SECTIONS))}"
    )


def key_facts(key: str) -> dict[str, str]:
    """Return type, default, allowed values, backend and meaning of a key or section of the schema.

    ``parallel_mode`` names the modes of a key that only some have, and is empty for others.
    """
    node = _node(key)
    return _facts(node) | {"parallel_mode": node.get("parallel_mode", "")}


@lru_cache(maxsize=1)
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _explained(key: str) -> str:
    node = _node(key)
    section = _section_of(node)
    if section is None:
        return _of_key(key, _facts(node))
    lines = [f"{key} (a section)", *textwrap.wrap(_facts(node)["meaning"], _WIDTH)]
    forms = [form for form in _types(node) if form != "section"]
    if forms:
        lines.append(f"also written as: {' or '.join(forms)}")
    width = max(map(len, section["properties"])) + 2
    for name, child in section["properties"].items():
        meaning = " ".join(child.get("description", "").split()) or "A section of its own."
        lines += textwrap.wrap(
            meaning, _WIDTH, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2)
        )
    return "\n".join([*lines, f"Details of a key: --explain {key}.{next(iter(section['properties']))}", ""])


def _node(key: str) -> dict[str, Any]:
    """Return the JSON Schema of a key, with the description that stands beside it and the marks of its section."""
    node, marks = _schema(), dict[str, Any]()
    for part in key.split("."):
        section = _section_of(node)
        assert section is not None, key
        node = section["properties"][part]
        marks |= {mark: node[mark] for mark in ("backend", "parallel_mode") if mark in node}
    return node | marks


def _section_of(node: dict[str, Any]) -> dict[str, Any] | None:
    return next((option for option in _options(node) if "properties" in option), None)


def _options(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a value, with references resolved."""
    if "$ref" in node:
        return _options(_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    return [leaf for option in node["anyOf"] for leaf in _options(option)] if "anyOf" in node else [node]


def _of_key(key: str, facts: dict[str, str]) -> str:
    lines = [key]
    for name, text in facts.items():
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11)
    return "\n".join([*lines, ""])


def _facts(node: dict[str, Any]) -> dict[str, str]:
    allowed = [text for option in _options(node) if (text := _allowed(option))]
    default = "none; the key is required" if "default" not in node else _literal(node["default"])
    facts = {"type": " or ".join(_types(node)), "default": "left out" if default == "null" else default}
    if allowed:
        facts["allowed"] = "; ".join(allowed)
    if "backend" in node:
        facts["backend"] = f"{node['backend']} only"
    meaning = node.get("description") or (_section_of(node) or {}).get("description", "")
    return facts | {"meaning": " ".join(meaning.split())}


_NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "array": "list"}


def _types(node: dict[str, Any]) -> list[str]:
    """Return the names of types, without null, which means that the key is left out."""
    found = []
    for option in _options(node):
        if "enum" in option or "const" in option:
            found.append("one of a few values")
        elif "properties" in option:
            found.append("section")
        elif option.get("type") == "array":
            items = " or ".join(_types(option.get("items", {})))
            items = f"({items})" if "list of" in items else items
            found.append(f"list of {items}" if items else "list")
        elif "additionalProperties" in option:
            found.append(f"mapping to {' or '.join(_types(option['additionalProperties']))}")
        elif option.get("type") != "null":
            found.append(_NAMES.get(str(option.get("type")), "any value"))
    return list(dict.fromkeys(found))


def _allowed(option: dict[str, Any]) -> str:
    if "const" in option:
        return _literal(option["const"])
    if "enum" in option:
        return ", ".join(map(_literal, option["enum"]))
    bounds = [
        f"{word} {_literal(option[name])}"
        for name, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in option
    ]
    return ", ".join(bounds)


def _literal(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)

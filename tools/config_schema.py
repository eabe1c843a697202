"""Print the JSON Schema of a run's YAML or of a study's, for completion and checks in editors.

    python tools/config_schema.py > configs/schema.json
    python tools/config_schema.py --study > configs/study/schema.json
    python tools/config_schema.py --reference > docs/config_reference.md

--reference prints a table of every key as Markdown. A single key in words:
python run_gpt2.py --explain optimizer.learning_rate. Exit code: 0, and 2 for an argument.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import json
import sys
from dataclasses import dataclass
from typing import Any

from common.config.aliases import ALIASES
from common.config.explain import BASE, SECTIONS, key_facts
from common.config.hints import schema_keys, section_of
from common.config.schema import MAX_COUNT, RunConfig
from common.dialects.rules import words
from common.errors import ConfigError
from common.flags import flag
from common.program import command
from gpt2_study.loading import definition_schema

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
    titles = {name: name or "top level" for name in SECTIONS}
    lines = [
        f"| [{titles[name]}](#{titles[name].replace(' ', '-')}) | {english} | {chinese} |"
        for name, (english, chinese) in SECTIONS.items()
    ]
    for section, title in titles.items():
        meaning = key_facts(section)["meaning"] if section else ""
        lines += ["", f"## {title}", "", *([_cell(meaning), ""] if meaning else []), f"{_COLUMNS}|"]
        if not section:
            lines.append(_row("base", "base", BASE | {"default": "left out", "parallel_mode": ""}))
        for key, field in schema_keys().items():
            top, dot, _ = key.partition(".")
            if top == section if dot else not (section or section_of(field)):
                lines.append(_row(key, key.removeprefix(f"{section}."), key_facts(key)))
    lines += [
        "",
        "## Other names · 别名",
        "",
        "Keys of MindFormers that are taken as they are. 可直接使用的 MindFormers 键名。",
        "",
        "| name 名称 | key 键 | meaning 含义 |",
        "| --- | --- | --- |",
        *(f"| `{name}` | `{alias.ours}` | {_cell(alias.meaning)} |" for name, alias in ALIASES.items()),
    ]
    return _HEAD + "\n".join(lines) + "\n"


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
    if facts["parallel_mode"]:
        backend = "MindSpore, modes 1 and 2"
    elif facts.get("backend"):
        backend = "MindSpore"
    elif key in TORCH_ONLY or key.partition(".")[0] in TORCH_ONLY:
        backend = "PyTorch"
    else:
        backend = "PyTorch; MindSpore in modes 1 and 2" if key in COMPILED_TOO else "both"
    default = "—" if facts["default"] == "left out" else f"`{facts['default']}`"
    cells = (f"`{name}`", _cell(values), default, _cell(facts["meaning"]), backend)
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def config_schema() -> str:
    schema = RunConfig.model_json_schema()
    schema["properties"] = {
        "base": {
            "description": "Files that this one builds on, in order; its own values win.",
            "type": ["string", "array"],
            "items": {"type": "string"},
        },
        **schema["properties"],
    }
    for name, alias in ALIASES.items():
        *sections, key = name.split(".")
        target = schema
        for section in sections:
            target = schema["$defs"][target["properties"][section]["$ref"].rpartition("/")[2]]
        choices: dict[str, Any] = {"enum": [*alias.values, None]} if alias.values else {"type": ["integer", "null"]}
        target["properties"][key] = {"description": alias.meaning, **choices}
    model = schema["properties"]["model"]
    model["anyOf"] = [{"const": "from_checkpoint"}, {"$ref": model.pop("$ref")}]
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)  # a file may leave to its base what the run needs
    return json.dumps(schema, indent=1) + "\n"


def study_schema() -> str:
    return json.dumps(definition_schema(), indent=1) + "\n"


@dataclass(kw_only=True)
class Request:
    reference: bool = flag("print the reference of keys instead of the schema")
    study: bool = flag("print the schema of a study's YAML instead")

    def __post_init__(self) -> None:
        if self.reference and self.study:
            raise ConfigError("argument --study: not allowed with argument --reference")


@command(Request)
def main(request: Request) -> None:
    write = config_reference if request.reference else study_schema if request.study else config_schema
    sys.stdout.write(write())

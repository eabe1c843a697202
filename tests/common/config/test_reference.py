"""The generated page of all keys is current and right about the backends. Every key that a user may
give acts: some code reads it, and not only its schema. Tables have a row for every name that the
schema takes, and for every part of an update rule.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from mypy.build import BuildSource, build
from mypy.nodes import MemberExpr, TypeInfo, Var
from mypy.options import Options
from mypy.types import Instance, Type, UnionType, get_proper_type

from common.config.hints import schema_keys, section_of
from common.config.schema import EvaluationConfig, LoggingConfig, Tracker
from common.config.values import RULES, STATE_PARTS, RuleName, TokenizerKind, rule_keeping
from common.evaluation.text import DETOKENIZERS
from common.flags import make_parser
from common.systems.config import COMMAND_LINES, DIALECTS
from common.systems.mindformers.read import MOMENTS as OF_MINDFORMERS
from common.systems.oneflow.read import MOMENTS as OF_ONEFLOW
from common.tokenizer import TOKENIZERS
from common.training.report import STYLES
from common.training.trackers import STORES
from tests.common.resolve.test_refusals import TABLE
from tools.config_schema import COMPILED_TOO, TORCH_ONLY, config_reference, main
from tools.convert_config import Request

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "config_reference.md"


def test_the_page_is_current_and_has_a_row_for_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(config_reference(), encoding="utf-8")
    assert main(["--reference"]) == 0
    page = PAGE.read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "make golden"
    keys = {key for key, field in schema_keys().items() if not section_of(field) or "." in key}
    found = re.findall(r"^\| `(\S+)` (?:\| .+ ){4}\|$", page.partition("\n## Other")[0], re.M)
    assert sorted(found) == sorted(key.partition(".")[2] or key for key in keys | {"base"})


def test_keys_of_pytorch_are_refused_on_mindspore() -> None:
    """By rows of tests/common/resolve/refusals.yaml."""
    words = " ".join(row[0] for row in TABLE["of torch"])
    assert [key for key in TORCH_ONLY | COMPILED_TOO if f"{key}=" not in words] == ["deepspeed"]


# ---- keys that are read, and rows of tables ----

OWN = ("common.config.", "gpt2_study.loading", "common.serving.protocol")
FOLDERS = ("common", "gpt2_study", "torch_gpt2", "mindformers_gpt2", "gpt2_toolkit", "tools")
SCHEMAS: dict[str, dict[str, str]] = {
    "common.config.schema.RunConfig": {
        "model.dropout": "resolved.py gives it to the three rates, which are read",
    },
    "gpt2_study.loading.Definition": {},
    "common.serving.protocol.CompletionRequest": {
        "best_of": "must equal n, which is read",
        "user": "names a client: accepted, unused",
        "stream_options.include_obfuscation": "accepted, unused",
    },
}
"""Keys that nothing reads by name, and the reason. A key that is only read from a dump or by a
variable name belongs there too.
"""


def instances(kind: Type | None) -> list[TypeInfo]:
    """Return the classes of which an expression may be."""
    kind = get_proper_type(kind)
    kinds = map(get_proper_type, kind.items) if isinstance(kind, UnionType) else [kind]
    return [each.type for each in kinds if isinstance(each, Instance)]


def keys_below(section: TypeInfo, path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the dotted path of each key, and its class and name. A class of the same module is a section."""
    for name, symbol in section.names.items():
        if name.startswith("_") or not isinstance(symbol.node, Var):
            continue
        sections = [each for each in instances(symbol.node.type) if each.module_name == section.module_name]
        for each in sections:
            yield from keys_below(each, f"{path}{name}.")
        if not sections:
            yield f"{path}{name}", (section.fullname, name)


def module_of(path: Path) -> BuildSource:
    """Leave out what schemas and their package do: what they read does not act."""
    text = path.read_text(encoding="utf-8")
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if name.startswith(OWN):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = [ast.Expr(ast.Constant(...))]
        text = ast.unparse(tree)
    return BuildSource(str(path), name, text)


@pytest.mark.long
def test_every_key_is_read() -> None:
    """An attribute counts only where mypy knows that the expression before it is of the key's section:
    config.logging.interval reads one of three keys named interval.
    """
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    options = Options()
    options.export_types = options.explicit_package_bases = True
    options.follow_imports, options.incremental = "skip", False
    built = build([*map(module_of, [*files, ROOT / "run_gpt2.py"])], options)
    reads = [node for node in built.types if isinstance(node, MemberExpr)]
    owners = [(owner, node.name) for node in reads for owner in instances(built.types.get(node.expr))]
    read = {(each.fullname, name) for owner, name in set(owners) for each in owner.mro}
    for root, exceptions in SCHEMAS.items():
        module, _, class_name = root.rpartition(".")
        made = built.files[module].names[class_name].node
        assert isinstance(made, TypeInfo)
        assert {path for path, key in keys_below(made) if key not in read} == exceptions.keys(), (
            "read each key where it acts, from a config with an annotated type, or take it out"
        )


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (RULES, get_args(RuleName)),
        (TOKENIZERS, get_args(TokenizerKind)),
        (STYLES, get_args(LoggingConfig.model_fields["style"].annotation)),
        (STORES | {"tensorboard": None}, get_args(Tracker)),  # which this project writes itself
        (DETOKENIZERS, get_args(EvaluationConfig.model_fields["detokenize"].annotation)),
        (OF_MINDFORMERS, STATE_PARTS),
        (OF_ONEFLOW, STATE_PARTS),
    ],
)
def test_every_name_has_a_row(table: dict[str, Any], names: Any) -> None:
    assert table.keys() == set(names)


def test_the_converter_knows_every_dialect() -> None:
    (option,) = (each for each in make_parser(None, Request)._actions if each.dest == "system")
    of_files = {"mindformers", "fleetx", "gpt2_chinese"}
    assert len(of_files) == len(DIALECTS)
    assert set(option.choices or ()) == of_files | COMMAND_LINES.keys()


def test_a_rule_is_known_by_its_parts() -> None:
    kept = (("exp_avg_sq", "exp_avg"), ("momentum_buffer",), (), ("sum",))
    assert [rule_keeping(parts) for parts in kept] == ["adamw", "sgd", "adamw", "adamw"]

"""Every key that a user may give acts: some code reads it, and not only its schema.

An attribute counts as a key of a section where what stands before it has the section's name or, in
that file, an annotation of its class or a plain assignment from it: ``config.logging.interval``
reads one of three keys named interval.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest
from pydantic import BaseModel

from common.config.hints import schema_keys
from common.config.schema import RunConfig
from common.serving.protocol import CompletionRequest
from common.study.definition import Definition

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("common", "torch_gpt2", "mindformers_gpt2", "gpt2_toolkit", "tools")
Model = type[BaseModel]


def types_in(annotation: object) -> Iterator[object]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from types_in(part)


def keys_of(model: Model, path: str = "", names: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Return the dotted keys, and the names that their section goes by: its key and its classes."""
    found: dict[str, set[str]] = {}
    kinds = {model.__name__, *names, *(["Run"] if model is RunConfig else [])}
    for name, field in model.model_fields.items():
        below = [
            kind for kind in types_in(field.annotation)
            if isinstance(kind, type) and not isinstance(kind, UnionType)
            and issubclass(kind, BaseModel) and kind.__module__ == model.__module__
        ]  # fmt: skip
        for kind in below:
            found |= keys_of(kind, f"{path}{name}.", (name,))
        if not below:
            found[f"{path}{name}"] = kinds
    return found


def last_name(node: ast.AST | None) -> str:
    """Return ``c`` of ``c``, ``a.c`` and ``a.c(...)``, without a leading underscore."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", ""))).strip("_")


def reads_of(path: Path) -> set[tuple[str, str]]:
    """Return each attribute that a file reads, with the names of what it may be read from."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    kinds: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.arg):
            target, of = node.arg.strip("_"), node.annotation
        elif isinstance(node, ast.AnnAssign):
            target, of = last_name(node.target), node.annotation
        elif isinstance(node, ast.FunctionDef):
            target, of = node.name.strip("_"), node.returns
        elif isinstance(node, ast.Assign):
            kinds.setdefault(last_name(node.targets[0]), set()).add(last_name(node.value))
            continue
        else:
            continue
        kinds.setdefault(target, set()).update(last_name(each) for each in ast.walk(of or node))
    return {
        (kind, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for kind in {last_name(node.value), *kinds.get(last_name(node.value), ())}
    }


READ = {
    path: reads_of(path)
    for path in [*(p for f in FOLDERS for p in (ROOT / f).rglob("*.py")), ROOT / "run_gpt2.py"]
}
PLANTED = ("model.activation", "parallel.context_parallel", "train.interval", "validation.name",
           "profile.seed")  # fmt: skip
"""No keys. Other sections have keys of the last three names."""


@pytest.mark.parametrize(
    ("root", "own", "unread"),
    [
        (RunConfig, "common/config/", {*PLANTED}),
        (Definition, "common/study/definition.py", set()),
        # best_of must equal n, which is read; the others are accepted, unused
        (CompletionRequest, "common/serving/protocol.py",
            {"best_of", "user", "stream_options.include_obfuscation"}),
    ],
)  # fmt: skip
def test_every_key_is_read(root: Model, own: str, unread: set[str]) -> None:
    """unread: keys that nothing reads by name."""
    keys, known = keys_of(root), schema_keys().keys()
    if root is RunConfig:
        of_section = {key.partition(".")[0]: kinds for key, kinds in keys.items() if "." in key}
        keys |= {key: of_section[key.partition(".")[0]] for key in PLANTED if key not in known}
    files = [r for p, r in READ.items() if not p.relative_to(ROOT).as_posix().startswith(own)]
    read = set().union(*files)
    found = {
        key for key, kinds in keys.items()
        if not any((kind, key.rpartition(".")[2]) in read for kind in kinds)
    }  # fmt: skip
    assert found == unread, (
        "read each key where it acts, from a config with an annotated type, or take it out"
    )

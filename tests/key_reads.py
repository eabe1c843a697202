"""Keys of the schema that code reads, found in the source by following annotated types.

An attribute counts as a key of a section only where the expression before it is of that section's
class: ``config.logging.interval`` reads one of three keys named interval. Types come from the
annotations of parameters, attributes and results, through imports and plain assignments. Anything
else is not followed, and reads nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Kinds = set[str]
"""Classes (module.Class) that an expression may be of."""


@dataclass
class Module:
    name: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """Local names, and the whole names that they stand for."""
    types: dict[str, ast.expr] = field(default_factory=dict)
    """Annotations of the results of functions, and values such as aliases of types."""


@dataclass
class Class:
    module: Module
    bases: list[ast.expr]
    fields: dict[str, ast.expr] = field(default_factory=dict)
    """Annotations of attributes."""
    results: dict[str, ast.expr] = field(default_factory=dict)
    """Annotations of the results of methods and properties."""
    assigned: dict[str, Kinds] = field(default_factory=dict)
    """Attributes that methods give to self."""


class Source:
    """The modules in these files. ``changes``: other text for some of them."""

    def __init__(self, root: Path, files: Iterable[Path], changes: Mapping[Path, str] | None = None) -> None:
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, Class] = {}
        for path in files:
            text = (changes or {}).get(path) or path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            self.modules[name] = Module(name, ast.parse(text))
            self._index(self.modules[name])

    def _index(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                whole = {each.asname or each.name: each.name for each in node.names}
                module.imports |= {name: f"{node.module}.{of}" for name, of in whole.items()}
            elif isinstance(node, ast.ClassDef):
                made = self.classes[f"{module.name}.{node.name}"] = Class(module, node.bases)
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        made.fields[each.target.id] = each.annotation
                    elif isinstance(each, ast.FunctionDef) and each.returns is not None:
                        made.results[each.name] = each.returns
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                module.types[node.name] = node.returns
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                module.types[node.targets[0].id] = node.value

    def kinds_named(self, module: Module, name: str) -> Kinds:
        """Return the class of this name, or those of an alias or of a function's result."""
        while name in module.imports:
            owner, _, name = module.imports[name].rpartition(".")
            if owner not in self.modules:
                return set()
            module = self.modules[owner]
        whole = f"{module.name}.{name}"
        return {whole} if whole in self.classes else self.kinds_in(module, module.types.get(name))

    def kinds_in(self, module: Module, annotation: ast.expr | None) -> Kinds:
        """Return the classes that an annotation names."""
        nodes = ast.walk(annotation) if annotation is not None else ()
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        return set().union(*(self.kinds_named(module, name) for name in names))

    def lineage(self, kind: str) -> Iterator[str]:
        """Yield a class and those that it derives from."""
        yield kind
        for base in self.classes[kind].bases:
            for parent in self.kinds_in(self.classes[kind].module, base):
                yield from self.lineage(parent)

    def attribute(self, kind: str, name: str) -> Kinds:
        for each in self.lineage(kind):
            made = self.classes[each]
            if annotation := made.fields.get(name) or made.results.get(name):
                return self.kinds_in(made.module, annotation)
            if name in made.assigned:
                return made.assigned[name]
        return set()

    def keys(self, section: str, path: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the dotted path of each key below a section, its class and its name there.

        A key whose class is of the same module is a section.
        """
        made = self.classes[section]
        for name, annotation in made.fields.items():
            kinds = self.kinds_in(made.module, annotation)
            sections = [kind for kind in kinds if self.classes[kind].module is made.module]
            if name.startswith("_"):  # a private attribute
                continue
            for kind in sections:
                yield from self.keys(kind, f"{path}{name}.")
            if not sections:
                yield f"{path}{name}", section, name

    @cached_property
    def reads(self) -> dict[str, set[tuple[str, str]]]:
        """Class and name of the attributes that each module reads."""
        found: dict[str, set[tuple[str, str]]] = {}
        for _ in range(2):  # the first round finds what methods give to self
            for name, module in self.modules.items():
                reader = _Reader(self, module)
                reader.visit(module.tree)
                found[name] = reader.reads
        return found

    def unread_keys(self, root: str, own: str) -> set[str]:
        """Return the keys below the section ``root`` that no module reads, but for ``own`` ones."""
        outside = [found for name, found in self.reads.items() if not name.startswith(own)]
        found = set().union(*outside)
        read = {(each, name) for kind, name in found for each in self.lineage(kind)}
        return {path for path, section, name in self.keys(root) if (section, name) not in read}


class _Reader(ast.NodeVisitor):
    """Collects the class and the name of each attribute that a module reads."""

    def __init__(self, source: Source, module: Module) -> None:
        self.source, self.module = source, module
        self.reads: set[tuple[str, str]] = set()
        self.scopes: list[dict[str, Kinds]] = [{}]
        self.owner = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.owner = self.owner, f"{self.module.name}.{node.name}"
        self.generic_visit(node)
        self.owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        of_self = {"self": {self.owner}} if self.owner in self.source.classes else {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotated = {each.arg: self.source.kinds_in(self.module, each.annotation) for each in arguments}
        self.scopes.append(annotated | of_self)
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(target.elts, node.value.elts, strict=False)]
            else:
                pairs = [(target, node.value)]
            for name, value in pairs:
                self._bind(name, self._kinds(value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.reads |= {(kind, node.attr) for kind in self._kinds(node.value)}
        self.generic_visit(node)

    def _bind(self, target: ast.expr, kinds: Kinds) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = self.scopes[-1].get(target.id, set()) | kinds
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            given = self.source.classes[self.owner].assigned
            given[target.attr] = given.get(target.attr, set()) | kinds

    def _kinds(self, node: ast.expr) -> Kinds:
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name):
                return self._kinds(node.func)
            return self.source.kinds_named(self.module, node.func.id)
        if isinstance(node, ast.Attribute):
            owners = self._kinds(node.value)
            return set().union(*(self.source.attribute(kind, node.attr) for kind in owners))
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in self.scopes[::-1] if node.id in scope), set())
        return set()

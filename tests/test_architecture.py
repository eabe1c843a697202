"""The import law: tools -> one backend, gpt2_study -> common. common needs no framework; the backends never meet."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.config.values import RULES

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "mindspore", "deepspeed", "torch_npu"}
MAY_IMPORT_TORCH = "common/tensor_files/torch_files.py"  # when a file of torch.save is opened
BACKENDS = {"torch_gpt2", "mindformers_gpt2"}
PRODUCT = ("common", "gpt2_study", *sorted(BACKENDS))

LAYERS = (
    ("errors", "interrupts", "log", "dialects", "whole_numbers"),
    ("accelerators", "file_kinds", "flags", "paths"),
    ("files",),
    ("structured_files", "hub", "run_folder"),
    ("yaml_files", "processes"),
    ("config", "tensor_files", "failures"),
    ("cluster", "command_line", "tokenizer", "weights"),
    ("device", "dataset", "parallel", "quantization"),
    ("resolve", "checkpoint"),
    ("planner",),
    ("launcher",),
    ("doctor",),
    ("systems",),
    ("training",),
    ("generation", "evaluation"),
    ("conversion", "serving"),
    ("inference",),
    ("run_config",),
    ("backends",),
    ("modelarts", "program"),
)
"""The folders and files of common/, lower ones first. Each imports only what is below it."""


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def told(check: Callable[[Path], Any], *places: str) -> dict[str, Any]:
    """Return what the check says of each file of these folders, if it says something."""
    paths = [path for place in places for path in [*(ROOT / place).rglob("*.py")] or [ROOT / place]]
    found = {path.relative_to(ROOT).as_posix(): check(path) for path in paths}
    return {path: names for path, names in found.items() if names}


def imports(path: Path) -> set[str]:
    """Whole names of modules and of what is taken from them; imports inside functions and for types
    count too. A relative one begins with a dot.
    """
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("common", FRAMEWORKS | BACKENDS | {"transformers", "gpt2_study", "gpt2_toolkit"}),
        ("gpt2_study", FRAMEWORKS | BACKENDS | {"transformers", "gpt2_toolkit"}),
        ("gpt2_toolkit", FRAMEWORKS | BACKENDS | {"transformers", "gpt2_study"}),
        ("torch_gpt2", {"mindspore", "mindformers_gpt2", "gpt2_study", "gpt2_toolkit"}),
        ("mindformers_gpt2", {"torch", "torch_gpt2", "deepspeed", "gpt2_study", "gpt2_toolkit"}),
    ],
)
def test_a_package_imports_nothing_above_or_beside_it(package: str, forbidden: set[str]) -> None:
    """Nor by a relative import, which the other tests would not follow."""

    def check(path: Path) -> set[str]:
        return {name.partition(".")[0] for name in imports(path)} & {*forbidden, ""}

    found = told(check, package)
    assert found.pop(MAY_IMPORT_TORCH, {"torch"}) == {"torch"}
    assert found == {}


def test_each_room_of_common_imports_only_lower_ones() -> None:
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    rooms: set[str] = set()

    def upwards(path: Path) -> set[str]:
        own = path.relative_to(ROOT / "common").parts[0].removesuffix(".py")
        rooms.add(own)
        others = {name.split(".")[1] for name in imports(path) if name.startswith("common.")}
        return {each for each in others - {own} if level[each] >= level.get(own, 0)}

    assert told(upwards, "common") == {}
    assert rooms - {"__init__"} == set(level), "a new one needs a place in LAYERS"


def test_the_folders_of_systems_do_not_import_each_other() -> None:
    folders = {path.parent.name for path in (ROOT / "common/systems").glob("*/*.py")}

    def others(path: Path) -> set[str]:
        ours = (name for name in imports(path) if name.startswith("common.systems."))
        return {name.split(".")[2] for name in ours} & folders - {path.parent.name}

    assert told(others, *(f"common/systems/{folder}" for folder in folders)) == {}


@pytest.mark.parametrize("package", PRODUCT)
def test_the_files_of_a_package_form_no_cycle(package: str) -> None:
    named = {module_name(path): path for path in (ROOT / package).rglob("*.py")}
    left = {name: imports(path) & named.keys() - {name} for name, path in named.items()}
    assert len(left) > 10 and any(left.values())
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in free}
    assert left == {}, "these import each other, or import files that do"


def test_common_imports_with_every_framework_blocked() -> None:
    """The doctor, which tells what is wrong with a framework, does not even try one. Help needs no library at all."""
    modules = sorted(module_name(path) for part in PRODUCT[:2] for path in (ROOT / part).rglob("*.py"))
    program = f"""
import importlib, runpy, sys
sys.argv = ["run_gpt2.py", "--help"]
try:
    runpy.run_path("run_gpt2.py", run_name="__main__")
except SystemExit as stop:
    assert stop.code == 0
heavy = {{"torch", "mindspore", "pydantic", "numpy", "yaml", "tqdm"}} & set(sys.modules)
assert not heavy, heavy
import tools.doctor
assert not {FRAMEWORKS} & sys.modules.keys()
for name in {sorted(FRAMEWORKS)}:
    sys.modules[name] = None
for name in {modules}:
    importlib.import_module(name)
"""
    said = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert b"section.key=value" in said


_REWRITES = {
    "as_run": {
        "common/backends.py", "common/parallel/run.py", "common/planner/fitting.py",
        "common/planner/suggest.py", "common/resolve/derive.py",
    },
    "resolve_other": {
        "common/inference/language_model.py", "common/inference/load.py",
        "common/inference/run_modes.py", "common/planner/fitting.py", "common/planner/plan.py",
    },
    "make_run": {"common/backends.py"},
    "model_copy": {"gpt2_study/loading.py", "common/systems/direct.py"},
    "model_construct": {"common/config/resolved.py"},
}  # fmt: skip
"""Files that call what makes a configuration from another one: the places where a run is made, and
those that ask what another one would be. The copies are not of configurations.
"""


def test_nobody_changes_a_run_that_is_made() -> None:
    def rewrites(path: Path) -> set[str]:
        """Names that a file calls or hands on, as functions or as methods."""
        return {getattr(node, "id", getattr(node, "attr", "")) for node in nodes_of(path)}

    programs = ("run_gpt2.py", "run_mindformer.py", "gpt2_toolkit", "tools", "compat")
    found = told(rewrites, *PRODUCT, *programs)
    callers = {name: {path for path in found if name in found[path]} for name in _REWRITES}
    assert callers == _REWRITES


def direct_readers(path: Path) -> set[str]:
    """Readers of JSON or YAML without limits: uses of json.load and loads, of decoders, and every
    import of a package for YAML.
    """
    readers = r"(json\.(load|loads|JSONDecoder|decoder.*|scanner.*)|(yaml|ruamel)\b.*)$"
    found = {name for name in imports(path) if re.match(readers, name)}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & {"raw_decode", "scan_once"}
            found |= {text} if re.match(readers, text := ast.unparse(node)) else set()
    return found


def test_json_and_yaml_are_read_through_the_one_reader() -> None:
    """Elsewhere a file could be of any size and depth, and its faults would be a dozen
    exceptions.
    """
    found = told(direct_readers, *PRODUCT, "tools", "run_gpt2.py", "run_mindformer.py")
    assert found.keys() == {"common/structured_files.py", "common/yaml_files.py"}


def test_device_words_stay_in_the_device_file() -> None:
    for path in (ROOT / "torch_gpt2").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        code = text.replace(ast.get_docstring(ast.parse(text), clean=False) or "", "")
        assert path.name == "device.py" or not re.search(r"\b(cuda|npu)\b", code, flags=re.I), path


def names_of_rules_compared(path: Path) -> list[str]:
    """Comparisons with the name of an update rule, and matches of one that let a new name pass."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Compare):
            constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            found += [ast.unparse(node)] if constants & RULES.keys() else []
        elif isinstance(node, ast.Match):
            patterns = [ast.unparse(case.pattern) for case in node.cases]
            if any(f"'{name}'" in pattern for name in RULES for pattern in patterns):
                last = ast.unparse(node.cases[-1])
                if not re.fullmatch(r"case _:\s+assert_never\(.*\)", last):
                    found.append(ast.unparse(node.subject))
    return found


def test_code_that_depends_on_the_update_rule_knows_them_all(tmp_path: Path) -> None:
    """A fact about a rule is a column of RULES, and the code of a rule a case that mypy misses."""
    folders = (*PRODUCT, "gpt2_toolkit", "tools", "benchmarks")
    assert told(names_of_rules_compared, *folders) == {}
    for text in ("a = 1 if optimizer.name in ('adam', 'adamw') else 2", "match name:\n case 'adam':\n  pass"):
        path = tmp_path / f"{len(text)}.py"
        path.write_text(text)
        assert names_of_rules_compared(path)


_PUBLIC_UNDERSCORES = {"os._exit", "_Entry._fields_", "_thread"}
"""Names that Python documents with a leading underscore."""
_KNOWN_ELSEWHERE = {"common/training/metrics.py": {"self._writer._py_recordio_writer"}}
"""tensorboardX 2.6, no framework: its writer's file, which the public close() would flush on a full disk."""
_DATA_MODEL = {name for kind in (object, type, list, BaseException) for name in dir(kind)} | {
    "__enter__", "__exit__", "__version__", "__name__"
}  # fmt: skip


@cache
def own_names(folder: Path) -> set[str]:
    """Attributes, functions and classes that the files of a folder define."""
    found: set[str] = set()
    for node in (node for path in folder.rglob("*.py") for node in nodes_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_uses(path: Path) -> set[str]:
    """Names with a leading underscore that a file takes from others: imported, of an object that is
    not self, or in a string.

    Of ``self`` and ``cls`` those count that no file of ours defines: a foreign base class has them.
    """
    if path.name == "private_api.py":
        return set()
    folder = next(ROOT / name for name in PRODUCT if (ROOT / name) in path.parents)
    found = {name for name in imports(path) if re.search(r"(^|\.)_(?!_future__)", name)}
    found = {name for name in found if name.partition(".")[0] not in PRODUCT}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            of = ast.unparse(node.value)
            if of not in ("self", "cls") or node.attr not in own_names(folder):
                found |= {f"{of}.{node.attr}"} if node.attr not in _DATA_MODEL else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr", "setattr", "hasattr", "delattr"
        ):  # fmt: skip
            words = [ast.literal_eval(w) for w in node.args[1:2] if isinstance(w, ast.Constant)]
            found |= {word for word in words if word[:1] == "_" and word not in _DATA_MODEL}
    return found - _PUBLIC_UNDERSCORES


def test_private_interfaces_of_others_are_used_only_in_files_of_that_name() -> None:
    assert told(private_uses, *PRODUCT) == _KNOWN_ELSEWHERE

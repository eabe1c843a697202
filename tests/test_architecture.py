"""The import law: tools -> one backend -> common. common needs no framework; the backends never
meet.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.update_rules import RULES

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "mindspore", "deepspeed", "torch_npu"}
MAY_IMPORT_TORCH = "common/tensor_files/torch_files.py"  # when a file of torch.save is opened
BACKENDS = {"torch_gpt2", "mindformers_gpt2"}

LAYERS = (
    ("errors", "file_kinds", "paths", "interrupts", "locks", "log", "dialects"),
    ("accelerators", "files", "flags", "packages", "whole_numbers", "run_folder"),
    ("structured_files", "hub"),
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
    ("inputs", "run_config", "bundle"),
    ("backends",),
    ("modelarts", "study", "program"),
    ("compare",),
)
"""The folders and files of common/, lower ones first. Each imports only what is below it."""


def imported_packages(path: Path) -> set[str]:
    """Names of packages; a dot for a relative import, which the other tests would not follow."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("common", FRAMEWORKS | BACKENDS | {"transformers", "gpt2_toolkit"}),
        ("gpt2_toolkit", FRAMEWORKS | BACKENDS | {"transformers"}),
        ("torch_gpt2", {"mindspore", "mindformers_gpt2", "gpt2_toolkit"}),
        ("mindformers_gpt2", {"torch", "torch_gpt2", "deepspeed", "gpt2_toolkit"}),
    ],
)
def test_a_package_imports_nothing_above_or_beside_it(package: str, forbidden: set[str]) -> None:
    found = {
        str(path.relative_to(ROOT)): imported_packages(path) & {*forbidden, "."}
        for path in (ROOT / package).rglob("*.py")
    }
    assert found.pop(MAY_IMPORT_TORCH, {"torch"}) == {"torch"}
    assert {path: names for path, names in found.items() if names} == {}


def rooms_imported(path: Path) -> set[str]:
    """The folders and files of common/ that a file imports, other than its own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "common":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("common.")
            }
    return found - {room_of(path)}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "common").parts[0].removesuffix(".py")


def test_each_room_of_common_imports_only_lower_ones() -> None:
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    files = [
        path for path in (ROOT / "common").rglob("*.py") if path != ROOT / "common" / "__init__.py"
    ]
    assert {room_of(path) for path in files} == set(level), (
        "a new folder or file needs a place in LAYERS"
    )
    upwards = [
        f"{path.relative_to(ROOT)} imports {room}"
        for path in files
        for room in rooms_imported(path)
        if level[room] >= level[room_of(path)]
    ]
    assert upwards == []


def systems_crossed(package: Path) -> list[str]:
    """Imports by a folder of common/systems/ from another one."""
    folders = {path.name for path in package.iterdir() if path.is_dir()}
    return [
        f"{path.relative_to(package)} imports {name}"
        for folder in sorted(folders)
        for path in sorted((package / folder).rglob("*.py"))
        for name in sorted(names_imported(path))
        if (match := re.match(r"common\.systems\.(\w+)", name)) and match[1] in folders - {folder}
    ]


def test_the_folders_of_systems_do_not_import_each_other() -> None:
    assert systems_crossed(ROOT / "common" / "systems") == []


@pytest.mark.parametrize(
    "text",
    [
        "from common.systems.megatron import names", "from common.systems import megatron",
        "import common.systems.megatron.names",
        "from common.systems.megatron.names import MAP",
    ],
)  # fmt: skip
def test_an_import_of_another_system_is_found(tmp_path: Path, text: str) -> None:
    package = tmp_path / "common" / "systems"
    for folder in ("nanogpt", "megatron"):
        (package / folder).mkdir(parents=True)
    (package / "megatron" / "read.py").write_text("from common.systems.megatron import names")
    (package / "nanogpt" / "config.py").write_text("from common.systems import dialect")
    assert systems_crossed(package) == []
    (package / "nanogpt" / "config.py").write_text(f"def f():\n    {text}")
    assert systems_crossed(package)
    (package / "nanogpt" / "config.py").write_text("from ..megatron import names")
    assert imported_packages(package / "nanogpt" / "config.py") == {"."}


def names_imported(path: Path) -> set[str]:
    """Whole names of what a file imports: modules, and names of modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def files_imported(package: Path) -> dict[str, set[str]]:
    """Module names of a package's files, and the files of the package that each one imports.

    Imports inside functions and for types count too: a reader follows them just the same.
    """
    root = package.parent
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = names_imported(path) & set(modules) - {module}
    return graph


@pytest.mark.parametrize("package", ["common", *sorted(BACKENDS)])
def test_the_files_of_a_package_form_no_cycle(package: str) -> None:
    left = files_imported(ROOT / package)
    assert len(left) > 20
    while free := {module for module, imports in left.items() if not imports & left.keys()}:
        left = {module: imports for module, imports in left.items() if module not in free}
    assert left == {}, "these import each other, or import files that do"


def test_a_cycle_of_files_is_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("from room import b")
    (tmp_path / "room" / "b.py").write_text("if TYPE_CHECKING:\n    from room.a import A")
    assert files_imported(tmp_path / "room") == {"room.a": {"room.b"}, "room.b": {"room.a"}}


def test_common_imports_with_every_framework_blocked() -> None:
    """The doctor, which tells what is wrong with a framework, does not even try one."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "common").rglob("*.py")
    ]
    assert len(modules) > 20
    program = f"""
import importlib, sys
import tools.doctor
assert not {FRAMEWORKS} & sys.modules.keys()
for name in {sorted(FRAMEWORKS)}:
    sys.modules[name] = None
for name in {sorted(modules)}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


_REWRITES = {
    "as_run": {
        "common/inputs.py", "common/parallel/run.py", "common/planner/fitting.py",
        "common/planner/suggest.py", "common/resolve/derive.py",
    },
    "resolve_other": {
        "common/inference/language_model.py", "common/inference/load.py",
        "common/inference/run_modes.py", "common/planner/fitting.py", "common/planner/plan.py",
        "common/planner/room.py",
    },
    "make_run": {"common/backends.py"},
    "model_copy": {
        "common/study/loading.py", "common/study/planning.py", "common/systems/direct.py"
    },
    "model_construct": {"common/config/resolved.py"},
}  # fmt: skip
"""Files that call what makes a configuration from another one: the places where a run is made, and
those that ask what another one would be. The copies are not of configurations.
"""


def rewrites_in(path: Path) -> set[str]:
    """Names in _REWRITES of the functions and methods that a file calls or hands on."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in _REWRITES):
        return set()
    tree = ast.parse(text)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names & _REWRITES.keys()


def test_nobody_changes_a_run_that_is_made() -> None:
    found: dict[str, set[str]] = {name: set() for name in _REWRITES}
    rooms = ("common", "gpt2_toolkit", "tools", "compat", *BACKENDS)
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    for path in [*files, ROOT / "run_gpt2.py", ROOT / "run_mindformer.py"]:
        for name in rewrites_in(path):
            found[name].add(str(path.relative_to(ROOT)))
    assert found == _REWRITES


_READERS = {"common/structured_files.py", "common/yaml_files.py"}
_DIRECT = {
    "json": {"load", "loads", "JSONDecoder", "decoder", "scanner"},
    "yaml": None,
    "ruamel": None,
}
"""Readers of JSON or YAML without limits: names of the module json, and every use of the packages
for YAML.
"""


def direct_readers(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {
                alias.name
                for alias in node.names
                if alias.name.partition(".")[0] in ("yaml", "ruamel")
            }
            found |= {
                alias.name
                for alias in node.names
                if alias.name.startswith("json.") or (alias.name == "json" and alias.asname)
            }
        elif (
            isinstance(node, ast.ImportFrom)
            and (package := (node.module or "").partition(".")[0]) in _DIRECT
        ):
            names = _DIRECT[package]
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if names is None or "." in str(node.module) or alias.name in names
            }
        elif isinstance(node, ast.Attribute):
            if (
                isinstance(node.value, ast.Name)
                and node.value.id == "json"
                and node.attr in (_DIRECT["json"] or ())
            ):
                found.add(f"json.{node.attr}")
            found |= {node.attr} & {"raw_decode", "scan_once"}
    return found


def test_json_and_yaml_are_read_through_the_one_reader() -> None:
    """Elsewhere a file could be of any size and depth, and its faults would be a dozen
    exceptions.
    """
    folders = ("common", "tools", "torch_gpt2", "mindformers_gpt2")
    files = [
        ROOT / "run_gpt2.py",
        ROOT / "run_mindformer.py",
        *(path for folder in folders for path in (ROOT / folder).rglob("*.py")),
    ]
    found = {path.relative_to(ROOT).as_posix(): direct_readers(path) for path in files}
    assert {path for path, names in found.items() if names} == _READERS


@pytest.mark.parametrize(
    "text",
    [
        "import json\njson.load(file)", "import json\njson.loads(text)", "import"
            " json\njson.JSONDecoder()", "import json as j",
        "import yaml",
        "from json import loads", "from json.decoder import JSONDecoder", "from yaml import"
            " safe_load", "decoder.raw_decode(text)",
    ],
)  # fmt: skip
def test_every_direct_way_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert direct_readers(path)
    path.write_text("import json\njson.dumps(1), json.dump(1, file)")
    assert not direct_readers(path)


def test_device_words_stay_in_the_device_file() -> None:
    for path in (ROOT / "torch_gpt2").rglob("*.py"):
        if path.name == "device.py":
            continue
        text = path.read_text(encoding="utf-8")
        code = text.replace(ast.get_docstring(ast.parse(text), clean=False) or "", "")
        assert not re.search(r"\b(cuda|npu)\b", code, flags=re.I), path


def test_help_loads_no_library() -> None:
    program = """
import runpy, sys
sys.argv = ["run_gpt2.py", "--help"]
try:
    runpy.run_path("run_gpt2.py", run_name="__main__")
except SystemExit as stop:
    assert stop.code == 0
heavy = {"torch", "mindspore", "pydantic", "numpy", "yaml", "tqdm"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "section.key=value" in done.stdout


def names_of_rules_compared(path: Path) -> list[str]:
    """Comparisons with the name of an update rule, and matches of one that let a new name pass."""
    text = path.read_text(encoding="utf-8")
    found: list[str] = []
    if not re.search("|".join(RULES), text):  # most files
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if constants & RULES.keys():
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Match):
            patterns = [ast.unparse(case.pattern) for case in node.cases]
            if any(f"'{name}'" in pattern for name in RULES for pattern in patterns):
                last = ast.unparse(node.cases[-1])
                if not re.fullmatch(r"case _:\s+assert_never\(.*\)", last):
                    found.append(ast.unparse(node.subject))
    return found


def test_code_that_depends_on_the_update_rule_knows_them_all() -> None:
    """A fact about a rule is a column of RULES, and the code of a rule a case that mypy misses."""
    folders = ("common", "torch_gpt2", "mindformers_gpt2", "gpt2_toolkit", "tools", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): names_of_rules_compared(path) for path in files}
    assert {path: places for path, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "text",
    [
        "if config.name != 'sgd': pass", "kind = A if optimizer.name in ('adam', 'adamw') else B",
        "match name:\n case 'sgd':\n  pass\n case _:\n  adam()",
        "match name:\n case 'adam':\n  pass",
    ],
)  # fmt: skip
def test_a_branch_that_takes_any_new_rule_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert names_of_rules_compared(path)
    path.write_text("match name:\n case 'sgd':\n  pass\n case _:\n  assert_never(name)")
    assert not names_of_rules_compared(path)


_PUBLIC_UNDERSCORES = {"os._exit", "_Entry._fields_", "_thread"}
"""Names that Python documents with a leading underscore."""
_KNOWN_ELSEWHERE = {"common/training/tensorboard.py": {"self._writer._py_recordio_writer"}}
"""tensorboardX 2.6, no framework: its writer's file, which the public close() would flush on a full
disk.
"""
_DATA_MODEL = {name for kind in (object, type, list, BaseException) for name in dir(kind)} | {
    "__enter__",
    "__exit__",
    "__version__",
    "__name__",
}


def own_names(folder: Path) -> set[str]:
    """Attributes, functions and classes that the files of a folder define."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) in ("self", "cls")
            ):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def private_uses(path: Path, own: set[str]) -> set[str]:
    """Names with a leading underscore that a file takes from others: imported, of an object that is
    not self, or in a string.

    Of ``self`` and ``cls`` those count that no file of ours defines: a foreign base class has them.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + alias.name for alias in node.names]
            found |= {
                name
                for name in names
                if name.split(".")[0] not in ("__future__", *BACKENDS, "common")
                and re.search(r"(^|\.)_", name)
            }
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and node.attr not in _DATA_MODEL
        ):
            of = ast.unparse(node.value)
            if of not in ("self", "cls") or node.attr not in own:
                found.add(f"{of}.{node.attr}")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        ):
            words = [
                word.value
                for word in node.args[1:2]
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            ]
            found |= {word for word in words if word.startswith("_") and word not in _DATA_MODEL}
    return found - _PUBLIC_UNDERSCORES


def test_private_interfaces_of_others_are_used_only_in_files_of_that_name() -> None:
    folders = ("common", "torch_gpt2", "mindformers_gpt2")
    own = {folder: own_names(ROOT / folder) for folder in folders}
    found = {
        path.relative_to(ROOT).as_posix(): private_uses(path, own[folder])
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "private_api.py"
    }
    assert {path: names for path, names in found.items() if names} == _KNOWN_ELSEWHERE


@pytest.mark.parametrize(
    "text",
    [
        "from torch import _C", "import torch._inductor.config", "from"
            " torch.distributed._composable import replicate",
        "import torch\ntorch._foreach_norm(x)", "torch.ops.mkldnn._linear_pointwise(x)",
        "model._modules", "getattr(engine, '_optimizer')",
        "deepspeed.ops.__compatible_ops__", "class A(Base):\n    def f(self):\n        return"
            " self._theirs",
        "class A(Base):\n    def _f(self):\n        return super()._f()",
    ],
)  # fmt: skip
def test_every_private_use_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert private_uses(path, own_names(tmp_path))
    path.write_text(
        "class A:\n    def f(self):\n        self._ours = type(self).__name__\n        return"
        " self._ours"
    )
    assert not private_uses(path, own_names(tmp_path))

"""The import law: tools -> one backend -> common; common needs no framework; the backends never meet."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "mindspore", "deepspeed", "torch_npu"}
BACKENDS = {"torch_gpt2", "mindformers_gpt2"}

LAYERS = (
    ("errors", "paths", "interrupts", "death_signal", "log"),
    ("accelerators", "files", "whole_numbers", "run_folder"),
    ("structured_files",),
    ("yaml_files",),
    ("config", "tensor_files"),
    ("cluster", "tokenizer", "weights"),
    ("device", "dataset", "parallel"),
    ("resolve", "launcher"),
    ("planner",),
    ("training", "doctor"),
    ("generation", "evaluation", "systems"),
    ("conversion",),
    ("inputs", "modelarts"),
)
"""The folders and files of common/, lower ones first. Each imports only what is below it."""


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("common", FRAMEWORKS | BACKENDS | {"transformers"}),
        ("torch_gpt2", {"mindspore", "mindformers_gpt2"}),
        ("mindformers_gpt2", {"torch", "torch_gpt2", "deepspeed"}),
    ],
)
def test_a_package_imports_nothing_above_or_beside_it(package: str, forbidden: set[str]) -> None:
    found = {str(path.relative_to(ROOT)): imported_packages(path) & forbidden for path in (ROOT / package).rglob("*.py")}
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
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("common.")}
    return found - {room_of(path)}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "common").parts[0].removesuffix(".py")


def test_each_room_of_common_imports_only_lower_ones() -> None:
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    files = [path for path in (ROOT / "common").rglob("*.py") if path != ROOT / "common" / "__init__.py"]
    assert {room_of(path) for path in files} == set(level), "a new folder or file needs a place in LAYERS"
    upwards = [
        f"{path.relative_to(ROOT)} imports {room}" for path in files for room in rooms_imported(path) if level[room] >= level[room_of(path)]
    ]
    assert upwards == []


def modules_imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_foreign_systems_do_not_import_each_other() -> None:
    """What two of them share is a file beside their folders, which knows none of them; the table alone knows all."""
    folder = ROOT / "common" / "systems"
    systems = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
    assert len(systems) >= 5
    found = {
        f"{path.relative_to(folder)} imports {module}"
        for path in folder.rglob("*.py")
        for module in modules_imported(path)
        if module.startswith("common.systems.") and module.split(".")[2] in systems - {path.relative_to(folder).parts[0]}
    }
    assert {line for line in found if not line.startswith("table.py ")} == set()


def test_common_imports_with_every_framework_blocked() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "common").rglob("*.py")]
    assert len(modules) > 20
    program = f"""
import importlib, sys
for name in {sorted(FRAMEWORKS)}:
    sys.modules[name] = None
for name in {sorted(modules)}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


_READERS = {"common/structured_files.py", "common/yaml_files.py"}
_DIRECT = {"json": {"load", "loads", "JSONDecoder", "decoder", "scanner"}, "yaml": None, "ruamel": None}
"""What reads JSON or YAML without limits: names of the module json, and every use of the packages for YAML."""


def direct_readers(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in ("yaml", "ruamel")}
            found |= {alias.name for alias in node.names if alias.name.startswith("json.") or (alias.name == "json" and alias.asname)}
        elif isinstance(node, ast.ImportFrom) and (package := (node.module or "").partition(".")[0]) in _DIRECT:
            names = _DIRECT[package]
            found |= {
                f"{node.module}.{alias.name}" for alias in node.names if names is None or "." in str(node.module) or alias.name in names
            }
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "json" and node.attr in (_DIRECT["json"] or ()):
                found.add(f"json.{node.attr}")
            found |= {node.attr} & {"raw_decode", "scan_once"}
    return found


def test_json_and_yaml_are_read_through_the_one_reader() -> None:
    """Elsewhere a file could be of any size and depth, and its faults would be a dozen exceptions."""
    folders = ("common", "tools", "torch_gpt2", "mindformers_gpt2")
    files = [ROOT / "run_gpt2.py", ROOT / "run_mindformer.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): direct_readers(path) for path in files}
    assert {path for path, names in found.items() if names} == _READERS


@pytest.mark.parametrize(
    "text",
    [
        "import json\njson.load(file)", "import json\njson.loads(text)", "import json\njson.JSONDecoder()", "import json as j",
        "import yaml",
        "from json import loads", "from json.decoder import JSONDecoder", "from yaml import safe_load", "decoder.raw_decode(text)",
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
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "section.key=value" in done.stdout

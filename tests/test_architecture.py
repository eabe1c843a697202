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

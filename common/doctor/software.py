"""Versions of Python, the frameworks and CANN, and combinations that fail.

Frameworks are imported only in child processes.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import chain
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from common.doctor.report import Check, error, ok, warning
from common.paths import ROOT, install
from common.processes.process_tree import last_line, run_program
from common.structured_files import parse_json

PACKAGES = ("torch", "torch_npu", "mindspore", "deepspeed", "numpy", "transformers")
BACKENDS = {"torch": ("torch", "torch_npu"), "mindspore": ("mindspore",)}
"""Packages that each backend imports."""
IMPORTED = (*BACKENDS["torch"], "deepspeed", *BACKENDS["mindspore"])
_OF_CANN = r"lib(hccl|ascend\w*|torch_npu|acl\w*|runtime|msprofiler)\.so|ASCEND"
"""Pattern of an error that CANN's libraries are not found."""
_COUNT = {
    "torch": "devices = {'cuda': torch.cuda.device_count()}",
    "torch_npu": "import torch; devices = {'npu': torch.npu.device_count()}",
}
_WITHOUT_NPU = "to run without the NPU: export TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def installed_versions(names: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return the version of each package by its metadata, without an import; None if not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def wanted_ranges() -> dict[str, str]:
    """Return the ranges of python and of packages that this project wants, such as '>=1,<2'.

    They are in its folder, or in the metadata of its wheel.
    """
    if (ROOT / "pyproject.toml").is_file():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        python = project["requires-python"]
        lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        lines += chain.from_iterable(project["optional-dependencies"].values())
    else:
        wheel = metadata.metadata("gpt2-toolkit")
        python, lines = wheel["Requires-Python"], wheel.get_all("Requires-Dist") or []
    ranges: dict[str, str] = {}
    for line in lines:
        if match := re.match(r"([\w.-]+?)\s*([<>=!][^#;]*)", line):
            # the first range: numpy's own, not the pin of one extra
            ranges.setdefault(match[1].replace("-", "_"), match[2].strip())
    return {"python": python, **ranges}


def check_versions(versions: Mapping[str, str | None], ranges: Mapping[str, str], backend: str | None) -> list[Check]:
    """Return a line for Python and each package.

    A version out of range is an error for Python, else a warning.
    """
    python = platform.python_version()
    found = f"{python} ({sys.executable})"
    is_fit = SpecifierSet(ranges["python"]).contains(python)
    needed = f"this project needs {ranges['python']}"
    checks = [ok("python", found) if is_fit else error("python", found, needed)]
    for name, version in versions.items():
        if version is None:
            missing = name == backend or (backend is None and name == "torch" and not versions.get("mindspore"))
            advice = install(backend or "torch")
            checks.append(error(name, "not installed", advice) if missing else ok(name, "not installed"))
        elif not SpecifierSet(ranges.get(name, "")).contains(version, prereleases=True):
            tested = f"this project is tested with {name}{ranges[name]}"
            checks.append(warning(name, version, tested))
        else:
            checks.append(ok(name, version))
    return checks


def check_device_package(versions: Mapping[str, str | None], backend: str, device: str) -> list[Check]:
    """Check whether ``backend`` can compute on the requested ``device``, by the installed packages."""
    if backend == "torch" and device == "npu" and not versions.get("torch_npu"):
        torch = versions.get("torch")
        same = f"torch_npu=={_minor(torch)}.*" if torch else "torch and the torch_npu of its version"
        found = "not installed: torch needs it for an Ascend"
        return [error("torch_npu", found, f"pip install {same}; or --backend mindspore")]
    if backend == "mindspore" and device == "cuda":
        found = "mindspore computes on Ascends and CPUs here, not on GPUs"
        return [error("device", found, "--backend torch")]
    return []


def check_pairs(versions: Mapping[str, str | None], environ: Mapping[str, str], cann: str | None) -> list[Check]:
    """Report versions that install together and fail together. cann: its version; None if absent."""
    torch, npu, mindspore, numpy = (versions.get(name) or "" for name in ("torch", "torch_npu", "mindspore", "numpy"))
    found = []
    if mindspore and numpy and Version(numpy).major >= 2:
        text = f"mindspore {mindspore} with numpy {numpy}: operators such as Reshape end in a"
        text += " SystemError in PyNative mode"
        found.append(error("mindspore with numpy", text, "pip install numpy==1.26.4"))
    if npu and _minor(npu) != _minor(torch):
        text = f"torch_npu {npu} without torch"
        remedy = f"pip install torch=={_minor(npu)}.*"
        if torch:
            text = f"torch_npu {npu} with torch {torch}: it is built only for torch {_minor(npu)}"
            remedy += f" or the torch_npu for {_minor(torch)}"
        found.append(error("torch_npu with torch", text, remedy))
    if npu and cann is None and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        text = f"torch_npu {npu} without CANN: `import torch` loads torch_npu, which finds no"
        remedy = f"install CANN and `source .../set_env.sh`; {_WITHOUT_NPU}"
        found.append(error("torch_npu with CANN", f"{text} libraries", remedy))
    return found or [ok("known bad pairs", "none")]


def check_cann(environ: Mapping[str, str], *, needed: bool, root: Path = Path("/")) -> tuple[Check, str | None]:
    """Check the CANN toolkit that the environment points to, and return its version.

    needed: this machine has an NPU or torch_npu.
    """
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if named := environ.get(variable):
            if version := _cann_version(Path(named)):
                return ok("CANN", f"{version} ({variable}={named})"), version
            text = f"{variable}={named} holds neither ascend_toolkit_install.info nor version.cfg"
            return error("CANN", text, "source set_env.sh of the CANN that is installed"), None
    for place in ("cann", "ascend-toolkit/latest", "ascend-toolkit"):
        folder = root / "usr/local/Ascend" / place
        if version := _cann_version(folder):
            script = root / "usr/local/Ascend" / place.removesuffix("/latest") / "set_env.sh"
            text = f"{version} is in {folder}, but this shell does not use it"
            return error("CANN", text, f"source {script}"), None
    remedy = "install the toolkit and kernels that fit the driver, then source its set_env.sh"
    missing = error("CANN", "not found", remedy)
    return missing if needed else ok("CANN", "not installed (only Ascend needs it)"), None


def check_imports(names: Sequence[str], limit: float) -> tuple[list[Check], dict[str, int]]:
    """Check in child processes whether each package imports, and count the devices of torch: cuda, npu."""
    checks, counts = [], dict[str, int]()
    for name in names:
        program = (
            f"import time; start = time.time(); import {name}; took = time.time() - start\n"
            f"{_COUNT.get(name, 'devices = {}')}\n"
            "import json; print('\\n' + json.dumps([took, devices]))"
        )
        code, output, errors = run_program([sys.executable, "-c", program], limit)
        if code == 0:
            seconds, devices = parse_json(output.strip().splitlines()[-1])
            counts |= devices
            checks.append(ok(f"import {name}", f"works, {seconds:.1f} s"))
            continue
        how = f"ended by signal {-code}" if code and code < 0 else "failed"
        remedy = f'for the full output: {sys.executable} -c "import {name}"'
        if name == "hccl":
            remedy = "source CANN's set_env.sh, or pip install the hccl wheel below CANN's folder"
        elif re.search(_OF_CANN, errors):
            remedy = f"source CANN's set_env.sh; {_WITHOUT_NPU}"
        why = last_line(errors)
        checks.append(error(f"import {name}", f"{how}: {why}" if why else how, remedy))
    return checks, counts


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cann_version(folder: Path) -> str | None:
    """Return the version in ``<arch>-linux/ascend_toolkit_install.info`` (version=8.0.RC2), else
    the last [inner:version] in ``version.cfg``.
    """
    pattern = r"^version=(\S+)|^toolkit_installed_version=.*:([^\]:]+)\]\s*$"
    for path in (*sorted(folder.glob("*-linux/ascend_toolkit_install.info")), folder / "version.cfg"):
        with suppress(OSError):
            if match := re.search(pattern, path.read_text("utf-8", "replace"), flags=re.M):
                return match[1] or match[2]
    return None

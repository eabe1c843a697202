"""Versions of Python, the frameworks and CANN, and combinations that fail.

Frameworks are imported only in child processes.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from common.doctor.report import Check, error, ok, warning
from common.packages import install
from common.processes.programs import last_line, run_program
from common.structured_files import parse_json

PACKAGES = ("torch", "torch_npu", "mindspore", "deepspeed", "numpy", "transformers")
BACKENDS = {"torch": ("torch", "torch_npu"), "mindspore": ("mindspore",)}
"""Packages that each backend imports."""
IMPORTED = (*BACKENDS["torch"], "deepspeed", *BACKENDS["mindspore"])


def installed_versions() -> dict[str, str | None]:
    """Return the version of each of PACKAGES by its metadata, without an import; None if not
    installed.
    """
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def wanted_ranges(project: Path) -> dict[str, str]:
    """Return the ranges of python and of packages in pyproject.toml and requirements.txt of
    ``project``.

    The result maps a name to a range such as '>=1,<2'.
    """
    document = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (project / "requirements.txt").read_text(encoding="utf-8").splitlines()
    ranges: dict[str, str] = {}
    for line in [
        *lines,
        *(item for extra in document["optional-dependencies"].values() for item in extra),
    ]:
        if match := re.match(r"([A-Za-z0-9_.-]+?)\s*([<>=!].*)$", line.partition("#")[0].strip()):
            # the first range: numpy's own, not the pin of one extra
            ranges.setdefault(match[1].replace("-", "_"), match[2])
    return {"python": document["requires-python"], **ranges}


def check_versions(
    versions: Mapping[str, str | None], ranges: Mapping[str, str], backend: str | None
) -> list[Check]:
    """Return a line for Python and each package.

    A version out of range is an error for Python, else a warning.
    """
    python = platform.python_version()
    checks = [ok("python", f"{python} ({sys.executable})")]
    if not satisfies(python, ranges["python"]):
        checks = [
            error(
                "python", f"{python} ({sys.executable})", f"this project needs {ranges['python']}"
            )
        ]
    for name, version in versions.items():
        if version is None:
            missing = name == backend or (
                backend is None and name == "torch" and not versions.get("mindspore")
            )
            advice = install(backend or "torch")
            checks.append(
                error(name, "not installed", advice) if missing else ok(name, "not installed")
            )
        elif name in ranges and not satisfies(version, ranges[name]):
            checks.append(
                warning(name, version, f"this project is tested with {name}{ranges[name]}")
            )
        else:
            checks.append(ok(name, version))
    return checks


def check_device_package(
    versions: Mapping[str, str | None], backend: str, device: str
) -> list[Check]:
    """Check whether ``backend`` can compute on the requested ``device``, by the installed
    packages.
    """
    torch = versions.get("torch")
    if backend == "torch" and device == "npu" and not versions.get("torch_npu"):
        remedy = (
            f"pip install torch_npu=={_minor(torch)}.*"
            if torch
            else "pip install torch and the torch_npu of the same version"
        )
        return [
            error(
                "torch_npu",
                "not installed: torch needs it for an Ascend",
                f"{remedy}; or --backend mindspore",
            )
        ]
    if backend == "mindspore" and device == "cuda":
        return [
            error(
                "device",
                "mindspore computes on Ascends and CPUs here, not on GPUs",
                "--backend torch",
            )
        ]
    return []


def check_pairs(
    versions: Mapping[str, str | None], environ: Mapping[str, str], cann: str | None
) -> list[Check]:
    """Report versions that install together and fail together. cann: its version; None if
    absent.
    """
    torch, npu, mindspore, numpy = (
        versions.get(name) for name in ("torch", "torch_npu", "mindspore", "numpy")
    )
    found = []
    if mindspore and numpy and _numbers(numpy)[0] >= 2:
        found.append(
            error(
                "mindspore with numpy",
                f"mindspore {mindspore} with numpy {numpy}: operators such as Reshape end in a"
                " SystemError in PyNative mode",
                "pip install numpy==1.26.4",
            )
        )
    if npu and not torch:
        found.append(
            error(
                "torch_npu with torch",
                f"torch_npu {npu} without torch",
                f"pip install torch=={_minor(npu)}.*",
            )
        )
    if npu and torch and _minor(npu) != _minor(torch):
        found.append(
            error(
                "torch_npu with torch",
                f"torch_npu {npu} with torch {torch}: it is built only for torch {_minor(npu)}",
                f"pip install torch=={_minor(npu)}.* or the torch_npu for {_minor(torch)}",
            )
        )
    if npu and cann is None and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        found.append(
            error(
                "torch_npu with CANN",
                f"torch_npu {npu} without CANN: `import torch` loads torch_npu, which finds no"
                " libraries",
                "install CANN and `source .../set_env.sh`; to run without the NPU: export"
                " TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            )
        )
    return found or [ok("known bad pairs", "none")]


def check_cann(
    environ: Mapping[str, str], *, needed: bool, root: Path = Path("/")
) -> tuple[Check, str | None]:
    """Check the CANN toolkit that the environment points to, and return its version.

    needed: this machine has an NPU or torch_npu.
    """
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if folder := environ.get(variable):
            version = _cann_version(Path(folder))
            if version:
                return ok("CANN", f"{version} ({variable}={folder})"), version
            return (
                error(
                    "CANN",
                    f"{variable}={folder} holds neither ascend_toolkit_install.info nor"
                    " version.cfg",
                    "source set_env.sh of the CANN that is installed",
                ),
                None,
            )
    for place in (
        "usr/local/Ascend/cann",
        "usr/local/Ascend/ascend-toolkit/latest",
        "usr/local/Ascend/ascend-toolkit",
    ):
        if version := _cann_version(root / place):
            script = root / place.removesuffix("/latest") / "set_env.sh"
            return error(
                "CANN",
                f"{version} is in {root / place}, but this shell does not use it",
                f"source {script}",
            ), None
    if needed:
        return error(
            "CANN",
            "not found",
            "install the toolkit and kernels that fit the driver, then source its set_env.sh",
        ), None
    return ok("CANN", "not installed (only Ascend needs it)"), None


def check_imports(names: Sequence[str], limit: float) -> tuple[list[Check], dict[str, int]]:
    """Check in child processes whether each package imports, and count the devices of torch: cuda,
    npu.
    """

    def attempt(name: str) -> tuple[Check, dict[str, int]]:
        program = (
            f"import time; start = time.time(); import {name}; took = time.time() -"
            f" start\n{_COUNT.get(name, 'devices = {}')}"
        )
        program += "\nimport json; print('\\n' + json.dumps([took, devices]))"
        code, output, errors = run_program([sys.executable, "-c", program], limit)
        if code == 0:
            seconds, devices = parse_json(output.strip().splitlines()[-1])
            return ok(f"import {name}", f"works, {seconds:.1f} s"), devices
        how = f"ended by signal {-code}" if code and code < 0 else "failed"
        remedy = f'for the full output: {sys.executable} -c "import {name}"'
        if name == "hccl":
            remedy = "source CANN's set_env.sh, or pip install the hccl wheel below CANN's folder"
        elif re.search(_OF_CANN, errors):
            remedy = (
                "source CANN's set_env.sh; to run without the NPU: export"
                " TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            )
        why = last_line(errors)
        return error(f"import {name}", f"{how}: {why}" if why else how, remedy), {}

    results = [attempt(name) for name in names]
    counts: dict[str, int] = {}
    for _, devices in results:
        counts |= devices
    return [check for check, _ in results], counts


_OF_CANN = r"lib(hccl|ascend\w*|torch_npu|acl\w*|runtime|msprofiler)\.so|ASCEND"
"""Pattern of an error that CANN's libraries are not found."""

_COUNT = {
    "torch": "devices = {'cuda': torch.cuda.device_count()}",
    "torch_npu": "import torch; devices = {'npu': torch.npu.device_count()}",
}


def satisfies(version: str, specifier: str) -> bool:
    """Tell whether the release numbers of ``version`` meet '>=1.2,<2'.

    Suffixes such as +cpu and .post1 are ignored.
    """
    own = _numbers(version)
    for condition in filter(None, specifier.replace(" ", "").split(",")):
        operator = re.match(r"[<>=!]+", condition)
        assert operator is not None, condition
        other = _numbers(condition[operator.end() :])
        width = max(len(own), len(other))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (own, other))
        held = {
            ">=": left >= right,
            "<": left < right,
            "==": left == right,
            "!=": left != right,
            ">": left > right,
            "<=": left <= right,
        }
        if not held[operator[0]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else (0,)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cann_version(folder: Path) -> str | None:
    """Return the version in ``<arch>-linux/ascend_toolkit_install.info`` (version=8.0.RC2), else
    ``version.cfg``.

    Of version.cfg the last [inner:version] counts.
    """
    for path in [
        *sorted(folder.glob("*-linux/ascend_toolkit_install.info")),
        folder / "version.cfg",
    ]:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(
            r"^version=(\S+)|^toolkit_installed_version=.*:([^\]:]+)\]\s*$", text, flags=re.M
        ):
            return match[1] or match[2]
    return None

"""Versions that fail together, CANN's files as its installers write them, and imports that break or
hang.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.cluster import hccn
from common.doctor import software
from common.doctor.examine import DoctorRequest, Facts
from common.doctor.report import State
from common.doctor.software import (
    check_cann,
    check_device_package,
    check_imports,
    check_pairs,
    check_versions,
    wanted_ranges,
)

NONE = dict.fromkeys(("torch", "torch_npu", "mindspore", "deepspeed", "numpy", "transformers"))


def test_the_ranges_of_this_project_and_of_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = wanted_ranges()
    assert ranges["python"] == ">=3.11,<3.14"
    assert ranges["numpy"] == ">=1.26,<3"
    # a torch_npu is built for one torch
    assert ranges["torch_npu"] == ranges["torch"] == ">=2.11,<2.14"
    assert {"torch", "mindspore", "deepspeed", "transformers"} <= ranges.keys()

    lines = ["Metadata-Version: 2.1", "Name: gpt2-toolkit", "Version: 0", "Requires-Python: >=3.12"]
    lines += ["Requires-Dist: numpy<3,>=1.26", 'Requires-Dist: torch-npu<3,>=2; extra == "npu"']
    wheel = tmp_path / "gpt2_toolkit-0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("\n".join(lines))
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert wanted_ranges() == {"python": ">=3.12", "numpy": "<3,>=1.26", "torch_npu": "<3,>=2"}


def versions_of(**given: str) -> dict[str, str | None]:
    return {**NONE, **given}


def test_versions_out_of_range_and_missing() -> None:
    ranges = {"python": ">=3.11", "torch": ">=2.11,<2.14", "deepspeed": ">=0.19.8,<0.20"}
    checks = {
        check.name: check
        for check in check_versions(
            versions_of(torch="2.10.0", deepspeed="0.18.1"), ranges, "torch"
        )
    }
    assert checks["python"].state is State.OK
    assert checks["torch"].state is checks["deepspeed"].state is State.WARNING
    assert checks["deepspeed"].remedy == "this project is tested with deepspeed>=0.19.8,<0.20"
    assert checks["mindspore"].state is State.OK
    assert check_versions(NONE, {"python": ">=3.30"}, None)[0].state is State.ERROR
    lacking = {
        check.name: check.state
        for check in check_versions(versions_of(torch="2.13.0"), ranges, "mindspore")
    }
    assert lacking["mindspore"] is State.ERROR


AUTOLOAD_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.parametrize(
    ("versions", "environ", "cann", "words"),
    [
        ({"mindspore": "2.10.0", "numpy": "2.1.3"}, {}, None, "pip install numpy==1.26.4"),
        (
            {"torch_npu": "2.6.0.post3", "torch": "2.13.0+cpu"},
            {},
            "8.2.RC1",
            "pip install torch==2.6.* or the torch_npu for 2.13",
        ),
        ({"torch_npu": "2.6.0"}, {}, "8.2.RC1", "pip install torch==2.6.*"),
        (
            {"torch_npu": "2.6.0", "torch": "2.6.0"},
            {},
            None,
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ),
        ({"mindspore": "2.10.0", "numpy": "1.26.4"}, {}, None, ""),
        ({"torch": "2.13.0", "numpy": "2.3.0"}, {}, None, ""),
        ({"torch_npu": "2.6.0.post3", "torch": "2.6.0"}, {}, "8.2.RC1", ""),
        ({"torch_npu": "2.6.0", "torch": "2.6.0"}, AUTOLOAD_OFF, None, ""),
    ],
)
def test_known_pairs(
    versions: dict[str, str], environ: dict[str, str], cann: str | None, words: str
) -> None:
    """words: of the remedy; a good pair has none."""
    (check,) = check_pairs(versions_of(**versions), environ, cann)
    assert check.state is (State.ERROR if words else State.OK)
    assert words in check.remedy


INFO = (
    "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\ninnerversion=V100R001C22\n"
    "arch=aarch64\nos=linux\n"
)
CONFIG = (
    "# version: 1.0\n"
    "runtime_running_version=[7.0.0.5.242:7.0.RC1]\n"
    "toolkit_installed_version=[7.0.0.5.242:7.0.RC1][7.3.0.1.231:8.0.RC2]\n"
)


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", INFO, "8.2.RC1"),
        ("version.cfg", CONFIG, "8.0.RC2"),
    ],
)
def test_the_version_of_cann(tmp_path: Path, name: str, text: str, version: str) -> None:
    write(tmp_path / "cann", {name: text})
    check, found = check_cann(
        {"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann")}, needed=True, root=tmp_path
    )
    assert (check.state, found) == (State.OK, version)


def test_a_version_of_cann_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "version.cfg").symlink_to("/proc/self/mem")
    environ = {"ASCEND_TOOLKIT_HOME": str(tmp_path)}
    assert check_cann(environ, needed=True, root=tmp_path)[1] is None


def test_cann_that_is_not_there_not_sourced_or_gone(tmp_path: Path) -> None:
    assert check_cann({}, needed=False, root=tmp_path)[0].state is State.OK
    assert check_cann({}, needed=True, root=tmp_path)[0].state is State.ERROR
    check, found = check_cann(
        {"ASCEND_HOME_PATH": str(tmp_path / "old")}, needed=True, root=tmp_path
    )
    assert check.state is State.ERROR and found is None
    write(tmp_path / "usr/local/Ascend/ascend-toolkit/latest", {"version.cfg": CONFIG})
    check, found = check_cann({}, needed=True, root=tmp_path)
    assert found is None
    assert check.remedy == f"source {tmp_path}/usr/local/Ascend/ascend-toolkit/set_env.sh"


def test_imports_in_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins that work, fail as torch_npu does without CANN, crash, and hang; none is imported
    here.
    """
    library = "libhccl.so: cannot open shared object file: No such file or directory"
    write(
        tmp_path,
        {
            "torch.py": "class cuda:\n    device_count = staticmethod(lambda: 3)\n",
            "torch_npu.py": f"raise ImportError({library!r})\n",
            "crashing.py": "import os; os.kill(os.getpid(), 11)\n",
            "hanging.py": "import time; time.sleep(60)\n",
        },
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["torch", "torch_npu", "crashing", "hccl"]
    checks, counted = check_imports(names, 30)
    assert [check.state for check in checks] == [State.OK, *[State.ERROR] * 3]
    assert "No module named 'hccl'" in checks[3].found and "hccl wheel" in checks[3].remedy
    assert counted == {"cuda": 3}
    assert library in checks[1].found and "set_env.sh" in checks[1].remedy
    assert checks[2].found == "ended by signal 11"
    (hanging,), _ = check_imports(["hanging"], 1)
    assert hanging.found == "failed: no answer within 1 s"
    assert not {"torch_npu", "crashing", "hanging"} & sys.modules.keys()


def test_a_device_that_was_asked_for_needs_its_package() -> None:
    found = check_device_package({"torch": "2.7.1", "torch_npu": None}, "torch", "npu")
    assert [(check.name, check.state) for check in found] == [
        ("torch_npu", State.ERROR)
    ] and "torch_npu==2.7.*" in found[0].remedy
    assert check_device_package({"torch": "2.7.1", "torch_npu": "2.7.1"}, "torch", "npu") == []
    assert check_device_package({"mindspore": "2.10.0"}, "mindspore", "npu") == []
    assert (
        check_device_package({"mindspore": "2.10.0"}, "mindspore", "cuda")[0].state is State.ERROR
    )


@pytest.mark.parametrize(("npus", "imported"), [([0], ["mindspore", "hccl"]), ([], ["mindspore"])])
def test_mindspore_on_an_ascend_needs_the_package_hccl(
    npus: list[int], imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = dict.fromkeys(software.PACKAGES) | {"mindspore": "2.10.0"}
    monkeypatch.setattr(software, "installed_versions", lambda: versions)
    monkeypatch.setattr(software, "check_imports", lambda names, limit: (names, {}))
    monkeypatch.setattr(hccn, "npu_numbers", lambda: npus)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert Facts(DoctorRequest(device="cpu")).imports[0] == imported

"""Versions that fail together, CANN's files as its installers write them, and imports that break or
hang.
"""

import sys
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

NONE = dict.fromkeys(software.PACKAGES)


def test_the_ranges_of_this_project_and_of_its_wheel(tmp_path, monkeypatch) -> None:
    ranges = wanted_ranges()
    assert (ranges["python"], ranges["numpy"]) == (">=3.11,<3.14", ">=1.26,<3")
    # a torch_npu is built for one torch
    assert ranges["torch_npu"] == ranges["torch"] == ">=2.11,<2.14"
    lines = ["Metadata-Version: 2.1", "Name: gpt2-toolkit", "Version: 0", "Requires-Python: >=3.12"]
    lines += ["Requires-Dist: numpy<3,>=1.26", 'Requires-Dist: torch-npu<3,>=2; extra == "npu"']
    wheel = tmp_path / "gpt2_toolkit-0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("\n".join(lines))
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert wanted_ranges() == {"python": ">=3.12", "numpy": "<3,>=1.26", "torch_npu": "<3,>=2"}


def test_versions_out_of_range_and_missing() -> None:
    ranges = {"python": ">=3.11", "torch": ">=2.11,<2.14", "deepspeed": ">=0.19.8,<0.20"}

    def checked(**versions: str) -> dict[str, State]:
        found = check_versions({**NONE, **versions}, ranges, "torch")
        return {check.name: check.state for check in found}

    states = checked(torch="2.10.0", deepspeed="0.18.1")
    assert states["python"] is states["mindspore"] is State.OK
    assert states["torch"] is states["deepspeed"] is State.WARNING
    assert checked(mindspore="2.10.0")["torch"] is State.ERROR
    assert checked(torch="2.13.0")["torch"] is State.OK
    assert check_versions(NONE, {"python": ">=3.30"}, None)[0].state is State.ERROR


@pytest.mark.parametrize(
    ("versions", "environ", "cann", "words"),
    [
        ({"mindspore": "2.10.0", "numpy": "2.1.3"}, {}, None, "pip install numpy==1.26.4"),
        ({"torch_npu": "2.6.0.post3", "torch": "2.13.0+cpu"}, {}, "8.2.RC1",
            "pip install torch==2.6.* or the torch_npu for 2.13"),
        ({"torch_npu": "2.6.0"}, {}, "8.2.RC1", "pip install torch==2.6.*"),
        ({"torch_npu": "2.6.0", "torch": "2.6.0"}, {}, None,
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        ({"mindspore": "2.10.0", "numpy": "1.26.4"}, {}, None, ""),
        ({"torch": "2.13.0", "numpy": "2.3.0"}, {}, None, ""),
        ({"torch_npu": "2.6.0.post3", "torch": "2.6.0"}, {}, "8.2.RC1", ""),
        ({"torch_npu": "2.6.0", "torch": "2.6.0"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, None,
            ""),
    ],
)  # fmt: skip
def test_known_pairs(versions, environ, cann, words) -> None:
    """words: of the remedy; a good pair has none."""
    (check,) = check_pairs({**NONE, **versions}, environ, cann)
    assert check.state is (State.ERROR if words else State.OK)
    assert words in check.remedy


INFO = "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\ninnerversion=V100R001C22\n"
CONFIG = (
    "runtime_running_version=[7.0.0.5.242:7.0.RC1]\n"
    "toolkit_installed_version=[7.0.0.5.242:7.0.RC1][7.3.0.1.231:8.0.RC2]\n"
)


def test_cann_that_is_used_not_there_not_sourced_gone_or_unreadable(tmp_path: Path) -> None:
    def checked(needed: bool = True, **environ: str) -> tuple[State, str | None, str]:
        check, version = check_cann(environ, needed=needed, root=tmp_path)
        return check.state, version, check.remedy

    assert checked(needed=False)[0] is State.OK
    assert checked()[0] is State.ERROR
    named, other, unreadable = (tmp_path / name for name in ("cann", "other", "unreadable"))
    latest = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    for folder in (named / "aarch64-linux", other, unreadable, latest):
        folder.mkdir(parents=True)
    (named / "aarch64-linux" / "ascend_toolkit_install.info").write_text(INFO)
    (other / "version.cfg").write_text(CONFIG)
    (latest / "version.cfg").write_text(CONFIG)
    (unreadable / "version.cfg").symlink_to("/proc/self/mem")
    assert checked(ASCEND_TOOLKIT_HOME=str(named))[:2] == (State.OK, "8.2.RC1")
    assert checked(ASCEND_HOME_PATH=str(other))[:2] == (State.OK, "8.0.RC2")
    for name in ("gone", "unreadable"):
        assert checked(ASCEND_HOME_PATH=str(tmp_path / name))[:2] == (State.ERROR, None)
    script = latest.parent / "set_env.sh"
    assert checked() == (State.ERROR, None, f"source {script}")


def test_imports_in_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins that work, fail as torch_npu does without CANN, crash, and hang; none is imported
    here.
    """
    library = "libhccl.so: cannot open shared object file: No such file or directory"
    for name, text in {
        "torch.py": "class cuda:\n    device_count = staticmethod(lambda: 3)\n",
        "torch_npu.py": f"raise ImportError({library!r})\n",
        "crashing.py": "import os; os.kill(os.getpid(), 11)\n",
        "hanging.py": "import time; time.sleep(60)\n",
    }.items():
        (tmp_path / name).write_text(text)
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
    (check,) = check_device_package({"torch": "2.7.1", "torch_npu": None}, "torch", "npu")
    assert check.state is State.ERROR and "torch_npu==2.7.*" in check.remedy
    assert check_device_package({"torch": "2.7.1", "torch_npu": "2.7.1"}, "torch", "npu") == []
    mindspore = {"mindspore": "2.10.0"}
    assert check_device_package(mindspore, "mindspore", "npu") == []
    assert check_device_package(mindspore, "mindspore", "cuda")[0].state is State.ERROR


@pytest.mark.parametrize(("npus", "imported"), [([0], ["mindspore", "hccl"]), ([], ["mindspore"])])
def test_mindspore_on_an_ascend_needs_the_package_hccl(npus, imported, monkeypatch) -> None:
    monkeypatch.setattr(software, "installed_versions", lambda: NONE | {"mindspore": "2.10.0"})
    monkeypatch.setattr(software, "check_imports", lambda names, limit: (names, {}))
    monkeypatch.setattr(hccn, "npu_numbers", lambda: npus)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert Facts(DoctorRequest(device="cpu")).imports[0] == imported

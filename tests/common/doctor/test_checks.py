"""Machines that the tests do not have, as trees of files and stand-ins for the vendors' tools; ports and names for
real. Versions that fail together, CANN's files as its installers write them, and imports that break or hang. The report
of what was found. Ranks of a trial; real ones are in tests/tools/test_doctor.py.
"""

import json
import socket
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.cluster import hccn
from common.cluster.hccn import npu_numbers
from common.cluster.places import Placement, RankPlacement
from common.doctor import machine, software
from common.doctor.allreduce import MARK, STAGES, judge, try_all_reduce
from common.doctor.examine import DoctorRequest, Facts
from common.doctor.machine import (
    check_devices,
    check_limits,
    check_memory,
    check_names,
    check_ports,
    check_storage,
    check_variables,
)
from common.doctor.report import Check, State, as_json, as_table, error, exit_code, ok, warning
from common.doctor.software import (
    check_cann,
    check_device_package,
    check_imports,
    check_pairs,
    check_versions,
    wanted_ranges,
)
from common.launcher.rank_process import ProcessSpec
from common.launcher.supervisor import Job, Outcome

DRIVER = "Version=7.35.23\nascendhal_version=7.35.23\npackage_version=25.0.rc1.1\n"
# the lines of `npu-smi info` that matter; a second line of each device has no health
NPU_SMI = """#!/bin/sh
cat <<'END'
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.3        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3162 / 65536         |
| 1     910B3               | {state}         | 90.1        45                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3162 / 65536         |
END
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder before everything else on PATH, for stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def ascend_root(root: Path, *numbers: int, driver: str = DRIVER) -> Path:
    (root / "dev").mkdir(parents=True)
    for name in (*(f"davinci{number}" for number in numbers), "davinci_manager"):
        (root / "dev" / name).touch()
    if driver:
        (root / "usr/local/Ascend/driver").mkdir(parents=True)
        (root / "usr/local/Ascend/driver/version.info").write_text(driver)
    return root


def test_ascend_devices_and_driver(tmp_path: Path, tools: Path) -> None:
    """Also a sick device, a driver that does not answer, and a container without devices."""
    root = ascend_root(tmp_path / "root", 0, 1, 10)
    put(tools, "npu-smi", NPU_SMI.format(state="OK   "))
    checks, count = check_devices(root)
    assert npu_numbers(root) == [0, 1, 10] and count == 3
    assert checks == [ok("Ascend driver", "25.0.rc1.1"), ok("devices", "3 Ascend devices: 0, 1, 10")]
    put(tools, "npu-smi", NPU_SMI.format(state="Alarm"))
    assert check_devices(root)[0][1].found == "3 Ascend devices: 0, 1, 10; NPU 1 is Alarm"
    put(tools, "npu-smi", "#!/bin/sh\necho 'dcmi failed. ret is -8005' >&2; exit 1\n")
    check = check_devices(root)[0][1]
    assert check.state == "error" and "ret is -8005" in check.found
    assert check_devices(ascend_root(tmp_path / "half", 0, driver=""))[0][0].state == "error"
    container = ascend_root(tmp_path / "container")
    for asked, state in (("auto", "warning"), ("npu", "error")):
        (check,), count = check_devices(container, asked=asked)
        assert (check.name, check.state, count) == ("devices", state, 0)


def test_gpus(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("CC", "nvidia-smi")  # a program on PATH
    (tmp_path / "Python.h").touch()
    lines = [f"{number}, NVIDIA H100 80GB HBM3, 81559 MiB, 550.90.07" for number in range(2)]
    put(tools, "nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    (check,), count = check_devices(tmp_path)
    assert (check.state, count) == ("ok", 2)
    (tmp_path / "Python.h").unlink()
    (_, check), _ = check_devices(tmp_path)
    assert f"no {tmp_path}/Python.h" in check.found and "python3-dev" in check.remedy
    put(tools, "nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    (check,), count = check_devices(tmp_path)
    assert (check.state, count) == ("error", 0) and "has failed" in check.found


def test_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (check,) = check_ports(port, {}, first_host=True, npu=False, several_hosts=True)
        assert check.state == "error" and str(port) in check.found
        (check,) = check_ports(port - 1, {}, first_host=True, npu=False, several_hosts=False)
        assert check.state == "warning"
        given: Any = {"first_host": False, "several_hosts": True, "root": tmp_path}
        assert check_ports(port, {}, npu=False, **given) == []
        (check,) = check_ports(port, {"HCCL_IF_BASE_PORT": str(min(port, 65520))}, npu=True, **given)
        assert check.state == "error"
    (check,) = check_ports(port, {"HCCL_IF_BASE_PORT": "many"}, npu=True, **given)
    assert check.found == "HCCL_IF_BASE_PORT=many"
    # ports that the kernel may give away
    monkeypatch.setattr(machine, "_can_listen", lambda port: True)
    settings = tmp_path / "proc/sys/net/ipv4"
    settings.mkdir(parents=True)
    (settings / "ip_local_port_range").write_text("32768\t60999\n")
    for reserved, state in (("60000-60007\n", "warning"), ("8080,60000-60015\n", "ok")):
        (settings / "ip_local_reserved_ports").write_text(reserved)
        (check,) = check_ports(29500, {}, npu=True, **given)
        assert check.state is state, reserved


def test_names_and_addresses_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """203.0.113.1 is reserved for documentation, TEST-NET-3 of RFC 5737."""
    assert check_names("127.0.0.1", several_hosts=True)[-1].found == "127.0.0.1 is held by interface lo"
    for several, state in ((True, "error"), (False, "warning")):
        assert check_names("203.0.113.1", several_hosts=several)[-1].state is state
    for addresses, *states in (
        (["127.0.1.1"], "ok", "warning"),
        (["10.0.0.5", "127.0.1.1"], "ok", "ok"),
        ([], "ok", "warning"),
        (None, "warning", "warning"),
    ):
        monkeypatch.setattr(machine, "_resolve", lambda name, addresses=addresses: addresses)
        assert [check_names(None, several_hosts=several)[0].state for several in (False, True)] == states


def test_memory_limits_and_storage(tmp_path, monkeypatch) -> None:
    kernel = SimpleNamespace(total=2**36, available=2**35)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: kernel)
    assert check_memory(tmp_path).found == "32.0 GiB available"
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert check_memory(tmp_path).state == "ok"
    (group / "memory.max").write_text(f"{8 * 2**30}\n")
    (group / "memory.current").write_text(f"{6 * 2**30}\n")
    check = check_memory(tmp_path)
    assert check.state == "warning"
    assert check.found == "2.0 GiB available (this container may hold 8.0 GiB)"
    (group / "pids.max").write_text("100\n")
    check = check_limits(tmp_path)
    assert check.state == "warning"
    assert "100 in this container" in check.found and "--pids-limit" in check.remedy
    check = check_storage(tmp_path / "output" / "run")[0]  # a folder that does not exist yet
    assert str(tmp_path) in check.found and "output" not in check.found


def test_variables_that_make_a_shell_a_rank() -> None:
    environ = {"RANK": "3", "NCCL_DEBUG": "INFO", "MASTER_PORT": "1", "SECRET": "x"}
    rank, tuning = check_variables(environ)
    assert rank.state == "warning" and rank.remedy.endswith("unset RANK")
    assert tuning.found == "MASTER_PORT=1, NCCL_DEBUG=INFO"


def test_the_report_as_people_and_as_programs_read_it() -> None:
    checks = [ok("torch", "2.13.0"), warning("disk", "3 GiB free", "make room")]
    checks.append(error("all-reduce", "rank 1 died\nits log ends", ""))
    assert as_table(checks) == (
        "ok       torch       2.13.0\n"
        "warning  disk        3 GiB free\n"
        "                     -> make room\n"
        "error    all-reduce  rank 1 died\n"
        "                     its log ends\n"
        "1 ok, 1 warning, 1 error\n"
    )
    one = {"name": "disk", "state": "warning", "found": "3 GiB free", "remedy": "make room"}
    assert json.loads(as_json(checks))["checks"][1] == one
    states = [json.loads(as_json(checks[:count]))["state"] for count in range(4)]
    assert states == ["ok", "ok", "warning", "error"]
    assert [exit_code(checks[:count]) for count in range(4)] == [0, 0, 0, 2]


NONE = dict.fromkeys(software.PACKAGES)


def test_the_ranges_of_this_project_and_of_its_wheel(tmp_path, monkeypatch) -> None:
    ranges = wanted_ranges()
    assert ranges["python"].startswith(">=3.") and ranges["numpy"].startswith(">=")
    assert ranges["torch_npu"] == ranges["torch"]  # it is built for one torch
    wheel = tmp_path / "gpt2_toolkit-0.dist-info"
    wheel.mkdir()
    needs = 'Requires-Dist: numpy<3,>=1.26\nRequires-Dist: torch-npu<3,>=2; extra == "npu"'
    head = "Metadata-Version: 2.1\nName: gpt2-toolkit\nVersion: 0\nRequires-Python: >=3.12"
    (wheel / "METADATA").write_text(f"{head}\n{needs}")
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert wanted_ranges() == {"python": ">=3.12", "numpy": "<3,>=1.26", "torch_npu": "<3,>=2"}


def test_versions_out_of_range_and_missing() -> None:
    ranges = {"python": ">=3.11", "torch": ">=2.11,<2.14", "deepspeed": ">=0.19.8,<0.20"}

    def checked(**versions: str) -> dict[str, State]:
        found = check_versions({**NONE, **versions}, ranges, "torch")
        return {check.name: check.state for check in found}

    states = checked(torch="2.10.0", deepspeed="0.18.1")
    assert states["mindspore"] == "ok" and states["torch"] is states["deepspeed"] == "warning"
    assert checked(mindspore="2.10.0")["torch"] == "error"
    assert checked(torch="2.13.0")["torch"] == "ok"
    assert check_versions(NONE, {"python": ">=3.30"}, None)[0].state == "error"


@pytest.mark.parametrize(
    ("versions", "cann", "words"),
    [
        ("mindspore=2.10.0 numpy=2.1.3", None, "pip install numpy==1.26.4"),
        ("torch_npu=2.6.0.post3 torch=2.13.0+cpu", "8.2.RC1", "pip install torch==2.6.* or the torch_npu for 2.13"),
        ("torch_npu=2.6.0", "8.2.RC1", "pip install torch==2.6.*"),
        ("torch_npu=2.6.0 torch=2.6.0", None, "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        ("mindspore=2.10.0 numpy=1.26.4", None, ""),
        ("torch=2.13.0 numpy=2.3.0", None, ""),
        ("torch_npu=2.6.0.post3 torch=2.6.0", "8.2.RC1", ""),
    ],
)
def test_known_pairs(versions: str, cann: str | None, words: str) -> None:
    """words: of the remedy; a good pair has none."""
    found = NONE | dict(word.split("=") for word in versions.split())
    (check,) = check_pairs(found, {}, cann)
    assert check.state == ("error" if words else "ok") and words in check.remedy
    if "AUTOLOAD" in words:
        assert check_pairs(found, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, cann)[0].state == "ok"


INFO = "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\ninnerversion=V100R001C22\n"
CONFIG = (
    "runtime_running_version=[7.0.0.5.242:7.0.RC1]\ntoolkit_installed_version=[7.0.0.5.242:7.0.RC1][7.3.0:8.0.RC2]\n"
)


def test_cann_that_is_used_not_there_not_sourced_gone_or_unreadable(tmp_path: Path) -> None:
    def checked(needed: bool = True, **environ: str) -> tuple[State, str | None, str]:
        check, version = check_cann(environ, needed=needed, root=tmp_path)
        return check.state, version, check.remedy

    assert checked(needed=False)[0] == "ok"
    assert checked()[0] == "error"
    named, other, unreadable = (tmp_path / name for name in ("cann", "other", "unreadable"))
    latest = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    for folder in (named / "aarch64-linux", other, unreadable, latest):
        folder.mkdir(parents=True)
    (named / "aarch64-linux" / "ascend_toolkit_install.info").write_text(INFO)
    (other / "version.cfg").write_text(CONFIG)
    (latest / "version.cfg").write_text(CONFIG)
    (unreadable / "version.cfg").symlink_to("/proc/self/mem")
    assert checked(ASCEND_TOOLKIT_HOME=str(named))[:2] == ("ok", "8.2.RC1")
    assert checked(ASCEND_HOME_PATH=str(other))[:2] == ("ok", "8.0.RC2")
    for name in ("gone", "unreadable"):
        assert checked(ASCEND_HOME_PATH=str(tmp_path / name))[:2] == ("error", None)
    script = latest.parent / "set_env.sh"
    assert checked() == ("error", None, f"source {script}")


def test_imports_in_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins that work, fail as torch_npu does without CANN, crash, and hang; none is imported here."""
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
    (fine, npu, crashing, hccl), counted = check_imports(names, 30)
    assert fine.state == "ok" and counted == {"cuda": 3}
    assert library in npu.found and "set_env.sh" in npu.remedy
    assert (crashing.state, crashing.found) == ("error", "ended by signal 11")
    assert "No module named 'hccl'" in hccl.found and "hccl wheel" in hccl.remedy
    (hanging,), _ = check_imports(["hanging"], 1)
    assert hanging.found == "failed: no answer within 1 s"
    assert not {"torch_npu", "crashing", "hanging"} & sys.modules.keys()


def test_packages_that_a_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an Ascend a torch_npu for the torch, and MindSpore's hccl."""
    (check,) = check_device_package({"torch": "2.7.1", "torch_npu": None}, "torch", "npu")
    assert check.state == "error" and "torch_npu==2.7.*" in check.remedy
    assert check_device_package({"mindspore": "2.10.0"}, "mindspore", "npu") == []
    assert check_device_package({"mindspore": "2.10.0"}, "mindspore", "cuda")[0].state == "error"
    monkeypatch.setattr(software, "installed_versions", lambda: NONE | {"mindspore": "2.10.0"})
    monkeypatch.setattr(software, "check_imports", lambda names, limit: (names, {}))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for npus, imported in (([0], ["mindspore", "hccl"]), ([], ["mindspore"])):
        monkeypatch.setattr(hccn, "npu_numbers", lambda root=None, npus=npus: npus)
        assert Facts(DoctorRequest(device="cpu")).imports[0] == imported


# ---- ranks of a trial that fail, as small programs without a framework: who is blamed, and the advice ----

ROOT = Path(__file__).resolve().parents[3]
SPEED = {"first": 0.5, "seconds": 0.01, "ready": 1.0, "bytes": 10**9}
# reports the stages of its first argument, and does its second
PROGRAM = f"""
import json, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.processes.heartbeat import beat, start_heartbeat
start_heartbeat()
for number, stage in enumerate(json.loads(sys.argv[1]), 1):
    print({MARK!r} + json.dumps({{"stage": stage, "facts": [{{"speed": {SPEED!r}}}] * 2}}))
    beat(number, stage)
exec(sys.argv[2])
"""
STAY = "time.sleep(60)"


def make_trial(*hosts: str) -> tuple[Placement, str, str]:
    of = enumerate(hosts)
    places = tuple(RankPlacement(rank=rank, device_id=rank + 4, local_rank=rank, host=host) for rank, host in of)
    everywhere = Placement(all=places, own_host=hosts[0], master=hosts[0])
    return everywhere, "gloo", "10.0.0.1:29500"


def trial(folder: Path, *ranks: tuple[str, str], limit: float = 30) -> Check:
    """Last check of a trial. Each rank: the last stage that it reports, and what it does then."""
    children = []
    for rank, (last, then) in enumerate(ranks):
        command = (sys.executable, "-c", PROGRAM, json.dumps(STAGES[1 : STAGES.index(last) + 1]), then)
        children.append(ProcessSpec(rank=rank, command=command, environment={"DEVICE_ID": str(rank + 4)}))
    job = Job(children=tuple(children), log_folder=folder, stall_limit=limit)
    return try_all_reduce(job, *make_trial(*["10.0.0.1"] * len(ranks)))[-1]


def test_all_reduced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """1 GB in 10 ms: each of two ranks sends 2 * (1 / 2) of it. Standard output is the report's."""
    check = trial(tmp_path, ("reduced", ""), ("reduced", ""))
    said = "2 ranks, gloo: the sum is right; 954 MiB in 10.0 ms (100.00 GB/s a rank), the first in 500 ms, group ready"
    assert (check.state, check.found) == ("ok", f"{said} after 1.0 s")
    out, error = capfd.readouterr()
    assert out == "" and "all ranks ended well" in error


ERROR = "fix the error in its log"


@pytest.mark.parametrize(
    ("ranks", "limit", "found", "remedy"),
    [
        ([("connected", STAY), ("started", "raise ImportError('no such library')")], 30,
            ["rank 1 (device 5) ended with exit code 1", "ImportError: no such library"], ERROR),
        ([("group made", "sys.exit(0)")], 30,
            ["rank 0 (device 4 of 10.0.0.1) ended too early, after 'group made'"], ERROR),
        ([("connected", STAY), ("imported", "os.kill(os.getpid(), 15)")], 30,
            ["rank 1 (device 5) was killed by signal 15 (SIGTERM"], ERROR),
        ([("connected", STAY), ("imported", f"def connecting(): {STAY}\nconnecting()")], 3,
            ["stalled for 3 s (--time_limit)", "rank 1 (device 5) has made no",
             "its last report was step 2, imported", "in connecting"],
            "every host can reach 10.0.0.1:29500, past firewalls; GLOO_SOCKET_IFNAME"),
    ],
)  # fmt: skip
def test_the_rank_at_fault_is_named_with_the_end_of_its_log(
    tmp_path: Path, ranks: list[tuple[str, str]], limit: float, found: list[str], remedy: str
) -> None:
    check = trial(tmp_path, *ranks, limit=limit)
    assert check.state == "error" and remedy in check.remedy
    assert [words for words in found if words not in check.found] == [], check.found


def test_a_wrong_sum_names_the_rank() -> None:
    wrong = {"stage": "wrong sum", "found": 2.0, "expected": 3.0}
    outcome = Outcome(code=1, report="error: ...")
    [check] = judge(outcome, {0: {"stage": "group made"}, 1: wrong}, *make_trial("a", "a"))
    assert (check.state, check.found) == ("error", "rank 1 (device 5 of a) got 2.0 instead of 3.0")


def test_hosts_compare_clocks_and_versions() -> None:
    here: dict[str, Any] = {"speed": SPEED, "time": 100.0, "torch": "2.13"}
    for ahead, *clock in (
        (0.25, "ok", "within 0.250 s of a's (the furthest: b)"),
        (-9.0, "warning", "b is 9.0 s behind a"),
    ):
        there = here | {"time": 100.0 + ahead, "torch": "2.12", "x": "1"}
        last = {0: {"stage": "reduced", "facts": [here, there]}}
        checks = judge(Outcome(code=0), last, *make_trial("a", "b"))
        assert [check.name for check in checks] == ["versions", "clock", "hosts", "all-reduce"]
        assert checks[0].found == "b has torch 2.12 (a: 2.13), x 1 (a: None)"
        assert [checks[1].state, checks[1].found] == clock
        assert checks[2].found == "all 2 have come"

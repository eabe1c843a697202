"""Machines that the tests do not have, as trees of files and stand-ins for the vendors' tools;
ports and names for real. The report of what was found.
"""

import json
import socket
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.cluster.hccn import npu_numbers
from common.doctor import machine
from common.doctor.machine import (
    check_devices,
    check_limits,
    check_memory,
    check_names,
    check_ports,
    check_storage,
    check_variables,
)
from common.doctor.report import State, as_json, as_table, error, exit_code, ok, warning

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


def ascend_root(root: Path, *numbers: int, driver: bool = True) -> Path:
    (root / "dev").mkdir(parents=True)
    for name in (*(f"davinci{number}" for number in numbers), "davinci_manager"):
        (root / "dev" / name).touch()
    if driver:
        (root / "usr/local/Ascend/driver").mkdir(parents=True)
        (root / "usr/local/Ascend/driver/version.info").write_text(DRIVER)
    return root


def test_ascend_devices_and_driver(tmp_path: Path, tools: Path) -> None:
    """Also a sick device, a driver that does not answer, and a container without devices."""
    root = ascend_root(tmp_path / "root", 0, 1, 10)
    put(tools, "npu-smi", NPU_SMI.format(state="OK   "))
    checks, count = check_devices(root)
    assert npu_numbers(root) == [0, 1, 10] and count == 3
    assert checks == [
        ok("Ascend driver", "25.0.rc1.1"),
        ok("devices", "3 Ascend devices: 0, 1, 10"),
    ]
    put(tools, "npu-smi", NPU_SMI.format(state="Alarm"))
    assert check_devices(root)[0][1].found == "3 Ascend devices: 0, 1, 10; NPU 1 is Alarm"
    put(tools, "npu-smi", "#!/bin/sh\necho 'dcmi failed. ret is -8005' >&2; exit 1\n")
    check = check_devices(root)[0][1]
    assert check.state is State.ERROR and "ret is -8005" in check.found
    assert check_devices(ascend_root(tmp_path / "half", 0, driver=False))[0][0].state is State.ERROR
    container = ascend_root(tmp_path / "container")
    for asked, state in (("auto", State.WARNING), ("npu", State.ERROR)):
        (check,), count = check_devices(container, asked=asked)
        assert (check.name, check.state, count) == ("devices", state, 0)


def test_gpus(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("CC", "nvidia-smi")  # a program on PATH
    (tmp_path / "Python.h").touch()
    lines = [f"{number}, NVIDIA H100 80GB HBM3, 81559 MiB, 550.90.07" for number in range(2)]
    put(tools, "nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    (check,), count = check_devices(tmp_path)
    assert (check.state, count) == (State.OK, 2)
    (tmp_path / "Python.h").unlink()
    (_, check), _ = check_devices(tmp_path)
    assert check.state is State.WARNING and f"no {tmp_path}/Python.h" in check.found
    assert "python3-dev" in str(check)
    put(tools, "nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    (check,), count = check_devices(tmp_path)
    assert (check.state, count) == (State.ERROR, 0) and "has failed" in check.found


def test_ports(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (check,) = check_ports(port, {}, first_host=True, npu=False, several_hosts=True)
        assert check.state is State.ERROR and str(port) in check.found
        (check,) = check_ports(port - 1, {}, first_host=True, npu=False, several_hosts=False)
        assert check.state is State.WARNING
        given: Any = {"first_host": False, "several_hosts": True}
        assert check_ports(port, {}, npu=False, **given) == []
        environ = {"HCCL_IF_BASE_PORT": str(min(port, 65520))}
        (check,) = check_ports(port, environ, npu=True, root=tmp_path, **given)
        assert check.state is State.ERROR
    (check,) = check_ports(port, {"HCCL_IF_BASE_PORT": "many"}, npu=True, **given)
    assert check.found == "HCCL_IF_BASE_PORT=many"


def test_ports_of_hccl_that_the_kernel_may_give_away(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "_can_listen", lambda port: True)
    settings = tmp_path / "proc/sys/net/ipv4"
    settings.mkdir(parents=True)
    (settings / "ip_local_port_range").write_text("32768\t60999\n")
    given: Any = {"first_host": False, "npu": True, "several_hosts": True, "root": tmp_path}
    for reserved, state in (
        ("\n", State.WARNING),
        ("60000-60007\n", State.WARNING),
        ("8080,60000-60015\n", State.OK),
    ):
        (settings / "ip_local_reserved_ports").write_text(reserved)
        (check,) = check_ports(29500, {}, **given)
        assert check.state is state, reserved


@pytest.mark.parametrize(
    ("addresses", "alone", "several"),
    [
        (["127.0.1.1"], State.OK, State.WARNING),
        (["10.0.0.5", "127.0.1.1"], State.OK, State.OK),
        ([], State.OK, State.WARNING),
        (None, State.WARNING, State.WARNING),
    ],
)
def test_the_name_of_this_host(addresses, alone, several, monkeypatch) -> None:
    monkeypatch.setattr(machine, "_resolve", lambda name: addresses)
    assert [check.state for check in check_names(None, several_hosts=False)] == [alone]
    assert [check.state for check in check_names(None, several_hosts=True)] == [several]


def test_whether_an_address_is_this_machines() -> None:
    """203.0.113.1 is reserved for documentation, TEST-NET-3 of RFC 5737."""
    here = check_names("127.0.0.1", several_hosts=True)[-1]
    assert here.found == "127.0.0.1 is held by interface lo"
    for several, state in ((True, State.ERROR), (False, State.WARNING)):
        assert check_names("203.0.113.1", several_hosts=several)[-1].state is state


def test_memory_and_limits_by_the_kernel_and_by_the_control_group(tmp_path, monkeypatch) -> None:
    kernel = SimpleNamespace(total=2**36, available=2**35)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: kernel)
    assert check_memory(tmp_path).found == "32.0 GiB available"
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert check_memory(tmp_path).state is State.OK
    (group / "memory.max").write_text(f"{8 * 2**30}\n")
    (group / "memory.current").write_text(f"{6 * 2**30}\n")
    check = check_memory(tmp_path)
    assert check.state is State.WARNING
    assert check.found == "2.0 GiB available (this container may hold 8.0 GiB)"
    (group / "pids.max").write_text("100\n")
    check = check_limits(tmp_path)
    assert check.state is State.WARNING
    assert "100 in this container" in check.found and "--pids-limit" in check.remedy


def test_storage_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    check = check_storage(tmp_path / "output" / "run")[0]
    assert str(tmp_path) in check.found and "output" not in check.found


def test_variables_that_make_a_shell_a_rank() -> None:
    assert check_variables({"PATH": "/bin"}) == []
    environ = {"RANK": "3", "NCCL_DEBUG": "INFO", "MASTER_PORT": "1", "SECRET": "x"}
    rank, tuning = check_variables(environ)
    assert rank.state is State.WARNING and rank.remedy.endswith("unset RANK")
    assert tuning.found == "MASTER_PORT=1, NCCL_DEBUG=INFO"


def test_the_report_as_people_and_as_programs_read_it() -> None:
    checks = [
        ok("torch", "2.13.0"),
        warning("disk", "3 GiB free", "make room"),
        error("all-reduce", "rank 1 died\nits log ends", ""),
    ]
    assert as_table(checks) == (
        "ok       torch       2.13.0\n"
        "warning  disk        3 GiB free\n"
        "                     -> make room\n"
        "error    all-reduce  rank 1 died\n"
        "                     its log ends\n"
        "1 ok, 1 warning, 1 error\n"
    )
    assert "\033[31merror" in as_table(checks, colour=True)
    read = json.loads(as_json(checks))
    one = {"name": "disk", "state": "warning", "found": "3 GiB free", "remedy": "make room"}
    assert read["checks"][1] == one
    states = [json.loads(as_json(checks[:count]))["state"] for count in range(4)]
    assert states == ["ok", "ok", "warning", "error"]
    assert [exit_code(checks[:count]) for count in range(4)] == [0, 0, 0, 2]

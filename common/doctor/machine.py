"""Checks of the machine: devices and drivers, ports, names and addresses, disk, memory, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from common.accelerators import GIB
from common.cluster import hccn
from common.device import missing_for_kernels, processor_name
from common.doctor.report import Check, error, ok, warning
from common.processes.addresses import interface_of, is_loopback
from common.processes.programs import last_line, run_program
from common.whole_numbers import shortened, whole_number

HCCL_PORTS = 16
_RESOLVE_SECONDS = 5.0
_QUERY_SECONDS = 20.0


def check_system() -> Check:
    return ok("system", f"{platform.platform()}, {processor_name()}, {os.cpu_count()} cores")


def check_devices(root: Path = Path("/"), *, asked: str = "auto") -> tuple[list[Check], int]:
    """Check drivers and devices of Ascend and NVIDIA, and return how many devices there are.

    Without any, the CPU computes. asked: auto, cpu, cuda or npu. Missing parts of an accelerator
    that was asked for are errors.
    """
    numbers = hccn.npu_numbers(root)
    version = _driver_version(root / "usr/local/Ascend/driver/version.info")
    checks = []
    if numbers:
        shown = ", ".join(map(str, numbers))
        if version is None:
            mounts = (
                "in a container: mount /usr/local/Ascend/driver and /usr/local/bin/npu-smi"
                " from the host"
            )
            checks.append(
                error("Ascend driver", f"devices {shown}, but no driver/version.info", mounts)
            )
        else:
            checks.append(ok("Ascend driver", version))
        code, output, errors = run_program(["npu-smi", "info"], _QUERY_SECONDS)
        if code == 0:
            health = re.findall(
                r"^\|\s*(\d+)\s+(?:Ascend)?910\S*\s*\|\s*(\w+)\s*\|", output, flags=re.M
            )
            sick = [f"NPU {number} is {state}" for number, state in health if state != "OK"]
            found = f"{len(numbers)} Ascend devices: {shown}"
            if sick:
                checks.append(
                    error(
                        "devices",
                        f"{found}; {', '.join(sick)}",
                        "npu-smi info -t health -i N tells why",
                    )
                )
            else:
                checks.append(ok("devices", found))
        else:
            why = last_line(errors) or f"exit code {code}"
            checks.append(
                error(
                    "devices",
                    f"devices {shown}, but `npu-smi info` fails: {why}",
                    "the driver does not answer; see dmesg",
                )
            )
    elif version is not None:
        found = f"Ascend driver {version}, but no /dev/davinciN"
        checks.append(
            (error if asked == "npu" else warning)(
                "devices", found, "in a container: pass --device=/dev/davinci0 ..."
            )
        )
    elif asked == "npu":
        remedy = (
            "install the driver and firmware of this Ascend, until `npu-smi info` lists it;"
            " in a container: mount it from the host"
        )
        checks.append(
            error("Ascend driver", f"no {root / 'usr/local/Ascend/driver/version.info'}", remedy)
        )
        checks.append(
            error(
                "devices",
                "no Ascend device: there is no /dev/davinciN",
                "check that this is the right machine, or give --device cpu",
            )
        )
    code, output, errors = run_program(
        [
            "nvidia-smi",
            "--query-gpu=index,name,memory.total,driver_version",
            "--format=csv,noheader",
        ],
        _QUERY_SECONDS,
    )
    gpus = len(output.strip().splitlines()) if code == 0 else 0
    if gpus:
        checks.append(ok("GPUs", output.strip()))
        if missing := missing_for_kernels():
            checks.append(
                warning(
                    "torch.compile",
                    f"no {missing}: kernels are not generated, and training is slower",
                    "install gcc and Python's headers (python3-dev)",
                )
            )
    elif shutil.which("nvidia-smi"):
        why = last_line(errors) or output.strip() or f"exit code {code}"
        checks.append(
            error(
                "GPUs",
                f"nvidia-smi fails: {why}",
                "the driver does not answer; reboot or reinstall it",
            )
        )
    elif asked == "cuda":
        remedy = (
            "install NVIDIA's driver; in a container: docker run --gpus all; without a GPU:"
            " --device cpu"
        )
        checks.append(error("GPUs", "no NVIDIA GPU: nvidia-smi is not on PATH", remedy))
    return checks or [ok("devices", "no Ascend device, no GPU")], len(numbers) + gpus


def check_ports(
    port: int,
    environ: Mapping[str, str],
    *,
    first_host: bool,
    npu: bool,
    several_hosts: bool,
    root: Path = Path("/"),
) -> list[Check]:
    """Check whether a run can listen on its ports.

    They are ``port``, its MASTER_PORT, and on host 0 the next one, and HCCL's.
    """
    checks = []
    if first_host:
        busy = [number for number in (port, port + 1) if not _can_listen(number)]
        if busy:
            shown = " and ".join(map(str, busy))
            remedy = (
                f"`ss -ltnp 'sport = :{busy[0]}'` shows which process; end it, or export"
                " MASTER_PORT=another on every host"
            )
            checks.append((error if several_hosts else warning)("ports", f"{shown} in use", remedy))
        else:
            checks.append(
                ok("ports", f"free: {port} and {port + 1} (MASTER_PORT and the one after it)")
            )
    if npu:
        text = environ.get("HCCL_IF_BASE_PORT") or "60000"
        base = whole_number(text)
        if base is None or not 1024 <= base <= 65520:
            return [
                *checks,
                error(
                    "HCCL ports",
                    f"HCCL_IF_BASE_PORT={shortened(text)}",
                    "give a number from 1024 to 65520",
                ),
            ]
        ports = range(base, base + HCCL_PORTS)
        busy = [port for port in ports if not _can_listen(port)]
        span = f"{ports[0]}-{ports[-1]}"
        if busy:
            remedy = (
                "check for another job: `ps -ef | grep python`; or export"
                " HCCL_IF_BASE_PORT=another on every host"
            )
            checks.append(
                error("HCCL ports", f"{', '.join(map(str, busy))} of {span} in use", remedy)
            )
        elif _may_be_given_away(ports, root):
            remedy = f"sysctl -w net.ipv4.ip_local_reserved_ports={span}"
            checks.append(
                warning(
                    "HCCL ports",
                    f"{span} free now, but the kernel may give them to other programs",
                    remedy,
                )
            )
        else:
            checks.append(ok("HCCL ports", f"free: {span}"))
    return checks


def check_names(server: str | None, *, several_hosts: bool) -> list[Check]:
    """Check what this host's own name resolves to, and whether ``server`` is one of its addresses.

    server: the host's address in the run.
    """
    name = socket.gethostname()
    addresses = _resolve(name)
    remedy = (
        f"put this host's address before {name} in /etc/hosts, or give hccl_tools.py --server_ip"
    )
    if addresses is None:
        checks = [
            warning(
                "host name",
                f"{name}: no answer from the name service within {_RESOLVE_SECONDS:g} s",
                remedy,
            )
        ]
    elif not addresses:
        found = f"{name} does not resolve"
        checks = [warning("host name", found, remedy) if several_hosts else ok("host name", found)]
    elif all(is_loopback(address) for address in addresses):
        found = f"{name} is {', '.join(addresses)}, which leads each host to itself"
        checks = [warning("host name", found, remedy) if several_hosts else ok("host name", found)]
    else:
        checks = [ok("host name", f"{name} is {', '.join(addresses)}")]
    if server is not None:
        interface = interface_of(server)
        if interface is None:
            remedy = (
                "start the doctor on that host, give this host's --node_rank, or"
                " make the table again"
            )
            checks.append(
                (error if several_hosts else warning)(
                    "address", f"{server} is not an address of this machine", remedy
                )
            )
        else:
            checks.append(ok("address", f"{server} is held by interface {interface}"))
    return checks


def check_variables(environ: Mapping[str, str]) -> list[Check]:
    """Report variables of this shell that affect a run: those of a rank, and those of the
    network.
    """
    rank = [
        name
        for name in ("RANK", "WORLD_SIZE", "RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "MS_ROLE")
        if environ.get(name)
    ]
    tuning = sorted(
        name
        for name in environ
        if re.match(r"(HCCL|NCCL|GLOO)_|(CUDA|ASCEND_RT)_VISIBLE_DEVICES$|MASTER_|OMP_NUM_", name)
    )
    checks = []
    if rank:
        found = ", ".join(f"{name}={environ[name]}" for name in rank)
        remedy = (
            "a run_gpt2.py started here would run as a rank; outside of a job: unset"
            f" {' '.join(rank)}"
        )
        checks.append(warning("variables", found, remedy))
    if tuning:
        checks.append(ok("variables", ", ".join(f"{name}={environ[name]}" for name in tuning)))
    return checks


def check_storage(folder: Path) -> list[Check]:
    """Check free space where the run writes, and in /dev/shm, which connects processes of one
    host.
    """
    existing = next(
        place for place in [folder.absolute(), *folder.absolute().parents] if place.exists()
    )
    free = shutil.disk_usage(existing).free / GIB
    found = f"{free:.1f} GiB free at {existing}"
    if not existing.is_dir():
        checks = [
            error(
                "disk",
                f"{existing} is a file, so no folder can be made there",
                "choose another output_dir",
            )
        ]
    elif not os.access(existing, os.W_OK):
        checks = [
            error(
                "disk",
                f"{existing} cannot be written",
                "choose another output_dir, or fix its permissions",
            )
        ]
    elif free < 1:
        checks = [error("disk", found, "free space, or choose another output_dir")]
    elif free < 20:
        checks = [
            warning(
                "disk",
                found,
                "a checkpoint with optimizer takes about 14 bytes per parameter: 2 GiB for gpt2,"
                " 170"
                " GiB for 13B",
            )
        ]
    else:
        checks = [ok("disk", found)]
    shared = Path("/dev/shm")  # noqa: S108
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / GIB
        small = warning(
            "shared memory",
            f"{shared} has {size:.2g} GiB",
            "in a container: docker run --shm-size=16g, or --ipc=host",
        )
        checks.append(ok("shared memory", f"{shared} has {size:.2g} GiB") if size >= 1 else small)
    return checks


def check_memory(root: Path = Path("/")) -> Check:
    """Check the free memory, by the kernel and by the control group."""
    left = int(psutil.virtual_memory().available)
    limit, used = (
        _number(root / f"sys/fs/cgroup/memory.{name}", r"^(\d+)$") for name in ("max", "current")
    )
    if limit:
        left = min(left, limit - used)
    found = f"{left / GIB:.1f} GiB available" + (
        f" (this container may hold {limit / GIB:.1f} GiB)" if limit else ""
    )
    if left < 4 * GIB:
        return warning(
            "memory", found, "end other programs; a framework by itself takes about 1 GiB per rank"
        )
    return ok("memory", found)


def check_limits(root: Path = Path("/")) -> Check:
    """Check how many open files and processes this user (ulimit -n, -u) and the control group
    allow.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group = _number(root / "sys/fs/cgroup/pids.max", r"^(\d+)$")
    shown = [f"{_limit(files)} open files", f"{_limit(processes)} processes"] + (
        [f"{group} in this container"] if group else []
    )
    low = []
    if 0 <= files < 4096:
        low.append("ulimit -n 65535")
    if 0 <= processes < 4096:
        low.append("ulimit -u 65535")
    if group and group < 4096:
        low.append("docker run --pids-limit=-1")
    found = ", ".join(shown)
    return (
        warning("limits", found, "; ".join(low) + " (threads count as processes)")
        if low
        else ok("limits", found)
    )


def _resolve(name: str) -> Sequence[str] | None:
    """Return the addresses of a name; None if the name service hangs."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            found.extend(
                dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None))
            )

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    return None if thread.is_alive() else found


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def _may_be_given_away(ports: Iterable[int], root: Path) -> bool:
    """Tell whether the kernel may use one of ``ports`` for an outgoing connection."""
    settings = root / "proc/sys/net/ipv4"
    try:
        low, high = map(int, (settings / "ip_local_port_range").read_text(encoding="utf-8").split())
        words = [
            word
            for word in (settings / "ip_local_reserved_ports")
            .read_text(encoding="utf-8")
            .strip()
            .split(",")
            if word
        ]
    except (OSError, ValueError):
        return False
    spans = [[int(end) for end in word.split("-")] for word in words]
    return any(
        low <= port <= high and not any(span[0] <= port <= span[-1] for span in spans)
        for port in ports
    )


def _driver_version(path: Path) -> str | None:
    """Return package_version, else Version, of the driver's version.info."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^package_version=(\S+)", text, flags=re.M) or re.search(
        r"^Version=(\S+)", text, flags=re.M
    )
    return match[1] if match else None


def _number(path: Path, pattern: str) -> int:
    """Return the number that ``pattern`` finds in a file; 0 without one."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8"), flags=re.M)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)

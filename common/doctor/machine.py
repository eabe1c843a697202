"""Checks of the machine: devices and drivers, ports, names and addresses, disk, memory, limits."""

from __future__ import annotations

import os
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
from common.device import missing_for_kernels
from common.doctor.report import Check, error, ok, warning
from common.processes.addresses import interface_of, is_loopback
from common.processes.process_tree import last_line, run_program
from common.whole_numbers import whole_number

HCCL_PORTS = 16
_RESOLVE_SECONDS = 5.0
_QUERY_SECONDS = 20.0
_VERSION_INFO = "usr/local/Ascend/driver/version.info"
_NVIDIA_QUERY = ("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")


def check_devices(root: Path = Path("/"), *, asked: str = "auto") -> tuple[list[Check], int]:
    """Check drivers and devices of Ascend and NVIDIA, and return how many devices there are.

    Without any, the CPU computes. asked: auto, cpu, cuda or npu. Missing parts of an accelerator
    that was asked for are errors.
    """
    numbers = hccn.npu_numbers(root)
    gpus, of_gpus = _check_gpus(asked)
    checks = [*_check_ascend(root, numbers, asked), *of_gpus]
    return checks or [ok("devices", "no Ascend device, no GPU")], len(numbers) + gpus


def _check_ascend(root: Path, numbers: Sequence[int], asked: str) -> list[Check]:
    # package_version is the driver's, and Version of older ones
    version = _found(root / _VERSION_INFO, r"^package_version=(\S+)") or _found(root / _VERSION_INFO, r"^Version=(\S+)")
    if not numbers and version:
        state = error if asked == "npu" else warning
        found = f"Ascend driver {version}, but no /dev/davinciN"
        return [state("devices", found, "in a container: pass --device=/dev/davinci0 ...")]
    if not numbers:
        remedy = (
            "install the driver and firmware of this Ascend, until `npu-smi info` lists it;"
            " in a container: mount it from the host"
        )
        missing = "no Ascend device: there is no /dev/davinciN"
        machine = "check that this is the right machine, or give --device cpu"
        return [error("Ascend driver", f"no {root / _VERSION_INFO}", remedy), error("devices", missing, machine)] * (
            asked == "npu"
        )
    shown = ", ".join(map(str, numbers))
    mounts = "in a container: mount /usr/local/Ascend/driver and /usr/local/bin/npu-smi"
    lacking = f"devices {shown}, but no driver/version.info"
    driver = ok("Ascend driver", version) if version else error("Ascend driver", lacking, f"{mounts} from the host")
    code, output, errors = run_program(["npu-smi", "info"], _QUERY_SECONDS)
    if code != 0:
        why = last_line(errors) or f"exit code {code}"
        found = f"devices {shown}, but `npu-smi info` fails: {why}"
        return [driver, error("devices", found, "the driver does not answer; see dmesg")]
    health = re.findall(r"^\|\s*(\d+)\s+(?:Ascend)?910\S*\s*\|\s*(\w+)\s*\|", output, flags=re.M)
    sick = [f"NPU {number} is {state}" for number, state in health if state != "OK"]
    found = f"{len(numbers)} Ascend devices: {shown}"
    if not sick:
        return [driver, ok("devices", found)]
    remedy = "npu-smi info -t health -i N tells why"
    return [driver, error("devices", f"{found}; {', '.join(sick)}", remedy)]


def _check_gpus(asked: str) -> tuple[int, list[Check]]:
    code, output, errors = run_program(["nvidia-smi", *_NVIDIA_QUERY], _QUERY_SECONDS)
    gpus = output.strip().splitlines() if code == 0 else []
    if gpus:
        checks = [ok("GPUs", output.strip())]
        if missing := missing_for_kernels():
            found = f"no {missing}: kernels are not generated, and training is slower"
            remedy = "install gcc and Python's headers (python3-dev)"
            checks.append(warning("torch.compile", found, remedy))
        return len(gpus), checks
    if shutil.which("nvidia-smi"):
        why = last_line(errors) or output.strip() or f"exit code {code}"
        remedy = "the driver does not answer; reboot or reinstall it"
        return 0, [error("GPUs", f"nvidia-smi fails: {why}", remedy)]
    remedy = "install NVIDIA's driver; in a container: docker run --gpus all; without a GPU: --device cpu"
    found = "no NVIDIA GPU: nvidia-smi is not on PATH"
    return 0, [error("GPUs", found, remedy)] if asked == "cuda" else []


def check_ports(
    port: int, environ: Mapping[str, str], *, first_host: bool, npu: bool, several_hosts: bool, root: Path = Path("/")
) -> list[Check]:
    """Check whether a run can listen on its ports.

    They are ``port``, its MASTER_PORT, and on host 0 the next one, and HCCL's.
    """
    checks = []
    busy = [number for number in (port, port + 1) if first_host and not _can_listen(number)]
    if busy:
        remedy = (
            f"`ss -ltnp 'sport = :{busy[0]}'` shows which process; end it, or export MASTER_PORT=another on every host"
        )
        state = error if several_hosts else warning
        checks.append(state("ports", f"{' and '.join(map(str, busy))} in use", remedy))
    elif first_host:
        found = f"free: {port} and {port + 1} (MASTER_PORT and the one after it)"
        checks.append(ok("ports", found))
    return [*checks, _check_hccl_ports(environ, root)] if npu else checks


def _check_hccl_ports(environ: Mapping[str, str], root: Path) -> Check:
    name, text = "HCCL ports", environ.get("HCCL_IF_BASE_PORT") or "60000"
    base = whole_number(text)
    if base is None or not 1024 <= base <= 65520:
        found = f"HCCL_IF_BASE_PORT={text:.40}"
        return error(name, found, "give a number from 1024 to 65520")
    ports = range(base, base + HCCL_PORTS)
    busy = [port for port in ports if not _can_listen(port)]
    span = f"{ports[0]}-{ports[-1]}"
    if busy:
        remedy = "check for another job: `ps -ef | grep python`; or export HCCL_IF_BASE_PORT=another on every host"
        return error(name, f"{', '.join(map(str, busy))} of {span} in use", remedy)
    if _may_be_given_away(ports, root):
        found = f"{span} free now, but the kernel may give them to other programs"
        return warning(name, found, f"sysctl -w net.ipv4.ip_local_reserved_ports={span}")
    return ok(name, f"free: {span}")


def check_names(server: str | None, *, several_hosts: bool) -> list[Check]:
    """Check what this host's own name resolves to, and whether ``server`` is one of its addresses.

    server: the host's address in the run.
    """
    name = socket.gethostname()
    addresses = _resolve(name)
    matters = several_hosts
    if addresses is None:
        matters = True
        found = f"{name}: no answer from the name service within {_RESOLVE_SECONDS:g} s"
    elif not addresses:
        found = f"{name} does not resolve"
    else:
        found = f"{name} is {', '.join(addresses)}"
        if all(map(is_loopback, addresses)):
            found += ", which leads each host to itself"
        else:
            matters = False
    remedy = f"put this host's address before {name} in /etc/hosts, or give hccl_tools.py"
    checks = [warning("host name", found, f"{remedy} --server_ip") if matters else ok("host name", found)]
    if server is not None and (interface := interface_of(server)) is None:
        remedy = "start the doctor on that host, give this host's --node_rank, or make the table"
        state = error if several_hosts else warning
        found = f"{server} is not an address of this machine"
        checks.append(state("address", found, f"{remedy} again"))
    elif server is not None:
        checks.append(ok("address", f"{server} is held by interface {interface}"))
    return checks


def check_variables(environ: Mapping[str, str]) -> list[Check]:
    """Report variables of this shell that affect a run: those of a rank, and those of the network."""
    names = ("RANK", "WORLD_SIZE", "RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "MS_ROLE")
    rank = [name for name in names if environ.get(name)]
    pattern = r"(HCCL|NCCL|GLOO)_|(CUDA|ASCEND_RT)_VISIBLE_DEVICES$|MASTER_|OMP_NUM_"
    tuning = sorted(name for name in environ if re.match(pattern, name))
    shown = [", ".join(f"{name}={environ[name]}" for name in group) for group in (rank, tuning)]
    checks = []
    if rank:
        remedy = "a run_gpt2.py started here would run as a rank; outside of a job: unset"
        checks.append(warning("variables", shown[0], f"{remedy} {' '.join(rank)}"))
    return checks + [ok("variables", shown[1])] * bool(tuning)


def check_storage(folder: Path) -> list[Check]:
    """Check free space where the run writes, and in /dev/shm, which connects processes of one host."""
    existing = next(place for place in [folder.absolute(), *folder.absolute().parents] if place.exists())
    free = shutil.disk_usage(existing).free / GIB
    found = f"{free:.1f} GiB free at {existing}"
    other = "choose another output_dir"
    if not existing.is_dir():
        disk = error("disk", f"{existing} is a file, so no folder can be made there", other)
    elif not os.access(existing, os.W_OK):
        disk = error("disk", f"{existing} cannot be written", f"{other}, or fix its permissions")
    elif free < 1:
        disk = error("disk", found, f"free space, or {other}")
    elif free < 20:
        needed = "a checkpoint with optimizer takes about 14 bytes per parameter: 2 GiB for gpt2,"
        disk = warning("disk", found, f"{needed} 170 GiB for 13B")
    else:
        disk = ok("disk", found)
    shared = Path("/dev/shm")  # noqa: S108
    if not shared.is_dir():
        return [disk]
    size = shutil.disk_usage(shared).total / GIB
    found = f"{shared} has {size:.2g} GiB"
    remedy = "in a container: docker run --shm-size=16g, or --ipc=host"
    return [disk, ok("shared memory", found) if size >= 1 else warning("shared memory", found, remedy)]


def check_memory(root: Path = Path("/")) -> Check:
    """Check the free memory, by the kernel and by the control group."""
    left = int(psutil.virtual_memory().available)
    limit, used = (int(_found(root / f"sys/fs/cgroup/memory.{name}", r"^(\d+)$") or 0) for name in ("max", "current"))
    found = ""
    if limit:
        left = min(left, limit - used)
        found = f" (this container may hold {limit / GIB:.1f} GiB)"
    found = f"{left / GIB:.1f} GiB available{found}"
    remedy = "end other programs; a framework by itself takes about 1 GiB per rank"
    return warning("memory", found, remedy) if left < 4 * GIB else ok("memory", found)


def check_limits(root: Path = Path("/")) -> Check:
    """Check how many open files and processes this user (ulimit -n, -u) and the control group allow."""
    group = int(_found(root / "sys/fs/cgroup/pids.max", r"^(\d+)$") or -1)
    limits = (
        (resource.getrlimit(resource.RLIMIT_NOFILE)[0], "open files", "ulimit -n 65535"),
        (resource.getrlimit(resource.RLIMIT_NPROC)[0], "processes", "ulimit -u 65535"),
        (group, "in this container", "docker run --pids-limit=-1"),
    )
    shown = [
        f"{'unlimited' if number == resource.RLIM_INFINITY else number} {what}"
        for number, what, _ in limits[: 2 if group < 0 else 3]
    ]
    low = [remedy for number, _, remedy in limits if 0 <= number < 4096]
    found, more = ", ".join(shown), " (threads count as processes)"
    return warning("limits", found, "; ".join(low) + more) if low else ok("limits", found)


def _resolve(name: str) -> Sequence[str] | None:
    """Return the addresses of a name; None if the name service hangs."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    return None if thread.is_alive() else found


def _can_listen(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _may_be_given_away(ports: Iterable[int], root: Path) -> bool:
    """Tell whether the kernel may use one of ``ports`` for an outgoing connection."""
    settings = root / "proc/sys/net/ipv4"
    span = _found(settings / "ip_local_port_range", r"^(\d+\s+\d+)$").split()
    if not span:
        return False
    low, high = map(int, span)
    reserved = _found(settings / "ip_local_reserved_ports", r"^([\d,-]+)$")
    spans = [[int(end) for end in word.split("-")] for word in reserved.split(",") if word]
    return any(low <= port <= high and not any(span[0] <= port <= span[-1] for span in spans) for port in ports)


def _found(path: Path, pattern: str) -> str:
    """Return what ``pattern`` finds in a file; "" without one."""
    try:
        match = re.search(pattern, path.read_text("utf-8", "replace"), flags=re.M)
    except OSError:
        return ""
    return match[1] if match else ""

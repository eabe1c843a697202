"""Around a run on ModelArts, or any with files elsewhere: input copied here, output copied back, ranks started where nobody else did."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from common.cluster.environment import Process, in_modelarts
from common.cluster.places import HERE, Place, Places, places_of_table
from common.cluster.rank_environment import FOREIGN, find_meeting, interface_of, is_own
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table, wait_for_table, write_table
from common.config.schema import RunConfig
from common.errors import ConfigError, DataError, StopRequested, StorageError
from common.modelarts import remote

_DATA_KEYS = ("data.train", "data.validation")


def bring_input(overrides: Sequence[str], output_url: str | None, environ: Mapping[str, str]) -> list[str]:
    """section.key=value words with folders and files of this host in place of URLs; what was not here is copied, once per host.

    A folder of data becomes the one .bin/.idx pair in it. Raises DataError, StorageError.
    """
    found = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if remote.is_url(value):
            value = str(remote.pull_once(value, local_folder(value, environ), environ))
        if key in _DATA_KEYS and value and Path(value).is_dir():
            value = corpus_in(Path(value))
        found.append(f"{key}{equals}{value}")
    if output_url is not None:
        folder = next((Path(word.partition("=")[2]) for word in reversed(found) if word.startswith("output_dir=")), None)
        if folder is None:
            folder = local_folder(output_url, environ).with_name("output")
            found.append(f"output_dir={folder}")
        if not folder.exists() and remote.exists(output_url, environ):  # a job that starts again goes on
            remote.pull_once(output_url, folder, environ)
    return found


def corpus_in(folder: Path) -> str:
    """The prefix of the one .bin/.idx pair below a folder; the folder where there is none, as of a MindRecord. Raises DataError."""
    prefixes = sorted(path.with_suffix("") for path in folder.rglob("*.idx") if path.with_suffix(".bin").is_file())
    if len(prefixes) > 1:
        shown = ", ".join(str(prefix.relative_to(folder)) for prefix in prefixes[:5])
        raise DataError(f"{folder} holds {len(prefixes)} corpora ({shown}); give one as data.train=FOLDER/NAME, or a folder with one")
    return str(prefixes[0] if prefixes else folder)


def local_folder(url: str, environ: Mapping[str, str]) -> Path:
    """Where a URL's copy lies on this host, for one job: on ModelArts' large disk /cache, else in the folder for temporary files."""
    cache = Path("/cache")
    base = cache if in_modelarts(environ) and os.access(cache, os.W_OK) else Path(environ.get("TMPDIR") or tempfile.gettempdir())
    job = environ.get("MA_VJ_NAME") or environ.get("JOB_ID") or ""
    name = hashlib.sha256(f"{job}\n{url}".encode()).hexdigest()[:16]
    return base / f"gpt2_files_{os.getuid()}" / name / (remote.base_name(url) or "files")


@contextmanager
def output_copied(url: str | None, output_dir: Path, process: Process, environ: Mapping[str, str]) -> Iterator[None]:
    """Copy ``output_dir`` to ``url`` when the block ends, however it ends; of each host its first rank does it.

    Raises StorageError when that fails. An error of the block itself goes first: the failed copy is then told on standard error.
    """
    if url is None or process.local_rank != 0:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(number, f"stopped by signal {number}")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the copy is what the time that is left is for
    except BaseException:
        try:
            remote.push(output_dir, url, environ)
        except (StorageError, ConfigError) as error:
            sys.stderr.write(f"error: {error}\n")
        raise
    else:
        remote.push(output_dir, url, environ)
    finally:
        signal.signal(signal.SIGTERM, previous)


def platform_variables(process: Process, environ: Mapping[str, str]) -> dict[str, str]:
    """What frameworks read themselves and the platform leaves out or writes in another form, where it started one process per card."""
    if not in_modelarts(environ) or process.launcher != "rank table":
        return {}
    found = {"HCCL_CONNECT_TIMEOUT": "1800", "RANK_SIZE": str(process.world_size)}
    if process.device_id is not None:
        found["DEVICE_ID"] = str(process.device_id)
    alone = process.world_size == process.local_world_size
    interface = "lo" if alone else interface_of(environ.get("MA_CURRENT_IP", ""))
    if interface:
        found["GLOO_SOCKET_IFNAME"] = interface
    found = {name: environ.get(name) or value for name, value in found.items()}
    if environ.get("RANK_TABLE_FILE"):
        path = Path(environ["RANK_TABLE_FILE"])
        found["RANK_TABLE_FILE"] = str(_as_version_1(path, read_table(path), environ))
    return found


def must_start_ranks(environ: Mapping[str, str]) -> bool:
    """Whether ModelArts started one process on a host of several devices, or on one of several hosts, and gave it no rank."""
    if not in_modelarts(environ) or any(environ.get(name) for name in ("RANK", "RANK_ID", "MS_ROLE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        return False
    return _device_count(environ) > 1 or len(_host_names(environ)) > 1


def start_ranks(command: tuple[str, ...], config: RunConfig, environ: Mapping[str, str]) -> int:
    """Start ``command`` for each device of this host and wait for all; their common exit code.

    Raises ConfigError and DataError where the platform's variables contradict each other.
    """
    from common.launcher.children import make_children
    from common.launcher.control import Host, Hosts
    from common.launcher.supervisor import Job, supervise

    table_file, places = find_places(environ)
    meeting = find_meeting(places, port=None, table=table_file, backend=config.backend, environ=environ)
    for name in FOREIGN:
        os.environ.pop(name, None)
    hosts = None
    if len(places.hosts) > 1:
        everyone = tuple(
            Host(address=_address(host, index, environ), ranks=tuple(place.rank for place in places.of_host(host)))
            for index, host in enumerate(places.hosts)
        )
        hosts = Hosts(all=everyone, own=places.hosts.index(places.own_host), port=meeting.port + 1)
    job = Job(
        children=make_children(places, meeting, command, environ=environ),
        log_folder=Path(config.output_dir),
        stall_limit=config.runtime.stall_limit,
        follow=True,
        hosts=hosts,
    )
    return supervise(job)


def world_size_of_job(environ: Mapping[str, str]) -> int:
    """Ranks that ``start_ranks`` starts, on all hosts together."""
    return find_places(environ)[1].world_size


def find_places(environ: Mapping[str, str]) -> tuple[Path | None, Places]:
    """From the platform's rank table where it gives one, else the same devices on each of VC_WORKER_HOSTS."""
    names, index = _host_names(environ), _number(environ, "VC_TASK_INDEX", 0)
    if environ.get("RANK_TABLE_FILE"):
        path = Path(environ["RANK_TABLE_FILE"])
        table = wait_for_table(path, float(_number(environ, "HCCL_CONNECT_TIMEOUT", 1800)))
        if table.version != "2.0":
            path, places = _as_version_1(path, table, environ), places_of_table(table)
            hosts = list(dict.fromkeys(place.host for place in places))
            own = environ.get("MA_CURRENT_IP", "")
            if own not in hosts:
                own = next((host for host in hosts if is_own(host)), hosts[index] if index < len(hosts) else "")
            if not own:
                raise ConfigError(
                    f"environment: neither MA_CURRENT_IP={environ.get('MA_CURRENT_IP', '')} nor VC_TASK_INDEX={index} says which server of"
                    f" RANK_TABLE_FILE={environ['RANK_TABLE_FILE']} this is: it holds {', '.join(hosts)}"
                )
            return path, Places(all=places, own_host=own, master=(names if len(names) > 1 else hosts)[0] if len(hosts) > 1 else HERE)
    if index >= len(names):
        raise ConfigError(f"environment: VC_TASK_INDEX={index}, but VC_WORKER_HOSTS names {len(names)}: {', '.join(names)}")
    devices = _device_count(environ)
    everyone = tuple(
        Place(rank=node * devices + device, device_id=device, local_rank=device, host=host)
        for node, host in enumerate(names)
        for device in range(devices)
    )
    return None, Places(all=everyone, own_host=names[index], master=names[0])


def _host_names(environ: Mapping[str, str]) -> list[str]:
    """VC_WORKER_HOSTS in order, checked against MA_NUM_HOSTS; this host alone where there is one."""
    names = [name.strip() for name in environ.get("VC_WORKER_HOSTS", "").split(",") if name.strip()]
    count = _number(environ, "MA_NUM_HOSTS", _number(environ, "VC_WORKER_NUM", len(names) or 1))
    if count <= 1 and len(names) <= 1:
        return [HERE]
    if len(names) != count:
        raise ConfigError(f"environment: MA_NUM_HOSTS={count}, but VC_WORKER_HOSTS={environ.get('VC_WORKER_HOSTS', '')} names {len(names)}")
    return names


def _device_count(environ: Mapping[str, str]) -> int:
    """Accelerators of this host: MA_NUM_GPUS, which counts Ascends too, else the driver's device files."""
    return _number(environ, "MA_NUM_GPUS", 0) or len(list(Path("/dev").glob("davinci[0-9]*"))) or 1


def _address(host: str, index: int, environ: Mapping[str, str]) -> str:
    """Names of VC_WORKER_HOSTS resolve inside the job; the server ids of a table may be another network's."""
    names = [name.strip() for name in environ.get("VC_WORKER_HOSTS", "").split(",") if name.strip()]
    return names[index] if index < len(names) and host not in names else host


def _as_version_1(path: Path, table: RankTable, environ: Mapping[str, str]) -> Path:
    """MindSpore reads 1.0; ModelArts may write version 0."""
    if table.version != "0":
        return path.absolute()
    written = local_folder(f"rank table {path.absolute()}", environ).with_name("hccl_1.0.json")
    write_table(table, written)
    return written


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name) or str(otherwise)
    if not text.isdecimal():
        raise ConfigError(f"environment: {name}={text}: expected a number")
    return int(text)

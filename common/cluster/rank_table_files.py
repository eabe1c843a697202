"""Rank tables as files: reading (and waiting for) every version, writing and merging 1.0 and
1.2.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.cluster.rank_table import RankTable, SuperPodTable, table_warnings, validate
from common.cluster.rank_table_formats import NotReadyError, parse_table
from common.errors import DataError
from common.files import atomic_write, reading
from common.structured_files import MAX_JSON_BYTES, MalformedError, parse_json, read_text

_POLL_SECONDS = 1.0
_SAID_EACH = 30.0


def read_table(path: Path) -> RankTable:
    """Read and validate a table. Raises DataError that names the file and the place in it."""
    table = parse_table(_load(path), str(path))
    validate(table, str(path))
    return table


def wait_for_table(
    path: Path, limit_seconds: float, on_wait: Callable[[str, float], None] | None = None
) -> RankTable:
    """Read a table that a platform fills, looking again each second until it is complete.

    It may be absent, half written or 'initializing' meanwhile. on_wait: called each half minute
    with the reason and the seconds waited. Raises DataError with the last reason after
    ``limit_seconds``, and at once for a table that is complete and wrong.
    """
    started = said = time.monotonic()
    deadline = started + limit_seconds
    while True:
        try:
            return read_table(path)
        except NotReadyError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DataError(f"{error} (waited {limit_seconds:g} s)") from None
            now = time.monotonic()
            if on_wait is not None and now - said >= _SAID_EACH:
                said = now
                on_wait(str(error), now - started)
        time.sleep(min(_POLL_SECONDS, left))


def to_json(table: RankTable) -> dict[str, Any]:
    """Return the table as version 1.0 (also for version 0) or 1.2, with every value as a string.

    Raises DataError for version 2.0.
    """
    version = _written_version(table)
    return table.model_dump(exclude_unset=True) | {"version": version, "status": "completed"}


def write_table(table: RankTable, path: Path) -> None:
    """Write ``to_json`` with an indent of 4 and no final line end, as Huawei's own tool does.

    Raises DataError, StorageError.
    """
    text = json.dumps(to_json(table), indent=4)
    with atomic_write(path, "w") as file:
        file.write(text)


def merge_tables(paths: Sequence[Path]) -> RankTable:
    """Merge all servers of all files into one table, with ranks counted across files in the given
    order.

    Raises DataError for a server or an address in two files, for versions that differ, and for
    servers with different numbers of devices.
    """
    tables = [(path, read_table(path)) for path in paths]
    owners: dict[str, Path] = {}
    for path, table in tables:
        for server, device in table.places():
            for name in (f"server {server.server_id}", f"device_ip {device.device_ip}"):
                other = owners.setdefault(name, path)
                if other is not path and name != "device_ip None":
                    raise DataError(
                        f"{name} is in {other} and in {path}; name each server once, with"
                        " addresses of its own, and leave the output of an earlier merge out"
                    )
    versions = {path: _written_version(table, f"{path}: ") for path, table in tables}
    if len(set(versions.values())) > 1:
        shown = ", ".join(f"{path} has {version}" for path, version in versions.items())
        raise DataError(
            f"the tables are of different versions ({shown}); make them again in one version"
        )
    base, servers = 0, []
    pods: dict[str, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    for _, table in tables:
        for server in table.server_list:
            servers.append(server.model_dump(exclude_unset=True))
            for device in servers[-1]["device"]:
                device["rank_id"] = base + int(device["rank_id"])
        for pod in table.super_pod_list if isinstance(table, SuperPodTable) else ():
            entry = pod.model_dump()
            members = pods.setdefault(pod.super_pod_id, entry)["server_list"]
            members += entry["server_list"] if members is not entry["server_list"] else []
        base += table.world_size
        extra |= table.model_extra or {}
    version = versions[paths[0]]
    known = {
        "version": version,
        "server_count": len(servers),
        "server_list": servers,
        "status": "completed",
    }
    known |= {"super_pod_list": list(pods.values())} if version == "1.2" else {}
    result = (SuperPodTable if version == "1.2" else RankTable).read(
        {**extra, **known}, "the merged table"
    )
    validate(result, "the merged table")
    uneven = [text for text in table_warnings(result) if "different numbers" in text]
    if uneven:
        raise DataError(f"the merged table: {uneven[0]}; make those tables again")
    return result


def _written_version(table: RankTable, where: str = "") -> str:
    if table.version == "2.0":
        raise DataError(
            f"{where}a rank table of version 2.0 names no servers and cannot be written as 1.0 or"
            " 1.2; use the file as it is, or start with msrun"
        )
    return "1.0" if table.version == "0" else table.version


_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
"""Line such as ``# 4机32卡``, with which tables in MindFormers' documents begin.

No JSON string contains a line end, so values stay intact.
"""


def _load(path: Path) -> Any:
    with reading(path, DataError):
        if not path.exists() and not path.is_symlink():
            raise NotReadyError(f"{path}: no such file; make a rank table with tools/hccl_tools.py")
    text = read_text(path, limit=MAX_JSON_BYTES, error=DataError)
    try:
        return parse_json(_COMMENT.sub("", text))
    except MalformedError as error:
        if error.line:  # perhaps half written
            raise NotReadyError(
                f"{path}, line {error.line}, column {error.column}: not valid JSON:"
                f" {error.problem}; make"
                " the table again"
            ) from None
        raise DataError(f"{path}: {error}; make the table again") from None

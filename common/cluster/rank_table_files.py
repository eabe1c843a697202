"""Rank tables as files: reading every version, writing and merging 1.0 and 1.2.

Formats: Huawei's HCCL user guide, and for version 0 (group_list) the ModelArts training guide.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from common.cluster.rank_table import (
    MaybeNumber,
    MaybeText,
    Number,
    RankTable,
    Record,
    SuperPodTable,
    Text,
    check_count,
    validate,
)
from common.errors import DataError
from common.files import atomic_write, reading
from common.log import LOG
from common.structured_files import MAX_JSON_BYTES, MalformedError, parse_json, read_text

_POLL_SECONDS = 1.0
_SAID_EACH = 30.0


class NotReadyError(DataError):
    """The platform has not filled the file yet."""


def read_table(path: Path) -> RankTable:
    """Read and validate a table. Raises DataError that names the file and the place in it."""
    table = parse_table(_load(path), str(path))
    validate(table, str(path))
    return table


def wait_for_table(path: Path, limit_seconds: float) -> RankTable:
    """Read a table that a platform fills, looking again each second until it is complete.

    It may be absent, half written or 'initializing' meanwhile, which is logged each half minute. Raises DataError with
    the last reason after ``limit_seconds``, and at once for a table that is complete and wrong.
    """
    started = said = time.monotonic()
    while True:
        try:
            return read_table(path)
        except NotReadyError as error:
            now = time.monotonic()
            left = started + limit_seconds - now
            if left <= 0:
                raise DataError(f"{error} (waited {limit_seconds:g} s)") from None
            if now - said >= _SAID_EACH:
                said, reason = now, str(error).partition(";")[0]
                LOG.warning(f"{reason}; waited {now - started:.0f} of {limit_seconds:g} s")
        time.sleep(min(_POLL_SECONDS, left))


def to_json(table: RankTable) -> dict[str, Any]:
    """Return the table as version 1.0 (also for version 0) or 1.2. Raises DataError for 2.0."""
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
    """Merge all servers of all files, with ranks counted across files in the given order.

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
        raise DataError(f"the tables are of different versions ({shown}); make them again in one version")
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
    extra |= {"super_pod_list": list(pods.values())} if pods else {}
    result = _table(versions[paths[0]], servers, "the merged table", extra)
    validate(result, "the merged table")
    counts = [
        (len(server.device), f"{path} gives server {server.server_id} {len(server.device)}")
        for path, table in tables
        for server in table.server_list
    ]
    if len({count for count, _ in counts}) > 1:
        raise DataError(
            "servers hold different numbers of devices:"
            f" {', '.join(text for _, text in counts)}; make those tables again"
        )
    return result


def _written_version(table: RankTable, where: str = "") -> str:
    if table.version == "2.0":
        raise DataError(
            f"{where}a rank table of version 2.0 names no servers and cannot be written as 1.0 or"
            " 1.2; use the file as it is, or start with msrun"
        )
    return "1.0" if table.version == "0" else table.version


_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
"""Line such as ``# 4机32卡``, with which tables in MindFormers' documents begin."""


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
                f" {error.problem}; make the table again"
            ) from None
        raise DataError(f"{path}: {error}; make the table again") from None


# ---- versions ----


class _Chip(Record):
    device_id: Number
    device_ip: MaybeText = None
    rank_id: MaybeNumber = None


class _Instance(Record):
    server_id: Text
    devices: list[_Chip]
    rank_id: MaybeNumber = None
    pod_name: Any = None


class _Group(Record):
    group_name: Any = None
    device_count: MaybeNumber = None
    instance_count: MaybeNumber = None
    instance_list: list[_Instance]


class _Table0(Record):
    status: Any
    version: Any = None
    group_count: MaybeNumber = None
    group_list: list[_Group]


class _Address(Record):
    addr_type: Any = None
    addr: Text


class _Level(Record):
    net_layer: Number
    net_instance_id: Text
    rank_addr_list: list[_Address]


class _Rank(Record):
    rank_id: Number
    local_id: Number
    device_id: Number
    level_list: list[_Level] = Field(min_length=1)


class _Table2(Record):
    rank_count: MaybeNumber = None
    rank_list: list[_Rank]


def parse_table(data: Any, place: str) -> RankTable:
    """Return the records of a table's JSON, not yet validated against each other.

    Raises DataError with ``place``, the key and what was expected. An incomplete table raises
    NotReadyError while the platform is still filling it.
    """
    if not isinstance(data, dict):
        raise DataError(f"{place}: found {json.dumps(data)}; expected a JSON object")
    status, version = data.get("status"), data.get("version")
    if status == "initializing":
        raise NotReadyError(
            f"{place}: status is 'initializing': the platform has not filled the table yet; try again later"
        )
    if status != "completed":
        found = "is missing" if status is None else f"is {json.dumps(status)}"
        raise DataError(f"{place}: status {found}; expected 'completed': the table was not finished; make it again")
    if "group_list" in data:
        return _from_0(_Table0.read(data, place), place)
    if version == "2.0" and "rank_list" in data:
        return _from_2(_Table2.read(data, place), place)
    if version == "1.0" and "server_list" in data:
        return RankTable.read(data, place)
    if version == "1.2" and "server_list" in data:
        return SuperPodTable.read(data, place)
    keys = ", ".join(key if key.isprintable() else ascii(key) for key in data)
    found = json.dumps(version)
    raise DataError(
        f"{place}: version {found} with the keys {keys} is not a known rank table;"
        " expected version 1.0 or 1.2 with server_list, 2.0 with rank_list, or group_list; other"
        " clusters start without a table, by msrun"
    )


def _table(version: str, servers: list[dict[str, Any]], place: str, more: dict[str, Any]) -> RankTable:
    known = {"version": version, "server_count": len(servers), "status": "completed"}
    kind = SuperPodTable if version == "1.2" else RankTable
    return kind.read({**more, **known, "server_list": servers}, place)


def _from_0(table: _Table0, place: str) -> RankTable:
    """Join the instances of each server.

    An instance of one device with a rank_id has that rank; a device's own rank_id overrides all.
    """
    check_count("group_count", table.group_count, table.group_list, "groups in group_list", place)
    extra = dict(table.model_extra or {})
    ordered: list[_Instance] = []
    for index, group in enumerate(table.group_list):
        where, held = f"{place}: group_list[{index}]", group.instance_list
        check_count("instance_count", group.instance_count, held, "instances", where)
        devices = range(sum(len(instance.devices) for instance in held))
        check_count("device_count", group.device_count, devices, "devices", where)
        extra |= group.model_extra or {}
        ordered += _in_order(held, where)
    ranked = all(len(instance.devices) == 1 and instance.rank_id is not None for instance in ordered)
    servers: dict[str, dict[str, Any]] = {}
    pods: dict[str, list[str]] = {}
    rank = 0
    for instance in ordered:
        server = servers.setdefault(instance.server_id, {"device": []})
        kept = {"server_id": instance.server_id, "device": server["device"]}
        server |= {**(instance.model_extra or {}), **kept}
        if isinstance(instance.pod_name, str):
            pods.setdefault(instance.server_id, []).append(instance.pod_name)
        for chip in instance.devices:
            own = chip.rank_id if chip.rank_id is not None else instance.rank_id if ranked else rank
            server["device"].append({**chip.model_dump(exclude_unset=True), "rank_id": own})
            rank += 1
    result = _table("0", list(servers.values()), place, extra)
    for one in result.server_list:
        one.pod_names.extend(pods.get(one.server_id, []))
    return result


def _in_order(instances: list[_Instance], where: str) -> list[_Instance]:
    with_rank = [instance.rank_id is not None for instance in instances]
    if any(with_rank):
        if not all(with_rank):
            raise DataError(
                f"{where}: instance_list[{with_rank.index(False)}]: rank_id is missing, which other"
                " instances have; give it to all or none"
            )
        return sorted(instances, key=lambda instance: instance.rank_id or 0)
    # those without a number keep their order, at the end
    numbers = [re.search(r"([0-9]{1,18})$", str(one.pod_name or "")) for one in instances]
    keys = [int(number[1]) if number else math.inf for number in numbers]
    return [instances[index] for index in sorted(range(len(keys)), key=keys.__getitem__)]


def _from_2(table: _Table2, place: str) -> RankTable:
    """Take the first layer's network instance for the server, and its first address."""
    check_count("rank_count", table.rank_count, table.rank_list, "ranks in rank_list", place)
    servers: dict[str, dict[str, Any]] = {}
    local_ids: set[tuple[str, int]] = set()
    for index, rank in enumerate(table.rank_list):
        where = f"{place}: rank_list[{index}]"
        level = min(rank.level_list, key=lambda level: level.net_layer)
        name = level.net_instance_id
        if (name, rank.local_id) in local_ids:
            raise DataError(
                f"{where}: local_id {rank.local_id} occurs twice in the network instance {name};"
                " number its ranks 0, 1, ..."
            )
        local_ids.add((name, rank.local_id))
        # EID is not an IP address
        reached = [item.addr for item in level.rank_addr_list if item.addr_type in ("IPV4", "IPV6")]
        device: dict[str, Any] = {"rank_id": rank.rank_id, "device_id": rank.device_id}
        device |= {"device_ip": reached[0]} if reached else {}
        server = servers.setdefault(name, {"server_id": name, "device": []})
        server["device"].append(device)
    return _table("2.0", list(servers.values()), place, {})

"""Parsers of rank tables: versions 0 (ModelArts' group_list), 1.0, 1.2 (super pods) and 2.0
(rank_list).

Formats: Huawei's HCCL user guide, and for version 0 the ModelArts training guide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.cluster.rank_table import RankTable, Server, SuperPod, TableDevice, in_rank_order
from common.errors import DataError


class NotReadyError(DataError):
    """The platform has not filled the file yet."""


def parse_table(data: Any, place: str) -> RankTable:
    """Return the records of a table's JSON, not yet validated against each other.

    Raises DataError with ``place``, the key and what was expected. An incomplete table raises
    NotReadyError while the platform is still filling it.
    """
    data = _mapping(data, place)
    _check_status(data.get("status"), place)
    version = data.get("version")
    if "group_list" in data:
        return _parse_0(data, place)
    if version == "2.0" and "rank_list" in data:
        return _parse_2(data, place)
    if version in ("1.0", "1.2") and "server_list" in data:
        return _parse_1(data, version, place)
    raise DataError(
        f"{place}: version {_shown(version)} with the keys {_keys(data)} is not a known rank"
        " table; expected version 1.0 or 1.2 with server_list, 2.0 with rank_list, or group_list;"
        " other"
        " clusters start without a table, by msrun"
    )


def _check_status(status: Any, place: str) -> None:
    if status == "initializing":
        raise NotReadyError(
            f"{place}: status is 'initializing': the platform has not filled the table yet; try"
            " again later"
        )
    if status != "completed":
        found = "is missing" if status is None else f"is {_shown(status)}"
        raise DataError(
            f"{place}: status {found}; expected 'completed': the table was not finished; make it"
            " again"
        )


def _parse_1(data: dict[str, Any], version: str, place: str) -> RankTable:
    servers = []
    for server, where in _items(data, "server_list", place):
        devices = []
        for device, at in _items(server, "device", where):
            super_device_id = (
                _number(device, "super_device_id", at) if "super_device_id" in device else None
            )
            devices.append(
                TableDevice(
                    rank_id=_number(device, "rank_id", at),
                    device_id=_number(device, "device_id", at),
                    device_ip=_text_if_there(device, "device_ip", at),
                    super_device_id=None if super_device_id is None else str(super_device_id),
                    extra=_others(device, "rank_id", "device_id", "device_ip", "super_device_id"),
                )
            )
        servers.append(
            Server(
                server_id=_text(server, "server_id", where),
                devices=tuple(devices),
                host_nic_ip=_text_if_there(server, "host_nic_ip", where),
                extra=_others(server, "server_id", "device", "host_nic_ip"),
            )
        )
    _check_count(data, "server_count", len(servers), "servers in server_list", place, needed=True)
    known = ("version", "status", "server_count", "server_list")
    if version == "1.0":
        return RankTable(
            version=version, servers=in_rank_order(servers), extra=_others(data, *known)
        )
    pods = []
    for pod, where in _items(data, "super_pod_list", place):
        members: dict[str, Mapping[str, Any]] = {}
        for member, at in _items(pod, "server_list", where):
            server_id = _text(member, "server_id", at)
            if server_id in members:
                raise DataError(f"{at}: server {server_id} is listed twice; list it once")
            members[server_id] = _others(member, "server_id")
        pods.append(
            SuperPod(
                super_pod_id=_text(pod, "super_pod_id", where),
                servers=members,
                extra=_others(pod, "super_pod_id", "server_list"),
            )
        )
    others = _others(data, *known, "super_pod_list")
    return RankTable(
        version=version, servers=in_rank_order(servers), super_pods=tuple(pods), extra=others
    )


def _parse_0(data: dict[str, Any], place: str) -> RankTable:
    """Parse version 0: groups in file order, and in each, instances by rank_id or by their
    pod_name.

    Without rank_id the number at the end of pod_name decides. An instance of one device with a
    rank_id has that rank; a device's own rank_id overrides all. Instances of one server are joined.
    """
    groups = _items(data, "group_list", place)
    _check_count(data, "group_count", len(groups), "groups in group_list", place)
    extra = _others(data, "status", "version", "group_count", "group_list")
    ordered: list[tuple[dict[str, Any], str]] = []
    for group, where in groups:
        instances = _items(group, "instance_list", where)
        _check_count(group, "instance_count", len(instances), "instances in instance_list", where)
        devices = sum(len(_items(instance, "devices", at)) for instance, at in instances)
        _check_count(group, "device_count", devices, "devices in its instances", where)
        extra |= _others(group, "group_name", "device_count", "instance_count", "instance_list")
        ordered += _in_order(instances)
    ranked = [
        len(_items(instance, "devices", at)) == 1 and "rank_id" in instance
        for instance, at in ordered
    ]
    servers: dict[str, Server] = {}
    rank = 0
    for instance, where in ordered:
        server_id = _text(instance, "server_id", where)
        found = []
        for device, at in _items(instance, "devices", where):
            source, source_at = (device, at) if "rank_id" in device else (instance, where)
            own = "rank_id" in device or all(ranked)
            found.append(
                TableDevice(
                    rank_id=_number(source, "rank_id", source_at) if own else rank,
                    device_id=_number(device, "device_id", at),
                    device_ip=_text_if_there(device, "device_ip", at),
                    extra=_others(device, "rank_id", "device_id", "device_ip"),
                )
            )
            rank += 1
        before = servers.get(server_id, Server(server_id=server_id, devices=()))
        others = _others(instance, "pod_name", "server_id", "devices", "rank_id")
        pod = instance.get("pod_name")
        servers[server_id] = replace(
            before,
            devices=(*before.devices, *found),
            pod_names=(*before.pod_names, pod) if isinstance(pod, str) else before.pod_names,
            extra={**before.extra, **others},
        )
    return RankTable(version="0", servers=in_rank_order(servers.values()), extra=extra)


def _in_order(instances: list[tuple[dict[str, Any], str]]) -> list[tuple[dict[str, Any], str]]:
    with_rank = ["rank_id" in instance for instance, _ in instances]
    if any(with_rank):
        if not all(with_rank):
            raise DataError(
                f"{instances[with_rank.index(False)][1]}: rank_id is missing, which other instances"
                " have; give it to all or none"
            )
        return sorted(instances, key=lambda item: _number(item[0], "rank_id", item[1]))
    suffixes = [
        re.search(r"([0-9]{1,18})$", str(instance.get("pod_name", ""))) for instance, _ in instances
    ]
    keys = [(0, int(match[1])) if match else (1, index) for index, match in enumerate(suffixes)]
    return [instances[index] for index in sorted(range(len(keys)), key=keys.__getitem__)]


def _parse_2(data: dict[str, Any], place: str) -> RankTable:
    """Parse version 2.0: the first layer's network instance is the server, with its first
    address.
    """
    servers: dict[str, Server] = {}
    local_ids: set[tuple[str, int]] = set()
    entries = _items(data, "rank_list", place)
    _check_count(data, "rank_count", len(entries), "ranks in rank_list", place)
    for entry, where in entries:
        levels = _items(entry, "level_list", where)
        if not levels:
            raise DataError(
                f"{where}.level_list: is empty; expected the networks that reach the rank"
            )
        level, at = min(levels, key=lambda item: _number(item[0], "net_layer", item[1]))
        name = _text(level, "net_instance_id", at)
        local_id = _number(entry, "local_id", where)
        if (name, local_id) in local_ids:
            raise DataError(
                f"{where}: local_id {local_id} occurs twice in the network instance {name};"
                " number its ranks 0, 1, ..."
            )
        local_ids.add((name, local_id))
        addresses = [
            _text(item, "addr", item_at)
            for item, item_at in _items(level, "rank_addr_list", at)
            if item.get("addr_type") in ("IPV4", "IPV6")  # EID is not an IP address
        ]
        device = TableDevice(
            rank_id=_number(entry, "rank_id", where),
            device_id=_number(entry, "device_id", where),
            device_ip=addresses[0] if addresses else None,
        )
        before = servers.get(name, Server(server_id=name, devices=()))
        servers[name] = replace(before, devices=(*before.devices, device))
    return RankTable(version="2.0", servers=in_rank_order(servers.values()))


def _others(data: Mapping[str, Any], *known: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in known}


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: found {_shown(value)}; expected a JSON object")
    return value


def _items(data: Mapping[str, Any], key: str, place: str) -> list[tuple[dict[str, Any], str]]:
    """Return the objects of a list, each with its place."""
    value = _present(data, key, place)
    if not isinstance(value, list):
        raise DataError(f"{place}: {key}: found {_shown(value)}; expected a list")
    return [
        (_mapping(item, f"{place}: {key}[{index}]"), f"{place}: {key}[{index}]")
        for index, item in enumerate(value)
    ]


def _text(data: Mapping[str, Any], key: str, place: str) -> str:
    value = _present(data, key, place)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise DataError(f"{place}: {key}: found {_shown(value)}; expected non-empty printable text")
    return value.strip()


def _text_if_there(data: Mapping[str, Any], key: str, place: str) -> str | None:
    return _text(data, key, place) if key in data else None


def _number(data: Mapping[str, Any], key: str, place: str) -> int:
    value = _present(data, key, place)
    text = value.strip() if isinstance(value, str) else str(value) if type(value) is int else ""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise DataError(
            f"{place}: {key}: found {_shown(value)}; expected a whole number, 0 or more"
        )
    return int(text)


def _check_count(
    data: Mapping[str, Any], key: str, found: int, what: str, place: str, *, needed: bool = False
) -> None:
    if (needed or key in data) and (said := _number(data, key, place)) != found:
        raise DataError(
            f"{place}: {key} is {said}, but there are {found} {what}; make the table again"
        )


def _present(data: Mapping[str, Any], key: str, place: str) -> Any:
    if key not in data:
        raise DataError(f"{place}: {key} is missing; found the keys {_keys(data)}")
    return data[key]


def _keys(data: Mapping[str, Any]) -> str:
    return ", ".join(key if key.isprintable() else ascii(key) for key in data) or "none"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

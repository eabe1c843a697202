"""Records of an Ascend rank table (which rank is on which device), and their validation.

Fields have the names of version 1.0's keys, and keys unknown to this project are kept.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    field_validator,
)

from common.errors import DataError
from common.log import spans
from common.processes.addresses import is_ip, is_loopback

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Model = TypeVar("_Model", bound="Record")


def _whole(value: object) -> int:
    text = value.strip() if isinstance(value, str) else str(value) if type(value) is int else ""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("expected non-empty printable text")
    return value.strip()


Number = Annotated[int, BeforeValidator(_whole), PlainSerializer(str)]
MaybeNumber = Annotated[int | None, BeforeValidator(_whole), PlainSerializer(str)]
Text = Annotated[str, BeforeValidator(_text)]
MaybeText = Annotated[str | None, BeforeValidator(_text)]


class Record(BaseModel):
    """Object of a table. Unknown keys are in ``model_extra``."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @classmethod
    def read(cls: type[_Model], data: Any, place: str) -> _Model:
        """Return the record of an object. Raises DataError with ``place`` and the wrong key."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        where = "".join(f"[{at}]" if isinstance(at, int) else f": {at}" for at in first["loc"])
        given = json.dumps(first["input"])
        found = f": found {given}; {first['msg'].removeprefix('Value error, ')}"
        found = " is missing" if first["type"] == "missing" else found
        raise DataError(f"{place}{where}{found}; make the table again") from None


class TableDevice(Record):
    """One chip. device_ip: address of its network port; None if absent, as on one server.

    super_device_id: its number inside a super pod (version 1.2).
    """

    device_id: Number
    device_ip: MaybeText = None
    super_device_id: MaybeNumber = None
    rank_id: Number


class Server(Record):
    """One machine, or a pod on it, with its devices in the order of their ranks.

    server_id: usually the machine's IP address; in version 2.0 its innermost network instance.
    """

    server_id: Text
    device: list[TableDevice]
    host_nic_ip: MaybeText = None
    _pod_names: list[str] = PrivateAttr(default_factory=list)

    @field_validator("device")
    @classmethod
    def _in_order(cls, devices: list[TableDevice]) -> list[TableDevice]:
        return sorted(devices, key=lambda device: device.rank_id)

    @property
    def pod_names(self) -> list[str]:
        """Names of the pods of version 0. It is no key of a table."""
        return self._pod_names

    @property
    def address(self) -> str:
        """Address for the ranks of other servers: of the pod, of the host, or server_id.

        HCCL's guide to versions 1.0 and 1.2 has names such as node_0 in server_id, beside host_ip.
        """
        others = ((self.model_extra or {}).get(key) for key in ("container_ip", "host_ip"))
        return next((other for other in others if isinstance(other, str) and is_ip(other)), self.server_id)


class _Member(Record):
    server_id: Text


class SuperPod(Record):
    """Servers whose chips share memory addresses (version 1.2)."""

    super_pod_id: Text
    server_list: list[_Member]


class RankTable(Record):
    """Table with the place of every rank. version: "0", "1.0", "1.2" or "2.0", as it was read.

    Servers are in the order of their first rank, whatever the order in the file.
    """

    version: str
    server_count: Number
    server_list: list[Server]
    super_pod_list: Any = None
    status: str = "completed"

    @field_validator("server_list")
    @classmethod
    def _in_order(cls, servers: list[Server]) -> list[Server]:
        return sorted(servers, key=lambda server: server.device[0].rank_id if server.device else -1)

    @property
    def world_size(self) -> int:
        return sum(len(server.device) for server in self.server_list)

    def places(self) -> list[tuple[Server, TableDevice]]:
        """Return servers and devices of ranks 0, 1, 2, ..."""
        pairs = [(server, device) for server in self.server_list for device in server.device]
        return sorted(pairs, key=lambda pair: pair[1].rank_id)


class SuperPodTable(RankTable):
    """Table of version 1.2."""

    super_pod_list: list[SuperPod]


def parse_address(text: str, place: str) -> Address:
    """Parse an IPv4 or IPv6 address that another machine can reach.

    Raises DataError that begins with ``place``. Loopback is accepted: whether it is an error depends on the caller.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise DataError(
            f"{place}: {text!r} is not an IP address; expected one such as 192.168.1.10 or fd00::10"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise DataError(
            f"{place}: {text} is not the address of one machine; expected one such as 192.168.1.10 or fd00::10"
        )
    return address


def validate(table: RankTable, place: str) -> None:
    """Reject a table that the communication library would reject minutes later.

    Raises DataError that begins with ``place``. Ranks must be 0, 1, ..., each once. Servers, device
    ids of a server and addresses must be unique. Several servers need addresses that others can
    reach. Source: the rank table chapters of Huawei's HCCL user guide.
    """
    check_count("server_count", table.server_count, table.server_list, "servers in server_list", place)
    for server in table.server_list:
        if not server.device:
            raise DataError(f"{place}: server {server.server_id} has no devices; leave it out or add them")
    if not table.server_list:
        raise DataError(f"{place}: there is no server in the table; make one with tools/hccl_tools.py")
    _refuse_repeats(
        (server.server_id for server in table.server_list), f"{place}: server", "merge its entries into one"
    )
    ranks = [device.rank_id for _, device in table.places()]
    if ranks != list(range(len(ranks))):
        raise DataError(
            f"{place}: {len(ranks)} devices have the ranks {spans({*ranks})}; expected 0 to"
            f" {len(ranks) - 1}, each once; make the table again"
        )
    # a server is then a network instance, which may span machines; local_id is checked while reading
    if table.version != "2.0":
        for server in table.server_list:
            ids = (device.device_id for device in server.device)
            _refuse_repeats(ids, f"{place}: server {server.server_id}: device_id", "list each device once")
    _check_addresses(table, place)
    if isinstance(table, SuperPodTable):
        _check_super_pods(table, place)


def check_count(key: str, said: int | None, found: list[Any] | range, what: str, place: str) -> None:
    if said is not None and said != len(found):
        raise DataError(f"{place}: {key} is {said}, but there are {len(found)} {what}; make the table again")


def table_warnings(table: RankTable) -> list[str]:
    """Return a warning for each entry that is allowed but probably unintended."""
    found = []
    if any(is_loopback(server.address) for server in table.server_list):
        found.append(
            f"server {table.server_list[0].address} is a loopback address: fine on one machine,"
            " but the table cannot be merged with others; make it again with --server_ip"
        )
    if len({len(server.device) for server in table.server_list}) > 1:
        counts = ", ".join(f"{server.server_id} has {len(server.device)}" for server in table.server_list)
        found.append(f"servers hold different numbers of devices ({counts}); most collectives expect the same number")
    return found


def _refuse_repeats(values: Iterable[Hashable], what: str, remedy: str) -> None:
    for value, times in Counter(values).items():
        if times > 1:
            raise DataError(f"{what} {value} is there {times} times; {remedy}")


def _check_addresses(table: RankTable, place: str) -> None:
    several = len(table.server_list) > 1
    seen: dict[Address, str] = {}
    for server, device in table.places():
        if several and is_loopback(server.address):
            raise DataError(
                f"{place}: server {server.address} is a loopback address, which other servers"
                " cannot reach; make that server's table again with tools/hccl_tools.py"
                " --server_ip"
            )
        name = f"rank {device.rank_id} (device {device.device_id} of {server.server_id})"
        where = f"{place}: {name}"
        if device.device_ip is None:
            if several and table.version != "2.0":
                raise DataError(
                    f"{where} has no device_ip, which several servers need; `hccn_tool -i"
                    f" {device.device_id} -ip -g` shows it"
                )
            continue
        address = parse_address(device.device_ip, f"{where}: device_ip")
        if address.is_loopback:
            raise DataError(
                f"{where}: device_ip {address} is a loopback address; set the device's own with `hccn_tool -i N -ip -s`"
            )
        if address in seen:
            raise DataError(
                f"{where}: device_ip {address} is also that of {seen[address]}; every device needs"
                " an address of its own"
            )
        seen[address] = name


def _check_super_pods(table: SuperPodTable, place: str) -> None:
    servers = {server.server_id: server for server in table.server_list}
    members = [member.server_id for pod in table.super_pod_list for member in pod.server_list]
    names = [pod.super_pod_id for pod in table.super_pod_list]
    if sorted(members) != sorted(servers) or len(set(names)) < len(names):
        raise DataError(
            f"{place}: super_pod_list has the pods {', '.join(names)} with the servers"
            f" {', '.join(members)}; version 1.2 needs each server of server_list once, in one pod"
        )
    for pod in table.super_pod_list:
        devices = [device for member in pod.server_list for device in servers[member.server_id].device]
        for device in devices:
            if device.super_device_id is None:
                raise DataError(
                    f"{place}: rank {device.rank_id} has no super_device_id, which version 1.2"
                    " needs; `npu-smi info -t spod-info -i N -c 0` shows it; chips without"
                    " super pods use version 1.0"
                )
        _refuse_repeats(
            (device.super_device_id for device in devices),
            f"{place}: super pod {pod.super_pod_id}: super_device_id",
            "give each device its own",
        )

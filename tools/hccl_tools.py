"""Write the rank table of this machine's Ascend devices, or check a table.

    python tools/hccl_tools.py --device_num "[0,8)" --server_ip 10.155.111.140
        hccl_8p_01234567_10.155.111.140.json
    python tools/hccl_tools.py --check hccl_8p_01234567_10.155.111.140.json
        ranks, and a sum to compare between hosts

Exit code 0: written, or valid; 2: bad arguments, devices or table; 1: the file could not be
written.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import hashlib
import logging
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from common.cluster.hccn import device_addresses
from common.cluster.places import parse_devices, parse_range
from common.cluster.rank_table import RankTable, Server, TableDevice, parse_address, table_warnings, validate
from common.cluster.rank_table_files import read_table, write_table
from common.errors import DataError
from common.files import refuse_to_overwrite
from common.flags import at_least, flag
from common.processes.addresses import is_loopback
from common.program import command

MAX_DEVICES = 1024
"""More than any machine holds. The table lists as many."""


@dataclass(kw_only=True)
class Request:
    device_num: str = flag("'[a,b)': logical devices a to b-1; [a,b] means the same; quote it", default="[0,8)")
    visible_devices: str | None = flag(
        "N,...: physical number of logical device 0, 1, ... (default: 0 to device_num_per_node - 1)"
    )
    device_num_per_node: int = flag("N: devices of this machine", default=8, type=at_least(1, MAX_DEVICES))
    server_ip: str | None = flag("IP: address of this machine for the others (default: that of its host name)")
    hccn_conf: Path | None = flag("FILE: read addresses only from FILE (default: ask hccn_tool, else /etc/hccn.conf)")
    output_dir: Path = flag("DIR: folder for the table (default: the current one)", default=Path())
    check: Path | None = flag("FILE: write nothing; validate this rank table of any version and list it")


@command(Request)
def main(request: Request) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if request.check is not None:
        table = read_table(request.check)
        print("rank device_id device_ip server")
        for server, device in table.places():
            name, address = server.server_id, server.address
            shown = name if address == name else f"{name} ({address})"
            print(device.rank_id, device.device_id, device.device_ip or "-", shown)
        print(f"sha256 {hashlib.sha256(request.check.read_bytes()).hexdigest()}  {request.check}")
        for remark in table_warnings(table):
            print(f"warning: {request.check}: {remark}", file=sys.stderr)
    else:
        generate(request)


def generate(arguments: Request) -> None:
    per_node = arguments.device_num_per_node
    logical = parse_range(arguments.device_num, "--device_num", "--device_num '[0,3)' --visible_devices")
    if logical[-1] >= per_node:  # before anything lists them
        raise DataError(
            f"--device_num {arguments.device_num} goes past the {per_node} devices of a node; give"
            f" --device_num_per_node {logical[-1] + 1} if it has more"
        )
    visible = list(range(per_node))
    if arguments.visible_devices is not None:
        visible = list(parse_devices(arguments.visible_devices, "--visible_devices"))
    if logical[-1] >= len(visible):
        raise DataError(
            f"--device_num {arguments.device_num} needs {logical[-1] + 1} visible devices, but --visible_devices names"
            f" {len(visible)}: it maps logical to physical devices, and --device_num counts logical ones from 0"
        )
    server_id = _server_id(arguments.server_ip)
    physical = [visible[number] for number in logical]
    print("visible_devices:", visible)
    print("server_id:", server_id)
    print("device_num_list:", list(logical))
    addresses = device_addresses(physical, arguments.hccn_conf)
    devices = [
        TableDevice(rank_id=rank, device_id=device, device_ip=addresses[device]) for rank, device in enumerate(physical)
    ]
    server = Server(server_id=server_id, device=devices, host_nic_ip="reserve")
    table = RankTable(version="1.0", server_count=1, server_list=[server])
    validate(table, "the devices of this machine")
    if per_node == 8 and logical[0] < 4 <= logical[-1] and len(logical) < 8:
        print(
            "warning: cards 0-3 and 4-7 of an Ascend 910A server are two rings: fewer than 8 should come from one",
            file=sys.stderr,
        )
    for device in devices:
        print(f"rank_id:{device.rank_id}, device_id:{device.device_id}, device_ip:{device.device_ip}")
    cards = "".join(map(str, logical))
    host = re.sub("[^0-9A-Za-z.]", "-", server_id)  # IPv6 has colons
    name = f"hccl_{len(logical)}p_{cards}_{host}.json"
    path = arguments.output_dir.resolve() / name
    refuse_to_overwrite([arguments.hccn_conf], [path], "choose another --output_dir")
    write_table(table, path)
    print("Completed: hccl file was save in :", path)


def _server_id(given: str | None) -> str:
    """An address under which the other machines know this one."""
    if given is not None:
        found, place = given.strip(), "--server_ip"
    else:
        name = socket.gethostname()
        place = f"the address of host name {name}"
        try:
            found = socket.gethostbyname(name)
        except OSError as error:
            raise DataError(f"{place} cannot be found: {error.strerror or error}; give --server_ip ADDRESS") from None
    server_id = str(parse_address(found, place))
    if is_loopback(server_id):
        raise DataError(
            f"{place} is {server_id}, a loopback address that no other machine can reach; give this"
            " machine's own: --server_ip ADDRESS"
        )
    return server_id

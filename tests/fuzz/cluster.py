"""Clusters: rank tables, hccn.conf, environment variables, ranges of devices, lists of hosts."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cluster.environment import (
    Process,
    announced_world_size,
    find_process,
    first_node,
    torch_variables,
)
from common.cluster.hccn import device_addresses
from common.cluster.places import find_places, parse_range, places_of_table
from common.cluster.rank_environment import given_port, parse_master
from common.cluster.rank_table import RankTable, table_warnings
from common.cluster.rank_table_files import merge_tables, read_table, to_json
from common.launcher.host_list import divide, parse_hosts
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case, Differs
from tests.fuzz.mutations import (
    UNREADABLE,
    copy_tree,
    spoil_one,
    spoil_tree,
    to_json as render,
    unreadable,
)
from tools import hccl_tools

CLASSES = {
    "table": "1 to 3 faults in the tree of a rank table of version 0, 1.0, 1.2 or 2.0",
    "table file": "a fault of bytes, a special file, or one that cannot be opened, as a rank table",
    "merge": "two tables, one of them faulty, the same, or of another version",
    "hccn.conf": "lines for devices: odd addresses, keys, repeats, bytes, special files",
    "environment": "variables of torchrun, msrun, Ascend, MPI, Slurm and ModelArts with hostile"
    " numbers and names",
    "range": "DEVICE_RANGE, RANK_SIZE, --nnodes, --node_rank, --master with and without a table",
    "hosts": "--hosts with odd names, repeats, users, IPv6, against ranges and tables",
    "hccl_tools": "words of tools/hccl_tools.py",
}


@dataclass
class Prepared:
    tables: dict[str, dict[str, Any]]


def _devices(server: int, count: int) -> list[dict[str, str]]:
    return [
        {
            "device_id": str(device),
            "device_ip": f"192.{device + 1}.27.{6 + server}",
            "rank_id": str(server * count + device),
        }
        for device in range(count)
    ]


def _table(version: str, servers: int, count: int) -> dict[str, Any]:
    names = [f"10.155.111.{140 + server}" for server in range(servers)]
    if version == "0":
        instances = [
            {"pod_name": f"job-worker-{n}", "server_id": name, "devices": [
                {"device_id": item["device_id"],
                "device_ip": item["device_ip"]} for item in _devices(n, count)
            ]} for n, name in enumerate(names)
        ]  # fmt: skip
        group = {
            "group_name": "job",
            "device_count": str(servers * count),
            "instance_count": str(servers),
            "instance_list": instances,
        }
        return {"status": "completed", "group_count": "1", "group_list": [group]}
    if version == "2.0":
        ranks = [
            {"rank_id": server * count + device, "local_id": device, "device_id": device,
            "level_list": [
                {"net_layer": 0, "net_instance_id": f"net{server}", "net_type": "TOPO_FILE_DESC",
                 "rank_addr_list": [{"addr_type": "IPV4",
                 "addr": f"192.{device + 1}.27.{6 + server}", "ports": ["0/1"]}]}
            ]} for server in range(servers) for device in range(count)
        ]  # fmt: skip
        return {
            "version": "2.0",
            "status": "completed",
            "rank_count": str(len(ranks)),
            "rank_list": ranks,
        }
    table: dict[str, Any] = {
        "version": version,
        "server_count": str(servers),
        "status": "completed",
    }
    table["server_list"] = [
        {"server_id": name, "device": _devices(n, count), "host_nic_ip": "reserve"}
        for n, name in enumerate(names)
    ]
    if version == "1.2":
        for server in table["server_list"]:
            for device in server["device"]:
                device["super_device_id"] = device["rank_id"]
        table["super_pod_list"] = [
            {"super_pod_id": "0", "server_list": [{"server_id": name} for name in names]}
        ]
    return table


def prepare(folder: Path) -> Prepared:
    sizes = ((1, 1), (1, 8), (2, 2), (4, 2))
    return Prepared(
        {
            f"{version} {servers}x{count}": _table(version, servers, count)
            for version in ("0", "1.0", "1.2", "2.0")
            for servers, count in sizes
        }
    )


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    kind = dice.pick(
        (
            "table",
            "table",
            "table",
            "table file",
            "merge",
            "hccn.conf",
            "environment",
            "environment",
            "environment",
            "range",
            "hosts",
            "hccl_tools",
        )
    )
    return MAKERS[kind](dice, prepared, folder)


# ---- rank tables ----


def _spoiled(dice: Dice, prepared: Prepared, path: Path) -> str:
    name = dice.pick(list(prepared.tables))
    tree, about = copy_tree(prepared.tables[name]), name
    for _ in range(dice.pick((0, 1, 1, 1, 2, 3))):
        tree, fault, key = spoil_tree(dice, tree)
        about += f", {fault} at {key}"
        if not isinstance(tree, dict) or "duplicate" in fault or "another type" in fault:
            break
    path.write_text(render(tree), encoding="utf-8", errors="surrogatepass")
    return about


def _use(path: Path) -> RankTable:
    """Do what launchers and tools do with a table."""
    table = read_table(path)
    places = places_of_table(table)
    if sorted(place.rank for place in places) != list(range(table.world_size)):
        raise Differs(f"ranks {[place.rank for place in places]}")
    table_warnings(table)
    if table.version != "2.0":
        again = path.with_name("again.json")
        again.write_text(json.dumps(to_json(table)))
        if [place.rank for place in places_of_table(read_table(again))] != [
            place.rank for place in places
        ]:
            raise Differs("written and read again, the table differs")
    return table


def _same_as_json(path: Path, table: RankTable) -> str | None:
    """Compare a table of version 1 with the json module's reading of it."""
    words = json.loads(path.read_text(encoding="utf-8-sig"))
    found = {
        (device.rank_id, device.device_id, device.device_ip, server.server_id)
        for server, device in table.places()
    }
    if "server_list" in words and "group_list" not in words:
        there = {
            (
                int(device["rank_id"]),
                int(device["device_id"]),
                device.get("device_ip", "").strip() or None,
                server["server_id"].strip(),
            )
            for server in words["server_list"]
            for device in server["device"]
        }
    elif "rank_list" in words:
        found, there = (
            {item[:2] for item in found},
            {(int(item["rank_id"]), int(item["device_id"])) for item in words["rank_list"]},
        )
    else:
        devices = [
            (device["device_id"], instance["server_id"].strip())
            for group in words["group_list"]
            for instance in group["instance_list"]
            for device in instance["devices"]
        ]
        found, there = (
            {item[1::2] for item in found},
            {(int(device), server) for device, server in devices},
        )
    return (
        None
        if found == there
        else f"read as {sorted(found, key=str)[:4]}, holds {sorted(there, key=str)[:4]}"
    )


def _make_table(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    path = folder / "table.json"
    about = _spoiled(dice, prepared, path)
    return Case(
        kind="table",
        run=lambda: _use(path),
        names=(str(path),),
        check=lambda table: _same_as_json(path, table),
        about=about,
    )


def _make_file(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    path = folder / "table.json"
    path.write_text(render(prepared.tables[dice.pick(list(prepared.tables))]))
    if dice.chance(0.15):
        about = dice.pick(list(UNREADABLE))

        def run() -> RankTable:
            with unreadable(about, path):
                return _use(path)

        return Case(kind="table file", run=run, names=(str(path),), about=about)
    about = spoil_one(dice, path)
    return Case(
        kind="table file",
        run=lambda: _use(path),
        names=(str(path),),
        check=lambda table: _same_as_json(path, table),
        about=about,
    )


def _make_merge(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    paths = [folder / "one.json", folder / "two.json"]
    about = "; ".join(_spoiled(dice, prepared, path) for path in paths)
    if dice.chance(0.5):  # so that they can be merged
        tree = json.loads(render(prepared.tables[dice.pick(("1.0 2x2", "1.0 1x8", "1.2 2x2"))]))
        paths[0].write_text(json.dumps(tree))
        paths[1].write_text(
            json.dumps(tree).replace("10.155.111.", "10.155.112.").replace(".27.", ".28.")
        )
        about = spoil_one(dice, paths[1], huge=False) if dice.chance(0.5) else "whole"
    if dice.chance(0.1):
        paths.append(dice.pick(paths))

    def run() -> RankTable:
        table = merge_tables(paths)
        if sorted(device.rank_id for _, device in table.places()) != list(range(table.world_size)):
            raise Differs("ranks of the merged table")
        if table.world_size != sum(read_table(path).world_size for path in paths):
            raise Differs("devices of the merged table")
        return table

    return Case(
        kind="merge",
        run=run,
        names=(str(folder), "server ", "merged table", "device_ip"),
        about=about,
    )


# ---- hccn.conf ----


def _make_hccn(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    path = folder / "hccn.conf"
    lines = [
        line
        for device in range(8)
        for line in (
            f"address_{device}=192.168.10{device % 4}.{100 + device}",
            f"netmask_{device}=255.255.255.0",
        )
    ]
    odd = (
        "address_0=", "address_0=1.2.3", "address_0=1.2.3.4.5", "address_0=::1",
        "IPv6address_0=fe80::1", "address_99999999999=1.2.3.4",
        "=", "address_x=1",
        "address_0=0.0.0.0", "address_1=192.168.100.100", "address_0=127.0.0.1", "#"
            " address_0=1.2.3.4", "address_0=a\0b",
        "address_0 = 1.2.3.4", "address_\u0663=1.2.3.4",
        "address_0=" + "9" * 5000, "x" * 100_000, "address_0=1.2.3.4=5", "\u202e",
        "address_0=1.2.3.4 ", "ADDRESS_0=9.9.9.9",
        "address_0=001.2.3.4", "address_0=256.1.1.1",
    )  # fmt: skip
    for _ in range(dice.between(0, 3)):
        place = dice.below(len(lines))
        if dice.chance(0.3):
            del lines[place]
        else:
            lines[place : place + dice.below(2)] = [dice.pick(odd)]
    path.write_text("\n".join(lines) + "\n")
    about = spoil_one(dice, path) if dice.chance(0.4) else "lines"
    wanted = dice.pick((range(8), range(1), range(4, 8), [0, 0], [7], [99], list(range(16))))

    def check(found: dict[int, str]) -> str | None:
        text = path.read_bytes().decode("utf-8", "replace")
        for device, address in found.items():
            last = [
                m[1].strip()
                for m in re.finditer(
                    rf"^\s*(?:ipv6)?address_0*{device}\s*=(.*)$", text, re.MULTILINE | re.IGNORECASE
                )
            ]
            if address not in last and address not in [word.lower() for word in last]:
                return f"device {device} has {address}, the file says {last[:3]}"
        return None

    return Case(
        kind="hccn.conf",
        run=lambda: device_addresses(list(wanted), path),
        names=(str(path),),
        check=check,
        about=about,
    )


# ---- environment variables ----

FAMILIES: tuple[dict[str, str], ...] = (
    {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x"},
    {"RANK": "1", "WORLD_SIZE": "4", "RANK_ID": "1", "RANK_SIZE": "4", "DEVICE_ID": "1",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GPT2_LAUNCHER_PID": "5"},
    {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": "1", "DEVICE_ID": "1",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118"},
    {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "4", "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118"},
    {"RANK_ID": "1", "RANK_SIZE": "4", "DEVICE_ID": "1", "ASCEND_DEVICE_ID": "1"},
    {"RANK_ID": "0", "DEVICE_ID": "0", "MA_NUM_HOSTS": "1"},
    {"RANK_ID": "1", "RANK_SIZE": "4", "MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "a,b"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "a"},
    {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login1",
    "SLURM_STEP_ID": "0",
     "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "0", "SLURM_LOCALID": "1",
     "SLURM_JOB_ID": "123"},
    {"RANK_TABLE_FILE": "TABLE", "RANK_ID": "1", "RANK_SIZE": "4", "DEVICE_ID": "1",
    "HCCL_CONNECT_TIMEOUT": "0"},
)  # fmt: skip
ODD_VALUES = (
    "", " ", "-1", "0", "1", "3", "4", "5", "64", "99999999999", "9" * 5000, "1.0", "1e3", "0x4",
    "+1", " 1", "1 ", "\u0663", "\u00b2",
    "abc", "a b", "[", "]",
    "gpu[", "gpu[1-", "[1-2]", "gpu[1-3],", ",", "a,b", "4(x", "2(x3)", "4(x99999999999)",
    "1(x9999999)", "127.0.0.1", "::1", "a:b",
    "true", "MS_SCHED", "x" * 5000,
    "4294967280", "65535", "65536", "\u202e",
)  # fmt: skip


def _make_environment(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    environ = dict(dice.pick(FAMILIES))
    if dice.chance(0.3):
        environ |= dice.pick(FAMILIES)
    for _ in range(dice.between(0, 3)):
        name = dice.pick(list(environ))
        if dice.chance(0.3) and len(environ) > 1:
            del environ[name]
        else:
            environ[name] = dice.pick(ODD_VALUES)
    if dice.chance(0.2):
        environ[
            dice.pick(("MASTER_PORT", "MASTER_ADDR", "RANK_ID", "MS_ROLE", "WORLD_SIZE", "RANK"))
        ] = dice.pick(ODD_VALUES)
    names = [*environ, "environment: ", f"{environ.get('RANK_TABLE_FILE', '?')}: "]
    if environ.get("RANK_TABLE_FILE") == "TABLE":
        environ["RANK_TABLE_FILE"] = str(folder / "table.json")
        _spoiled(dice, prepared, folder / "table.json")
        if dice.chance(0.6):
            (folder / "table.json").write_text(render(prepared.tables["1.0 2x2"]))
        names.append(str(folder))

    def run() -> Process:
        given_port(environ)
        announced_world_size(environ)
        process = find_process(environ)
        torch_variables(process)
        return process

    def check(process: Process) -> str | None:
        if (
            not 0 <= process.rank < process.world_size
            or not 0 <= process.local_rank < process.local_world_size <= process.world_size
        ):
            return f"{process}"
        if process.port is not None and not 0 < process.port < 65536:
            return f"port {process.port}"
        if process.master == "":
            return "no address"
        port = environ.get("MASTER_PORT", "")
        return (
            f"MASTER_PORT={port!r} is a port"
            if port and not (port.isascii() and port.isdigit())
            else None
        )

    return Case(
        kind="environment",
        run=run,
        names=tuple(names),
        check=check,
        about=str({name: value[:30] for name, value in environ.items()}),
    )


# ---- ranges, hosts, tools ----

RANGES = ("[0,8)", "[0,8]", "[0,4)", "[4,8)", "[0,2)", "[2,4)", "[0,1)", "[8,0)", "[0,0)", "(0,8)",
"[0,8", "0,8", "0", "", "[,]",
"[a,b)", "[0,99999999999)",
          "[0,999999999)", "[ 0 , 8 )", "[0,8)x", "[\u0660,\u0668)", "[-1,3)", "[0,8,9)", "[0.0,8)",
          "[" + "9" * 5000 + ",1)",
          "[0,65537)", "[1000,1008)", "[]")  # fmt: skip
NUMBERS = (None, None, None, 1, 2, 4, 8, 0, -1, 3, 16, 65536, 65537, 2**31, 2**63)
MASTERS = (
    None,
    None,
    "10.0.0.1:29500",
    "[::1]:29500",
    "a:1",
    ":1",
    "a:",
    "a",
    "",
    "a:0",
    "a:65535",
    "a:99999",
    "a:\u0663\u0663\u0663\u0663",
    "a:-1",
    "a: 1",
    "a:" + "9" * 5000,
    "[:1",
    "a:b:5000",
)


def _make_range(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    text, size, nodes, node, address = (
        dice.pick(RANGES),
        dice.pick(NUMBERS),
        dice.pick(NUMBERS),
        dice.pick(NUMBERS),
        dice.pick(MASTERS),
    )
    path = None
    if dice.chance(0.4):
        path = folder / "table.json"
        path.write_text(render(prepared.tables[dice.pick(list(prepared.tables))]))
        nodes = node = None

    def run() -> Any:
        host, port = parse_master(address)
        if port is not None and not (address or "").rpartition(":")[2].isascii():
            raise Differs(f"--master {address} is port {port}")
        numbers = parse_range(text)
        table = None if path is None else read_table(path)
        return find_places(
            numbers, rank_size=size, table=table, master=host, nodes=nodes, node_rank=node
        )

    def check(places: Any) -> str | None:
        ranks = [place.rank for place in places.all]
        if (
            ranks != list(range(len(ranks)))
            or not places.own
            or places.own_host not in places.hosts
        ):
            return f"{len(ranks)} ranks, {len(places.own)} here"
        return (
            None
            if len(places.own) == len(parse_range(text))
            else f"{len(places.own)} ranks here of {text}"
        )

    words = {
        "range": text[:40],
        "size": size,
        "nodes": nodes,
        "node": node,
        "master": (address or "")[:40],
    }
    names = (
        "DEVICE_RANGE",
        "start_device",
        "end_device",
        "RANK_SIZE",
        "--nnodes",
        "--node_rank",
        "--master",
        "rank table",
        "launcher starts",
    )
    return Case(kind="range", run=run, names=names, check=check, about=str(words))


HOSTS = ("10.0.0.1", "10.0.0.2", "10.155.111.140", "10.155.111.141", "user@a", "user@b", "a", "b",
"", " ", "-oProxyCommand=x", "a b",
"::1", "fe80::1%eth0", "\u202e", "a\nb",
         "user@", "@", "a;rm", "$(x)", "x" * 5000, "a", "[::1]")  # fmt: skip


def _make_hosts(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    text = ",".join(dice.pick(HOSTS) for _ in range(dice.between(1, 4)))
    if dice.chance(0.3):
        text = "10.155.111.140,10.155.111.141"
    table = (
        prepared.tables[dice.pick(("1.0 2x2", "1.0 1x8", "1.0 4x2"))] if dice.chance(0.4) else None
    )
    size, numbers = (
        dice.pick((None, 4, 8, 7, 16)),
        dice.pick((range(4), range(8), range(2, 4), range(1))),
    )
    master = dice.pick((None, None, "10.0.0.9", "fe80::1"))

    def run() -> Any:
        hosts = parse_hosts(text)
        path = folder / "table.json"
        places = ()
        if table is not None:
            path.write_text(render(table))
            places = places_of_table(read_table(path))
        return hosts, divide(
            hosts, numbers, rank_size=size, table=places, master=master, port=29500
        )

    def check(result: Any) -> str | None:
        hosts, parts = result
        if any(host.startswith("-") for host in hosts) or len(set(hosts)) != len(hosts):
            return f"hosts {hosts}"
        if {part.host for part in parts} != set(hosts):
            return f"parts for {[part.host for part in parts]} of {hosts}"
        if (
            size is not None
            and table is None
            and [rank for part in parts for rank in part.numbers] != list(range(size))
        ):
            return f"ranks {[part.numbers for part in parts]} of {size}"
        return None

    return Case(
        kind="hosts", run=run, names=("--hosts", "rank table"), check=check, about=text[:100]
    )


def _make_nodes(dice: Dice) -> Case:
    """Write a list of Slurm's nodes."""
    text = dice.pick(ODD_VALUES) + dice.pick(("", "[1-3]", "[", "]", ",x", "[01,5-7]y"))

    def check(name: str) -> str | None:
        return None if name and not re.search(r"[\[\],]", name) else f"{name!r} of {text[:50]!r}"

    return Case(
        kind="environment",
        run=lambda: first_node(text),
        names=("SLURM_STEP_NODELIST",),
        check=check,
        about=text[:50],
    )


def _make_tools(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    conf = folder / "hccn.conf"
    conf.write_text(
        "".join(f"address_{device}=192.168.100.{100 + device}\n" for device in range(8))
    )
    words = ["--device_num", dice.pick(RANGES), "--server_ip",
    dice.pick(("10.0.0.1", "10.0.0.1", "::1", "x", "127.0.0.1", "fe80::1",
    "")), "--hccn_conf", str(conf),
             "--output_dir", str(folder)]  # fmt: skip
    if dice.chance(0.4):
        words += [
            "--device_num_per_node",
            dice.pick(("8", "1", "0", "-1", "16", "99999999999999", "x", "9" * 30, "4096")),
        ]
    if dice.chance(0.3):
        words += [
            "--visible_devices",
            dice.pick(
                (
                    "0,1,2,3",
                    "4,5,6,7",
                    "0,0",
                    "",
                    "a",
                    "0,",
                    "999999999",
                    "\u0663",
                    ",".join(map(str, range(8))),
                )
            ),
        ]
    out, err = io.StringIO(), io.StringIO()

    def run() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                return hccl_tools.main(words)
            except SystemExit as error:
                return int(error.code or 0)

    def check(code: int) -> str | None:
        written = list(folder.glob("hccl_*.json"))
        if code == 0:
            return (
                None
                if len(written) == 1 and read_table(written[0]).world_size
                else f"exit code 0, files {written}"
            )
        if code != 2 or written:
            return f"exit code {code}, files {written}"
        return (
            None
            if 0 < len(err.getvalue()) < 3000
            else f"a message of {len(err.getvalue())} characters"
        )

    return Case(
        kind="hccl_tools",
        run=run,
        names=("",),
        check=check,
        about=str([word[:40] for word in words]),
    )


MAKERS = {
    "table": _make_table,
    "table file": _make_file,
    "merge": _make_merge,
    "hccn.conf": _make_hccn,
    "environment": lambda dice, prepared, folder: (
        _make_nodes(dice) if dice.chance(0.1) else _make_environment(dice, prepared, folder)
    ),
    "range": _make_range,
    "hosts": _make_hosts,
    "hccl_tools": _make_tools,
}
assert set(MAKERS) == set(CLASSES)

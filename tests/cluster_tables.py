"""Rank tables and address files made from numbers, in the forms that vendors' pages show."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Devices = list[dict[str, str]]


def devices(addresses: Sequence[str], *, first_rank: int | None = None) -> Devices:
    """Device 0, 1, ... with its address, and with ranks from ``first_rank`` on if given."""
    return [
        {"device_id": str(number), "device_ip": address}
        | ({} if first_rank is None else {"rank_id": str(first_rank + number)})
        for number, address in enumerate(addresses)
    ]


def table_1(*servers: tuple[str, Devices], **more: str) -> dict[str, Any]:
    """A table of version 1.0. more: keys of each server."""
    return {
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": [{"server_id": name, "device": own, **more} for name, own in servers],
        "status": "completed",
    }


def table_0(job: str, *pods: tuple[str, str, Devices]) -> dict[str, Any]:
    """ModelArts' table of version 0, its pods in the order given."""
    listed = [{"pod_name": pod, "server_id": server, "devices": own} for pod, server, own in pods]
    count = sum(len(own) for _, _, own in pods)
    group = {"group_name": job, "device_count": str(count), "instance_count": str(len(pods))}
    group["instance_list"] = listed
    return {"status": "completed", "group_count": "1", "group_list": [group]}


def table_2() -> dict[str, Any]:
    """HCCL's table of version 2.0 (Ascend 950): two network instances of two ranks, numbers in place of strings."""

    def address(layer: int, last: int, *ports: str, **more: str) -> dict[str, Any]:
        return {"addr_type": "IPV4", "addr": f"172.16.{layer}.{last}", "ports": list(ports), **more}

    def level(layer: int, instance: str, kind: str, *addresses: dict[str, Any]) -> dict[str, Any]:
        found = {"net_layer": layer, "net_instance_id": instance, "net_type": kind, "net_attr": ""}
        return found | {"rank_addr_list": list(addresses)}

    def levels(pod: int, local: int) -> list[dict[str, Any]]:
        first = address(pod, 15 + 18 * local, "0/4", "0/5", plane_id=f"plane{2 * local}")
        second = address(pod, 5 + 18 * local, "1/5", "1/6", plane_id=f"plane{2 * local + 1}")
        near = level(0, f"az0-rack0-pod{pod}", "TOPO_FILE_DESC", address(pod, 10 + 18 * local, "1/0"))
        return [near, level(1, "az0", "CLOS", first, second)]

    ranks = [
        {
            "rank_id": rank, "local_id": rank % 2, "device_id": rank % 2,
            "device_port": 16666 + rank, "host_port": 60001 + rank,
            "level_list": levels(*divmod(rank, 2)),
        }
        for rank in range(4)
    ]  # fmt: skip
    return {"status": "completed", "version": "2.0", "rank_count": 4, "rank_list": ranks}


def tutorial_servers(servers: int, count: int = 8, first_device: int = 0) -> list[tuple[str, Devices]]:
    """Server s is 10.155.111.(140+s); rank s * count + d is its device first_device + d, with four
    networks of devices, as in MindFormers' tutorial.
    """
    found = []
    for server in range(servers):
        addresses = [f"192.{d % 4 + 1}.27.{6 + 2 * server + d // 4}" for d in range(count)]
        own = devices(addresses, first_rank=server * count)
        for number, device in enumerate(own):
            device["device_id"] = str(first_device + number)
        found.append((f"10.155.111.{140 + server}", own))
    return found


def write_tutorial_table(path: Path, *, servers: int = 4, devices: int = 8, first_device: int = 0) -> Path:
    """Version 1.0, of ``tutorial_servers``."""
    table = table_1(*tutorial_servers(servers, devices, first_device), host_nic_ip="reserve")
    path.write_text(json.dumps(table, indent=1))
    return path


_PODS = [
    ("10.19.1.142", "1.65.251 2.119.60 3.23.207 4.186.90 1.72.194 2.38.84 3.199.174 4.178.32"),
    ("10.19.1.79", "1.194.107 2.151.252 3.151.103 4.42.97 1.231.84 2.33.15 3.129.242 4.33.172"),
]
"""Servers and addresses of pods 0 and 1, as in the tests of davincirunsdk (Huawei's launcher in
ModelArts' images, k8s_jobstart_hccl.json).
"""


def sample_tables() -> dict[str, dict[str, Any]]:
    """Return one table of each form.

    Sources: MindFormers' README (1x8), merge_hccl's in MindSpore's model_zoo (2x8), davincirunsdk (version 0 and the
    table that it makes of it), pages of MindCluster (1.2, and a table that is not filled yet) and of HCCL (2.0).
    """
    pods = [(server, [f"192.{part}" for part in parts.split()]) for server, parts in _PODS]
    generated = table_1(*((name, devices(own, first_rank=8 * n)) for n, (name, own) in enumerate(pods)))
    unordered = [(f"fake-job-pod-{n}", name, devices(own)) for n, (name, own) in enumerate(pods)]
    super_pod = devices([f"10.0.{2 + d % 2}.{41 + d // 2}" for d in range(16)], first_rank=0)
    for number, device in enumerate(super_pod):
        device["super_device_id"] = str(113246208 + 262144 * (number // 2) + 65537 * (number % 2))
    merged = []
    for n in range(2):
        own = [f"192.100.{61 + d % 4}.{14 + 2 * n + d // 4}" for d in range(8)]
        merged.append((f"90.90.66.{64 + 2 * n}", devices(own, first_rank=8 * n)))
    return {
        "v0_modelarts_cce_1x1": table_0("job-arm-d", ("job-mindspore-0", "192.168.6.101", devices(["192.1.244.169"]))),
        "v0_modelarts_k8s_jobstart_2x8_unordered": table_0("fake-job", *reversed(unordered)),
        "v1.0_merge_hccl_2x8": table_1(*merged, host_nic_ip="reserve"),
        "v1.0_mindformers_1x8": table_1(*tutorial_servers(1), host_nic_ip="reserve"),
        "v1.0_modelarts_generated_2x8_nohostnic": generated,
        "v1.2_a3_superpod_1x16": table_1(("10.0.0.1", super_pod), container_ip="192.168.247.11")
        | {"version": "1.2", "super_pod_list": [{"super_pod_id": "1", "server_list": [{"server_id": "10.0.0.1"}]}]},
        "v2.0_rank_list_950_2x2_ipv4": table_2(),
        "status_initializing": {"status": "initializing"},
    }


def write_samples(folder: Path) -> None:
    """Write these tables, and files hccn.conf as those of PaddleDetection and HIXL."""
    for name, table in sample_tables().items():
        (folder / f"{name}.json").write_text(json.dumps(table, indent=2))
    eight = [f"192.168.{10 * (d % 4 + 1)}.{21 + d // 4}" for d in range(8)]
    mask = "255.255.255.0"
    for name, lines in {
        "hccn_paddle_8p": [f"address_{d}={one}\nnetmask_{d}={mask}" for d, one in enumerate(eight)],
        "hccn_hixl_gap": ["address_1=192.168.1.11"],
        "hccn_hixl_mixed": ["address_0=192.168.1.10", "IPv6address_0=121::101"],
    }.items():
        (folder / f"{name}.conf").write_text("\n".join(lines) + "\n")

"""Rank tables made from numbers: the seed tutorial's 4 servers of 8 devices, and others of its
kind.
"""

import json
from pathlib import Path


def write_tutorial_table(
    path: Path, *, servers: int = 4, devices: int = 8, first_device: int = 0
) -> Path:
    """Version 1.0. Server s is 10.155.111.(140+s); rank s * devices + d is its device first_device
    + d, with four networks of devices.
    """
    server_list = [
        {
            "server_id": f"10.155.111.{140 + server}",
            "device": [
                {
                    "device_id": str(first_device + device),
                    "device_ip": f"192.{device % 4 + 1}.27.{6 + 2 * server + device // 4}",
                    "rank_id": str(server * devices + device),
                }
                for device in range(devices)
            ],
            "host_nic_ip": "reserve",
        }
        for server in range(servers)
    ]
    table = {
        "version": "1.0",
        "server_count": str(servers),
        "server_list": server_list,
        "status": "completed",
    }
    path.write_text(json.dumps(table, indent=1))
    return path

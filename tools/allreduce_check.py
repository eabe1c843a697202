"""Run one rank of the doctor's all-reduce.

It reports each stage to its log, sums a tensor over all ranks and checks the sum.

tools/doctor.py starts it, once a rank, under the variables that a launched rank gets (RANK,
RANK_SIZE, MASTER_ADDR, ...); for the check itself run

    python tools/doctor.py --help

Exit codes: 0 the sum is right, 1 it is not, 2 an argument is at fault.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from common.program import start

    start(__file__)

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from common.doctor.allreduce import MARK
from common.errors import ConfigError
from common.flags import flag
from common.processes.addresses import is_loopback, listen
from common.processes.heartbeat import start_heartbeat
from common.program import command

START = time.monotonic()
ELEMENTS = 4 * 2**20  # float32: 16 MiB
REPEATS = 3


Reduce = Callable[[float], tuple[float, float, float]]
"""Fills a tensor with a value and sums it over the ranks: the least and the greatest element of the
sum, and the seconds it took.
"""


@dataclass(kw_only=True)
class Request:
    backend: Literal["torch", "mindspore"] = flag(
        "the framework whose collectives are tried", required=True, positional=True
    )
    device: Literal["cpu", "cuda", "npu"] = flag(
        "the kind of device", required=True, positional=True
    )
    seconds: float = flag("how long to wait for the other ranks", required=True, positional=True)

    def __post_init__(self) -> None:
        if "RANK_SIZE" not in os.environ:
            raise ConfigError(
                "RANK_SIZE is not set: this is one rank of tools/doctor.py, which sets it; run that"
            )


@command(Request)
def main(request: Request) -> int:
    backend, device, seconds = request.backend, request.device, request.seconds
    start_heartbeat()
    report("started")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ["RANK_SIZE"])
    reduce = {"torch": join_torch, "mindspore": join_mindspore}[backend](
        device, seconds, rank, world
    )
    if reduce is None:  # MindSpore's scheduler
        return 0
    report("group made")
    ready = time.monotonic() - START
    expected = world * (world + 1) / 2
    times = []
    for _ in range(1 + REPEATS):
        least, most, took = reduce(float(rank + 1))
        times.append(took)
        if (least, most) != (expected, expected):
            report("wrong sum", found=least if least != expected else most, expected=expected)
            return 1
    report(
        "reduced",
        first=times[0],
        seconds=sorted(times[1:])[REPEATS // 2],
        ready=ready,
        bytes=4 * ELEMENTS,
    )
    # others may still need this rank's connections (MindSpore's do); the doctor ends all of them
    time.sleep(seconds)
    return 0


def report(stage: str, **more: Any) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps({'stage': stage, **more})}\n")
    sys.stdout.flush()


def join_torch(device: str, seconds: float, rank: int, world: int) -> Reduce:
    import torch
    import torch.distributed as dist

    place = torch.device("cpu")
    if device != "cpu":
        if device == "npu":
            import torch_npu  # noqa: F401
        place = torch.device(device, int(os.environ["DEVICE_ID"]))
        getattr(torch, device).set_device(place)
    torch.empty(1, device=place)
    report("imported")
    limit = timedelta(seconds=seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # at a loopback address where all ranks are on this host
    listener = listen(address, port).detach() if rank == 0 and is_loopback(address) else None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        world,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    report("connected")
    library = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device]
    dist.init_process_group(library, store=store, rank=rank, world_size=world, timeout=limit)

    def reduce(value: float) -> tuple[float, float, float]:
        tensor = torch.full((ELEMENTS,), value, device=place)
        tensor[:1].item()  # waits for the device
        start = time.monotonic()
        dist.all_reduce(tensor)
        tensor[:1].item()
        took = time.monotonic() - start
        return tensor.min().item(), tensor.max().item(), took

    return reduce


def join_mindspore(device: str, seconds: float, rank: int, world: int) -> Reduce | None:
    os.environ.setdefault("GLOG_v", "3")  # errors; without it hundreds of lines about its network
    import mindspore
    import numpy as np
    from mindspore import communication, ops

    os.environ.setdefault("MS_TOPO_TIMEOUT", str(int(seconds)))
    if device == "npu":
        mindspore.set_device("Ascend", int(os.environ["DEVICE_ID"]))
    else:
        mindspore.set_device("CPU")
    report("imported")
    if world > 1:
        communication.init()  # the scheduler stays in here until the ranks are done
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        return None
    all_reduce = ops.AllReduce() if world > 1 else lambda tensor: tensor

    def reduce(value: float) -> tuple[float, float, float]:
        tensor = mindspore.Tensor(np.full(ELEMENTS, value, np.float32))
        start = time.monotonic()
        result = all_reduce(tensor).asnumpy()
        took = time.monotonic() - start
        return float(result.min()), float(result.max()), took

    return reduce

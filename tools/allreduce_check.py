"""Run one rank of the doctor's all-reduce.

It reports each stage to its log, sums a tensor over all ranks and checks the sum.

tools/doctor.py starts it, once a rank, under the variables that a launched rank gets (RANK,
RANK_SIZE, MASTER_ADDR, ...); for the check itself run

    python tools/doctor.py --help

Exit codes: 0 the sum is right, 1 it is not, 2 an argument is at fault.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np

from common.doctor.allreduce import FACTS, MARK, STAGES
from common.errors import ConfigError
from common.flags import flag
from common.processes.addresses import is_loopback, listen
from common.processes.heartbeat import beat, start_heartbeat
from common.program import command
from common.structured_files import parse_json

START = time.monotonic()
ELEMENTS = 4 * 2**20  # float32: 16 MiB
REPEATS = 3
FACTS_BYTES = 2048
LEAVE_SECONDS = 1.0


@dataclass(kw_only=True)
class Request:
    backend: Literal["torch", "mindspore"] = flag(
        "the framework whose collectives are tried", required=True, positional=True
    )
    device: Literal["cpu", "cuda", "npu"] = flag("the kind of device", required=True, positional=True)
    seconds: float = flag("how long to wait for the other ranks", required=True, positional=True)

    def __post_init__(self) -> None:
        if "RANK_SIZE" not in os.environ:
            raise ConfigError("RANK_SIZE is not set: this is one rank of tools/doctor.py, which sets it; run that")


@command(Request)
def main(request: Request) -> int:
    backend, device, seconds = request.backend, request.device, request.seconds
    start_heartbeat()
    report("started")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ["RANK_SIZE"])
    join = TorchNetwork if backend == "torch" else MindSporeNetwork
    network = join(device, seconds, rank, world)
    report("group made")
    ready = time.monotonic() - START
    expected = world * (world + 1) / 2
    times = []
    for _ in range(1 + REPEATS):
        least, most, took = network.reduce(float(rank + 1))
        times.append(took)
        if (least, most) != (expected, expected):
            report("wrong sum", found=least if least != expected else most, expected=expected)
            return 1
    speed = {"first": times[0], "seconds": sorted(times[1:])[REPEATS // 2], "ready": ready, "bytes": 4 * ELEMENTS}
    facts = exchange_facts(network, rank, world, speed)
    report("reduced", facts=facts if os.environ.get("LOCAL_RANK", "0") == "0" else [])
    network.total([0.0])
    time.sleep(LEAVE_SECONDS)  # others may still need this rank's connections
    os._exit(0)  # MindSpore's exit handlers would wait for its scheduler


def exchange_facts(
    network: "TorchNetwork | MindSporeNetwork", rank: int, world: int, speed: dict[str, float]
) -> list[dict[str, Any]]:
    """Return the facts of all ranks, by rank, with their clocks at one moment.

    Letters travel as numbers, each rank's in a row of its own, so that a sum is a list.
    """
    network.total([0.0])  # all leave it at about the same time
    facts = {"time": time.time(), "speed": speed, **parse_json(os.environ.get(FACTS, "{}"))}
    letters = json.dumps(facts).encode()[:FACTS_BYTES]
    rows = [0.0] * (FACTS_BYTES * world)
    rows[FACTS_BYTES * rank : FACTS_BYTES * rank + len(letters)] = map(float, letters)
    told = bytes(map(int, network.total(rows)))
    parts = [told[at : at + FACTS_BYTES] for at in range(0, len(told), FACTS_BYTES)]
    return [parse_json(part.rstrip(b"\0")) for part in parts]


def report(stage: str, **more: Any) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps({'stage': stage, **more})}\n")
    sys.stdout.flush()
    if stage in STAGES:
        beat(STAGES.index(stage), stage)


class TorchNetwork:
    def __init__(self, device: str, seconds: float, rank: int, world: int) -> None:
        import torch
        import torch.distributed as dist

        self._place = torch.device("cpu")
        if device != "cpu":
            if device == "npu":
                import torch_npu  # noqa: F401
            self._place = torch.device(device, int(os.environ["DEVICE_ID"]))
            getattr(torch, device).set_device(self._place)
        torch.empty(1, device=self._place)
        report("imported")
        limit = timedelta(seconds=seconds)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # at a loopback address where all ranks are on this host
        listener = listen(address, port).detach() if rank == 0 and is_loopback(address) else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, world, is_master=rank == 0, timeout=limit, wait_for_workers=False, master_listen_fd=listener
        )
        report("connected")
        library = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device]
        dist.init_process_group(library, store=store, rank=rank, world_size=world, timeout=limit)
        self._torch, self._all_reduce = torch, dist.all_reduce

    def reduce(self, value: float) -> tuple[float, float, float]:
        """Fill a tensor with a value and sum it over the ranks.

        Returns the least and the greatest element of the sum, and the seconds it took.
        """
        tensor = self._torch.full((ELEMENTS,), value, device=self._place)
        tensor[:1].item()  # waits for the device
        start = time.monotonic()
        self._all_reduce(tensor)
        tensor[:1].item()
        took = time.monotonic() - start
        return tensor.min().item(), tensor.max().item(), took

    def total(self, numbers: list[float]) -> list[float]:
        """Sum numbers over the ranks, in float32."""
        tensor = self._torch.tensor(numbers, device=self._place)
        self._all_reduce(tensor)
        return list(tensor.tolist())


class MindSporeNetwork:
    def __init__(self, device: str, seconds: float, rank: int, world: int) -> None:
        os.environ.setdefault("GLOG_v", "3")  # errors; without it hundreds of lines of its network
        import mindspore
        from mindspore import communication, ops

        os.environ.setdefault("MS_TOPO_TIMEOUT", str(int(seconds)))
        if device == "npu":
            mindspore.set_device("Ascend", int(os.environ["DEVICE_ID"]))
        else:
            mindspore.set_device("CPU")
        report("imported")
        if world > 1:
            communication.init()
        self._tensor = mindspore.Tensor
        self._all_reduce = ops.AllReduce() if world > 1 else lambda tensor: tensor

    def reduce(self, value: float) -> tuple[float, float, float]:
        tensor = self._tensor(np.full(ELEMENTS, value, np.float32))
        start = time.monotonic()
        result = self._all_reduce(tensor).asnumpy()
        took = time.monotonic() - start
        return float(result.min()), float(result.max()), took

    def total(self, numbers: list[float]) -> list[float]:
        return list(self._all_reduce(self._tensor(np.array(numbers, np.float32))).asnumpy())

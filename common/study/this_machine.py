"""Measured peak rates of this CPU, in the planner's form of a device.

They are good for the order of layouts by time, and not for the time itself: a rank has its share of
all cores, and the time that starting a message takes is not counted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.accelerators import Accelerator, find_accelerator
from common.study.results import Machine

_SIDE = 768
_BYTES = 1 << 25
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that all cores of this machine reach together, per second."""

    flops: float
    """Operations of products of float32 matrices."""
    bandwidth: float
    """Bytes of memory read and written."""
    messages: float
    """Bytes through a socket of this host, from one thread to another."""


def measure_rates() -> Rates:
    """Take a tenth of a second to measure this machine."""
    matrix = np.ones((_SIDE, _SIDE), dtype=np.float32)
    source = np.ones(_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    return Rates(
        flops=2 * _SIDE**3 / _least_seconds(lambda: matrix @ matrix),
        bandwidth=2 * _BYTES / _least_seconds(lambda: np.copyto(target, source)),
        messages=_BYTES / _least_seconds(lambda: _send(bytes(_BYTES))),
    )


def device_here(
    machine: Machine, ranks: int, rates: Rates, threads: int | None = None
) -> Accelerator | None:
    """Return the device of each of ``ranks`` ranks: the accelerator that is there, else a share of
    the processor. None for an accelerator without known figures.

    threads: how many a rank computes with, None for its share of the cores (runtime.threads).
    """
    if machine.accelerators:
        return find_accelerator(machine.accelerators[0])
    share = min(1 / ranks, (threads or machine.cores) / machine.cores)
    return Accelerator(
        name=f"{machine.cpu}, {machine.cores} cores",
        pattern="",
        half_flops=rates.flops * share,
        single_flops=rates.flops * share,
        bandwidth=rates.bandwidth * share,
        memory=machine.memory // ranks,
        source="measured at the start of the study",
        link=rates.messages / ranks,
        network=rates.messages / ranks,
        server_devices=ranks,
        link_source="measured at the start of the study",
    )


def _least_seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def _send(data: bytes) -> None:
    """Send all of it to a thread that reads it."""
    reading, writing = socket.socketpair()
    with reading, writing:
        thread = threading.Thread(target=_read, args=(reading, len(data)))
        thread.start()
        writing.sendall(data)
        thread.join()


def _read(stream: socket.socket, size: int) -> None:
    while size > 0 and (found := stream.recv(1 << 20)):
        size -= len(found)

"""Device, time of a step, and memory that each rank of a run used, in ``memory.json`` of the run
folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from common.device import Device
from common.files import atomic_write
from common.parallel.world import WorldBase

MEMORY_FILE = "memory.json"


def record_memory(
    folder: Path,
    world: WorldBase,
    device: Device,
    *,
    state_bytes: int,
    resident_at_start: int,
    step_seconds: float | None,
) -> None:
    """Gather the bytes of all ranks, and write them on rank 0, one object a rank.

    ``peak`` is the maximum held by the device, or on a CPU by the process. ``at_start`` is the
    memory of a process on a CPU before the model was created, else 0. ``state`` counts the weights
    and the optimizer's state. step_seconds: median time of a full step, if one was measured.
    Every rank calls it after the last step. Raises StorageError.
    """
    ranks = world.gather(
        {
            "peak": device.peak_memory(),
            "at_start": resident_at_start if device.kind == "cpu" else 0,
            "state": state_bytes,
        }
    )
    if world.rank == 0:
        with atomic_write(folder / MEMORY_FILE, "w") as file:
            found = {"device": device.kind, "name": device.name, "step_seconds": step_seconds}
            json.dump(found | {"ranks": ranks}, file, indent=1)

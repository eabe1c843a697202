"""Counter of what makes the host wait for an accelerator, or talk to other hosts, in each step of a training.

What the host does on purpose, to read the results of the step before, is not counted: it is a copy into pinned memory
and an event.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_gpt2.deepspeed.engine import DeepSpeedEngine
from torch_gpt2.device import TorchDevice
from torch_gpt2.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
"""Operators that return a number, or a shape that follows from numbers."""


class HostWaits(TorchDispatchMode):
    """Counts by step, before the first as step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Counter[str]] = [Counter()]
        self._pinned: set[int] = set()

    def pinned(self, tensor: Tensor) -> Tensor:
        """Take note of memory that the device reads by itself."""
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        name = function.overloadpacket.__name__
        tensors = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        on_device = any(each.device.type != "cpu" for each in tensors)
        if options.get("pin_memory"):
            self.pinned(result)
        if name in READS and on_device:
            self._note(f"{name} waits for the device")
        elif name == "lift_fresh" and on_device:
            self._note("a number of the host becomes a tensor of the device")
        elif name in ("copy_", "_to_copy"):
            self._copy(name, arguments, options, result)
        elif function.namespace == "c10d" and not on_device and tensors:
            self._note(f"{name} between hosts")
        return result

    def _copy(self, name: str, arguments: Any, options: Any, target: Tensor) -> None:
        source = arguments[1 if name == "copy_" else 0]
        if source.device.type == target.device.type:
            return
        where = f"{name} {source.device.type} to {target.device.type}"
        host = source if source.device.type == "cpu" else target
        if not (options.get("non_blocking") or (name == "copy_" and arguments[2:] == (True,))):
            self._note(f"{where} is blocking")
        elif host.untyped_storage().data_ptr() not in self._pinned:
            self._note(f"{where} of memory that is not pinned")

    def _note(self, what: str) -> None:
        frames = [
            f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if Path(frame.filename).is_relative_to(ROOT)
            and not {"tests", "site-packages"} & set(Path(frame.filename).parts)
        ]
        self.steps[-1][f"{what} ({frames[-1] if frames else 'torch'})"] += 1


@contextmanager
def counted() -> Iterator[HostWaits]:
    """Count in the trainings of this context. Step n begins with its call of the engine."""
    waits, pin = HostWaits(), TorchDevice.pin

    def counted_step(step: Any) -> Any:
        def begin(*arguments: Any) -> Any:
            waits.steps.append(Counter())
            return step(*arguments)

        return begin

    def noted_pin(self: TorchDevice, tensor: Tensor) -> Tensor:
        return waits.pinned(pin(self, tensor))

    with (
        patch.object(Engine, "_train_step", counted_step(Engine._train_step)),
        patch.object(DeepSpeedEngine, "_train_step", counted_step(DeepSpeedEngine._train_step)),
        patch.object(TorchDevice, "pin", noted_pin),
        waits,
    ):
        yield waits


@contextmanager
def watch(note: Path) -> Iterator[None]:
    """Write the counts of each step as JSON."""
    with counted() as waits:
        yield
    note.write_text(json.dumps(waits.steps))

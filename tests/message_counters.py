"""Counters of a rank's messages while it trains: gathered parameters, and the buffers that a pipeline receives into."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from torch_gpt2.parallel.private_api import FrugalStage


@contextmanager
def watch(note: Path) -> Iterator[None]:
    """Writes {"gathers": calls by ZeRO, "received": the most buffers there were during a pass}."""
    counts = {"gathers": 0, "received": 0}
    alive: set[int] = set()

    def gather(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        counts["gathers"] += 1
        return original(*args, **options)

    def receive(original: Callable[..., Any], *args: Any) -> Any:
        operations = original(*args)
        for operation in operations:
            buffer = operation.tensor
            alive.add(id(buffer))
            weakref.finalize(buffer, alive.discard, id(buffer))
        return operations

    def go(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        counts["received"] = max(counts["received"], len(alive))
        return original(*args, **options)

    with ExitStack() as patches:
        for owner, name, watcher in (
            (DefaultAllGather, "__call__", gather),
            (FrugalStage, "_get_recv_ops", receive),
            (FrugalStage, "forward_one_chunk", go),
            (FrugalStage, "backward_one_chunk", go),
        ):
            patches.enter_context(_watched(owner, name, watcher))
        yield
    note.write_text(json.dumps(counts))


def _watched(owner: Any, name: str, watcher: Callable[..., Any]) -> Any:
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **options: watcher(original, *args, **options))

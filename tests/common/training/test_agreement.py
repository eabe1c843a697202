"""Every host compares the checksums of the checkpoint that it reads, once, and a fault on one rank
ends all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.errors import CheckpointError
from common.training import opened_checkpoint
from common.training.opened_checkpoint import Checkpoint
from tests.common.parallel.test_world import Told

Check = Callable[..., str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    manifest = {"state": {"step": 5}, "engine": {}, "config": {}}
    files = {"model.safetensors": {"w": np.ones(3, np.float32)}}
    made = CheckpointWriter(tmp_path, asynchronous=False)
    return made.save(Snapshot(files=files, manifest=manifest))


@pytest.fixture
def check(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """What a rank says of the checkpoint. hosts: a letter for each rank; fault: another rank's."""

    def of(hosts: str, rank: int, fault: str | None = None) -> str:
        def gathered(own: Any) -> list[Any]:
            if own == hosts[rank]:
                return list(hosts)
            return [own, fault] if own is None else [own] * len(hosts)

        monkeypatch.setattr(opened_checkpoint, "_view_of", lambda path: hosts[rank])
        world = Told(rank=rank, size=len(hosts), answer=gathered)
        try:
            opened_checkpoint.check_everywhere(world, Checkpoint(checkpoint))
        except CheckpointError as error:
            return str(error)
        return ""

    return of


@pytest.mark.parametrize(("hosts", "readers"), [("aabb", [2]), ("abab", [1]), ("abcd", [1, 2, 3])])
def test_one_rank_of_each_host_reads(checkpoint: Path, check: Check, hosts: str, readers: Any) -> None:
    """Rank 0 has read its own before. A file is changed, so that who reads it says so."""
    path = checkpoint / "model.safetensors"
    assert [check(hosts, rank) for rank in range(4)] == [""] * 4
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    said = [check(hosts, rank) for rank in range(4)]
    changed = f"{path}: its bytes have changed since it was written (CRC-32); use another checkpoint"
    wanted = [f"rank {rank}: {changed}" if rank in readers else "" for rank in range(4)]
    assert said == wanted
    assert check(hosts, 0, fault=said[readers[0]]) == said[readers[0]]


def test_processes_of_one_host_that_read_the_same_files_see_the_same(checkpoint: Path) -> None:
    before = opened_checkpoint._view_of(checkpoint)
    assert opened_checkpoint._view_of(checkpoint) == before
    copy = checkpoint.parent / "copy"
    copy.write_bytes((checkpoint / "model.safetensors").read_bytes())
    copy.replace(checkpoint / "model.safetensors")
    assert opened_checkpoint._view_of(checkpoint) != before, "as a file mounted over another"
    assert opened_checkpoint._view_of(copy) != opened_checkpoint._view_of(copy), "absent files are nobody's"

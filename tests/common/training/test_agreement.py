"""Every host compares the checksums of the checkpoint that it reads, once, and a fault on one rank
ends all.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.errors import CheckpointError, ConfigError
from common.parallel.world import WorldBase
from common.training import agreement
from common.training.opened_checkpoint import Checkpoint

T = TypeVar("T")
HERE = threading.local()


@dataclass(frozen=True, kw_only=True)
class SingleProcessDataParallel(WorldBase):
    """Ranks that are threads of this process."""

    barrier: threading.Barrier
    values: list[Any]

    def gather(self, value: T) -> list[T]:
        self.values[self.rank] = value
        self.barrier.wait(10)
        found = list(self.values)
        self.barrier.wait(10)
        return found


def check(checkpoint: Path | None, ranks: int) -> list[BaseException | None]:
    """Errors that check_everywhere raised on each rank."""
    shared = {"barrier": threading.Barrier(ranks), "values": [None] * ranks}

    def one(rank: int) -> BaseException | None:
        HERE.rank = rank
        world = SingleProcessDataParallel(rank=rank, size=ranks, **shared)  # type: ignore[arg-type]
        try:
            agreement.check_everywhere(world, checkpoint and Checkpoint(checkpoint))
        except (CheckpointError, ConfigError) as error:
            return error
        return None

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    manifest = {"state": {"step": 5}, "engine": {}, "config": {}}
    files = {
        "model.safetensors": {"w": np.ones(3, np.float32)},
        "optimizer.safetensors": {"w.exp_avg": np.ones(3, np.float32)},
    }
    return CheckpointWriter(tmp_path, asynchronous=False).save(
        Snapshot(files=files, manifest=manifest)
    )


@pytest.mark.parametrize(
    ("hosts", "readers"), [("aaaa", []), ("aabb", [2]), ("abab", [1]), ("abcd", [1, 2, 3])]
)
def test_one_rank_of_each_host_reads(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, readers: list[int]
) -> None:
    seen: list[int] = []
    read = agreement.read_manifest
    monkeypatch.setattr(agreement, "_view_of", lambda path: hosts[HERE.rank])
    monkeypatch.setattr(
        agreement, "read_manifest", lambda path: seen.append(HERE.rank) or read(path)
    )
    assert check(checkpoint, 4) == [None] * 4
    assert sorted(seen) == readers


def test_other_bytes_on_one_host_end_all_ranks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host's file is of the right size, and has another bit; rank 0 has compared its own
    before.
    """
    path = checkpoint / "optimizer.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 64
    path.write_bytes(changed)
    monkeypatch.setattr(agreement, "_view_of", lambda path: "aab"[HERE.rank])
    failures = check(checkpoint, 3)
    assert [type(failure) for failure in failures] == [CheckpointError] * 3
    assert {str(failure) for failure in failures} == {
        f"rank 2: {path}: its bytes have changed since it was written (CRC-32); use another"
        " checkpoint"
    }


def test_processes_of_one_host_that_read_the_same_files_see_the_same(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = agreement._view_of(checkpoint)
    assert agreement._view_of(checkpoint) == before
    (tmp_path / "copy").write_bytes((checkpoint / "optimizer.safetensors").read_bytes())
    (tmp_path / "copy").replace(checkpoint / "optimizer.safetensors")
    assert agreement._view_of(checkpoint) != before, "as a file mounted over another"
    assert agreement._view_of(tmp_path / "absent") != agreement._view_of(tmp_path / "absent")
    assert check(None, 2) == [None] * 2

"""Folders whole or absent: kill -9 and a full disk at any moment leave a checkpoint that loads."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file

import common.checkpoint.writer as module
from common.checkpoint.folders import find_checkpoint, whole_checkpoints
from common.checkpoint.manifest import read_manifest
from common.checkpoint.writer import CheckpointWriter, Part, Snapshot
from common.errors import StorageError
from common.weights.pieces import open_stored
from tests.tiny import tiny_config

FORK = multiprocessing.get_context("fork")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
IT_WAS_FULL = r"step_00000010.*No space left on device.*earlier checkpoints are whole"


CONFIG = {"model": tiny_config().model.model_dump()}


def manifest(step: int) -> dict[str, Any]:
    return {"state": {"step": step}, "engine": {}, "config": CONFIG}


def snapshot(step: int, size: int = 10) -> Snapshot:
    return Snapshot(files={"model.safetensors": {"w": np.full(size, step, np.float32)}}, manifest=manifest(step))


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in whole_checkpoints(folder)]


def assert_loads(folder: Path) -> int:
    found = find_checkpoint(folder)
    assert found is not None
    step: int = read_manifest(found)["state"]["step"]
    assert (load_file(found / "model.safetensors")["w"] == step).all()
    assert found.name == f"step_{step:08d}"
    return step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_find_and_keep(tmp_path: Path, asynchronous: bool) -> None:
    writer = CheckpointWriter(tmp_path, keep=2, asynchronous=asynchronous)
    assert find_checkpoint(tmp_path) is None
    for step in (5, 10, 15):
        writer.save(snapshot(step))
    writer.wait()
    last = tmp_path / "step_00000015"
    assert steps(tmp_path) == [10, 15]
    assert (tmp_path / "latest").read_text() == "step_00000015\n"
    assert len(list(tmp_path.iterdir())) == 3
    for where in (tmp_path, tmp_path / "latest", last):
        assert find_checkpoint(where) == last
    (tmp_path / "latest").write_text("step_00000099\n")
    assert find_checkpoint(tmp_path) == last
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == last


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: Any, asynchronous: bool) -> None:
    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=asynchronous)
    writer.save(snapshot(5))
    writer.wait()
    with monkeypatch.context() as full, pytest.raises(StorageError, match=IT_WAS_FULL):
        full.setattr(module, "write_manifest", Mock(side_effect=FULL))
        writer.save(snapshot(10))
        writer.wait()
    assert assert_loads(tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005"]
    writer.save(snapshot(15))
    writer.wait()
    assert assert_loads(tmp_path) == 15 and steps(tmp_path) == [15]


def test_a_step_saved_again_replaces_the_old_folder(tmp_path: Path) -> None:
    """Going back never prunes what was just saved."""
    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=False)
    writer.save(snapshot(100))
    for size in (3, 4):
        writer.save(snapshot(50, size=size))  # a run resumed from before step 50
    assert assert_loads(tmp_path) == 50
    assert len(load_file(tmp_path / "step_00000050" / "model.safetensors")["w"]) == 4


def save_forever(folder: Path, step: int, told: Any) -> None:
    writer = CheckpointWriter(folder, keep=2)
    while True:
        step += 1
        writer.save(snapshot(step, size=300_000))
        told.send(step)


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.campaign)])
def test_kill_nine_while_saving(tmp_path: Path, kills: int) -> None:
    moments, step = random.Random(0), 0
    for _ in range(kills):
        saved, told = FORK.Pipe(duplex=False)
        child = FORK.Process(target=save_forever, args=(tmp_path, step, told), daemon=True)
        child.start()
        told.close()  # so that a child that fails ends the wait
        for _ in range(3):  # two saves are surely whole when the third begins
            saved.recv()
        time.sleep(moments.uniform(0.0, 0.05))
        child.kill()
        child.join()
        found = assert_loads(tmp_path)
        assert found > step
        step = found


@pytest.mark.parametrize("moment", ["before the new one is in place", "after"])
def test_killed_while_replacing_a_checkpoint(tmp_path: Path, moment: str) -> None:
    """A step saved again moves the old folder away first: whatever the moment, one of the two is there afterwards."""
    CheckpointWriter(tmp_path, asynchronous=False).save(snapshot(5))
    kept = tmp_path / ".step_00000005.replaced.tmp"
    if moment == "after":
        shutil.copytree(tmp_path / "step_00000005", kept)
    else:
        (tmp_path / "step_00000005").rename(kept)
    CheckpointWriter(tmp_path)
    assert assert_loads(tmp_path) == 5
    assert not kept.exists()


def test_a_failed_replacement_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    writer.save(snapshot(5))
    rename = os.replace

    def fail_the_second(source: Path, target: Path) -> None:
        if Path(source).name == ".step_00000005.tmp":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(module.os, "replace", fail_the_second)
    with pytest.raises(StorageError, match="Input/output error"):
        writer.save(snapshot(5))
    assert assert_loads(tmp_path) == 5


def test_a_failing_run_waits_for_its_last_save(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the run"), CheckpointWriter(tmp_path) as writer:
        writer.save(snapshot(5, size=2_000_000))
        raise RuntimeError("the run")
    assert assert_loads(tmp_path) == 5


# ---- parts of two ranks ----


def part(step: int, rank: int) -> Snapshot:
    """Rank 0 has the first row of three, rank 1 the others."""
    rows = [[0, 1], [1, 3]][rank]
    tensors = {"w": np.full((rows[1] - rows[0], 2), step, np.float32)}
    own = Part(rank=rank, ranks=2, rectangles={"w": [rows, [0, 2]]})
    return Snapshot(files={"model.safetensors": tensors}, manifest=manifest(step), part=own)


def save_parts(folder: Path, step: int) -> None:
    """Prune as the next start would, after what it finds."""
    writers = [CheckpointWriter(folder, active=rank == 0, patience=5) for rank in (0, 1)]
    for rank, writer in enumerate(writers):
        writer.save(part(step, rank))
    for writer in writers:
        writer.wait()


def assert_parts_load(folder: Path, step: int) -> None:
    found = find_checkpoint(folder)
    assert found == folder / f"step_{step:08d}"
    stored = open_stored(found, "model.safetensors", read_manifest(found))
    stored.require({"w": (3, 2)})
    assert (stored.read("w", ((0, 3), (0, 2))) == step).all()


def test_a_part_that_is_not_whole_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / ".step_00000010.tmp").mkdir()
    (tmp_path / ".step_00000010.tmp" / "rank_00001.json").touch()
    with pytest.raises(StorageError, match="step_00000010: the checkpoint could not be written"):
        CheckpointWriter(tmp_path, active=False, asynchronous=False).save(part(10, 0))


def save_part(folder: Path, rank: int, dying: int, moment: str) -> None:
    """Save, or die as a file or folder is made durable or renamed."""

    def die(of: str, before: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            name = arguments[0]
            if not isinstance(name, Path):
                name = os.readlink(f"/proc/self/fd/{name}")
            if moment == f"{of} of {Path(name).name.lstrip('.').split('.')[0]}":
                os.kill(os.getpid(), signal.SIGKILL)
            before(*arguments)

        return call

    if rank == dying:
        os.fsync, os.replace = die("fsync", os.fsync), die("rename", os.replace)
    patience = 1.0 if dying else 60.0  # where rank 1 dies, rank 0 waits for its part in vain
    writer = CheckpointWriter(folder, active=False, asynchronous=False, patience=patience)
    writer.save(part(10, rank))


@pytest.mark.parametrize(
    ("dying", "moment"),
    [(1, "fsync of model"), (1, "fsync of rank_00001"), (0, "fsync of manifest"), (0, "rename of step_00000010"),
     (0, "fsync of latest")],
)  # fmt: skip
def test_a_rank_that_dies_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], dying: int, moment: str
) -> None:
    save_parts(tmp_path, 5)
    ranks = [FORK.Process(target=save_part, args=(tmp_path, rank, dying, moment), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    printed = capfd.readouterr().err
    codes = [rank.exitcode for rank in ranks]
    assert codes == ([-signal.SIGKILL, 0] if dying == 0 else [1, -signal.SIGKILL]), printed
    said = "step_00000010: the checkpoint could not be written: ranks [1] have not written their"
    assert dying == 0 or f"{said} parts within 1 s" in printed
    assert_parts_load(tmp_path, 5)
    [left] = tmp_path.glob(".*")
    assert left.name.split(".")[1] == ("latest" if "latest" in moment else "step_00000010")
    save_parts(tmp_path, 10)
    assert_parts_load(tmp_path, 10)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step_00000005", "step_00000010"]


@pytest.mark.parametrize("full", [0, 1])
def test_the_rank_whose_disk_is_full_is_the_one_that_says_so(tmp_path: Path, monkeypatch: Any, full: int) -> None:
    """The others write theirs, and find the folder where it was."""
    save_parts(tmp_path, 5)
    write = module.write_safetensors
    failed = threading.Event()

    def of_rank(path: Path, tensors: dict[str, np.ndarray]) -> int:
        if f"rank_{full:05d}" not in path.name:
            assert failed.wait(10)
            return write(path, tensors)
        path.write_bytes(b"a part")
        raise FULL

    monkeypatch.setattr(module, "write_safetensors", of_rank)
    writers = [CheckpointWriter(tmp_path, active=rank == 0, patience=0.2) for rank in (0, 1)]
    writers[full].save(part(10, full))
    with pytest.raises(StorageError, match=IT_WAS_FULL):
        writers[full].wait()
    failed.set()
    writers[1 - full].save(part(10, 1 - full))
    said = r"ranks \[1\] have not written their parts within 0\.2 s"
    with pytest.raises(StorageError, match=said) if full == 1 else nullcontext():
        writers[1 - full].wait()
    assert_parts_load(tmp_path, 5)
    assert not list(tmp_path.glob(f".step_00000010.tmp/*rank_{full:05d}*")), "space is given back"
    monkeypatch.undo()
    save_parts(tmp_path, 10)
    assert_parts_load(tmp_path, 10)


def test_a_run_that_failed_waits_less_for_the_parts_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it waits already."""
    monkeypatch.setattr(module, "PATIENCE_AFTER_FAILURE", 0.1)
    with pytest.raises(RuntimeError, match="no contact"), CheckpointWriter(tmp_path, patience=30) as writer:
        writer.save(part(5, 0))
        while not (tmp_path / ".step_00000005.tmp" / "rank_00000.json").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        failed = time.monotonic()
        raise RuntimeError("no contact")
    assert find_checkpoint(tmp_path) is None and time.monotonic() < failed + 15

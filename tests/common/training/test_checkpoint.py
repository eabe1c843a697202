"""Folders whole or absent: kill -9 and a full disk at any moment leave a checkpoint that loads."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import common.training.checkpoint as module
from common.errors import CheckpointError, StorageError
from common.training.checkpoint import CheckpointWriter, Snapshot, find_checkpoint, read_manifest, whole_checkpoints
from common.training.lent import LentArrays

ROOT = Path(__file__).resolve().parents[3]


def snapshot(step: int, size: int = 10) -> Snapshot:
    manifest = {"state": {"step": step}, "engine": {}, "config": {}}
    return Snapshot(files={"model.safetensors": {"w": np.full(size, step, np.float32)}}, manifest=manifest)


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
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step_00000010", "step_00000015"]
    assert (tmp_path / "latest").read_text() == "step_00000015\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000015"]
    for where in (tmp_path, tmp_path / "latest", tmp_path / "step_00000015"):
        assert find_checkpoint(where) == tmp_path / "step_00000015"


def test_a_step_saved_again_replaces_the_old_folder(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    writer.save(snapshot(5, size=3))
    writer.save(snapshot(5, size=4))
    assert len(load_file(tmp_path / "step_00000005" / "model.safetensors")["w"]) == 4


def test_going_back_never_prunes_what_was_just_saved(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=False)
    writer.save(snapshot(100))
    writer.save(snapshot(50))  # a run resumed from before step 50
    assert assert_loads(tmp_path) == 50


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(snapshot(5))
    writer.wait()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_safetensors", full)
    writer.save(snapshot(10))
    with pytest.raises(StorageError, match=r"step_00000010.*No space left on device.*earlier checkpoints are whole"):
        writer.wait()
    assert assert_loads(tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005"]
    monkeypatch.undo()
    writer.save(snapshot(15))
    writer.wait()
    assert assert_loads(tmp_path) == 15


def test_a_really_full_disk(tmp_path: Path) -> None:
    """On a file system of 1 MB, where this process may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no right to mount a small file system: {mount.stderr.strip()}")
    try:
        writer = CheckpointWriter(small, keep=1)
        writer.save(snapshot(5, size=100_000))
        writer.save(snapshot(10, size=500_000))
        with pytest.raises(StorageError, match="No space left on device"):
            writer.wait()
        assert assert_loads(small) == 5
    finally:
        subprocess.run(["umount", str(small)], check=True)


_SAVE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from common.training.checkpoint import CheckpointWriter, Snapshot
writer = CheckpointWriter(Path(sys.argv[1]), keep=2)
step = int(sys.argv[2])
while True:
    step += 1
    tensors = {"w": np.full(300_000, step, np.float32)}
    writer.save(Snapshot(files={"model.safetensors": tensors}, manifest={"state": {"step": step}, "engine": {}, "config": {}}))
    print(step, flush=True)
"""


def kill_while_saving(folder: Path, kills: int) -> None:
    moments = random.Random(0)
    step = 0
    for _ in range(kills):
        with subprocess.Popen([sys.executable, "-c", _SAVE_FOREVER, str(folder), str(step)], cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(3):  # two saves are surely whole when the third begins
                child.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.05))
            child.send_signal(signal.SIGKILL)
        found = assert_loads(folder)
        assert found > step
        step = found


def test_kill_nine_while_saving(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=12)


@pytest.mark.campaign
def test_kill_nine_while_saving_200_times(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=200)


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


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    CheckpointWriter(tmp_path, asynchronous=False).save(snapshot(5))
    weights = tmp_path / "step_00000005" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="bytes have changed since it was written"):
        read_manifest(tmp_path / "step_00000005")


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    CheckpointWriter(tmp_path, asynchronous=False).save(snapshot(5))
    folder = tmp_path / "step_00000005"
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {len(whole) - 1} bytes, expected {len(whole)}"):
        read_manifest(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="missing, expected"):
        read_manifest(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="broken manifest"):
        read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps({"format_version": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="format version 99"):
        read_manifest(folder)


def test_a_lost_latest_file_is_no_loss(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    for step in (5, 10):
        writer.save(snapshot(step))
    (tmp_path / "latest").write_text("step_00000099\n")
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000010"
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000010"


def test_a_writer_that_fails_gives_back_what_was_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next update would wait for ever."""

    def fails(path: Path, tensors: LentArrays) -> int:
        next(iter(tensors.values()))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("common.training.checkpoint.write_safetensors", fails)
    lent = Snapshot(files={"model.safetensors": LentArrays({"w": np.zeros(3, np.float32)})}, manifest={"state": {"step": 1}})
    writer = CheckpointWriter(tmp_path)
    writer.save(lent)
    owner = threading.Thread(target=lent.keep, daemon=True)
    owner.start()
    owner.join(10)
    assert not owner.is_alive()
    with pytest.raises(StorageError, match="No space left on device"):
        writer.wait()

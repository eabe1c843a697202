"""Choice of the checkpoint to resume from. A folder that cannot be looked into, or shows a run, is
never started over. Every changed bit of a manifest is found.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from common.checkpoint.folders import find_checkpoint, read_or_name_older, whole_checkpoints
from common.checkpoint.manifest import read_manifest, seal, unseal, write_manifest
from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.errors import CheckpointError, ConfigError, UserError
from common.training.start import Start, where_to_start
from tests.common.checkpoint.test_writer import snapshot, steps
from tests.tiny import tiny_config


def save(folder: Path, *steps: int, **writer: Any) -> CheckpointWriter:
    made = CheckpointWriter(folder, asynchronous=False, **writer)
    for step in steps:
        made.save(snapshot(step))
    return made


def start(run: Path, **checkpoint: Any) -> Start:
    config = tiny_config(run, checkpoint=checkpoint)
    data: Any = SimpleNamespace(tokenizer_record=None, fingerprint="")
    return where_to_start(config, data)


@pytest.mark.parametrize("resume", ["auto", "latest", "never"])
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str) -> None:
    """A missing permission would not stop root."""
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 5, 10)
    denied = PermissionError(13, "Permission denied", str(checkpoints))
    monkeypatch.setattr(os, "scandir", Mock(side_effect=denied))
    expected = r"checkpoints: cannot be read: Permission denied; .* nothing was started"
    with pytest.raises(CheckpointError, match=expected):
        start(tmp_path, resume=resume)
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointWriter(checkpoints, keep=1)
    monkeypatch.undo()
    assert len(whole_checkpoints(checkpoints)) == 2


STEP = "step_00000020"


def linked(folder: Path, to: Any) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(to)


DAMAGE: list[tuple[list[Callable[[Path], Any]], str]] = [
    ([lambda folder: linked(folder, folder)], "checkpoints: cannot be read: Too many levels of symbolic links"),
    ([lambda folder: linked(folder, "/mnt/not mounted/here")],
     r"is a link to /mnt/not mounted/here, which is not there; is its disk mounted\?"),
    ([lambda folder: (folder / STEP / "manifest.json").unlink()],
     r"step_00000020.* not a whole checkpoint.*checkpoint\.resume=.*to start over"),
    ([lambda folder: shutil.rmtree(folder / STEP)],
     "latest names 'step_00000020', which is not a whole checkpoint here; "),
    ([shutil.rmtree, Path.touch], r"checkpoints: checkpoints cannot be written there: File exists; .* output_dir"),
]  # fmt: skip


@pytest.mark.parametrize(("damages", "message"), DAMAGE)
def test_a_folder_that_shows_a_run_is_never_started_over(
    tmp_path: Path, damages: list[Callable[[Path], Any]], message: str
) -> None:
    save(tmp_path / "checkpoints", 20)
    for damage in damages:
        damage(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=message):
        start(tmp_path)


def test_an_older_whole_one_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "checkpoints", 5, 10, 20, 30)
    (tmp_path / "checkpoints" / "latest").write_text("step_00000020\n")
    (tmp_path / "checkpoints" / "step_00000020" / "manifest.json").unlink()
    assert str(start(tmp_path, init_from="a.ckpt").resume) == str(tmp_path / "checkpoints" / "step_00000010")
    assert "20', which is not a whole checkpoint here; taking" in caplog.text and "a.ckpt is not read" in caplog.text
    for step in (5, 10):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}")
    with pytest.raises(CheckpointError, match=r"whole and newer: step_00000030; "):
        start(tmp_path)


def test_a_run_that_saves_meanwhile_is_not_mistaken_for_a_broken_one(tmp_path: Path, monkeypatch: Any) -> None:
    """keep=1: between two looks the checkpoint that latest named has made way for the next."""
    writer = save(tmp_path, 5, keep=1)
    look = os.scandir

    def scandir(path: Any) -> Any:
        monkeypatch.setattr(os, "scandir", look)
        writer.confirm(9)
        writer.save(snapshot(10))
        shutil.rmtree(tmp_path / "step_00000005", ignore_errors=True)
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000010"


def test_a_run_killed_before_its_first_save_starts_over(tmp_path: Path) -> None:
    """So does one whose first save was cut off; another program's file named latest is not
    a run.
    """
    (tmp_path / "checkpoints" / ".step_00000005.tmp").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert start(tmp_path) == Start() and not any((tmp_path / "checkpoints").iterdir())  # or the disk stays full
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "latest").write_text("global_step100")
    assert find_checkpoint(tmp_path / "else") is None


def test_checkpoints_that_a_run_has_not_seen_stay(tmp_path: Path) -> None:
    save(tmp_path, 1)
    writer = save(tmp_path, 10, keep=1)
    save(tmp_path / "elsewhere", 3, 7, 90)
    for step in (3, 7, 90):
        (tmp_path / "elsewhere" / f"step_{step:08d}").rename(tmp_path / f"step_{step:08d}")
    for step in (20, 30):
        writer.save(snapshot(step))
    assert steps(tmp_path) == [3, 7, 30, 90]


def test_the_newest_good_checkpoint_stays(tmp_path: Path) -> None:
    writer = save(tmp_path, 10, keep=1)
    writer.confirm(11)
    for step in (20, 30, 40):
        writer.save(snapshot(step))
        assert steps(tmp_path) == [10, step], "a step after it has not shown that it is good"
    writer.confirm(41)
    writer.save(snapshot(50))
    assert steps(tmp_path) == [40, 50]


def test_unwritable_checkpoint_folders_are_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "checkpoints", 5)
    assert start(tmp_path).resume is not None
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000005"]

    read_only = Mock(side_effect=OSError(30, "Read-only file system"))
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    expected = "checkpoints cannot be written there: Read-only file system"
    with pytest.raises(ConfigError, match=expected):
        start(tmp_path)


STATE = TrainState(
    step=10, consumed_samples=40, sample_hash="29544761717fbba3", losses=[4.5, 4.25], grad_norms=[1.5, 0.1]
).to_dict()
ENGINE = {"loss_scale": {"mode": "dynamic", "value": 65536.0}, "rng": {"torch": [{"cpu": "AbC="}]}}


def record(**changes: Any) -> dict[str, Any]:
    files = {"model.safetensors": {"bytes": 12, "crc32": 5, "pieces": {"w": [[0, 3]]}}}
    config = {"model": {"num_layers": 2}}
    return {"state": STATE, "engine": ENGINE, "config": config, "files": files} | changes


def test_it_reads_back_and_flipped_bits_are_found() -> None:
    whole = seal(record())
    assert unseal(whole) == {"format_version": 2, **record()}
    assert seal(unseal(whole)) == whole, "what is read may be written again"
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            with pytest.raises(ValueError):
                unseal(bytes(changed))
    with pytest.raises(ValueError, match="format version 1, this program reads 2"):
        unseal(whole.replace(b'"format_version": 2', b'"format_version": 1'))


def test_cut_swapped_and_reformatted_texts_are_refused() -> None:
    whole = seal(record())
    others = [b"", whole[:-20], whole + b"\n", whole.replace(b"\n", b"\r\n")]
    for text in (*others, json.dumps(json.loads(whole)).encode()):
        with pytest.raises(ValueError):
            unseal(text)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "model.rank_../../x.safetensors", "x\n", ""])
def test_files_of_a_manifest_lie_in_its_folder(tmp_path: Path, name: str) -> None:
    write_manifest(tmp_path, record(files={name: {"bytes": 1, "crc32": 1}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json: names the file .*; use another checkpoint"):
        read_manifest(tmp_path)


def test_a_manifest_of_a_thousand_ranks_is_read_back() -> None:
    """It is longer than any other JSON may be."""
    assert unseal(seal(record(many="x" * 2**25)))["state"] == STATE


def test_missing_and_unreadable_inputs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require(message: str) -> None:
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
            read_manifest(tmp_path)

    write_manifest(tmp_path, record())
    weights = tmp_path / "model.safetensors"
    require("missing, expected 12 bytes")
    weights.mkdir()
    require("is not a regular file")
    weights.rmdir()
    weights.write_bytes(bytes(11))
    require("11 bytes, expected 12 bytes")
    weights.write_bytes(bytes(12))

    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("common.checkpoint.manifest.file_checksum", denied)
    require("cannot be read: Permission denied; allow this user to read it")


def test_a_damaged_checkpoint_names_the_newest_whole_one_before_it(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 15)
    for step in (10, 15):
        path = tmp_path / f"step_{step:08d}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="its bytes have changed since it was") as failure:
        read_or_name_older(tmp_path / "step_00000015", "checkpoint.resume")
    assert str(failure.value).endswith(
        "use another checkpoint: step_00000005 beside it is whole,"
        f" checkpoint.resume={tmp_path / 'step_00000005'} uses it"
    )

"""Every changed bit of a manifest is found, and what its readers rely on is checked."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from common.checkpoint.folders import read_or_name_older
from common.checkpoint.manifest import read_manifest, seal, unseal, write_manifest
from common.checkpoint.state import TrainState
from common.errors import CheckpointError
from tests.common.checkpoint.test_folders import save

STATE = TrainState(
    step=10, consumed_samples=40, sample_hash="29544761717fbba3", losses=[4.5, 4.25], grad_norms=[1.5, 0.1]
).to_dict()
ENGINE = {"loss_scale": {"mode": "dynamic", "value": 65536.0}, "rng": {"torch": [{"cpu": "AbC="}]}}


def record(**changes: Any) -> dict[str, Any]:
    files = {"model.safetensors": {"bytes": 12, "crc32": 5, "pieces": {"w": [[0, 3]]}}}
    config = {"model": {"num_layers": 2}}
    return {"state": STATE, "engine": ENGINE, "config": config, "files": files} | changes


def test_it_reads_back() -> None:
    assert unseal(seal(record())) == {"format_version": 2, **record()}
    assert seal(unseal(seal(record()))) == seal(record()), "what is read may be written again"


def test_flipped_bits_are_found() -> None:
    whole = seal(record())
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
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        unseal(b'{"a":' * 5000 + b"1" + b"}" * 5000)


def file(name: str = "model.safetensors", **more: Any) -> dict[str, Any]:
    return {"files": {name: {"bytes": 1, "crc32": 1} | more}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"model": 40}}, r"config\.model: Input should be a valid dictionary, found 40"),
        (file("../x"), r"files\..*: String should match pattern"),
        (file("model.rank_../../x.safetensors"), r"files\..*: String should match pattern"),
        (file(bytes="12"), r"safetensors\.bytes: Input should be a valid int"),
    ],
)
def test_values_that_readers_rely_on_are_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_manifest(tmp_path, record(**changes))
    wanted = rf"manifest\.json: broken manifest: .*{message}.*; use another checkpoint"
    with pytest.raises(CheckpointError, match=wanted):
        read_manifest(tmp_path)


def test_a_state_that_contradicts_itself_is_refused() -> None:
    for values, message in (
        ({"skipped_steps": 11}, "skipped_steps=11 and step=10 contradict"),
        ({"losses": [1.0]}, "1 losses and 2 gradient norms"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainState.from_dict(STATE | values)


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

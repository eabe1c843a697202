"""Every changed bit of a manifest is found, and what its readers rely on is checked."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.folders import read_or_name_older
from common.checkpoint.manifest import MANIFEST, read_manifest, seal, unseal, write_manifest
from common.checkpoint.snapshot import EngineState, make_snapshot
from common.checkpoint.state import TrainState
from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.errors import CheckpointError
from tests.tiny import tiny_config


def record() -> dict[str, Any]:
    """The manifest of a small run on two ranks of torch, as an engine makes it."""
    random_bytes = [random.Random(rank).randbytes(5056) for rank in range(2)]
    states = [{"cpu": base64.b64encode(each).decode()} for each in random_bytes]
    state = TrainState(
        step=10, consumed_samples=40, sample_hash="29544761717fbba3", losses=[4.5, 4.25],
        grad_norms=[1.5, 0.1],
    )  # fmt: skip
    scale = {"mode": "dynamic", "value": 65536.0, "finite_steps": 3, "overflows": 0}
    snapshot = make_snapshot(
        tiny_config(ranks=2),
        state,
        weights={"w": np.ones(3, np.float32)},
        moments={},
        engine=EngineState(optimizer_steps=10, loss_scale=scale, rng={"torch": states}),
        versions={"backend": "torch", "torch": "2.13"},
        extra={"tokenizer": None, "data": "29544761717fbba3", "samples_per_epoch": 700},
    )
    files = {"model.safetensors": {"bytes": 12, "crc32": 5, "pieces": {"w": [[0, 3]]}}}
    return {**snapshot.manifest, "files": files}


def test_it_reads_back() -> None:
    plain = json.loads(json.dumps(record()))
    assert unseal(seal(record())) == {"format_version": 2, **plain}
    assert seal(unseal(seal(record()))) == seal(record()), "what is read may be written again"


def accepted_flips(places: list[int]) -> list[tuple[int, int]]:
    whole = seal(record())
    accepted = []
    for place in places:
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            try:
                unseal(bytes(changed))
            except ValueError:
                continue
            accepted.append((place, bit))
    return accepted


def test_flipped_bits_are_found() -> None:
    """All of the version and of the checksum, and 2,400 others."""
    whole = seal(record())
    ends = [*range(30), *range(len(whole) - 30, len(whole))]
    assert accepted_flips([*ends, *random.Random(0).sample(range(30, len(whole) - 30), 300)]) == []
    with pytest.raises(ValueError, match="format version 1, this program reads 2"):
        unseal(whole.replace(b'"format_version": 2', b'"format_version": 1'))


@pytest.mark.campaign
def test_every_flipped_bit_is_found() -> None:
    assert accepted_flips(list(range(len(seal(record()))))) == []


def test_cut_swapped_and_reformatted_texts_are_refused() -> None:
    whole = seal(record())
    others = [b"", whole[:-1], whole[:-20], whole + b"\n", whole.replace(b"\n", b"\r\n")]
    for text in (*others, json.dumps(json.loads(whole)).encode()):
        with pytest.raises(ValueError):
            unseal(text)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        unseal(b'{"a":' * 5000 + b"1" + b"}" * 5000)


def changed(path: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(record()))
    at: Any = values
    *parents, last = path.split("/")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[last] = value
    return values


NAMES = ("../x", "/etc/x", "", "model.rank_../../x.safetensors")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("config/model", 40, r"config\.model: Input should be a valid dictionary, found 40"),
        *(
            ("files", {name: {"bytes": 1, "crc32": 1}}, r"files\..*: String should match pattern")
            for name in NAMES
        ),
        ("files/model.safetensors/bytes", "12", r"safetensors\.bytes: Input should be a valid int"),
        ("files/model.safetensors/pieces", {"w": None}, r"pieces\.w: Input should be a valid list"),
    ],
)
def test_values_that_readers_rely_on_are_checked(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    (tmp_path / MANIFEST).write_bytes(seal(changed(path, value)))
    with pytest.raises(
        CheckpointError,
        match=rf"manifest\.json: broken manifest: .*{message}.*; use another checkpoint",
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"skipped_steps": 11}, "skipped_steps=11 and step=10 contradict"),
        ({"losses": [1.0]}, "1 losses and 2 gradient norms"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainState.from_dict(record()["state"] | values)


def test_missing_and_unreadable_inputs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, record())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing, expected 12 bytes"):
        read_manifest(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a regular file"):
        read_manifest(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(11))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: 11 bytes, expected 12 bytes"):
        read_manifest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(12))

    def refused(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("common.checkpoint.manifest.file_checksum", refused)
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: cannot be read: Permission denied; allow this user to read it",
    ):
        read_manifest(tmp_path)


def test_a_damaged_checkpoint_names_the_newest_whole_one_before_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    files = {"model.safetensors": {"w": np.ones(3, np.float32)}}
    for step in (5, 10, 15, 20):
        manifest = {"state": {"step": step}, "engine": {}, "config": {}}
        writer.save(Snapshot(files=files, manifest=manifest))
    for step in (10, 15):
        path = tmp_path / f"step_{step:08d}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="its bytes have changed since it was") as failure:
        read_or_name_older(tmp_path / "step_00000015", "checkpoint.resume")
    assert str(failure.value).endswith(
        "use another checkpoint: step_00000005 beside it is whole,"
        f" checkpoint.resume={tmp_path / 'step_00000005'} uses it"
    )

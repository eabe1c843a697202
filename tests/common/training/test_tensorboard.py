"""Event files as TensorBoard's own format reads them: length, checksum, Event message."""

import struct
from pathlib import Path

import pytest

from common.training.metrics import MetricsWriter

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def events(folder: Path) -> list:
    (path,) = folder.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def test_scalars_by_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"step": 1, "loss": 2.5, "sample_hash": "abc"})
        metrics.write({"step": 2, "validation_loss": 2.0, "validation_loss/a": 3.0})
    found = events(tmp_path / "tensorboard")
    assert found[0].file_version == "brain.Event:2"
    assert [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in found[1:]] == [
        (1, {"loss": 2.5}),
        (2, {"validation_loss": 2.0, "validation_loss/a": 3.0}),
    ]


def test_a_resumed_run_replaces_later_events(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, step=7):
        pass
    begin = events(tmp_path / "tensorboard")[1]
    assert (begin.step, begin.session_log.status) == (8, 1)


def test_a_full_disk_ends_the_events_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").mkdir()
    with MetricsWriter(tmp_path) as metrics:
        board = metrics._board
        assert board is not None

        class Full:
            def write_event(self, event: object) -> None:
                raise OSError(28, "No space left on device")

        board._writer = Full()
        metrics.write({"step": 1, "loss": 1.0})
        metrics.write({"step": 2, "loss": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2

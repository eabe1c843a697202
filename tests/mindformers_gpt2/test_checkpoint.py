"""`.ckpt` files beside the checkpoints, read back by MindSpore; a disk that cannot take them."""

import tests.needs_mindspore  # noqa: F401

# isort: split
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from common.checkpoint.folders import require_checkpoint, whole_checkpoints
from common.config.load import build_config
from common.errors import StorageError
from common.resolve.derive import resolve_config
from common.systems.mindformers import write as rank_files
from common.tensor_files.safetensors_file import open_safetensors
from common.training.data import open_corpus
from tests.common.systems.mindformers.test_rank_files import theirs as theirs_of
from tests.tiny import tiny_run, train_here


def train(folder: Path, corpus: Path, **changes: Any) -> None:
    usual: dict[str, Any] = {
        "backend": "mindspore",
        "context__mode": "pynative",  # graphs would take seconds each to compile
        "model__num_layers": 1,
        "validation__max_samples": 2,
        "checkpoint__ckpt_prefix": "gpt2",
        "checkpoint__interval": 1,
        "checkpoint__keep": 2,
    }
    train_here(tiny_run(folder, corpus, **(usual | changes)))


def test_ckpt_holds_what_the_checkpoint_holds(tmp_path: Path, corpus_prefix: Path) -> None:
    """Named by rank, epoch and step, the newest two; MindSpore's own reader finds the tensors of
    the safetensors files under MindFormers' names.
    """
    foreign = tmp_path / "checkpoints" / "rank_0" / "gpt2_rank_0-of_mine.ckpt"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    train(tmp_path, corpus_prefix, optimizer={"learning_rate": 0.01, "decay_steps": 4})
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in (folder / "rank_0").iterdir()) == [
        "gpt2_rank_0-1_3.ckpt",
        "gpt2_rank_0-1_4.ckpt",
        foreign.name,
    ]
    assert [path.name for path in whole_checkpoints(folder)] == ["step_00000003", "step_00000004"]
    found = ms.load_checkpoint(str(folder / "rank_0" / "gpt2_rank_0-1_4.ckpt"))
    newest = require_checkpoint(folder, "test")
    expected = {}
    for file in ("model.safetensors", "optimizer.safetensors"):
        with open_safetensors(newest / file) as reader:
            expected |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    names = {}
    for name, values in expected.items():
        parameter, prefix = name, ""
        for part in ("exp_avg_sq", "exp_avg"):
            if name.endswith(f".{part}"):
                parameter = name.removesuffix(f".{part}")
                prefix = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v."}[part]
        theirs, turned = theirs_of(parameter)
        names[prefix + theirs] = values.T if turned else values
    assert set(found) == {*names, "epoch_num", "step_num", "global_step", "loss_scale"}
    assert int(found["step_num"].asnumpy()) == int(found["global_step"].asnumpy()[0]) == 4
    for name, values in names.items():
        np.testing.assert_array_equal(found[name].asnumpy(), values, err_msg=name)


def test_epochs_count_from_one(tmp_path: Path, corpus_prefix: Path) -> None:
    """Steps of an epoch: samples // global batch."""
    batch = {"train__global_batch_size": 700, "train__micro_batch_size": 350}
    samples = open_corpus(
        resolve_config(
            build_config(tiny_run(tmp_path, corpus_prefix, backend="mindspore", **batch))
        )
    ).samples
    assert samples is not None
    steps = samples.samples_per_epoch // 700
    assert 1 <= steps < 4
    train(tmp_path, corpus_prefix, **batch)
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "rank_0").iterdir())
    assert names == [
        f"gpt2_rank_0-{(step - 1) // steps + 1}_{(step - 1) % steps + 1}.ckpt" for step in (3, 4)
    ]


def test_a_failed_write_leaves_nothing_and_going_back_drops_the_future(
    tmp_path: Path, corpus_prefix: Path, monkeypatch: Any
) -> None:
    """A full disk in the middle of a file; then back to step 2, and on to step 4."""
    folder, real = tmp_path / "checkpoints" / "rank_0", rank_files.stream_mindspore

    def fails(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_files, "stream_mindspore", fails)
    message = "No space left on device; the checkpoint beside it is whole"
    with pytest.raises(StorageError, match=message):
        train(tmp_path, corpus_prefix, train__max_steps=1)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(rank_files, "stream_mindspore", real)
    train(tmp_path, corpus_prefix, train__max_steps=3)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["gpt2_rank_0-1_2.ckpt", "gpt2_rank_0-1_3.ckpt"]
    back = str(tmp_path / "checkpoints" / "step_00000002")
    changes = {"checkpoint__resume": back, "checkpoint__interval": 0, "checkpoint__keep": 1}
    train(tmp_path, corpus_prefix, **changes)
    assert sorted(path.name for path in folder.iterdir()) == ["gpt2_rank_0-1_4.ckpt"]

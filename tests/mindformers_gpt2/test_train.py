"""Signals to a run on MindSpore, which handles Ctrl-C itself unless it is kept from it. `.ckpt` files
beside the checkpoints, read back by MindSpore; a disk that cannot take them.
"""

import tests.needs_mindspore  # noqa: F401

# isort: split
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from common.checkpoint.folders import require_checkpoint, whole_checkpoints
from common.errors import StorageError
from common.systems.mindformers import write as rank_files
from tests.common.systems.mindformers.test_rank_files import theirs as theirs_of
from tests.run_scripts import start_program, wait_until
from tests.tiny import SGD, rows_of, tensors_of, tiny_run, train_here


@pytest.mark.long
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_stops_at_a_step_boundary_and_saves(
    tmp_path: Path, corpus_prefix: Path, number: signal.Signals, name: str
) -> None:
    """Exit code 128 + n, finished steps are saved, and the same command resumes from there."""
    optimizer = SGD | {"momentum": 0.0, "decay_steps": 100000}
    words: dict[str, Any] = {"model__num_layers": 1, "data__split": "100,0,0"}
    tree = tiny_run(tmp_path / "run", corpus_prefix, backend="mindspore", optimizer=optimizer, **words)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tree))  # JSON is YAML
    rows = tmp_path / "run" / "metrics.jsonl"

    def start(steps: int) -> subprocess.Popen[str]:
        words = ("--config", str(config), "--run_mode", "train", f"train.max_steps={steps}")
        return start_program(*words)

    with start(100000) as child:
        wait_until(lambda: child.poll() or (rows.is_file() and rows.read_text().count("\n") >= 3), "rows")
        child.send_signal(number)
        _, error = child.communicate(timeout=60)
    kernels = "attention written out; layer norm LayerNorm in float32; optimizer ApplyGradientDescent"
    assert f"# kernels: {kernels}\n" in (tmp_path / "run" / "config.yaml").read_text()
    done = len(rows_of(tmp_path / "run"))
    checkpoint = require_checkpoint(tmp_path / "run", "test")
    assert checkpoint.name == f"step_{done:08d}"
    assert (child.returncode, error.splitlines()[-1]) == (
        128 + number,
        f"stopped by {name} after step {done}; saved in {checkpoint.parent}; the same command resumes",
    )
    with start(done + 2) as child:
        child.communicate(timeout=120)
    assert child.returncode == 0
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, done + 3))


def train(folder: Path, corpus: Path, **changes: Any) -> None:
    # graphs would take seconds each to compile
    usual: dict[str, Any] = {"backend": "mindspore", "context__mode": "pynative", "model__num_layers": 1}
    usual |= {"validation__max_samples": 2, "checkpoint": {"ckpt_prefix": "gpt2", "interval": 1, "keep": 2}}
    train_here(tiny_run(folder, corpus, **(usual | changes)))


def test_ckpt_holds_what_the_checkpoint_holds(tmp_path: Path, corpus_prefix: Path) -> None:
    """Named by rank, epoch and step, the newest two. An epoch has 2 batches of 700 of some 1,850
    samples. MindSpore's own reader finds the tensors under MindFormers' names.
    """
    foreign = tmp_path / "checkpoints" / "rank_0" / "gpt2_rank_0-of_mine.ckpt"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    batch = {"train__global_batch_size": 700, "train__micro_batch_size": 350}
    adamw = {"learning_rate": 0.01, "decay_steps": 4}
    train(tmp_path, corpus_prefix, optimizer=adamw, **batch)
    names = sorted(path.name for path in foreign.parent.iterdir())
    assert names == ["gpt2_rank_0-2_1.ckpt", "gpt2_rank_0-2_2.ckpt", foreign.name]
    steps = [path.name for path in whole_checkpoints(tmp_path / "checkpoints")]
    assert steps == ["step_00000003", "step_00000004"]
    found = ms.load_checkpoint(str(foreign.with_name(names[1])))
    expected = {}
    for key, values in tensors_of(tmp_path).items():
        name = key.partition("/")[2]
        parameter, _, part = name.rpartition(".")
        prefix = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v."}.get(part, "")
        theirs, turned = theirs_of(parameter if prefix else name)
        expected[prefix + theirs] = values.T if turned else values
    assert set(found) == {*expected, "epoch_num", "step_num", "global_step", "loss_scale"}
    assert int(found["step_num"].asnumpy()) == int(found["global_step"].asnumpy()[0]) == 4
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].asnumpy(), values, err_msg=name)


def test_a_failed_write_leaves_nothing_and_going_back_drops_the_future(
    tmp_path: Path, corpus_prefix: Path, monkeypatch: Any
) -> None:
    """A full disk in the middle of a file; then back to step 2, and on to step 4."""
    folder, real = tmp_path / "checkpoints" / "rank_0", rank_files.stream_mindspore

    def fails(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_files, "stream_mindspore", fails)
    with pytest.raises(StorageError, match="space left on device; the checkpoint beside it is"):
        train(tmp_path, corpus_prefix, train__max_steps=1)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(rank_files, "stream_mindspore", real)
    train(tmp_path, corpus_prefix, train__max_steps=3)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["gpt2_rank_0-1_2.ckpt", "gpt2_rank_0-1_3.ckpt"]
    back = str(tmp_path / "checkpoints" / "step_00000002")
    train(tmp_path, corpus_prefix, checkpoint={"ckpt_prefix": "gpt2", "keep": 1, "resume": back})
    assert sorted(path.name for path in folder.iterdir()) == ["gpt2_rank_0-1_4.ckpt"]

"""Whole runs in this process: resume, stop, finetune, what is written."""

import gzip
import json
import math
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common.backends import make_run
from common.checkpoint.folders import find_checkpoint, require_checkpoint
from common.checkpoint.manifest import read_manifest, write_manifest
from common.errors import CheckpointError, ConfigError, DataError, DeviceError, DivergedError, StopRequested, UserError
from common.run_config import load_config
from common.training.metrics import MetricsWriter, read_metrics
from common.weights.names import initial_rows
from tests.packed_corpus import FLAGS
from tests.tiny import require_same_bits, results_of, rows_of, tensors_of, tiny_run, train_here
from torch_gpt2.evaluate import evaluate

ADAMW = {"learning_rate": 0.01, "warmup_steps": 4, "decay_steps": 20, "weight_decay": 0.1}
SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "warmup_steps": 4, "decay_steps": 20}


@pytest.fixture
def start(corpus_prefix: Path, tmp_path: Path) -> Any:
    """Start a run of 20 tiny steps under ``tmp_path / name``; returns its folder."""

    def run(name: str, steps: int = 20, **changes: Any) -> Path:
        small = {"model__hidden_size": 16, "model__num_heads": 2, "model__dropout": 0.1}
        usual: dict[str, Any] = small | {"train__max_steps": steps, "optimizer": ADAMW}
        return train_here(tiny_run(tmp_path / name, corpus_prefix, **(usual | changes)))

    return run


SCALE = {"initial": 2.0**32, "window": 6, "factor": 8.0, "hysteresis": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    # OneFlow's, Megatron's and MindFormers' first scale, which overflows in the first steps
    "fp16 from 2^32": {"precision": "fp16", "loss_scale": SCALE},
    "bf16 weights": {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}},
    "O2": {"precision": {"parameters": "float16", "compute": "float16"}, "loss_scale": {"initial": 64.0, "window": 3}},
    "sgd": {"optimizer": SGD},
    "documents apart": FLAGS,
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_ten_and_ten_resumed_equal_twenty_bit_for_bit(start: Any, name: str) -> None:
    whole = start("whole", **PRECISIONS[name])
    rows = rows_of(whole)
    assert len(rows) == 20 and rows[-1]["skipped_steps"] < 10, "skipped steps prove nothing"
    # a warm-up of four updates from 0, then a cosine to update 20, whatever is skipped in between
    peak = 0.1 if name == "sgd" else 0.01
    made = [row["learning_rate"] for row in rows if not row["skipped"]]
    shares = [n / 4 if n <= 4 else (1 + math.cos(math.pi * (n - 4) / 16)) / 2 for n in range(20)]
    assert made == pytest.approx([peak * share for share in shares[: len(made)]])
    assert name != "fp16 from 2^32" or (rows[3]["skipped"] and any(r["skipped"] for r in rows[10:]))
    start("parts", steps=10, **PRECISIONS[name])
    torch.manual_seed(999)  # a resumed run owes nothing to the process it runs in
    require_same_bits(start("parts", **PRECISIONS[name]), whole)


def test_ten_and_ten_equal_twenty_with_skipped_outliers(start: Any) -> None:
    """Steps skipped after the resume follow from the losses before it."""
    # half a deviation, so that ordinary steps are skipped; 8 steps of history, with all of which the second half starts
    changes: dict[str, Any] = {"logging__outlier_deviations": 0.5, "logging__outlier_window": 8}
    changes["train__on_outlier"] = "skip"
    whole = start("whole", **changes)
    rows = rows_of(whole)
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert skipped == [row["step"] for row in rows if row["outlier"]]
    assert rows[-1]["skipped_steps"] == len(skipped) < 10
    assert min(skipped) <= 10 and {11, 12, 13, 14} & {*skipped}
    start("parts", steps=10, **changes)
    torch.manual_seed(999)
    require_same_bits(start("parts", **changes), whole)


def test_going_back_to_an_older_checkpoint_repeats_the_same_steps(start: Any) -> None:
    """By its folder; later rows are dropped. Once more does nothing more. In another folder the run is saved there."""
    whole = start("whole", checkpoint__interval=5, checkpoint__keep=0)

    def bits_of(run: Path) -> dict[str, bytes]:
        return {key: each.tobytes() for key, each in tensors_of(run).items()}

    before = results_of(whole), bits_of(whole)
    for resume in (str(whole / "checkpoints" / "step_00000005"), "auto"):
        start("whole", checkpoint__resume=resume)
        assert (results_of(whole), bits_of(whole)) == before
    assert bits_of(start("copy", checkpoint__resume=str(whole))) == before[1]


def test_validation_a_trace_and_asynchronous_saving_do_not_change_the_run(start: Any) -> None:
    """The trace has torch's own names of operators."""
    plain, saved = start("plain"), {"checkpoint__interval": 2, "checkpoint__keep": 2}
    busy = start("busy", validation__interval=3, profile={"start": 2, "stop": 3, "memory": True}, **saved)
    inline = start("inline", data__prefetch=0, checkpoint__asynchronous=False, **saved)
    require_same_bits(busy, plain)
    require_same_bits(inline, plain)
    names = sorted(path.name for path in (busy / "checkpoints").iterdir())
    assert names == ["latest", "step_00000018", "step_00000020"]
    with gzip.open(busy / "profile" / "steps_2_3_rank_0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    assert found.count("aten::gelu") == 2 * 2 * 2  # steps, layers, micro batches


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_a_step_boundary_and_saves(
    start: Any, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start("whole")
    write = MetricsWriter.write

    def write_and_interrupt(writer: MetricsWriter, row: dict[str, Any]) -> None:
        write(writer, row)
        if row["step"] == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patched, pytest.raises(StopRequested) as stop:
        patched.setattr(MetricsWriter, "write", write_and_interrupt)
        start("parts", checkpoint__resume="never", logging={"tensorboard": False})
    done = len(rows_of(tmp_path / "parts"))
    assert stop.value.exit_code == 128 + number and (tmp_path / "parts" / "loss.png").is_file()
    name, folder = {2: "Ctrl-C", 15: "SIGTERM"}[number], tmp_path / "parts" / "checkpoints"
    said = f"stopped by {name} after step {done}; saved in {folder}; the same command resumes with"
    assert str(stop.value) == f"{said} checkpoint.resume=auto" and 3 <= done < 20
    assert find_checkpoint(tmp_path / "parts") == folder / f"step_{done:08d}"
    require_same_bits(start("parts"), whole)


def test_finetuning_starts_from_weights_with_a_new_optimizer(start: Any) -> None:
    """A finetuned run resumes itself, not its base; and its own weights are evaluated."""
    base = start("base", steps=120, optimizer={"learning_rate": 0.02})
    whole = start("whole", checkpoint__init_from=str(base))
    assert rows_of(whole)[0]["loss"] < rows_of(base)[0]["loss"] - 0.2
    rates = [(row["step"], row["learning_rate"]) for row in rows_of(whole)[:2]]
    assert rates == [(1, 0.0), (2, 0.01 / 4)]
    start("parts", steps=8, checkpoint__init_from=str(base))
    require_same_bits(start("parts", checkpoint__init_from=str(base)), whole)
    last = read_metrics(whole / "metrics.jsonl")[-1]["validation_loss"]
    for words, used in (([], whole), ([f"checkpoint.load={base}"], base)):
        evaluate(*make_run(load_config(whole / "config.yaml", words), "eval"))
        found = json.loads((whole / "evaluation.json").read_text())
        assert found["checkpoint"] == str(find_checkpoint(used)) and found["tokens"] == 8 * 16
        equal = found["validation_loss"] == pytest.approx(last, rel=1e-6)
        assert equal == (used == whole)


def test_gradients_or_weights_that_become_infinite_are_not_a_success(start: Any, tmp_path: Path) -> None:
    scale = {"mode": "static", "initial": 2.0**60}
    with pytest.raises(DivergedError, match=r"3 steps in a row had no finite gradient"):
        start("run", precision="fp16", loss_scale=scale, train__max_skipped_steps=3)
    assert [row["skipped_steps"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]
    fast = {"name": "sgd", "learning_rate": 1e38, "schedule": "constant", "clip_grad": 0.0}
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf)"):
        start("fast", steps=6, optimizer=fast)
    assert find_checkpoint(tmp_path / "fast") is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"checkpoint__resume": "latest"}, CheckpointError, "no whole checkpoint here"),
        ({"checkpoint__init_from": "nowhere"}, CheckpointError, "nowhere: no whole checkpoint"),
        ({"data__train": "nowhere"}, DataError, "nowhere"),
        ({"model__vocab_size": 60}, DataError, "vocab_size is 60"),
        ({"model__seq_length": 100_000, "model__dropout": 0.0}, DataError, "seq_length"),
        ({"device": "cuda"}, DeviceError, "device=cuda: no usable GPU (torch "),
        ({"device": "npu"}, DeviceError, "device=npu: torch_npu"),
        ({"context__max_device_memory": "30GB"}, ConfigError, "is for accelerators; leave it out on a CPU"),
    ],
)
def test_bad_input(start: Any, tmp_path: Path, changes: dict[str, Any], error: type[UserError], message: str) -> None:
    """Found before anything is written."""
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(error) as caught:
        start("run", **changes)
    assert message in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


OTHERS: list[tuple[str, dict[str, Any], type[UserError], str]] = [
    ("run", {"model__hidden_size": 32}, CheckpointError, "hidden_size is 16 there and 32 in the"),
    ("run", {"optimizer": SGD}, CheckpointError, "optimizer.name=adamw, the config says sgd"),
    ("other", {"checkpoint__init_from": "run", "model__num_heads": 4}, CheckpointError, "or model.num_heads=2"),
    ("run", {"checkpoint__resume": "never"}, ConfigError, "checkpoint.resume=never"),
]


def test_a_checkpoint_of_another_run_is_refused(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the same shapes, whose function is another, and a state that is broken."""
    monkeypatch.chdir(tmp_path)
    checkpoint = require_checkpoint(start("run", steps=2), "test")
    for name, change, error, message in OTHERS:
        with pytest.raises(error) as caught:
            start(name, steps=3, **change)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    manifest = read_manifest(checkpoint)
    manifest["engine"]["rng"]["torch"] = [{"cpu": "@@@"}]
    write_manifest(checkpoint, manifest)
    with pytest.raises(CheckpointError, match="the state of the random generators is broken"):
        start("run", steps=3)


def test_a_changed_precision_or_loss_scale_is_obeyed_on_resume(start: Any) -> None:
    scales = {"fp16": 65536.0, "bf16": 1.0}
    start("run", steps=2, precision="bf16")
    for steps, precision in ((4, "fp16"), (6, "bf16")):
        rows = rows_of(start("run", steps=steps, precision=precision))
        assert rows[-2]["loss_scale"] == scales[precision]
    for steps, scale in ((8, 128.0), (10, 1024.0)):
        rows = rows_of(start("run", steps=steps, loss_scale={"mode": "static", "initial": scale}))
        assert rows[-2]["loss_scale"] == scale


def test_going_back_and_being_killed_resumes_from_there(start: Any) -> None:
    folder = start("run", steps=8, checkpoint__interval=4, checkpoint__keep=0)
    older = str(folder / "checkpoints" / "step_00000004")
    killed = patch("common.training.session.train_loop", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        start("run", steps=10, checkpoint__resume=older)
    start("run", steps=10)
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 11))


def test_training_begins_at_the_shared_initial_weights(start: Any) -> None:
    """Not at their rounding: the float32 copies of bfloat16 weights are filled from the generator itself."""
    precision = PRECISIONS["bf16 weights"]
    folder = start("run", steps=1, optimizer={"learning_rate": 1e-30}, **precision)
    name, model = "h.0.mlp.c_fc.weight", load_config(folder / "config.yaml").model
    saved = tensors_of(folder)[f"model.safetensors/{name}"]
    assert saved.tobytes() == initial_rows(model, 1234, name, saved.shape).tobytes()


def test_a_run_names_its_kernels(start: Any) -> None:
    """Without attention dropout, for which a CPU's kernel is not made."""
    written = {"train__fused_attention": False, "optimizer__name": "sgd"}
    for changes, attention, optimizer in (
        ({}, "scaled_dot_product_attention", "fused AdamW"), (written, "written out", "SGD"),
    ):  # fmt: skip
        folder = start(optimizer, 1, model__attention_dropout=0.0, **changes)
        found = (folder / "config.yaml").read_text().splitlines()[-1]
        norm = "layer norm native_layer_norm in float32"
        assert found == f"# kernels: attention {attention}; {norm}; optimizer {optimizer}"

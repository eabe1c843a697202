"""Whole runs in this process: resume, stop, finetune, what is written."""

import gzip
import json
import math
import os
import signal
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest
from common.config.load import build_config
from common.dataset import IndexedDataset
from common.errors import CheckpointError, ConfigError, DataError, DivergedError, StopRequested
from common.inputs import make_run
from common.log import LOG, start_log
from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.training.metrics import MetricsWriter, read_metrics
from tests.config_overrides import changed
from torch_gpt2.engine import Engine
from torch_gpt2.evaluate import evaluate
from torch_gpt2.train import train


@pytest.fixture
def start(corpus_prefix: Path, tmp_path: Path) -> Any:
    """Start a run of 20 tiny steps under ``tmp_path / name``; returns its folder."""

    def run(name: str, steps: int = 20, **changes: Any) -> Path:
        tree: dict[str, Any] = {
            "output_dir": str(tmp_path / name),
            "device": "cpu",
            "model": {
                "num_layers": 2,
                "hidden_size": 16,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 101,
                "dropout": 0.1,
            },
            "train": {"max_steps": steps, "micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {
                "learning_rate": 0.01,
                "warmup_steps": 4,
                "decay_steps": 20,
                "weight_decay": 0.1,
            },
            "data": {"train": str(corpus_prefix), "split": "90,10,0"},
            "validation": {"max_samples": 8},
            "logging": {"tensorboard": False, "plot": False},
        }
        train(*make_run(build_config(changed(tree, changes))))
        return tmp_path / name

    return run


def steps_of(folder: Path) -> list[dict[str, Any]]:
    wanted = (
        "step",
        "loss",
        "learning_rate",
        "grad_norm",
        "loss_scale",
        "consumed_samples",
        "sample_hash",
    )
    return [
        {key: row[key] for key in wanted}
        for row in read_metrics(folder / "metrics.jsonl")
        if "loss" in row
    ]


def tensors_of(folder: Path) -> dict[str, bytes]:
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    return {
        f"{file}/{name}": array.tobytes()
        for file in ("model.safetensors", "optimizer.safetensors")
        for name, array in load_file(checkpoint / file).items()
    }


def assert_same_run(one: Path, other: Path) -> None:
    assert steps_of(one) == steps_of(other)
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


PRECISIONS = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale": {"initial": 2.0**16, "window": 3}},
    # OneFlow's, Megatron's and MindFormers' first scale, which overflows in the first steps
    "fp16 from 2^32": {
        "precision": "fp16",
        "loss_scale": {"initial": 2.0**32, "window": 6, "factor": 8.0, "hysteresis": 2},
    },
    "bf16 weights": {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}},
    "O2": {
        "precision": {"parameters": "float16", "compute": "float16"},
        "loss_scale": {"initial": 64.0, "window": 3},
    },
    "pure fp16": {
        "precision": dict.fromkeys(("parameters", "compute", "softmax", "layer_norm"), "float16"),
        "loss_scale": {"initial": 64.0, "window": 3},
    },
    "sgd": {
        "optimizer": {
            "name": "sgd",
            "learning_rate": 0.1,
            "momentum": 0.9,
            "warmup_steps": 4,
            "decay_steps": 20,
        }
    },
    "recompute": {
        "train": {
            "max_steps": 20,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "recompute": "full",
        }
    },
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_ten_and_ten_resumed_equal_twenty_bit_for_bit(start: Any, name: str) -> None:
    whole = start("whole", **PRECISIONS[name])
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 20 and rows[-1]["skipped_steps"] < 10, (
        "steps that are skipped prove nothing"
    )
    # a warm-up of four updates from 0, then a cosine to update 20, whatever is skipped in between
    peak = 0.1 if name == "sgd" else 0.01
    made = [row["learning_rate"] for row in rows if not row["skipped"]]
    shares = [n / 4 if n <= 4 else (1 + math.cos(math.pi * (n - 4) / 16)) / 2 for n in range(20)]
    assert made == pytest.approx([peak * share for share in shares[: len(made)]])
    assert name != "fp16 from 2^32" or (rows[3]["skipped"] and any(r["skipped"] for r in rows[10:]))
    halves = PRECISIONS[name] | (
        {"train": PRECISIONS[name]["train"] | {"max_steps": 10}}
        if "train" in PRECISIONS[name]
        else {}
    )
    start("parts", steps=10, **halves)
    torch.manual_seed(999)  # a resumed run owes nothing to the process it runs in
    parts = start("parts", **PRECISIONS[name])
    assert_same_run(whole, parts)


def test_ten_and_ten_equal_twenty_with_skipped_outliers(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps skipped after the resume follow from the losses before it."""
    # half a deviation, so that ordinary steps are skipped; 8 steps of history, with all of which
    # the second half starts
    settings = {"tensorboard": False, "plot": False, "outlier_deviations": 0.5, "outlier_window": 8}
    train_settings = {"micro_batch_size": 2, "global_batch_size": 4, "on_outlier": "skip"}
    whole = start("whole", logging=settings, train=train_settings | {"max_steps": 20})
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "loss" in row]
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert skipped == [row["step"] for row in rows if row["outlier"]] and rows[-1][
        "skipped_steps"
    ] == len(skipped)
    assert (
        min(skipped) <= 10
        and 11 <= next(step for step in skipped if step > 10) <= 14
        and len(skipped) < 10
    )
    start("parts", logging=settings, train=train_settings | {"max_steps": 10})
    torch.manual_seed(999)
    parts = start("parts", logging=settings, train=train_settings | {"max_steps": 20})
    assert_same_run(whole, parts)
    assert [
        row["step"] for row in read_metrics(parts / "metrics.jsonl") if row.get("skipped")
    ] == skipped
    # without its history the second half would decide otherwise: the test is not blind
    start("forgetful", logging=settings, train=train_settings | {"max_steps": 10})
    begin = Engine.begin
    monkeypatch.setattr(
        Engine, "begin", lambda *words: replace(begin(*words), losses=[], grad_norms=[])
    )
    other = start("forgetful", logging=settings, train=train_settings | {"max_steps": 20})
    assert [
        row["step"] for row in read_metrics(other / "metrics.jsonl") if row.get("skipped")
    ] != skipped


def test_a_trace_of_two_steps(start: Any) -> None:
    """Torch's own names of operators, twice the number of calls of one step, and the run's results
    unchanged.
    """

    def calls(folder: Path, steps: str) -> Counter[str]:
        [path] = (folder / "profile").iterdir()
        assert path.name == f"steps_{steps}_rank_0.json.gz"
        with gzip.open(path) as file:
            return Counter(
                event["name"]
                for event in json.load(file)["traceEvents"]
                if event.get("cat") == "cpu_op"
            )

    plain = start("plain", steps=3)
    two = start("two", steps=3, profile={"start": 2, "stop": 3, "memory": True})
    one = start("one", steps=3, profile={"start": 3})
    assert_same_run(plain, two)
    # 2 layers, 2 micro batches
    assert calls(two, "2_3")["aten::gelu"] == 2 * calls(one, "3_3")["aten::gelu"] == 2 * 2 * 2


def test_a_style_changes_the_log_and_nothing_else(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        start_log()
        plain = start("plain", steps=4, validation__interval=2)
        ours = capsys.readouterr().out
        theirs = start("theirs", steps=4, validation__interval=2, logging__style="megatron")
        lines = capsys.readouterr().out.splitlines()
    finally:
        LOG.handlers.clear()
    assert_same_run(plain, theirs)
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (plain, theirs)]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]
    assert "| lm loss" not in ours and "Final" not in ours
    assert [line.split()[1] for line in lines if line.startswith("steps: ")] == ["1", "2", "3", "4"]
    assert [
        line.split()[4] for line in lines if line.startswith(" validation loss at iteration ")
    ] == ["2", "4"]
    assert sum("samples/sec" in line for line in lines) == 4, (
        "their grep takes the mean of all such lines"
    )


@pytest.mark.parametrize("step", [1, 7, 19])
def test_resume_at_any_step(start: Any, step: int) -> None:
    whole = start("whole")
    start("parts", steps=step)
    assert_same_run(whole, start("parts"))


def test_resume_from_a_perturbed_state(start: Any) -> None:
    """Resuming an earlier checkpoint by its folder drops later rows and repeats the same steps."""
    whole = start("whole", checkpoint__interval=5, checkpoint__keep=0)
    before = steps_of(whole), tensors_of(whole)
    start("whole", checkpoint__resume=str(whole / "checkpoints" / "step_00000005"))
    assert (steps_of(whole), tensors_of(whole)) == before


def test_validation_and_asynchronous_saving_do_not_change_the_run(start: Any) -> None:
    plain = start("plain")
    busy = start("busy", validation__interval=3, checkpoint__interval=2, checkpoint__keep=2)
    inline = start(
        "inline", checkpoint__interval=2, checkpoint__asynchronous=False, data__prefetch=0
    )
    assert_same_run(plain, busy)
    assert_same_run(plain, inline)
    assert sorted(path.name for path in (busy / "checkpoints").iterdir()) == [
        "latest",
        "step_00000018",
        "step_00000020",
    ]


def test_learning_happens_and_the_run_folder_is_complete(start: Any) -> None:
    longer = {"learning_rate": 0.02, "warmup_steps": 4}
    folder = start(
        "run",
        steps=120,
        optimizer=longer,
        logging={"tensorboard": True, "plot": True},
        validation__interval=60,
    )
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert math.log(101) - 0.2 < losses[0] < math.log(101) + 0.2
    assert sum(losses[-10:]) / 10 < losses[0] - 0.3
    wanted = (
        "step loss learning_rate grad_norm tokens_per_second samples_per_second step_time mfu"
        " loss_scale consumed_samples sample_hash"
    )
    assert all(set(wanted.split()) <= row.keys() for row in rows if "loss" in row)
    validations = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in validations] == [60, 120]
    assert validations[-1]["validation_perplexity"] == math.exp(validations[-1]["validation_loss"])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert load_config(folder / "config.yaml").train.max_steps == 120
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step_00000120"
    manifest = read_manifest(folder / "checkpoints" / "step_00000120")
    assert (
        manifest["state"]["consumed_samples"] == 480
        and manifest["versions"]["torch"] == torch.__version__
    )


def test_the_same_command_again_does_nothing_more(start: Any) -> None:
    folder = start("run")
    before = steps_of(folder), tensors_of(folder)
    start("run")
    assert (steps_of(folder), tensors_of(folder)) == before


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
    done = len(steps_of(tmp_path / "parts"))
    assert stop.value.exit_code == 128 + number and (tmp_path / "parts" / "loss.png").is_file()
    name, folder = {2: "Ctrl-C", 15: "SIGTERM"}[number], tmp_path / "parts" / "checkpoints"
    assert str(stop.value) == (
        f"stopped by {name} after step {done}; saved in {folder}; the same command resumes with"
        " checkpoint.resume=auto"
    )
    assert 3 <= done < 20
    checkpoint = find_checkpoint(tmp_path / "parts")
    assert checkpoint is not None and checkpoint.name == f"step_{done:08d}"
    assert_same_run(whole, start("parts"))


def test_finetune_starts_from_weights_with_a_new_optimizer(start: Any) -> None:
    base = start("base", steps=120, optimizer={"learning_rate": 0.02})
    tuned = start("tuned", steps=5, checkpoint__init_from=str(base))
    assert steps_of(tuned)[0]["loss"] < steps_of(base)[0]["loss"] - 0.2
    assert [(row["step"], row["learning_rate"]) for row in steps_of(tuned)[:2]] == [
        (1, 0.0), (2, 0.01 / 4),
    ]  # fmt: skip


def test_a_finetuned_run_resumes_itself_not_its_base(start: Any) -> None:
    base = start("base")
    whole = start("whole", checkpoint__init_from=str(base))
    start("parts", steps=8, checkpoint__init_from=str(base))
    assert_same_run(whole, start("parts", checkpoint__init_from=str(base)))


def test_evaluation_equals_the_last_validation(start: Any, corpus_prefix: Path) -> None:
    folder = start("run")
    last = [row for row in read_metrics(folder / "metrics.jsonl") if "validation_loss" in row][-1]
    evaluate(*make_run(load_config(folder / "config.yaml"), "eval"))
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert result["tokens"] == 8 * 16


def test_epochs_and_tokens(start: Any, corpus_prefix: Path) -> None:
    by_tokens = start("tokens", train={"max_tokens": 5 * 4 * 16, "micro_batch_size": 4})
    assert len(steps_of(by_tokens)) == 5
    by_epochs = start("epochs", train={"max_epochs": 0.05, "micro_batch_size": 4})
    samples = read_manifest(find_checkpoint(by_epochs) or Path())["state"]["consumed_samples"]
    # 90 % of 60 documents; windows of seq_length + 1 tokens that overlap by one
    windows = (int(IndexedDataset(corpus_prefix).sizes[:54].sum()) - 1) // 16
    assert samples == int(0.05 * windows) // 4 * 4


def test_gradients_that_stay_infinite_stop_the_run(start: Any, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"3 steps in a row had no finite gradient"):
        start(
            "run",
            precision="fp16",
            loss_scale={"mode": "static", "initial": 2.0**60},
            train__max_skipped_steps=3,
        )
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [1, 2, 3]


def test_a_second_run_in_the_same_folder_is_refused(start: Any, tmp_path: Path) -> None:
    from common.run_folder import owned_folder

    with (
        owned_folder(tmp_path / "run"),
        pytest.raises(ConfigError, match="another run is writing here"),
    ):
        start("run")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"checkpoint__resume": "latest"}, CheckpointError, "no whole checkpoint here"),
        ({"checkpoint__init_from": "nowhere"}, CheckpointError, "nowhere: no whole checkpoint"),
        ({"data__train": "nowhere"}, DataError, "nowhere"),
        ({"data": {}}, ConfigError, "data.train is not given"),
        ({"model__vocab_size": 60}, DataError, "vocab_size is 60"),
        ({"model__seq_length": 100_000, "model__dropout": 0.0}, DataError, "seq_length"),
        ({"train": {"micro_batch_size": 2}}, ConfigError, "length of the run is not given"),
        ({"device": "cuda"}, None, "device=cuda"),
        ({"device": "npu"}, None, "device=npu"),
    ],
)
def test_bad_input(
    start: Any, changes: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    from common.errors import UserError

    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(error or UserError) as caught:
        start("run", **changes)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_a_checkpoint_of_another_shape(start: Any) -> None:
    folder = start("run", steps=2)
    with pytest.raises(CheckpointError) as caught:
        start("run", steps=3, model__hidden_size=32)
    message = str(caught.value)
    assert "hidden_size is 16 there and 32 in the config" in message and "\n" not in message
    assert (
        "model.hidden_size=16 model.ffn_hidden_size=64" in message
        and f"output_dir={folder}_2" in message
    )
    with pytest.raises(
        CheckpointError, match=r"add: model=from_checkpoint, or model\.num_layers=2$"
    ):
        start("other", steps=3, model__num_layers=3, checkpoint__init_from=str(folder))
    with pytest.raises(CheckpointError, match=r"optimizer\.name=adamw, the config says sgd"):
        start("run", steps=3, optimizer={"name": "sgd", "learning_rate": 0.1})


def test_a_changed_precision_or_loss_scale_is_obeyed_on_resume(start: Any) -> None:
    start("run", steps=2, precision="bf16")
    assert steps_of(start("run", steps=4, precision="fp16"))[2]["loss_scale"] == 65536.0
    assert steps_of(start("run", steps=6, precision="bf16"))[4]["loss_scale"] == 1.0
    scaled = {"mode": "static", "initial": 128.0}
    assert steps_of(start("run", steps=8, loss_scale=scaled))[6]["loss_scale"] == 128.0
    assert (
        steps_of(start("run", steps=10, loss_scale=scaled | {"initial": 1024.0}))[8]["loss_scale"]
        == 1024.0
    )


@pytest.mark.parametrize("change", [{"model__num_heads": 4}, {"model__layer_norm_epsilon": 0.5}])
def test_settings_that_change_the_function_but_no_shape_are_refused(
    start: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = start("run", steps=2)
    for words in ({"name": "run"}, {"name": "other", "checkpoint__init_from": str(folder)}):
        with pytest.raises(
            CheckpointError, match=r"or model\.(num_heads=2|layer_norm_epsilon=1e-05)\b"
        ):
            start(steps=3, **words, **change)


def test_ranks_compare_their_weights_and_moments(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start("run", steps=3)
    facts: dict[str, Any] = {}
    monkeypatch.setattr(
        "torch_gpt2.parallel.world.World.require_equal",
        lambda self, found, models=None: facts.update(found),
    )
    start("run", steps=4)
    saved = folder / "checkpoints" / "step_00000003"
    for fact, file in (
        ("norm of the weights", "model.safetensors"),
        ("norm of the optimizer's state", "optimizer.safetensors"),
    ):
        expected = math.sqrt(
            sum(
                float((values.astype("float64") ** 2).sum())
                for values in load_file(saved / file).values()
            )
        )
        assert facts[fact] == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_reads_the_manifest_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start("run", steps=2)
    read: list[str] = []
    for module, name in (
        ("common.checkpoint.manifest", "unseal"),
        ("common.systems.direct", "detect"),
    ):
        true = getattr(import_module(module), name)
        monkeypatch.setattr(
            f"{module}.{name}",
            lambda *words, true=true, name=name: read.append(name) or true(*words),
        )
    start("run", steps=3)
    assert read == ["unseal"]


def test_after_finetuning_the_tuned_weights_are_evaluated(start: Any) -> None:
    base = start("base", steps=2)
    tuned = start("tuned", steps=3, checkpoint__init_from=str(base))
    config = resolve_config(load_config(tuned / "config.yaml"))
    evaluate(*make_run(config, "eval"))
    assert json.loads((tuned / "evaluation.json").read_text())["checkpoint"] == str(
        tuned / "checkpoints" / "step_00000003"
    )
    evaluate(
        *make_run(
            config.model_copy(
                update={"checkpoint": config.checkpoint.model_copy(update={"load": str(base)})}
            ),
            "eval",
        )
    )
    assert json.loads((tuned / "evaluation.json").read_text())["checkpoint"] == str(
        base / "checkpoints" / "step_00000002"
    )


def test_a_finished_run_of_another_folder_is_saved_here(start: Any) -> None:
    base = start("base", steps=3)
    copy = start("copy", steps=3, checkpoint__resume=str(base))
    assert tensors_of(copy) == tensors_of(base)


def test_weights_that_become_infinite_are_not_a_success(start: Any, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf)"):
        start(
            "run",
            steps=6,
            optimizer={
                "name": "sgd",
                "learning_rate": 1e38,
                "schedule": "constant",
                "clip_grad": 0.0,
            },
        )
    assert find_checkpoint(tmp_path / "run") is None


def test_going_back_and_being_killed_resumes_from_there(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start("run", steps=8, checkpoint__interval=4, checkpoint__keep=0)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("common.training.session.train_loop", killed)
    with pytest.raises(KeyboardInterrupt):
        start("run", steps=10, checkpoint__resume=str(folder / "checkpoints" / "step_00000004"))
    monkeypatch.undo()
    start("run", steps=10)
    assert [row["step"] for row in steps_of(folder)] == list(range(1, 11))


def test_training_begins_at_the_shared_initial_weights(start: Any) -> None:
    """Not at their rounding: the float32 copies of bfloat16 weights are filled from the generator
    itself.
    """
    from common.weights.initial import initial_rows

    kinds = {"parameters": "bfloat16", "compute": "bfloat16"}
    folder = start("run", steps=1, precision=kinds, optimizer={"learning_rate": 1e-30})
    model = load_config(folder / "config.yaml").model
    saved = load_file(folder / "checkpoints" / "step_00000001" / "model.safetensors")[
        "h.0.mlp.c_fc.weight"
    ]
    assert (
        saved.tobytes() == initial_rows(model, 1234, "h.0.mlp.c_fc.weight", saved.shape).tobytes()
    )


def test_deterministic_mode_is_switched_on(start: Any) -> None:
    try:
        start("run", steps=1, train={"max_steps": 1, "micro_batch_size": 2, "deterministic": True})
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_validation_data_of_its_own_leave_the_training_data_whole(
    start: Any, corpus_prefix: Path
) -> None:
    with_split = start("split", steps=1)
    whole = start(
        "whole", steps=1, data={"train": str(corpus_prefix), "validation": str(corpus_prefix)}
    )
    assert steps_of(with_split)[0]["sample_hash"] != steps_of(whole)[0]["sample_hash"]
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "validation_loss" in row]
    assert rows[0]["validation_tokens"] == 8 * 16


def test_never_resume_protects_a_run(start: Any) -> None:
    start("run", steps=2)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=never"):
        start("run", steps=3, checkpoint__resume="never")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model__attention_dropout": 0.0},  # a CPU's kernel has none
            "attention scaled_dot_product_attention; layer norm native_layer_norm in float32;"
            " optimizer fused AdamW",
        ),
        (
            {
                "model__attention_dropout": 0.0,
                "train__fused_attention": False,
                "optimizer__name": "sgd",
            },
            "attention written out; layer norm native_layer_norm in float32; optimizer SGD",
        ),
    ],
)
def test_a_run_names_its_kernels(start: Any, changes: dict[str, Any], expected: str) -> None:
    folder = start("run", 1, **changes)
    assert (folder / "config.yaml").read_text().splitlines()[-1] == f"# kernels: {expected}"


def test_a_token_that_the_model_lacks_is_found_before_anything_is_written(
    start: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"holds the token id \d+"):
        start("run", model__vocab_size=50)
    assert not (tmp_path / "run").exists()

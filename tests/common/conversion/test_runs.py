"""A converted run resumes as if it had not been converted. What MindSpore's own optimizers save
is read too.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from common.conversion.convert import convert  # noqa: E402
from common.errors import CheckpointError  # noqa: E402
from common.systems.table import FORMATS  # noqa: E402
from common.tensor_files.containers import open_tensors  # noqa: E402
from tests.tiny import SGD, require_same_bits, rows_of, tiny_run, train_here  # noqa: E402
from tools.convert_weight import main  # noqa: E402

ADAMW = {"learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 6, "weight_decay": 0.1}
FLOAT16 = {"precision": {"compute": "float16"}, "loss_scale": {"mode": "dynamic", "initial": 1024, "window": 2}}


def train(folder: Path, prefix: Path, steps: int = 2, **changes: Any) -> Path:
    changes = {"optimizer": ADAMW, "model__hidden_dropout": 0.1} | changes
    return train_here(tiny_run(folder, prefix, train__max_steps=steps, **changes))


@pytest.mark.parametrize(
    ("way", "changes"),
    [(["mindformers", "megatron"], FLOAT16), (["torch_gpt2", "mindformers_r0.3", "megatron_core"], {"optimizer": SGD})],
)
def test_a_run_resumes_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path, way: list[str], changes: dict[str, Any]
) -> None:
    """Moments, step, schedule, loss scale, place in the data and dropout masks."""
    whole = train(tmp_path / "whole", corpus_prefix, 6, **changes)
    before = train(tmp_path / "half", corpus_prefix, 3, **changes)
    for number, target in enumerate([*way, "torch_gpt2"]):
        ranks = {"model_parallel": 2, "pipeline_stage": 2} if FORMATS[target].write_shards else {}
        result = convert(before, tmp_path / str(number), target_format=target, verify=True, **ranks)
        assert result["step"] == 3
        before = tmp_path / str(number)
    resumed = {"checkpoint__resume": str(before), **changes}
    require_same_bits(train(tmp_path / "resumed", corpus_prefix, 6, **resumed), whole, last=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder / "run", corpus_prefix)


def test_training_says_that_it_does_not_begin_at_checkpoint_load(
    trained: Path, tmp_path: Path, corpus_prefix: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, corpus_prefix, 1, checkpoint__load=str(trained))
    assert "not for training; set checkpoint.resume to resume from it" in caplog.text
    assert rows_of(tmp_path)[0]["step"] == 1


def test_weights_without_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(to: str, name: str, *more: str) -> str:
        words = ["--input", str(trained), "--output", str(tmp_path / name), "--verify", *more]
        assert main([*words, "--to", to]) == 0
        return capsys.readouterr().out

    whole = told("mindformers", "run")
    assert "36 parameters" in whole
    assert "and the run at step 2 with 72 tensors of the optimizer, read back and equal" in whole
    alone = told("mindformers", "alone", "--weights_only")
    assert "not written: 72 x state of the optimizer" in alone
    assert "not written: run (where training stood)" in told("hf", "hf")
    with (
        open_tensors(tmp_path / "run" / "gpt2.ckpt") as run,
        open_tensors(tmp_path / "alone" / "gpt2.ckpt") as alone_file,
    ):
        assert len(alone_file) == 36 and len(run) == 3 * 36 + 3 and run["step_num"].read() == 2


def test_a_checkpoint_of_mindspore_itself(tmp_path: Path, mindspore: ModuleType, trained: Path) -> None:
    """Its optimizers name their state, and save_checkpoint its counters."""
    ms, random = mindspore, np.random.default_rng(0)
    ours = convert(trained, tmp_path / "ours", target_format="mindformers", weights_only=True)
    assert ours["step"] is None
    loaded = ms.load_checkpoint(str(tmp_path / "ours" / "gpt2.ckpt"))
    optimizer = ms.nn.AdamWeightDecay(list(loaded.values()), learning_rate=0.1)
    gradients = {
        parameter.name: random.standard_normal(parameter.shape).astype(np.float32) for parameter in loaded.values()
    }
    optimizer(tuple(map(ms.Tensor, gradients.values())))
    folder = tmp_path / "theirs"
    folder.mkdir()
    counters = {"step_num": 7, "epoch_num": 1, "loss_scale": 512.0}
    ms.save_checkpoint(optimizer, str(folder / "x.ckpt"), append_dict=counters)
    (folder / "model.yaml").write_bytes((tmp_path / "ours" / "model.yaml").read_bytes())
    result = convert(folder, tmp_path / "back", target_format="mindspore", verify=True)
    assert result["step"] == 7
    assert "reads from the first sample" in result["ignored"]["position in the data"]
    engine = json.loads((tmp_path / "back" / "manifest.json").read_text())["engine"]
    assert (engine["optimizer_steps"], engine["loss_scale"]["value"]) == (1, 512)
    with open_tensors(tmp_path / "back" / "optimizer.safetensors") as found:
        for name, value, tolerance in (
            ("h.1.mlp.c_fc.weight.exp_avg",
             0.1 * gradients["backbone.blocks.1.output.mapping.weight"].T, 1e-5),
            ("h.0.attn.k_proj.bias.exp_avg_sq",
             0.001 * gradients["backbone.blocks.0.attention.dense2.bias"] ** 2, 1e-4),
        ):  # fmt: skip
            np.testing.assert_allclose(found[name].read(), value, rtol=tolerance)


def test_files_that_do_not_belong_together_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    convert(trained, folder, target_format="mindformers")
    text = (folder / "model.yaml").read_text()
    (folder / "model.yaml").write_text(text.replace("optimizer_steps: 2", "optimizer_steps: 5"))
    message = r"global_step is 2.0, and model.yaml says 5: they are of two runs"
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "out", target_format="torch_gpt2")
    assert not (tmp_path / "out").exists()

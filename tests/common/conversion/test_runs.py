"""A converted run resumes as if it had not been converted. What MindSpore's own optimizers save
is read too.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

torch = pytest.importorskip("torch")

import torch_gpt2.train  # noqa: E402
from common.checkpoint.folders import require_checkpoint  # noqa: E402
from common.checkpoint.manifest import write_manifest  # noqa: E402
from common.config.load import build_config  # noqa: E402
from common.config.schema import RunConfig  # noqa: E402
from common.conversion.convert import convert  # noqa: E402
from common.errors import CheckpointError  # noqa: E402
from common.inputs import make_run  # noqa: E402
from common.resolve.derive import resolve_config  # noqa: E402
from common.systems.table import FORMATS  # noqa: E402
from common.tensor_files.arrays import TensorKind  # noqa: E402
from common.tensor_files.containers import open_tensors  # noqa: E402
from common.tensor_files.mindspore_ckpt import stream_mindspore  # noqa: E402
from common.training.metrics import read_metrics  # noqa: E402
from tools.convert_weight import main  # noqa: E402


def make_config(folder: Path, prefix: Path, **sections: dict[str, Any]) -> RunConfig:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "seq_length": 16}
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "model": sizes | {"vocab_size": 101, "hidden_dropout": 0.1},
        "train": {"max_steps": 6, "micro_batch_size": 2, "global_batch_size": 4},
        "optimizer": {
            "learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 6, "weight_decay": 0.1,
        },
        "data": {"train": str(prefix), "split": "100,0,0"},
        "logging": {"tensorboard": False, "plot": False},
    }  # fmt: skip
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return resolve_config(build_config(tree))


def train(folder: Path, prefix: Path, **sections: dict[str, Any]) -> Path:
    torch_gpt2.train.train(*make_run(make_config(folder, prefix, **sections)))
    return folder


SGD = {"name": "sgd", "momentum": 0.9, "learning_rate": 0.1, "schedule": "constant"}
FLOAT16 = {
    "precision": {"compute": "float16"},
    "loss_scale": {"mode": "dynamic", "initial": 1024, "window": 2},
}


@pytest.mark.parametrize(
    ("way", "sections"),
    [
        (["mindformers", "megatron"], FLOAT16),
        (["torch_gpt2", "mindformers_r0.3", "megatron_core"], {"optimizer": SGD}),
    ],
)
def test_a_run_resumes_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path, way: list[str], sections: dict[str, Any]
) -> None:
    """Moments, step, schedule, loss scale, place in the data and dropout masks."""
    train(tmp_path / "whole", corpus_prefix, **sections)
    half = {**sections, "train": {"max_steps": 3}}
    before = train(tmp_path / "half", corpus_prefix, **half)
    for number, target in enumerate([*way, "torch_gpt2"]):
        ranks = {"model_parallel": 2, "pipeline_stage": 2} if FORMATS[target].write_shards else {}
        result = convert(before, tmp_path / str(number), target_format=target, verify=True, **ranks)
        assert result["step"] == 3
        before = tmp_path / str(number)
    train(tmp_path / "resumed", corpus_prefix, **sections, checkpoint={"resume": str(before)})
    kept = ("step", "loss", "grad_norm", "learning_rate", "loss_scale", "consumed_samples",
            "sample_hash")  # fmt: skip
    steps = [
        [[row.get(name) for name in kept] for row in read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "resumed")
    ]
    assert steps[1] == steps[0][3:] and [row[0] for row in steps[1]] == [4, 5, 6]
    ends = [require_checkpoint(tmp_path / folder, "") for folder in ("whole", "resumed")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder / "run", corpus_prefix, train={"max_steps": 2})


def test_training_says_that_it_does_not_begin_at_checkpoint_load(
    trained: Path, tmp_path: Path, corpus_prefix: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, corpus_prefix, train={"max_steps": 1}, checkpoint={"load": str(trained)})
    assert "not for training; set checkpoint.resume to resume from it" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["step"] == 1


def test_weights_without_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_checkpoint_of_mindspore_itself(
    tmp_path: Path, mindspore: ModuleType, trained: Path
) -> None:
    """Its optimizers name their state, and save_checkpoint its counters."""
    ms, random = mindspore, np.random.default_rng(0)
    ours = convert(trained, tmp_path / "ours", target_format="mindformers", weights_only=True)
    assert ours["step"] is None
    loaded = ms.load_checkpoint(str(tmp_path / "ours" / "gpt2.ckpt"))
    optimizer = ms.nn.AdamWeightDecay(list(loaded.values()), learning_rate=0.1)
    gradients = {
        parameter.name: random.standard_normal(parameter.shape).astype(np.float32)
        for parameter in loaded.values()
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
    config = yaml.safe_load((folder / "model.yaml").read_text())

    def fails(match: str, source: Path = folder) -> None:
        with pytest.raises(CheckpointError, match=match):
            convert(source, tmp_path / "out", target_format="torch_gpt2")
        assert not (tmp_path / "out").exists()

    (tmp_path / "ours").mkdir()
    manifest = json.loads((require_checkpoint(trained, "") / "manifest.json").read_text())
    write_manifest(tmp_path / "ours", manifest | {"files": {}, "config": {"model": [1]}})
    fails(r"broken manifest: config.model: .* valid dictionary, found \[1\]", tmp_path / "ours")
    config["run"]["engine"]["optimizer_steps"] = 5
    (folder / "model.yaml").write_text(yaml.safe_dump(config))
    fails("global_step is 2.0, and model.yaml says 5: they are of two runs")
    config["run"]["engine"]["optimizer_steps"] = 2
    (folder / "model.yaml").write_text(yaml.safe_dump(config))
    with open_tensors(folder / "gpt2.ckpt") as found:
        lost = "adam_v.backbone.layernorm.beta"
        kept = {name: tensor for name, tensor in found.items() if name != lost}
        kinds = {name: TensorKind(dtype=x.dtype, shape=x.shape) for name, x in kept.items()}
        arrays = (np.array(tensor.read()) for tensor in kept.values())
        stream_mindspore(tmp_path / "cut.ckpt", kinds, arrays)
    (tmp_path / "cut.ckpt").replace(folder / "gpt2.ckpt")
    fails(r"missing adam_v.backbone.layernorm.beta \[16\]")


def test_every_format_that_holds_a_run_is_tested() -> None:
    here = {"torch_gpt2", "mindspore", "mindformers", "mindformers_r0.3", "megatron"}
    read_only = {"deepspeed", "oneflow"}  # tests/common/systems has their own files
    holding = {name for name, format in FORMATS.items() if format.holds_run}
    assert holding == here | {"megatron_core"} | read_only

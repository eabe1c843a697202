"""OpenAI's folders: what TensorFlow wrote, tensor for tensor where transformers has it; heads that
cannot be right.
"""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from common.config.schema import ModelConfig
from common.conversion.convert import convert
from common.conversion.heads import warn_of_heads
from common.errors import CheckpointError, ConfigError, GPT2Error
from common.log import LOG
from common.systems.openai.read import open_openai
from common.systems.table import detect
from common.tensor_files.containers import open_tensors
from tools.convert_weight import main

FIXTURE = Path(__file__).parents[2] / "tensor_files" / "data" / "openai"
PRESETS = Path(__file__).parents[4] / "configs" / "gpt2"
BLOCK = {
    "attn.c_attn": "attn/c_attn", "attn.c_proj": "attn/c_proj", "ln_1": "ln_1", "ln_2": "ln_2",
    "mlp.c_fc": "mlp/c_fc",
    "mlp.c_proj": "mlp/c_proj",
}  # fmt: skip


def copy(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "117M")
    (tmp_path / "117M" / "encoder.json").write_text('{"a": 0}')
    (tmp_path / "117M" / "vocab.bpe").write_text("#version: 0.2\na b\n")
    return tmp_path / "117M"


def expected() -> dict[str, np.ndarray]:
    """transformers' names and layout, which OpenAI's are but for the first axis, from the file
    itself.
    """
    with open_tensors(FIXTURE / "model.ckpt.index") as stored:
        theirs = {
            "wte.weight": "wte",
            "wpe.weight": "wpe",
            "ln_f.weight": "ln_f/g",
            "ln_f.bias": "ln_f/b",
        }
        for ours, name in BLOCK.items():
            theirs |= {
                f"h.0.{ours}.weight": f"h0/{name}/{'g' if 'ln' in ours else 'w'}",
                f"h.0.{ours}.bias": f"h0/{name}/b",
            }
        arrays = {
            f"transformer.{ours}": stored[f"model/{name}"].read() for ours, name in theirs.items()
        }
    return {name: array[0] if array.ndim == 3 else array for name, array in arrays.items()}


def test_a_folder_of_openai_becomes_one_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copy(tmp_path)
    assert detect(source) == "openai"
    assert (
        main(["--to", "hf", "--input", str(source), "--output", str(tmp_path / "hf"), "--verify"])
        == 0
    )
    assert "not written: 7 x state of the training" in capsys.readouterr().out
    with open_tensors(tmp_path / "hf" / "model.safetensors") as found:
        values = expected()
        assert found.keys() == values.keys()
        for name, array in values.items():
            np.testing.assert_array_equal(found[name].read(), array, err_msg=name)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [
        config[key] for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    ] == [1, 8, 2, 5, 11]
    for theirs, name in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
        assert (tmp_path / "hf" / name).read_bytes() == (source / theirs).read_bytes(), (
            "the tokenizer goes along"
        )


def test_the_latest_of_several_checkpoints(tmp_path: Path) -> None:
    """Files as gpt-2-simple leaves them."""
    source = copy(tmp_path)
    for file in source.glob("model.ckpt.*"):
        shutil.copy(file, source / file.name.replace("model.ckpt", "model-200"))
    (source / "model-200.data-00002-of-00003").write_bytes(b"other")
    with open_openai(source) as weights:
        assert weights.model.num_heads == 2
    (source / "checkpoint").write_text(
        'model_checkpoint_path: "/content/run1/model-200"\nall_model_checkpoint_paths:'
        ' "model.ckpt"\n'
    )
    with pytest.raises(CheckpointError, match=r"model-200.index"), open_openai(source):
        pass
    (source / "checkpoint").unlink()
    with (
        pytest.raises(
            CheckpointError, match=r"holds 2 checkpoints \(files .index\); give the path of one"
        ),
        open_openai(source),
    ):
        pass
    with open_openai(source / "model.ckpt.index") as weights:
        assert len(weights.tensors) == 20


def test_bad_folders_and_a_format_that_is_read_only(tmp_path: Path) -> None:
    source = copy(tmp_path)
    sizes = json.loads((source / "hparams.json").read_text())

    def fails(error: type[GPT2Error], match: str, to: str = "hf") -> None:
        with pytest.raises(error, match=match):
            convert(
                source,
                tmp_path / "out",
                source_format="openai",
                target_format=to,
                dtype=None,
                verify=False,
            )
        assert not list(tmp_path.glob("*out*"))

    fails(ConfigError, "--to openai: this format is read only; say --to hf", to="openai")
    for changes, fault in {
        "n_layer": (2, "missing model/h1/ln_1/g"),
        "n_vocab": (12, r"model/wte is \[11, 8\], the model's is \[12, 8\]"),
        "n_head": (3, "3 heads do not divide a width of 8"),
    }.items():
        (source / "hparams.json").write_text(json.dumps(sizes | {changes: fault[0]}))
        fails(CheckpointError if changes != "n_head" else ConfigError, fault[1])
    (source / "hparams.json").write_text("{}")
    fails(
        ConfigError,
        r"hparams.json: no sizes of a GPT-2: n_layer, n_embd, n_head, n_ctx, n_vocab missing",
    )
    (source / "hparams.json").unlink()
    fails(ConfigError, "put OpenAI's hparams.json beside the weights")


def test_an_unusual_number_of_heads_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that fit every shape can still be wrong. None of our presets is unusual, nor is any
    small model.
    """

    def warnings(width: int, heads: int) -> list[str]:
        caplog.clear()
        warn_of_heads(
            Path("folder"),
            ModelConfig(
                num_layers=1, hidden_size=width, num_heads=heads, seq_length=1, vocab_size=1
            ),
        )
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        return [record.getMessage() for record in caplog.records]

    monkeypatch.setattr(LOG, "propagate", False)
    LOG.addHandler(caplog.handler)
    try:
        sections = [
            yaml.safe_load(path.read_bytes()).get("model", {}) for path in PRESETS.rglob("*.yaml")
        ]
        presets = [
            (section["hidden_size"], section["num_heads"])
            for section in sections
            if "num_heads" in section
        ]
        assert len(presets) > 12 and not any(warnings(*preset) for preset in [*presets, (24, 1)])
        for width, heads, others in (
            (768, 16, "12"),
            (1024, 8, "16"),
            (1600, 32, "25"),
            (2048, 8, "32 or 16"),
            (256, 1, "4 or 2"),
        ):
            (message,) = warnings(width, heads)
            assert message.startswith(
                f"folder: its config says {heads} heads, where a GPT-2 of width {width} has"
                f" {others};"
            )
    finally:
        LOG.removeHandler(caplog.handler)

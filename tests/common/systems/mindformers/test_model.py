"""A `.ckpt` with MindFormers' own YAML beside it: the model comes from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.conversion.convert import convert
from common.errors import ConfigError
from common.systems.mindformers.read import open_mindformers
from common.systems.own_folder import write_project
from common.systems.run_state import MODEL_YAML
from common.systems.weights import checked_model
from tests.common.systems.tiny_weights import as_weights, random_arrays

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 8, "max_positions": 16,
    "ffn_hidden_size": 64, "vocab_size": 101, "layer_norm_epsilon": 0.001,
}  # fmt: skip
# r1.x says width and places in one file; r0.3 in a file that the run's names as a base
R1 = """model:
  model_config:
    type: GPT2Config
    seq_length: 8
    max_position_embeddings: 16
    vocab_size: 101
    hidden_size: 32
    num_layers: 2
    num_heads: 4
    expand_ratio: 2
    layernorm_epsilon: 0.001
    checkpoint_name_or_path: "gpt2"
  arch: {type: GPT2LMHeadModel}
train_dataset: {a_key_that_nobody_knows: 1}
"""
R03 = (
    R1.partition("train")[0]
    .replace("hidden_size", "embedding_size")
    .replace("expand_ratio: 2", "intermediate_size: 64")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Only the checkpoint."""
    (tmp_path / "ours").mkdir()
    model = checked_model(tmp_path, SIZES)
    write_project(tmp_path / "ours", as_weights(model, random_arrays(model)), None)
    convert(tmp_path / "ours", tmp_path / "mf", target_format="mindformers")
    (tmp_path / "mf" / MODEL_YAML).unlink()
    return tmp_path / "mf"


def sizes_of(folder: Path) -> dict[str, object]:
    with open_mindformers(folder) as weights:
        return {key: getattr(weights.model, key) for key in SIZES}


@pytest.mark.parametrize("name", ["run_gpt2.yaml", MODEL_YAML, "mindspore_model.yml"])
def test_a_yaml_of_r1(folder: Path, name: str) -> None:
    (folder / name).write_text(R1)
    assert sizes_of(folder) == SIZES == sizes_of(folder / "gpt2.ckpt")


def test_a_yaml_of_r03_with_its_base(folder: Path) -> None:
    base = folder / "model_config" / "gpt2.yaml"
    base.parent.mkdir()
    base.write_text(R03)
    run = "base_config: ['./model_config/gpt2.yaml']\nrunner_config: {epochs: 1}\n"
    (folder / "run_gpt2.yaml").write_text(run)
    assert sizes_of(folder) == SIZES
    base.unlink()
    with pytest.raises(ConfigError, match=r"gpt2\.yaml: no such file"):
        sizes_of(folder)


def test_the_file_of_the_same_name_is_chosen(folder: Path) -> None:
    (folder / "run_gpt2.yaml").write_text(R1)
    (folder / "run_other.yaml").write_text(R1.replace("num_heads: 4", "num_heads: 2"))
    with pytest.raises(ConfigError, match=r"run_gpt2\.yaml, run_other\.yaml have a model of Mind"):
        sizes_of(folder)
    (folder / "gpt2.yaml").write_text(R1)
    assert sizes_of(folder) == SIZES
    (folder / MODEL_YAML).write_text(f"model: {SIZES | {'num_heads': 8}}")
    assert sizes_of(folder) == SIZES | {"num_heads": 8}, "ours says more, and comes first"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (R1.replace("    num_heads: 4\n", ""), r"a\.yaml: 12 heads do not divide a width of 32"),
        (R1.replace("GPT2Config", "LlamaConfig"), r"a\.yaml:3.*use GPT2Config"),
        (R1.replace("num_heads: 4", "num_heads: 5"), "5 heads do not divide a width of 32"),
        ("base_config: []\n", "has no model.model_config"),
        ("model: {model_config\n", r"a\.yaml.*move it away from the weights"),
    ],
)
def test_missing_parts_are_named(folder: Path, text: str, match: str) -> None:
    (folder / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=match):
        sizes_of(folder)

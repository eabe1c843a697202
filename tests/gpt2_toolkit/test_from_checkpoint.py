"""A configuration that leaves its model to the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from common.config.load import build_config
from common.config.schema import ModelConfig
from common.run_config import fill_model, load_config
from run_gpt2 import main
from tests.reference import MERGES, POSITIONS, save_model, write_vocabulary
from tests.tiny import tiny_run

VOCABULARY = 262


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("from_checkpoint")
    return save_model(root / "hf", write_vocabulary(root / "v", MERGES), size=VOCABULARY)


def model_of(folder: Path, **sections: Any) -> ModelConfig:
    tree = tiny_run(folder / "run")
    del tree["model"]
    return build_config(tree | sections, fill=fill_model).model


def test_sizes_come_from_the_checkpoint_and_given_keys_win(source: Path, tmp_path: Path) -> None:
    for model in (None, "from_checkpoint", {}):
        found = model_of(tmp_path, checkpoint={"load": str(source)}, model=model)
        assert (found.num_layers, found.hidden_size, found.num_heads) == (2, 32, 4)
        assert (found.vocab_size, found.seq_length, found.max_positions) == (262, *[POSITIONS] * 2)
        assert found.attention_dropout == 0.1, "transformers' default"
    given = {"seq_length": 16, "dropout": 0.2}
    found = model_of(tmp_path, checkpoint={"init_from": str(source)}, model=given)
    assert (found.seq_length, found.max_positions, found.num_layers) == (16, POSITIONS, 2)
    assert found.dropout == 0.2 and found.attention_dropout is None
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: x\noptimizer: {learning_rate: 1.0}\nmodel: from_checkpoint\n")
    words = [f"checkpoint.load={source}", "model.seq_length=8"]
    assert load_config(file, words).model.seq_length == 8


def test_a_whole_section_is_not_changed(source: Path, tmp_path: Path) -> None:
    section = {
        "num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 4, "vocab_size": 100,
    }  # fmt: skip
    found = model_of(tmp_path, checkpoint={"load": str(source)}, model=section)
    assert found == ModelConfig.model_validate(section)


def test_finetune_then_eval_and_predict_without_a_model(
    source: Path, tmp_path: Path, corpus_prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own checkpoint is what eval and predict then take, with its tokenizer."""
    file = tmp_path / "run.yaml"
    tree = tiny_run(tmp_path / "run", corpus_prefix, train__max_steps=1)
    del tree["model"]
    file.write_text(json.dumps(tree))
    command = ["--config", str(file), "--run_mode"]
    tuned = [f"checkpoint.init_from={source}", "model.seq_length=16"]
    assert main([*command, "finetune", *tuned]) == 0
    assert main([*command, "eval", "model.seq_length=16"]) == 0
    capsys.readouterr()
    assert main([*command, "predict", "predict.prompt=hello", "predict.max_new_tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("Prompt: hello\nGeneration: hello")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": "from_checkpoint"}, "model: its sizes come from the checkpoint, and none is"),
        ({"model": "from_nowhere"}, "'from_nowhere': expected from_checkpoint"),
        ({}, "model: required"),
        ({"checkpoint": {"load": "nothing"}}, "nothing: no model here: there is no such file"),
    ],
)
def test_without_a_checkpoint(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as error:
        model_of(tmp_path, **sections)
    assert getattr(error.value, "exit_code", None) == 2 and "\n" not in str(error.value)

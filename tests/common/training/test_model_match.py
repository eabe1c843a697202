"""A checkpoint of another model: the words that the error gives, pasted, make the config that
fits.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from common.config.resolved import as_run
from common.errors import CheckpointError
from common.parallel.run import Run
from common.resolve.derive import fitting_vocabulary, resolve_config
from common.run_config import load_config
from common.training.start import require_same_model

CONFIG = """
output_dir: OUTPUT
model: {num_layers: 4, hidden_size: 192, num_heads: 6, seq_length: 128, vocab_size: 50257}
train: {max_steps: 1, micro_batch_size: 1}
optimizer: {learning_rate: 0.1}
"""
GPT2 = {
    "num_layers": 12, "hidden_size": 768, "num_heads": 12, "seq_length": 1024, "vocab_size": 50257,
    "ffn_hidden_size": 3072,
    "max_positions": 1024, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def config_of(folder: Path, words: list[str], tokenizer: int | None = None) -> Run:
    file = folder / "config.yaml"
    file.write_text(CONFIG.replace("OUTPUT", str(folder / "run")))
    config = resolve_config(load_config(file, words))
    if tokenizer is None:
        return config
    return as_run(Run, config, model=fitting_vocabulary(config.model, tokenizer, "it"))


def fault_of(model: dict[str, Any], config: Run, **more: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        require_same_model({"config": {"model": model}}, config, Path("output/hf"), **more)
    return str(caught.value)


WRITTEN = [f"model.{key}={value}" for key, value in GPT2.items()]
OURS = {"num_layers": 4, "hidden_size": 192, "num_heads": 6, "seq_length": 128}


@pytest.mark.parametrize(
    ("model", "words", "given"),
    [
        (GPT2, [], "num_layers=12 hidden_size=768 num_heads=12 ffn_hidden_size=3072"
         " max_positions=1024"),
        (GPT2 | {"layer_norm_epsilon": 1e-6}, WRITTEN, "layer_norm_epsilon=1e-06"),
        # every value explicit, as in the config.yaml of a run folder; a window longer than the
        # checkpoint's positions
        (GPT2 | {"max_positions": 64}, WRITTEN, "max_positions=64 seq_length=64"),
        # a section with its defaults left out, as model.yaml may have it
        (OURS | {"vocab_size": 101}, [], "vocab_size=101"),
    ],
)  # fmt: skip
def test_the_words_make_the_config_fit(tmp_path: Path, model: dict[str, Any], words: list[str], given: str) -> None:
    """Another window, dropout or multiple is not another model."""
    message = fault_of(model, config_of(tmp_path, words))
    added = re.findall(r"model\.\w+=\S+", message.partition("add: ")[2])
    assert added == [f"model.{word}" for word in given.split()] and "output_dir" not in message
    config = config_of(tmp_path, [*words, *added, *(["model.seq_length=64"] if words else [])])
    more = {"dropout": 0.5, "vocab_multiple": 64}
    require_same_model({"config": {"model": model | more}}, config, Path("output/hf"))


def test_a_table_of_padded_size_keeps_its_rows(tmp_path: Path) -> None:
    """A table as PaddleFleetX's of 50304 rows with 50257 tokens, which a config of 50304 would be
    cut to.
    """
    model = OURS | {"vocab_size": 50304}
    message = fault_of(model, config_of(tmp_path, [], tokenizer=50257))
    added = re.findall(r"model\.\w+=\S+", message.partition("add: ")[2])
    config = config_of(tmp_path, added, tokenizer=50257)
    require_same_model({"config": {"model": model}}, config, Path("output/hf"))
    assert config.model.vocab_size == 50304


def test_a_new_size_in_the_same_folder_is_offered_another_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run_2").mkdir()
    message = fault_of(GPT2, config_of(tmp_path, []), may_move=True)
    assert message.startswith(
        "output/hf: holds another model than the config: num_layers is 12 there and 4 in the config, hidden_size"
    )
    assert message.endswith(f"begin in another folder: output_dir={tmp_path}/run_3")


@pytest.mark.parametrize("model", [{}, GPT2 | {"num_heads": "12"}, GPT2 | {"num_layers": None}])
def test_a_manifest_that_does_not_tell(tmp_path: Path, model: dict[str, Any]) -> None:
    message = fault_of(model, config_of(tmp_path, []))
    assert re.search(r"manifest\.json: has no number for model\.\w+", message)

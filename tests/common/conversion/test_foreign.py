"""Where a checkpoint of ours is expected: what is there instead, and what to give."""

from pathlib import Path

import pytest

from common.checkpoint.folders import NoCheckpointError, require_checkpoint
from common.conversion.convert import convert
from common.conversion.foreign import explained
from common.systems.own_folder import write_project
from common.systems.weights import checked_model
from common.training.opened_checkpoint import open_checkpoint
from tests.common.systems.tiny_weights import as_weights, random_arrays

SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": 9, "vocab_size": 11}


def fault_of(where: str, why: str = "checkpoint.init_from") -> str:
    with pytest.raises(NoCheckpointError) as caught:
        require_checkpoint(Path(where), why)
    message = str(explained(caught.value))
    assert message.startswith(f"{where}: no whole checkpoint here ({why}): ")
    return message


def test_files_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message says to give is taken."""
    monkeypatch.chdir(tmp_path)
    model = checked_model(Path("here"), SIZES)
    Path("ours").mkdir()
    write_project(Path("ours"), as_weights(model, random_arrays(model)), None)
    convert(Path("ours"), Path("hf"), target_format="hf")
    for where, why, key in (
        ("hf/config.json", "checkpoint.init_from", "checkpoint.init_from"),
        ("hf", "checkpoint.resume=latest", "checkpoint.resume"),
        ("hf", "the run in output_dir, or checkpoint.load", "checkpoint.load"),
    ):
        assert fault_of(where, why).endswith(f": it is a Hugging Face folder; give {key}=hf")
    assert open_checkpoint(Path("hf"), "x").is_foreign
    file = "ours/model.safetensors"
    assert fault_of(file).endswith(": it is a file of a checkpoint; give the folder ours")
    assert not open_checkpoint(Path("ours"), "x").is_foreign


@pytest.mark.parametrize(
    ("name", "is_model"), [("gpt2", True), ("there/gpt2", False), ("a.bin", False)]
)
def test_a_name_that_is_not_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_model: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    message = fault_of(name)
    assert f"there is no such file or folder (looked in {tmp_path})" in message
    assert ("; a model of the Hugging Face hub is named as hf://OWNER/NAME" in message) == is_model
    assert "hf:" not in fault_of(name, "the run in output_dir, or checkpoint.load")
    assert "expected a run folder, its checkpoints folder" in fault_of("there")

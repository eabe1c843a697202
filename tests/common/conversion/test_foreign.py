"""Weights of other systems where a checkpoint is expected: the commands that the error prints are
run, and their result fits.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from common.checkpoint.folders import NoCheckpointError, read_manifest, require_checkpoint
from common.conversion.convert import convert, convert_as_mindformers_did
from common.conversion.foreign import explained
from common.systems.own_folder import write_project
from common.systems.run_state import MODEL_YAML
from common.systems.weights import checked_model
from tests.common.systems.tiny_weights import as_weights, random_arrays
from tools import convert_weight

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 1, "seq_length": 9, "vocab_size": 101}
SIZES["ffn_hidden_size"] = 96


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights, in a current folder of its own."""
    monkeypatch.chdir(tmp_path)
    model = checked_model(Path("here"), SIZES)
    Path("ours").mkdir()
    write_project(Path("ours"), as_weights(model, random_arrays(model)), None)
    return Path("ours")


def fault_of(where: str, why: str = "checkpoint.init_from") -> str:
    with pytest.raises(NoCheckpointError) as caught:
        require_checkpoint(Path(where), why)
    message = str(explained(caught.value))
    assert message.startswith(f"{where}: no whole checkpoint here ({why}): ")
    return message


def obey(message: str) -> Path:
    """Run the commands of a message; the folder that it says to give."""
    for line in message.splitlines()[1:-1]:
        words = shlex.split(line)
        if words[0] != "python":
            subprocess.run(["bash", "-c", line], check=True)
            continue
        assert Path(words[1]).samefile(convert_weight.__file__)
        assert convert_weight.main(words[2:]) == 0, message
    found = re.fullmatch(r"then give checkpoint\.init_from=(\S+)", message.splitlines()[-1])
    assert found, message
    return Path(found[1])


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ("hf", "a Hugging Face folder"),
        ("mindformers", "a checkpoint of MindFormers (.ckpt)"),
        ("mindformers_r0.3", "a checkpoint of MindFormers before 0.6 (.ckpt)"),
        ("megatron", "a checkpoint of Megatron-LM"),
        ("megatron_core", "a checkpoint of Megatron-Core"),
    ],
)
def test_the_command_converts_it(ours: Path, format: str, kind: str) -> None:
    convert(ours, Path("their folder"), target_format=format)
    message = fault_of("their folder")
    assert f"it is {kind}; convert it first:\n" in message
    target = obey(message)
    model = read_manifest(require_checkpoint(target, ""))["config"]["model"]
    assert {key: model[key] for key in SIZES} == SIZES and (
        target / "model.safetensors"
    ).read_bytes() == (ours / "model.safetensors").read_bytes()
    assert f"--output {target}_2" in fault_of("their folder"), (
        "what is there already is not replaced"
    )


@pytest.mark.parametrize("name", ["old.ckpt", "its folder"])
def test_a_ckpt_without_sizes(ours: Path, name: str) -> None:
    """Checkpoint as MindFormers' command makes it of pytorch_model.bin. Shapes tell all but the
    heads.
    """
    convert(ours, Path("hf"), target_format="hf")
    Path("its folder").mkdir()
    convert_as_mindformers_did(
        2,
        Path("hf/model.safetensors"),
        Path("old.ckpt" if name == "old.ckpt" else "its folder/gpt2.ckpt"),
    )
    message = fault_of(name)
    assert f"without the {MODEL_YAML} that tells the number of heads" in message
    model = read_manifest(obey(message))["config"]["model"]
    assert {key: model[key] for key in SIZES} == SIZES


def test_a_file_in_place_of_its_folder(ours: Path) -> None:
    convert(ours, Path("hf"), target_format="hf")
    assert "--input hf --output output/hf_converted" in fault_of("hf/model.safetensors")
    assert "it is a file of a checkpoint; give the folder ours" in fault_of(
        "ours/model.safetensors"
    )


def test_the_key_that_named_it(ours: Path) -> None:
    convert(ours, Path("hf"), target_format="hf")
    assert fault_of("hf", "checkpoint.load=hf").endswith(
        "then give checkpoint.load=output/hf_converted"
    )
    # a run cannot resume from weights only
    assert fault_of("hf", "checkpoint.resume=hf").endswith(
        "then give checkpoint.init_from=output/hf_converted"
    )
    assert fault_of("hf", "the run in output_dir").endswith("and give output/hf_converted instead")


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

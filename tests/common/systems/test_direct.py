"""Weights of every format, read in place, equal those of tools/convert_weight.py for any part a
rank asks for. Runs that begin with them have equal losses.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.conversion.convert import convert
from common.errors import CheckpointError
from common.parallel.sharding import slice_of
from common.parallel.updates import LossScale
from common.systems.mindformers.write import write_rank_file
from common.systems.own_folder import open_project
from common.systems.run_state import MODEL_YAML
from common.training.metrics import read_metrics
from common.training.opened_checkpoint import Checkpoint, open_checkpoint
from common.training.start import require_same_model
from common.weights.names import parameter_shapes
from common.weights.pieces import open_parameters
from common.yaml_files import dump_yaml
from run_gpt2 import main
from tests.common.systems.fleetx.test_weights import copy as fleetx_folder
from tests.common.systems.mindformers.test_rank_files import MODEL, SPLIT, config_of, write_run
from tests.tiny import tiny_run


def converted_to(format: str, **ranks: int) -> Callable[[Path, Path], Path]:
    def make(checkpoint: Path, folder: Path) -> Path:
        convert(checkpoint, folder / "theirs", target_format=format, **ranks)
        return folder / "theirs"

    return make


def bare_ckpt(checkpoint: Path, folder: Path) -> Path:
    """A `.ckpt` and nothing that tells its heads: the config does."""
    path = converted_to("mindformers")(checkpoint, folder)
    (path / MODEL_YAML).unlink()
    return path / "gpt2.ckpt"


def slices(checkpoint: Path, folder: Path) -> Path:
    for rank in range(8):
        write_rank_file(config_of(8, **SPLIT), (1, 4), rank, True, checkpoint)
    shutil.copytree(checkpoint.parent, folder / "cut", ignore=shutil.ignore_patterns("step_*"))
    shutil.copy(checkpoint.parent.parent / "config.yaml", folder / "cut")
    return folder / "cut"


SOURCES: dict[str, Callable[[Path, Path], Path]] = {
    "hf": converted_to("hf"),
    "a file of hf": lambda checkpoint, folder: converted_to("hf")(checkpoint, folder) / "model.safetensors",
    "mindformers": converted_to("mindformers"),
    "mindformers_r0.3": converted_to("mindformers_r0.3"),
    "a .ckpt alone": bare_ckpt,
    "slices": slices,
    "megatron": converted_to("megatron", model_parallel=2, pipeline_stage=2),
    "megatron_core": converted_to("megatron_core"),
    "fleetx": lambda _, folder: fleetx_folder(folder / "fleetx"),
}


@pytest.mark.parametrize("source", list(SOURCES))
def test_a_rank_reads_its_part_as_after_the_converter(source: str, tmp_path: Path) -> None:
    path = SOURCES[source](write_run(tmp_path / "run"), tmp_path)
    ours, whole = tmp_path / "ours", path.parent if path.is_file() else path
    if source == "a .ckpt alone":
        whole = Path(shutil.copytree(whole, tmp_path / "with_model"))
        shutil.copy(tmp_path / "run" / "config.yaml", whole)
    convert(whole, ours, target_format="torch_gpt2")
    weights = open_project(ours)
    model, run = weights.model, weights.run
    config = config_of().model_copy(update={"model": model})
    there, here = open_checkpoint(path, "x"), Checkpoint(ours)
    for cut in ({}, {"tensor": 2, "tensor_rank": 1}, {"shards": 3, "shard_rank": 2}):
        pieces = {
            name: slice_of(name, (shape[0] + shape[0] % 2, *shape[1:]), **cut)
            for name, shape in parameter_shapes(model).items()
        }
        found, expected = (list(each.weights(model, pieces)) for each in (there, here))
        for (name, values), (same, other) in zip(found, expected, strict=True):
            assert name == same and values.dtype == np.float32 and values.flags.writeable
            assert np.array_equal(values, other), name
        if run is not None:
            moments, others = (list(each.moments(config, 3, pieces)) for each in (there, here))
            assert len(moments) == 2 * len(pieces)
            for theirs, other in zip(moments, others, strict=True):
                assert theirs[:2] == other[:2] and np.array_equal(theirs[2], other[2])
    if run is not None:
        states = [reader.states(config, LossScale(config.loss_scale)) for reader in (there, here)]
        assert states[0] == states[1] and states[0][1].optimizer_steps == 3


@pytest.mark.parametrize("named", [None, "added_tokens.json", "tokenizer_config.json"])
def test_rows_beyond_the_tokenizer_are_padding_where_no_file_names_a_token_there(
    named: str | None, tmp_path: Path
) -> None:
    path = converted_to("hf")(write_run(tmp_path / "run"), tmp_path)
    run, whole = config_of(), dict(open_checkpoint(path, "x").weights(config_of().model))
    rows = run.model.vocab_size
    cut = run.model.model_copy(update={"vocab_size": rows - 2, "vocab_multiple": rows})
    if named is not None:
        entry = {str(rows - 1): {"content": "<|user|>", "special": True}}
        is_list = named == "added_tokens.json"
        content = {"<|user|>": rows - 1} if is_list else {"added_tokens_decoder": entry}
        (path / named).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"name '<\|user\|>' beyond these; preprocess"):
            open_checkpoint(path, "x").manifest(cut)
        return
    there = open_checkpoint(path, "x")
    require_same_model(there.manifest(cut), run.model_copy(update={"model": cut}), path)
    found = dict(there.weights(cut))
    assert found["wte.weight"].shape[0] == rows - 2
    for name, values in found.items():
        assert np.array_equal(values, whole[name][: len(values)]), name


# ---- whole runs ----


def test_one_flag_of_mindformers_takes_weights_and_runs(
    corpus_prefix: Path, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    """--load_checkpoint in train: a run resumes at its step, weights begin at the first. The
    second start of the same command resumes from its own checkpoint.
    """
    monkeypatch.chdir(tmp_path)
    checkpoint = write_run(tmp_path / "run")
    starts = {"slices": slices(checkpoint, tmp_path), "hf": converted_to("hf")(checkpoint, tmp_path)}
    rule = {"learning_rate": 0.01, "schedule": "constant"}
    tree = tiny_run(
        corpus=corpus_prefix, model=MODEL, data__split="100,0,0", validation={"interval": 0}, optimizer=rule
    )
    del tree["output_dir"]
    Path("run.yaml").write_text(dump_yaml(tree))

    def steps(source: Path, folder: str, most: int) -> list[int]:
        command = ["--config", "run.yaml", "--run_mode", "train", f"--load_checkpoint={source}"]
        assert main([*command, f"output_dir={folder}", f"train.max_steps={most}"]) == 0
        rows = read_metrics(Path(folder) / "metrics.jsonl")
        return [row["step"] for row in rows if "loss" in row]

    assert steps(starts["slices"], "a", 5) == [5]
    assert steps(starts["hf"], "b", 2) == [1, 2]
    assert "theirs: holds only weights" in capfd.readouterr().out
    assert steps(starts["hf"], "b", 3) == [1, 2, 3]


def test_integers_without_their_scales_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"x.weight": np.zeros((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* lacks x\.weight_scale; copy it"):
        open_parameters(tmp_path / "model.safetensors")

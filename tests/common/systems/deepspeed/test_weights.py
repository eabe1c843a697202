"""Checkpoints that DeepSpeed itself has written, against the tensors in its processes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from common.conversion.convert import convert  # noqa: E402
from common.errors import CheckpointError, ConfigError  # noqa: E402
from common.systems.table import FORMATS, detect  # noqa: E402
from tests.common.systems.tiny_weights import refused, resave  # noqa: E402
from tests.ranks import ROOT  # noqa: E402

pytestmark = pytest.mark.long

LAYERS, WIDTH, HEADS, VOCABULARY, STEPS = 3, 8, 4, 29, 3
WHOLE, STAGES = "float16_zero2_pp1_tp1", "float16_zero1_pp2_tp1"
HALF, PIPELINE = "bfloat16_zero1_pp2_tp1", "float16fused_zero0_pp2_tp2"
TWO = ("float32_zero0_pp1_tp1", "float16_zero0_pp1_tp2", WHOLE, STAGES, HALF)
FOUR = (PIPELINE, "float32_zero1_pp2_tp2")
"""Cases of two processes, and of four, whose file mp_rank_02 is tensor rank 0 of stage 1."""
IN_BLOCK = {
    "ln_1": "input_layernorm", "attn.c_proj": "self_attention.dense", "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h", "mlp.c_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoint of each case."""
    folder = tmp_path_factory.mktemp("cases")
    jobs = [",".join((str(ranks), *cases)) for ranks, cases in ((2, TWO), (4, FOUR))]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("train_tiny.py")), str(folder), *jobs],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def in_megatrons_words(name: str) -> str:
    """Return a name of the model in a process as Megatron has it below its embedding or encoder."""
    if layer := re.fullmatch(r"(\d+)\.(.+)", name):  # of a pipeline: blocks from 3 on
        number = int(layer[1])
        block = number < 3 + LAYERS
        return f"layers.{number - 3}.{layer[2]}" if block else f"final_layernorm.{layer[2]}"
    return re.sub(r"^(language_model\.(embedding|encoder)|tied_modules\.embed)\.", "", name)


def expected(folder: Path, case: str, part: str) -> dict[str, np.ndarray]:
    """Put the tensors of the processes together by Megatron's rules, under our names."""
    stages, size = int(case[-5]), int(case[-1])
    files = sorted(folder.glob(f"{case}.rank_*.pt"))
    ranks = [torch.load(file) for file in files]
    data = len(ranks) // stages // size
    whole: dict[str, np.ndarray] = {}
    for stage in range(stages):
        tensor_ranks = [ranks[(stage * data) * size + tensor] for tensor in range(size)]
        for theirs in tensor_ranks[0]:
            name = in_megatrons_words(theirs)
            if name in whole or part not in tensor_ranks[0][theirs]:
                continue
            pieces = [rank[theirs][part].numpy() for rank in tensor_ranks]
            dim = tensor_ranks[0][theirs]["dim"]
            whole[name] = pieces[0] if dim is None else np.concatenate(pieces, dim)
    ours = {
        "wte.weight": whole["word_embeddings.weight"][:VOCABULARY],
        "wpe.weight": whole["position_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        ours[f"ln_f.{kind}"] = whole[f"final_layernorm.{kind}"]
        for layer in range(LAYERS):
            block = f"layers.{layer}."
            for name, theirs in IN_BLOCK.items():
                ours[f"h.{layer}.{name}.{kind}"] = whole[f"{block}{theirs}.{kind}"]
            fused = whole[f"{block}self_attention.query_key_value.{kind}"]
            by_head = fused.reshape(HEADS, 3, WIDTH // HEADS, *fused.shape[1:])
            for number, letter in enumerate("qkv"):
                values = by_head[:, number].reshape(WIDTH, *fused.shape[1:])
                ours[f"h.{layer}.attn.{letter}_proj.{kind}"] = values
    return ours


@pytest.mark.parametrize("case", TWO + FOUR)
def test_a_checkpoint_is_what_its_processes_had(saved: Path, case: str) -> None:
    """Bit for bit: weights in float32, both moments, step, samples and loss scale."""
    assert detect(saved / case) == "deepspeed"
    found = FORMATS["deepspeed"].open(saved / case)
    tensors, moments = (
        {name: np.array(tensor.load()) for name, tensor in each.items()} for each in (found.tensors, found.moments)
    )
    for part in ("", ".exp_avg", ".exp_avg_sq"):
        stored = moments if part else tensors
        for name, array in expected(saved, case, part).items():
            value = stored.pop(name + part)
            np.testing.assert_array_equal(value, array, err_msg=name + part)
            assert value.dtype == np.float32 and (array.any() or not part)
    assert not tensors and not moments
    run = found.run
    assert run is not None
    assert (run["state"]["step"], run["state"]["consumed_samples"]) == (STEPS, 6)
    # without ZeRO, DeepSpeed lets a float16 optimizer make a step of zeros before the first one
    before = case.startswith("float16") and "zero0" in case
    assert run["engine"]["optimizer_steps"] == STEPS + before
    # 2^4, and twice as much after two finite steps
    scale = ("dynamic", 32.0) if case.startswith("float16") else ("none", 1.0)
    assert (run["engine"]["loss_scale"]["mode"], run["engine"]["loss_scale"]["value"]) == scale


@pytest.mark.parametrize("target", ["torch_gpt2", "megatron"])
def test_a_run_goes_to_other_formats(saved: Path, tmp_path: Path, target: str) -> None:
    """The whole run, and both hold the same bits."""
    case = saved / STAGES
    convert(case, tmp_path / target, target_format=target, verify=True)
    source, found = FORMATS["deepspeed"].open(case), FORMATS[target].open(tmp_path / target)
    one, other = ({**weights.tensors, **weights.moments} for weights in (source, found))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name].load(), other[name].load())
    assert source.run is not None and found.run is not None
    assert found.run["state"]["step"] == source.run["state"]["step"]
    assert found.run["engine"] == source.run["engine"]


def test_weights_without_a_run(saved: Path, tmp_path: Path) -> None:
    """Without the optimizer's files the weights are those of less precision."""
    folder = tmp_path / "release"
    shutil.copytree(saved / HALF, folder)
    for file in (folder / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    found = FORMATS["deepspeed"].open(folder / "global_step3")
    assert {tensor.dtype for tensor in found.tensors.values()} == {"bfloat16"}
    assert found.run is None and not found.moments
    assert "without the state of the optimizer" in found.ignored["global_steps"]


@pytest.mark.parametrize(
    ("why", "spoil"),
    [
        (r"of an unknown form \(KeyError", lambda tree: tree.pop("param_groups")),
        (r"^not of these weights, .*: other shapes", lambda tree: tree["state"].pop(0)),
    ],
)
def test_an_optimizer_that_does_not_fit_leaves_the_weights(
    saved: Path, tmp_path: Path, why: str, spoil: Callable[[Any], object]
) -> None:
    """It is in the files of the weights, so that nobody can take it away."""
    shutil.copytree(saved / "float32_zero0_pp1_tp1", tmp_path / "run")
    for file in tmp_path.glob("run/*/mp_rank_*"):
        resave(file, lambda tree: spoil(tree["optimizer"]))
    found = FORMATS["deepspeed"].open(tmp_path / "run")
    assert found.run is None and not found.moments
    assert re.search(f"{why}.*: only weights$", found.ignored["optimizer"])


def changed(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda file: resave(file, edit)


def shorten(tree: Any) -> None:
    groups = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-40].clone()


def add_update(tree: Any) -> None:
    for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] += 1


FIRST, SECOND = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
BAD: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "missing mp_rank_01_model_states.pt; copy the whole folder again":
        (PIPELINE, "mp_rank_01_model_states.pt", Path.unlink),
    "no mp_rank_00_model_states.pt here": (WHOLE, "mp_rank_00_model_states.pt", Path.unlink),
    r"missing layers\.2\.input_layernorm\.weight":
        (PIPELINE, "layer_04-model_00-model_states.pt",
         lambda file: [each.unlink() for each in file.parent.glob("layer_04*")]),
    f"missing {SECOND}": (WHOLE, SECOND, Path.unlink),
    r"mp_rank_01_model_states.pt: global_steps is 4, and mp_rank_00_model_states.pt says 3":
        (PIPELINE, "mp_rank_01_model_states.pt", changed(lambda tree: tree.update(global_steps=4))),
    r"unexpected layers\.2\.rotary\.inv_freq": (
        STAGES, "layer_05-model_00-model_states.pt",
        changed(lambda tree: tree.update({"rotary.inv_freq": torch.zeros(2)}))),
    "its optimizer is not of these weights.*elements are there": (WHOLE, SECOND, changed(shorten)),
    f"mp_rank_01_optim_states.pt: number of updates is 4, and {FIRST} says 3":
        (STAGES, "zero_pp_rank_0_mp_rank_01_optim_states.pt", changed(add_update)),
    f"{FIRST}: ZeRO-3, whose weights lie in pieces": (
        WHOLE, FIRST, changed(lambda tree: tree["optimizer_state_dict"].update(zero_stage=3))),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_error(saved: Path, tmp_path: Path, capsys: Any, message: str) -> None:
    case, file, spoil = BAD[message]
    shutil.copytree(saved / case, tmp_path / case)
    spoil(tmp_path / case / "global_step3" / file)
    refused(capsys, tmp_path / case, message)


def test_the_meant_folder_is_found(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved / WHOLE, root)
    shutil.copytree(root / "global_step3", root / "global_step4")
    (root / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match=r"latest: names 'global_step9', .* but global_step3,"):
        FORMATS["deepspeed"].open(root)
    (root / "latest").unlink()
    with pytest.raises(ConfigError, match="holds global_step3, global_step4 and no file latest"):
        FORMATS["deepspeed"].open(root)
    # Megatron-DeepSpeed's own file of the last iteration does not make it Megatron's
    (root / "latest_checkpointed_iteration.txt").write_text("4")
    assert detect(root) == detect(root / "global_step3") == "deepspeed"
    assert FORMATS["deepspeed"].open(root).path == root

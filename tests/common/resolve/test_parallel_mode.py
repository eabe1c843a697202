"""What DeepSpeed and MindSpore's modes 0 to 3 are given, what a file of one's own may add to that,
MindFormers' own YAML, and what is refused before any framework.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.device import naming_auto
from common.errors import ConfigError, DeviceError
from common.parallel.run import Run
from common.resolve.derive import resolve_config, resolve_mode
from common.resolve.engine_checks import check_here, check_mindspore, compiled_mode, read_deepspeed_file
from common.resolve.vendor_settings import deepspeed_settings, semi_auto_settings
from common.run_config import load_config
from tests.common.resolve.test_refusals import FILES, small_tree

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "gpt2"
GOLDEN = Path(__file__).parent / "golden"
ORIGINALS = Path(__file__).parents[1] / "systems" / "originals"

FLOATS = {"bf16": {"parameters": "bfloat16", "compute": "bfloat16"}}
FLOATS["fp16"] = {"parameters": "float16", "compute": "float16"}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero_0": {},
    "zero_1_pipeline_bf16": {
        "parallel": {"zero_stage": 1, "pipeline_stage": 2}, "precision": FLOATS["bf16"]},
    "zero_2_fp16_offload": {
        "parallel__zero_stage": 2, "precision": FLOATS["fp16"],
        "deepspeed__offload_optimizer": True},
    "zero_3_kernels": {"parallel__zero_stage": 3, "deepspeed": dict.fromkeys(
        ("offload_optimizer", "offload_parameters", "build_kernels"), True)},
}  # fmt: skip


SEMI_AUTO = {"run_gpt2_13b": 9, "run_gpt2_13b_dp4_mp8": 31, "run_gpt2_52b": 127}
"""Presets, and a rank of theirs."""
TUTORIAL = Path(__file__).with_name("tutorial_13b.yaml").read_text(encoding="utf-8")


def resolved(world_size: int = 4, **changes: Any) -> Run:
    usual = {"backend": "mindspore", "device": "npu", "train__accumulation_steps": 4}
    return resolve_config(build_config(small_tree(**usual | changes)), world_size=world_size)


def of_deepspeed(**changes: Any) -> Run:
    usual = {"backend": "torch", "device": "auto", "engine": "deepspeed"}
    return resolved(**{**usual, "train__accumulation_steps": 3, **changes})


@pytest.mark.parametrize("name", [*DEEPSPEED, *SEMI_AUTO])
def test_golden(name: str) -> None:
    if name in DEEPSPEED:
        settings, folder = deepspeed_settings(of_deepspeed(**DEEPSPEED[name])), "deepspeed"
    else:
        config = load_config(FOLDER / f"{name}.yaml", ["device=npu"])
        run = resolve_config(config, world_size=128 if "52b" in name else 32)
        settings, folder = semi_auto_settings(run, SEMI_AUTO[name]), "semi_auto"
    text, golden = json.dumps(settings, indent=1) + "\n", GOLDEN / folder / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "if that change is wanted: make golden"


FLOAT16: dict[str, Any] = {
    "precision": FLOATS["fp16"],
    "optimizer__clip_grad": 1.0,
    "loss_scale": {"initial": 4096, "window": 500, "hysteresis": 2},
}
MODELZOO = json.loads((ORIGINALS / "modelzoo" / "ds_config.json").read_text()) | {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
}
"""The ds_config.json that the Ascend ModelZoo's script writes, of this batch."""


def with_file(folder: Path, own: Any, **changes: Any) -> Run:
    path = folder / "ds_config.json"
    path.write_text(own if isinstance(own, str) else json.dumps(own))
    return of_deepspeed(**changes, deepspeed__config_file=str(path))


def test_a_file_of_ones_own_is_merged(tmp_path: Path) -> None:
    own = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "wall_clock_breakdown": True,
    }
    config = with_file(tmp_path, own, parallel__zero_stage=2)
    plain = deepspeed_settings(of_deepspeed(parallel__zero_stage=2))
    assert deepspeed_settings(config, read_deepspeed_file(config)) == plain | {
        key: own[key] for key in ("zero_optimization", "wall_clock_breakdown")
    }


@pytest.mark.parametrize(("own", "message"), FILES)
def test_a_file_that_contradicts_is_refused(tmp_path: Path, own: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, own, **FLOAT16, parallel__zero_stage=1)
    assert str(tmp_path / "ds_config.json") in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_modelzoos_file_is_taken(tmp_path: Path, stage: int) -> None:
    own = MODELZOO | {"zero_optimization": {"stage": stage}}
    changes = FLOAT16 | {"parallel__zero_stage": stage}
    config = with_file(tmp_path, own, **changes)
    assert deepspeed_settings(config, own) == deepspeed_settings(of_deepspeed(**changes)) | {
        key: own[key] for key in ("steps_per_print", "prescale_gradients", "wall_clock_breakdown")
    }
    if stage:
        return
    # one of a static scale also holds the keys of a dynamic one
    static = changes | {"loss_scale": {"mode": "static", "initial": 65536}}
    own["fp16"] = own["fp16"] | {"loss_scale": 65536}
    config = with_file(tmp_path, own, **static)
    assert deepspeed_settings(config, own)["fp16"] == {"enabled": False}  # the engine does it


def test_layouts_that_run_beside_those_of_the_matrices() -> None:
    """On DeepSpeed, and on MindSpore without its compiled modes."""
    of_deepspeed(parallel={"model_parallel": 2, "sequence_parallel": True, "zero_stage": 3})
    resolved(device="cpu", parallel={"pipeline_stage": 2, "stage_layers": [3, 1], "zero_stage": 1})


def test_the_model_is_not_compiled_for_copies_in_one_process() -> None:
    one = of_deepspeed(engine="native", parallel__strategy="parameter_server", world_size=1)
    assert one.train.compile == "auto"


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_zero_has_no_effect_on_one_process(backend: str) -> None:
    """MindFormers' files for one device have enable_parallel_optimizer too."""
    plain, split = (resolved(1, backend=backend, device="auto", parallel={"zero_stage": stage}) for stage in (0, 1))
    assert split == plain


def test_names_of_mindformers(tmp_path: Path) -> None:
    path, text = tmp_path / "own.yaml", TUTORIAL.format(folder=FOLDER)
    path.write_text(text.replace("vocab_emb_dp: True", "expert_parallel: 1"))
    named = ["parallel.strategy_ckpt_save_file=s_{rank}.ckpt", "recompute_config.recompute=false"]
    words = ["parallel_config.model_parallel=4", "parallel_config.use_seq_parallel=true", "parallel.parallel_mode=2"]
    found = load_config(path, [*named, *words, "micro_batch_interleave_num=2"])
    parallel = found.parallel
    assert (parallel.model_parallel, parallel.micro_batch_interleave_num) == (4, 2)
    assert parallel.sequence_parallel and parallel.parallel_mode == "auto_parallel"
    assert found.train.recompute == "none"
    named += ["parallel.parallel_mode=2", "parallel.loss_repeated_mean=true"]
    config = load_config(path, [*named, "train.recompute_slice_activation=false"])
    settings = semi_auto_settings(resolve_config(config, world_size=32), 5)
    assert settings["strategy_ckpt_config"]["save_file"] == "s_5.ckpt"


def test_the_mode_decides_the_splitter() -> None:
    several = resolved(parallel__model_parallel=2, device="auto")
    assert compiled_mode(several, "npu") and not compiled_mode(several, "cpu")
    assert not compiled_mode(resolved(world_size=1), "npu")
    modes = ("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")
    for number, mode in enumerate(modes):
        config = resolved(parallel__parallel_mode=number)
        assert config.parallel.parallel_mode == mode
        assert compiled_mode(config, "npu") == (number in (1, 2))
    evaluated = resolve_mode(resolved(parallel__parallel_mode=1), "eval", world_size=1)
    assert not compiled_mode(evaluated, "npu")


def test_an_unknown_device_is_asked_again() -> None:
    config = resolved(device="auto", parallel__enable_alltoall=True)
    check_mindspore(config, "npu")
    with pytest.raises(ConfigError, match=r"parallel.enable_alltoall=True"):
        check_mindspore(config, "cpu")


def test_a_host_without_an_ascend_is_told_so_before_any_framework(tmp_path: Path) -> None:
    sliced = {"train__recompute_slice_activation": True, "train__recompute": "full"}
    chose = "^device=auto chose cpu because no Ascend was found .*leave it out"
    for changes, message in (
        ({"parallel__parallel_mode": 1}, "device=cpu; set parallel.parallel_mode=3"),
        ({"parallel__zero_stage": 2}, "parallel.zero_stage=2 is for backend torch"),
        ({"parallel__model_parallel": 2, **sliced}, chose),
        ({"parallel__model_parallel": 2, "context__device_id": 3}, chose),
    ):
        with pytest.raises(ConfigError, match=message):
            check_here(resolved(device="auto", **changes), tmp_path)
    assert check_here(resolved(device="auto"), tmp_path) == "cpu"
    with pytest.raises(DeviceError, match=r"^x$"), naming_auto(resolved(), "npu", "Ascend"):
        raise DeviceError("x")  # of a device that was found: nothing to explain
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    assert check_here(resolved(device="auto", parallel__parallel_mode=1), tmp_path) == "auto"


def test_other_names_of_zero() -> None:
    named = {"parallel__enable_parallel_optimizer": True}
    assert resolved(**named).parallel.zero_stage == 1
    shard = {"gradient_accumulation_shard": True}
    sharded = resolved(**named, parallel__parallel_optimizer_config=shard)
    level = semi_auto_settings(sharded, 0)["parallel_optimizer_config"]["optimizer_level"]
    assert level == "level2"
    strategy = semi_auto_settings(resolved(parallel__full_batch=False), 0)["dataset_strategy"]
    assert strategy == ((4, 1), (4, 1))


def test_documents_are_kept_apart_where_ranks_split_the_work() -> None:
    found = resolved(parallel__parallel_mode=0, data__reset_attention_mask=True)
    assert found.data.reset_attention_mask

"""DeepSpeed's settings as generated, what a file of one's own may add to them, and which layouts
are refused.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from common.resolve.engine_checks import read_deepspeed_file
from common.resolve.vendor_settings import deepspeed_settings
from tests.common.resolve.test_refusals import small_tree

GOLDEN = Path(__file__).parent / "golden" / "deepspeed"
ORIGINALS = Path(__file__).parents[1] / "systems" / "originals"

FLOATS = {"bf16": {"parameters": "bfloat16", "compute": "bfloat16"}}
FLOATS["fp16"] = {"parameters": "float16", "compute": "float16"}
CASES: dict[str, dict[str, Any]] = {
    "zero_0": {},
    "zero_1_pipeline_bf16": {
        "parallel": {"zero_stage": 1, "pipeline_stage": 2}, "precision": FLOATS["bf16"]},
    "zero_2_fp16_offload": {
        "parallel__zero_stage": 2, "precision": FLOATS["fp16"],
        "deepspeed__offload_optimizer": True},
    "zero_3_kernels": {"parallel__zero_stage": 3, "deepspeed": dict.fromkeys(
        ("offload_optimizer", "offload_parameters", "build_kernels"), True)},
}  # fmt: skip


def resolved(world_size: int = 4, **changes: Any) -> RunConfig:
    tree = small_tree(**{"engine": "deepspeed", "train__accumulation_steps": 3, **changes})
    return resolve_config(build_config(tree), world_size=world_size)


@pytest.mark.parametrize("name", list(CASES))
def test_golden(name: str) -> None:
    text = json.dumps(deepspeed_settings(resolved(**CASES[name])), indent=1) + "\n"
    golden = GOLDEN / f"{name}.json"
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


def own_file(folder: Path, tree: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return str(path)


def test_a_file_of_ones_own_is_merged(tmp_path: Path) -> None:
    own = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "wall_clock_breakdown": True,
    }
    config = resolved(parallel__zero_stage=2, deepspeed__config_file=own_file(tmp_path, own))
    plain = deepspeed_settings(resolved(parallel__zero_stage=2))
    assert deepspeed_settings(config, read_deepspeed_file(config)) == plain | {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "wall_clock_breakdown": True,
    }


CONTRADICTING: list[tuple[Any, str]] = [
    ({"train_batch_size": 64},
     "train_batch_size=64, but the run's config has 24; set train.global_batch_size"),
    ({"zero_optimization": {"stage": 2}},
     "zero_optimization.stage=2, but the run's config has {stage}; set parallel.zero_stage"),
    ({"bf16": {"enabled": True}},
     "bf16.enabled=True, but the run's config has False; set precision.parameters"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
     "but the run's config has no setting of that name; set deepspeed.offload_optimizer"),
    ({"scheduler": {"type": "WarmupLR"}},
     "scheduler is set in this run's config (optimizer.schedule"),
    ({"optimizer": {"type": "Adam"}}, "optimizer is set in this run's config"),
    ({"curriculum_learning": {}}, "curriculum_learning is not supported by this version"),
    ({"gradient_clipping": 0.5}, "the run's config has 1.0; set optimizer.clip_grad"),
    ("[]", "expected keys and values, found a list"),
    ("{", "not valid JSON"),
    *(({"fp16": {key: value}}, f"fp16.{key}={value}, but the run's config has {remedy}")
      for key, value, remedy in (
        ("loss_scale", 65536, "0; set loss_scale.mode and loss_scale.initial"),
        ("initial_scale_power", 16, "12; set loss_scale.initial (2 to this power)"),
        ("loss_scale_window", 1000, "500; set loss_scale.window"),
        ("hysteresis", 1, "2; set loss_scale.hysteresis"),
        ("min_loss_scale", 2, "1.0; set loss_scale.minimum"),
        ("consecutive_hysteresis", True, "False; remove it from the file"),
        ("enabled", False, "True; set precision.parameters"),
        ("of_tomorrow", 1, "no setting of that name; remove it from the file"))),
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("own", "message"), CONTRADICTING)
def test_a_file_that_contradicts_is_refused(
    tmp_path: Path, stage: int, own: Any, message: str
) -> None:
    file = own_file(tmp_path, own)
    with pytest.raises(ConfigError) as caught:
        resolved(**FLOAT16, parallel__zero_stage=stage, deepspeed__config_file=file)
    assert file in str(caught.value) and message.format(stage=stage) in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_modelzoos_file_is_taken(tmp_path: Path, stage: int) -> None:
    own = MODELZOO | {"zero_optimization": {"stage": stage}}
    changes = FLOAT16 | {"parallel__zero_stage": stage}
    config = resolved(**changes, deepspeed__config_file=own_file(tmp_path, own))
    assert deepspeed_settings(config, own) == deepspeed_settings(resolved(**changes)) | {
        key: own[key] for key in ("steps_per_print", "prescale_gradients", "wall_clock_breakdown")
    }
    if stage:
        return
    # one of a static scale also holds the keys of a dynamic one
    static = changes | {"loss_scale": {"mode": "static", "initial": 65536}}
    own["fp16"] = own["fp16"] | {"loss_scale": 65536}
    config = resolved(**static, deepspeed__config_file=own_file(tmp_path, own))
    assert deepspeed_settings(config, own)["fp16"] == {"enabled": False}  # the engine does it


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_stage": 2},
        {"model_parallel": 2, "sequence_parallel": True, "zero_stage": 3},
        {"model_parallel": 2, "pipeline_stage": 2},
        {"model_parallel": 2, "zero_stage": 1},
    ],
)
@pytest.mark.parametrize("parameters", ["float32", "float16"])
def test_layouts_that_deepspeed_runs(parallel: dict[str, Any], parameters: str) -> None:
    resolved(parallel=parallel, precision={"parameters": parameters, "compute": parameters})


MINDSPORE = {"engine": "native", "backend": "mindspore", "device": "cpu"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel__model_parallel": 2},
        {"parallel__zero_stage": 1},
        {"parallel": {"pipeline_stage": 2, "stage_layers": [3, 1], "zero_stage": 1}},
        {"parallel": {"pipeline_stage": 2, "model_parallel": 2, "pipeline_schedule": "gpipe"}},
    ],
)
def test_layouts_that_mindspore_runs(changes: dict[str, Any]) -> None:
    resolved(**MINDSPORE, **changes)


def test_the_model_is_not_compiled_for_copies_in_one_process() -> None:
    settings = {"engine": "native", "parallel__strategy": "parameter_server"}
    assert resolved(**settings, world_size=1).train.compile == "auto"


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_zero_has_no_effect_on_one_process(backend: str) -> None:
    """MindFormers' files for one device have enable_parallel_optimizer too."""
    plain, split = (
        resolved(1, engine="native", backend=backend, parallel={"zero_stage": stage})
        for stage in (0, 1)
    )
    assert split == plain

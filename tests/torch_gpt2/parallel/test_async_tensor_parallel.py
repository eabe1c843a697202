"""parallel.async_tensor_parallel: which messages join a product, and losses of one process."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.errors import ConfigError, DeviceError
from common.resolve.derive import resolve_config
from tests.layouts import PIPELINE, SEQUENCE, SPLIT, TOLERANCE, TORCH
from tests.ranks import run_ranks
from tests.tiny import require_equal, rows_of
from tests.torch_gpt2.parallel.test_layouts import SMALL
from torch_gpt2.device import TorchDevice, check_support, select_device

ASYNC: dict[str, Any] = {**SEQUENCE, "parallel__async_tensor_parallel": True}
STEPS = 3
COMPILED = {
    "train__compile": True,
    "train__max_steps": STEPS,
    "train__micro_batch_size": 6,
    "model__num_layers": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"train__recompute": "full"},
}
IN_CAMPAIGN = ("recomputed",)
CASES = [
    pytest.param(name, marks=pytest.mark.campaign if name in IN_CAMPAIGN else ()) for name in RUNS
]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_message_of_a_block_joins_its_product(
    tmp_path: Path, corpus_prefix: Path, name: str
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which torch.compile needs on a CPU: g++ is not on PATH")
    settings = SMALL | COMPILED | RUNS[name]
    run_ranks(
        2,
        [
            TORCH.job(tmp_path / "async", corpus_prefix, **settings, **ASYNC),
            TORCH.job(
                tmp_path / "one", corpus_prefix, ranks=1, **settings | {"train__compile": False}
            ),
        ],
        watched="joined_products",
        seconds=120.0,
    )
    assert len(rows_of(tmp_path / "one")) == STEPS
    require_equal(tmp_path / "async", tmp_path / "one", TOLERANCE)
    micro_batches = STEPS * 12 // 6
    forward = 2 if name == "recomputed" else 1
    passes = micro_batches * (forward + 1)  # two regions, with a gather and a scatter each
    for rank in range(2):
        counts = json.loads((tmp_path / "async" / f"watched_{rank}.json").read_text())
        assert counts == {
            "fused_all_gather_matmul": 2 * passes,
            "fused_matmul_reduce_scatter": 2 * passes,
        }


@pytest.mark.long
@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [SPLIT | {"train__micro_batch_size": 3}, PIPELINE | {"model__num_layers": 2}],
    ids=["zero3", "pipeline"],
)
def test_four_ranks_equal_one_process(
    tmp_path: Path, corpus_prefix: Path, layout: dict[str, Any]
) -> None:
    settings = SMALL | COMPILED | layout
    alone = {key: value for key, value in settings.items() if not key.startswith("parallel")}
    run_ranks(
        4,
        [
            TORCH.job(tmp_path / "async", corpus_prefix, **settings, **ASYNC),
            TORCH.job(
                tmp_path / "one", corpus_prefix, ranks=1, **alone | {"train__compile": False}
            ),
        ],
        watched="joined_products",
        seconds=60.0,
    )
    require_equal(tmp_path / "async", tmp_path / "one", TOLERANCE)
    for rank in range(4):  # a pipeline runs a stage once before its first step
        counts = json.loads((tmp_path / "async" / f"watched_{rank}.json").read_text())
        assert min(counts.values()) >= 24 and len(counts) == 2


def resolve(**changes: Any) -> Any:
    settings = ASYNC | {"train__compile": True, "train__micro_batch_size": 1} | changes
    config = build_config(TORCH.job(Path("unused"), Path("unused"), **settings))
    return resolve_config(config, world_size=2 * config.parallel.pipeline_stage)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__sequence_parallel": False}, "needs parallel.sequence_parallel=true"),
        ({"train__compile": False}, "needs train.compile=true or auto, not train.compile=false"),
        ({"train__compile_mode": "reduce-overhead"}, "needs train.compile_mode=default"),
        (
            {
                "parallel__pipeline_stage": 2,
                "parallel__pipeline_schedule": "interleaved_zero_bubble",
                "train__compile": "auto",
            },
            "needs a compiled model, not a layout with parallel.pipeline_schedule",
        ),
        ({"engine": "deepspeed"}, "needs engine=native, not engine=deepspeed"),
        ({"quantization": {}}, "needs no section quantization"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**changes)
    assert words in str(caught.value)
    assert "leave the key out" in str(caught.value)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(DeviceError, match="and the key needs CUDA GPUs"):
        check_support(resolve(), select_device("cpu"))


def test_a_gpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchDevice, "compiles", property(lambda device: False))
    device = replace(select_device("cpu"), kind="cuda", name="NVIDIA H100")
    with pytest.raises(DeviceError, match="NVIDIA H100 without Triton, a C compiler or Python"):
        check_support(resolve(), device)

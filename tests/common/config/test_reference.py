"""The generated page of all keys: it is current, whole, and right about the backends."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from common.config.hints import schema_keys
from common.config.reference import COMPILED_TOO, TORCH_ONLY, config_reference
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from common.run_config import load_config
from tools.config_schema import main

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "config_reference.md"
OVERRIDES = {
    "engine": "engine=deepspeed",
    "precision.float8": "precision=fp8",
    "precision.float8_head": "precision=bf16 precision.float8_head=true",
    "train.compile": "train.compile=true",
    "train.compile_mode": "train.compile_mode=reduce-overhead",
    "train.offload_activations": "train.offload_activations=true",
    "parallel.async_tensor_parallel": "parallel.async_tensor_parallel=true"
    " parallel.sequence_parallel=true parallel.model_parallel=2",
    "parallel.strategy": "parallel.strategy=parameter_server",
    "parallel.virtual_stages": "parallel.virtual_stages=2"
    " parallel.pipeline_schedule=interleaved_1f1b parallel.pipeline_stage=2"
    " train.accumulation_steps=2 train.micro_batch_size=4",
    "deepspeed": "engine=deepspeed deepspeed.offload_optimizer=true parallel.zero_stage=1"
    " parallel.data_parallel=2 train.micro_batch_size=4",
    "parallel.sequence_parallel": "parallel.sequence_parallel=true parallel.model_parallel=2",
    "parallel.shard_size": "parallel.shard_size=2 parallel.zero_stage=1 parallel.data_parallel=2"
    " train.micro_batch_size=4",
}
"""For each key of PyTorch only, a run that uses it; of two processes where it needs them."""


def test_the_page_is_current_and_has_a_row_for_every_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(config_reference(), encoding="utf-8")
    assert main(["--reference"]) == 0
    page = PAGE.read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "make golden"
    keys = {key for key, is_section in schema_keys().items() if not is_section or "." in key}
    found = re.findall(r"^\| `(\S+)` (?:\| .+ ){4}\|$", page.partition("\n## Other")[0], re.M)
    assert sorted(found) == sorted(key.partition(".")[2] or key for key in keys | {"base"})


@pytest.mark.parametrize("key", sorted(TORCH_ONLY | COMPILED_TOO))
def test_a_key_of_pytorch_is_taken_there_and_refused_on_mindspore(key: str) -> None:
    words = ["device=cpu", *OVERRIDES[key].split()]
    world_size = 2 if "=2" in OVERRIDES[key] else 1
    config = ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml"
    resolve_config(load_config(config, words), world_size=world_size)
    with pytest.raises(ConfigError, match="for backend torch"):
        resolve_config(load_config(config, ["backend=mindspore", *words]), world_size=world_size)

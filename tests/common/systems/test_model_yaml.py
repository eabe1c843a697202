"""model.yaml as users write it: what a run lacks, and values of wrong types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from common.systems.megatron.write import write_megatron
from common.systems.run_state import MODEL_YAML, moment_shapes, read_model_yaml, write_model_yaml
from common.systems.weights import Weights
from tests.common.systems.tiny_weights import as_weights, random_arrays

MODEL = {
    "num_layers": 1, "hidden_size": 4, "num_heads": 2, "seq_length": 8, "vocab_size": 11,
    "ffn_hidden_size": 8, "max_positions": 8,
}  # fmt: skip
RUN: dict[str, Any] = {
    "state": {
        "step": 3, "consumed_samples": 6, "sample_hash": "", "skipped_steps": 0,
        "skipped_in_a_row": 0, "updated_samples": 12,
    },
    "engine": {"optimizer_steps": 3, "loss_scale": {}, "rng": {}},
    "config": {"optimizer": {"name": "adamw", "decay_steps": 9}, "train": {"global_batch_size": 2}},
}  # fmt: skip


def test_a_run_without_the_keys_of_the_optimizer_goes_to_megatron_without_its_schedule(
    tmp_path: Path,
) -> None:
    (tmp_path / MODEL_YAML).write_text(yaml.safe_dump({"model": MODEL, "run": RUN}))
    model, run = read_model_yaml(tmp_path / MODEL_YAML)
    moments = {name: np.zeros(shape, "f4") for name, shape in moment_shapes(model, "adamw").items()}
    weights = as_weights(model, random_arrays(model), moments=moments, run=run)
    write_megatron(tmp_path / "out", weights, None)
    file = tmp_path / "out" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    assert "opt_param_scheduler" not in saved
    assert saved["optimizer"]["param_groups"][0]["step"] == 3
    write_model_yaml(tmp_path, Weights(path=tmp_path, format="x", model=model, tensors={}, run=run))
    assert read_model_yaml(tmp_path / MODEL_YAML) == (model, run) == (model, RUN)

"""The record of a step: what it holds, and the planted fault that it leads to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from common.errors import DataError
from common.run_config import load_config
from common.training.recording import record_request
from gpt2_study.compare.step_records import StepReader, compare_records, difference
from tests.reference import hugging_face_model, hugging_face_names
from tests.tiny import tiny_run, train_here
from torch_gpt2 import engine as engine_module
from torch_gpt2.model import GPT2

LAYERS = 3


@pytest.fixture
def record(corpus_prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Record the first step of a tiny run; returns the folder of the record."""

    def run(name: str, samples: int = 8, **changes: Any) -> Path:
        usual: dict[str, Any] = {"model__num_layers": LAYERS, "model__hidden_size": 16, "model__num_heads": 2}
        usual |= {"train__max_steps": 1, "optimizer": {"learning_rate": 0.01, "decay_steps": 20}}
        with monkeypatch.context() as patched:
            for key, value in record_request(step=1, samples=samples, folder=tmp_path / name).items():
                patched.setenv(key, value)
            train_here(tiny_run(tmp_path / f"run_{name}", corpus_prefix, **(usual | changes)))
        return tmp_path / name

    return run


def altered(change: Callable[[GPT2], Any]) -> Any:
    """Have ``change`` done to the model that an engine builds."""
    build = engine_module.build_parts

    def build_altered(*given: Any) -> list[GPT2]:
        parts = build(*given)
        change(parts[0])
        return parts

    return patch.object(engine_module, "build_parts", build_altered)


def test_the_record_is_what_transformers_computes(record: Any, tmp_path: Path) -> None:
    """Outputs of blocks, their gradients and those of all weights, of transformers' own model."""
    folder = record("one")
    reader = StepReader(folder)
    found = {name: reader.read(name) for name in load_file(folder / "rank_00000.safetensors")}

    def section(kind: str) -> dict[str, torch.Tensor]:
        chosen = [name for name in found if name.startswith(f"{kind}/")]
        return {name.partition("/")[2]: torch.from_numpy(found[name]) for name in chosen}

    config = load_config(tmp_path / "run_one" / "config.yaml").model
    model = hugging_face_model(config, section("weights"))
    tokens = torch.from_numpy(found["tokens"].astype(np.int64))
    outputs = model(tokens[:, :-1], output_hidden_states=True)
    for state in outputs.hidden_states:
        state.retain_grad()
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    names = ["embeddings", *(f"h.{layer}" for layer in range(LAYERS - 1)), "ln_f"]
    states = outputs.hidden_states  # the last of transformers' is the output of the last norm
    for name, state in zip(names, states, strict=True):
        np.testing.assert_allclose(found[f"forward/{name}"], state.detach(), atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(found[f"backward/{name}"], state.grad, atol=1e-8, rtol=1e-4)
    for name, gradient in hugging_face_names(section("gradients"), 101).items():
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-4)
    facts = json.loads((folder / "rank_00000.json").read_text())
    assert facts["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert facts["samples"] == [0, 1, 2, 3] and len(found) == len(facts["pieces"])


def test_equal_steps_have_no_difference(record: Any) -> None:
    """A smaller micro batch adds the same gradients in another order; a loss scale cancels out."""
    one, other = record("one"), record("other", train__micro_batch_size=1)
    found = compare_records(one, other, None)
    assert found.first is None and not found.left_out and found.tolerance == 1e-5
    sections = {"tokens", "weights", "forward", "backward", "gradients"}
    assert {row.section for row in found.rows} == sections
    scaled = record("scaled", loss_scale={"mode": "static", "initial": 1024.0})
    assert compare_records(one, scaled, None).first is None


def test_a_fault_is_named(record: Any) -> None:
    """A layer whose output is scaled, and a gradient that is, with which nothing else differs."""
    one = record("one")

    def scaled(*given: Any) -> Any:
        return 1.001 * given[-1]

    with altered(lambda model: model.h[1].mlp.register_forward_hook(scaled)):
        row = compare_records(one, record("layer"), None).first
    assert row is not None and (row.section, row.name) == ("forward", "h.1.mlp")
    assert row.relative == pytest.approx(1e-3, rel=0.01)
    assert row.place == (0, 0, 0) and row.sample == 0
    for name in ("h.1.mlp.c_fc.weight", "wpe.weight"):
        with altered(lambda model, at=name: model.get_parameter(at).register_hook(scaled)):
            rows = compare_records(one, record(name), None).rows
        assert [(row.section, row.name) for row in rows if row.differs] == [("gradients", name)]


def test_other_samples_and_weights_come_first(record: Any, tmp_path: Path) -> None:
    """And samples are spread over the batch, where not all are recorded. A rank that is not there is an error."""
    one = record("one", samples=2)
    facts = one / "rank_00000.json"
    assert json.loads(facts.read_text())["samples"] == [0, 2]
    assert load_file(one / "rank_00000.safetensors")["forward/h.0"].shape == (2, 16 * 16)
    row = compare_records(one, record("seed", samples=2, seed=7), None).first
    assert row is not None and row.section == "tokens"
    start = {"checkpoint__init_from": str(tmp_path / "run_one")}
    row = compare_records(one, record("trained", samples=2, **start), None).first
    assert row is not None and (row.section, row.name) == ("weights", "wte.weight")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"ranks": 2}))
    with pytest.raises(DataError, match="rank 1 has not recorded the step"):
        compare_records(one, one, None)


def test_difference_is_relative_to_the_norm() -> None:
    one = np.array([[3, 4, 0], [0, 0, 0]], np.float32)
    other = one + np.array([[0, 0, 0], [0, 0, 0.5]], np.float32)
    assert difference(one, one, 0.0) == (0.0, 0.0, None)
    assert difference(one, other, 1e-3) == (0.5, pytest.approx(0.5 / np.sqrt(25.25)), (1, 2))
    assert difference(one, other, 1e-3, scale=1000.0)[2] is None
    other[0, 1] = np.nan
    assert difference(other, other, 0.9)[2] == (0, 1), "NaN equals nothing"

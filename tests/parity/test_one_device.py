"""torch and MindSpore on the same weights and batches, and transformers beside them; documents that
share a window; one MindRecord, and a blend of it and a pair.
"""

import tests.needs_both  # noqa: F401

# isort: split
import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch

import mindformers_gpt2.data
import mindformers_gpt2.evaluate
import torch_gpt2.evaluate
import torch_gpt2.model
from common.backends import make_run
from common.config.load import build_config
from common.training.metrics import read_metrics
from mindformers_gpt2.device import select_device
from mindformers_gpt2.layers import GELU
from mindformers_gpt2.mindrecord import write_mindrecord
from tests.layouts import TORCH, averages, figures
from tests.reference import hugging_face_model, hugging_face_names
from tests.tiny import SGD, require_equal, results_of, rows_of, tiny_config, tiny_run, train_here
from tests.torch_gpt2 import test_packing as packing
from tests.torch_gpt2.test_model import FORMULAS
from tests.torch_gpt2.test_ramp import BY_SAMPLES, SIZES, STEPS, make_tree
from tests.twins import mindspore_mode, mindspore_twin, random_model
from torch_gpt2.data import split

VOCABULARY = 101
ADAMW = {"learning_rate": 0.01, "warmup_steps": 4, "decay_steps": 20, "weight_decay": 0.1, "clip_grad": 2.3}
SHAPE: dict[str, Any] = {"model__seq_length": 24, "data__split": "100,0,0", "optimizer": ADAMW}


def train(folder: Path, corpus: Path, steps: int = 20, **changes: Any) -> Path:
    return train_here(tiny_run(folder, corpus, **(SHAPE | {"train__max_steps": steps} | changes)))


@pytest.mark.parametrize("activation", FORMULAS)
def test_each_activation_is_its_formula_on_mindspore_too(activation: str) -> None:
    select_device("cpu")  # before anything is computed
    numbers = np.linspace(-12, 12, 4001, dtype=np.float32)
    found = GELU(activation, native=False)(ms.Tensor(numbers)).asnumpy()
    np.testing.assert_allclose(found, FORMULAS[activation](torch.from_numpy(numbers)).numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "activation"),
    [("graph", "gelu_new"), ("pynative", "gelu_new"), ("graph", "gelu"), ("graph", "quick_gelu")],
)
def test_logits_and_every_gradient_are_equal(mode: str, activation: str) -> None:
    """float32: 1e-5, against torch and against transformers, with random weights and biases."""
    one = random_model(std=0.2, positions=None, seq_length=24, activation=activation)
    other = mindspore_twin(tiny_config(**SHAPE, model__vocab_multiple=16, model__activation=activation), one)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 25)).astype(np.int32)
    ids, targets = torch.from_numpy(tokens[:, :-1]).long(), torch.from_numpy(tokens[:, 1:]).long()
    reference = hugging_face_model(one.config, dict(one.named_parameters()))
    logits = reference(ids).logits
    (torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())).backward()
    parameters = list(other.get_parameters())
    with mindspore_mode(mode) as compiled:
        function = compiled(ms.value_and_grad(other.loss_sum, None, parameters))
        loss, found = function(ms.Tensor(tokens[:, :-1]), ms.Tensor(tokens[:, 1:]))
        hidden = other(ms.Tensor(tokens[:, :-1]))
        found_logits = other.logits(hidden.reshape((-1, 32))).asnumpy().reshape(2, 24, VOCABULARY)
    np.testing.assert_allclose(found_logits, logits.detach().numpy(), rtol=0, atol=1e-5)
    assert float(loss.asnumpy()) == pytest.approx(one.loss_sum(ids, targets).item(), rel=1e-6)
    gradients = (torch.from_numpy(gradient.asnumpy()) / targets.numel() for gradient in found)
    names = [parameter.name for parameter in parameters]
    for name, gradient in hugging_face_names(dict(zip(names, gradients, strict=True)), VOCABULARY).items():
        expected = reference.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-5, err_msg=name)


PLAIN = SGD | {"learning_rate": 0.3}
ADAM = {"name": "adam", "learning_rate": 0.01, "weight_decay": 0.1, "schedule": "linear"}
OPTIMIZERS: dict[str, tuple[dict[str, Any], int]] = {
    "sgd, clip on some steps": (PLAIN | {"clip_grad": 2.0, "weight_decay": 0.01}, 20),
    "adam without first moment": (ADAM | {"beta1": 0.0}, 20),
    "adamw": ({"learning_rate": 0.003, "warmup_steps": 20, "weight_decay": 0.1, "clip_grad": 1.5}, 200),
    "sgd": (SGD | {"schedule": "cosine", "warmup_steps": 20}, 200),
}
"""Section optimizer, and steps."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.campaign if steps > 20 else ()) for name, (_, steps) in OPTIMIZERS.items()],
)
def test_runs_of_the_same_config_are_equal(tmp_path: Path, corpus_prefix: Path, name: str) -> None:
    """Losses within 1e-4 relative at every step, gradient norms within 1e-3, the same samples. With
    accumulation 2, schedules, and clips that act on some steps.
    """
    optimizer, steps = OPTIMIZERS[name]
    found, expected = (
        train(tmp_path / backend, corpus_prefix, steps, optimizer=optimizer, backend=backend)
        for backend in ("mindspore", "torch")
    )
    require_equal(found, expected, 1e-4, grad_norm=1e-3)
    norms = [row["grad_norm"] for row in rows_of(expected)]
    assert len(norms) == steps
    if "clip" in name:
        assert min(norms) < optimizer["clip_grad"] < max(norms)


@pytest.mark.parametrize("backend", [pytest.param("mindspore", marks=pytest.mark.long), "torch"])
def test_sgd_resumes_with_and_without_momentum(tmp_path: Path, corpus_prefix: Path, backend: str) -> None:
    small: dict[str, Any] = {"model__num_layers": 1, "backend": backend}
    if backend == "mindspore":  # graphs would take seconds each to compile
        small["context__mode"] = "pynative"

    def go(name: str, steps: int, momentum: float) -> Path:
        optimizer = PLAIN | {"momentum": momentum}
        return train(tmp_path / name, corpus_prefix, steps, optimizer=optimizer, **small)

    begun: list[Any] = []
    for steps, momentum in ((2, 0.0), (4, 0.0), (5, 0.9), (6, 0.0)):
        run = go("run", steps, momentum)
        assert rows_of(run)[: len(begun)] == begun, "it resumes, and does not start over"
        begun = rows_of(run)
    assert results_of(run)[:4] == results_of(go("whole", 4, 0.0))


@pytest.mark.long
def test_runs_whose_batch_grows_are_equal(tmp_path: Path, corpus_prefix: Path) -> None:
    """float32 on other kernels: 1e-5. On MindSpore three steps are in flight, in which the size changes."""
    ramp: dict[str, Any] = {"model__num_layers": 1, "train__rampup_batch_size": STEPS, **BY_SAMPLES}
    found, expected = (
        train_here(make_tree(tmp_path / name, corpus_prefix, **ramp, **changes))
        for name, changes in (("run", {"backend": "mindspore", "train__sink_size": 3}), ("torch", {}))
    )
    require_equal(found, expected, 1e-5)
    assert [row["global_batch_size"] for row in rows_of(found)] == SIZES


@pytest.mark.long
def test_quantization_aware_training_moves_between_the_frameworks(tmp_path: Path, corpus_prefix: Path) -> None:
    """Products in another order round an activation to the next of 15 levels now and then: 1.5e-5 was seen."""
    small = TORCH.numerics["quantized"] | {"model__num_layers": 2, "train__micro_batch_size": 4}

    def run(name: str, **changes: Any) -> Path:
        job = TORCH.job(tmp_path / name, corpus_prefix, **small, **changes)
        return train_here(job | {"backend": name})

    expected = run("torch", checkpoint__interval=2)
    second = expected / "checkpoints" / "step_00000002"
    found = run("mindspore", checkpoint__resume=str(second))
    own = figures(found)
    assert own == pytest.approx(figures(expected)[-len(own) :], rel=1e-4)
    assert averages(found) == pytest.approx(averages(expected), rel=1e-4)
    assert len(averages(found)) == 12


PACKED: dict[str, dict[str, Any]] = {
    "all": {},
    **{only: {key: key == only for key in packing.KEYS} for only in packing.KEYS},
    "targets": {**dict.fromkeys(packing.KEYS, False), "data__eod_mask_loss": "targets"},
    "recomputed": {"train__recompute": "full"},
}


@pytest.mark.parametrize("name", PACKED)
def test_losses_and_gradients_of_documents_kept_apart_are_torchs(name: str) -> None:
    """float32: 1e-6 of the loss, 1e-5 of the gradients, as without the keys. Two single keys
    operator by operator: each graph takes its compiler seconds.
    """
    alone = ("data__reset_position_ids", "data__eod_mask_loss")
    one = packing.make_model(packing.make_config(**PACKED[name]))
    other = mindspore_twin(packing.make_config(backend="mindspore", **PACKED[name]), one)
    loss = one.loss_sum(*split(packing.windows(), one.packing))
    loss.backward()
    given = mindformers_gpt2.data.inputs_and_targets(packing.windows().int().numpy(), one.packing)
    parameters = list(other.get_parameters())
    with mindspore_mode("pynative" if name in alone else "graph") as compiled:
        found, gradients = compiled(ms.value_and_grad(other.loss_sum, None, parameters))(*given)
    assert float(found.asnumpy()) == pytest.approx(loss.item(), rel=1e-6)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        wanted = one.get_parameter(parameter.name).grad.numpy()
        largest = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(gradient.asnumpy(), wanted, rtol=0, atol=1e-5 * largest, err_msg=parameter.name)


def small_tree(folder: Path, data: Path, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"model__num_layers": 1, "model__hidden_size": 16, "model__num_heads": 2}
    usual |= {"model__seq_length": 24, "train__max_steps": 6, "validation": {"max_samples": 4}}
    return tiny_run(folder, data, **(usual | changes))


@pytest.mark.long
def test_runs_over_one_mindrecord_are_equal(tmp_path: Path, corpus_prefix: Path) -> None:
    """Losses within 1e-4 relative, as over a pair; equal hashes: the same rows in the same shuffled order."""
    write_mindrecord(corpus_prefix, tmp_path / "data" / "corpus.mindrecord", 24, 3)
    data = tmp_path / "data"
    expected, one_shard = (
        train_here(small_tree(tmp_path / f"torch {each.name}", each)) for each in (data, data / "corpus.mindrecord1")
    )
    found = train_here(small_tree(tmp_path / "mindspore", data, backend="mindspore"))
    assert len(rows_of(expected)) == 6
    require_equal(found, expected, 1e-4, grad_norm=1e-3)
    assert results_of(one_shard) == results_of(expected), "one shard stands for its set"


@pytest.mark.parametrize("module", [torch_gpt2, mindformers_gpt2])
def test_a_blend_of_a_pair_and_a_mindrecord_is_validated_as_each_by_itself(
    tmp_path: Path, corpus_prefix: Path, module: Any
) -> None:
    """The loss is the mean over all tokens of 5 and 2 windows, in batches of at most 2."""
    keys: dict[str, Any] = {"train__max_steps": 1}
    if module is mindformers_gpt2:  # graphs would take seconds each to compile
        keys |= {"backend": "mindspore", "context__mode": "pynative"}
    other, run = tmp_path / "other.mindrecord", tmp_path / "run"
    write_mindrecord(corpus_prefix.with_name("other"), other, 24)
    blend = [3, str(corpus_prefix), 1, str(other)]
    tree = small_tree(run, corpus_prefix, data__train=blend, validation__max_samples=7, **keys)
    *_, row = read_metrics(train_here(tree) / "metrics.jsonl")
    total = 0.0
    for data, windows in ((corpus_prefix, 5), (other, 2)):
        tree = small_tree(run, data, validation__max_samples=windows, **keys)
        module.evaluate.evaluate(*make_run(build_config(tree), "eval"))
        found = json.loads((run / "evaluation.json").read_text())
        assert row[f"validation_tokens/{data.name}"] == found["tokens"] == windows * 24
        loss = found["validation_loss"]
        assert row[f"validation_loss/{data.name}"] == pytest.approx(loss, rel=1e-6)
        total += loss * windows / 7
    assert row["validation_tokens"] == 7 * 24
    assert row["validation_loss"] == pytest.approx(total, rel=1e-6)

"""torch and MindSpore on the same weights and batches, and transformers beside them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
ms = pytest.importorskip(
    "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
)
torch = pytest.importorskip("torch")

import mindformers_gpt2.device  # noqa: E402
import mindformers_gpt2.evaluate  # noqa: E402
import mindformers_gpt2.model  # noqa: E402
import mindformers_gpt2.train  # noqa: E402
import torch_gpt2.device  # noqa: E402
import torch_gpt2.evaluate  # noqa: E402
import torch_gpt2.model  # noqa: E402
import torch_gpt2.train  # noqa: E402
from common.config.load import build_config  # noqa: E402
from common.config.schema import RunConfig  # noqa: E402
from common.inputs import make_run  # noqa: E402
from common.resolve.derive import resolve_config  # noqa: E402
from common.run_config import load_config  # noqa: E402
from common.training.metrics import read_metrics  # noqa: E402
from tests.config_overrides import changed  # noqa: E402
from tests.reference import hugging_face_model, hugging_face_names  # noqa: E402

VOCABULARY = 101


def make_config(folder: Path, prefix: Path, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "seq_length": 24,
            "vocab_size": VOCABULARY,
        },
        "train": {"max_steps": 20, "micro_batch_size": 2, "global_batch_size": 4},
        "optimizer": {
            "learning_rate": 0.01,
            "warmup_steps": 4,
            "decay_steps": 20,
            "weight_decay": 0.1,
            "clip_grad": 2.3,
        },
        "data": {"train": str(prefix), "split": "100,0,0"},
        "logging": {"tensorboard": False, "plot": False},
    }
    return resolve_config(build_config(changed(tree, changes)))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model of each backend with the same random weights, zero biases avoided."""
    config = make_config(tmp_path_factory.mktemp("twins"), Path("unused"))
    one = torch_gpt2.model.build_model(config, torch_gpt2.device.select_device("cpu"))
    torch.manual_seed(0)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    other = mindformers_gpt2.model.build_model(config, mindformers_gpt2.device.select_device("cpu"))
    for parameter in other.get_parameters():
        ms.ops.assign(parameter, ms.Tensor(one.get_parameter(parameter.name).detach().numpy()))
    return one, other


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_logits_and_every_gradient_are_equal(twins: tuple[Any, Any], mode: str) -> None:
    """float32: 1e-5, against torch and against transformers."""
    one, other = twins
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 25)).astype(np.int32)
    ids, targets = torch.from_numpy(tokens[:, :-1]).long(), torch.from_numpy(tokens[:, 1:]).long()
    reference = hugging_face_model(one.config, dict(one.named_parameters()))
    logits = reference(ids).logits
    (torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())).backward()
    one.zero_grad()
    (one.loss_sum(ids, targets) / targets.numel()).backward()
    gradients = {name: parameter.grad for name, parameter in one.named_parameters()}

    try:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        parameters = list(other.get_parameters())
        function = ms.value_and_grad(other.loss_sum, None, parameters)
        loss, found = (ms.jit(function) if mode == "graph" else function)(
            ms.Tensor(tokens[:, :-1]), ms.Tensor(tokens[:, 1:])
        )
        hidden = other(ms.Tensor(tokens[:, :-1]))
        found_logits = other.logits(hidden.reshape((-1, 32))).asnumpy().reshape(2, 24, VOCABULARY)
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_allclose(found_logits, logits.detach().numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        float(loss.asnumpy()) / targets.numel(),
        one.loss_sum(ids, targets).item() / targets.numel(),
        rtol=1e-6,
    )
    for parameter, gradient in zip(parameters, found, strict=True):
        value = gradient.asnumpy() / targets.numel()
        np.testing.assert_allclose(
            value, gradients[parameter.name].numpy(), rtol=0, atol=1e-5, err_msg=parameter.name
        )
    by_name = {
        parameter.name: torch.from_numpy(gradient.asnumpy()) / targets.numel()
        for parameter, gradient in zip(parameters, found, strict=True)
    }
    wanted = dict(reference.named_parameters())
    for name, gradient in hugging_face_names(by_name, VOCABULARY).items():
        torch.testing.assert_close(
            gradient,
            wanted[name].grad,
            rtol=0,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


SGD = {
    "name": "sgd",
    "learning_rate": 0.3,
    "momentum": 0.9,
    "schedule": "constant",
    "clip_grad": 0.0,
}
OPTIMIZERS = {
    "sgd, clip on some steps": {"optimizer": SGD | {"clip_grad": 2.0, "weight_decay": 0.01}},
    "adam without first moment": {
        "optimizer": {
            "name": "adam",
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "schedule": "linear",
            "beta1": 0.0,
        }
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_runs_of_the_same_config_are_equal(tmp_path: Path, corpus_prefix: Path, name: str) -> None:
    """20 steps with accumulation 2: losses within 1e-4 relative at every step, gradient norms
    within 1e-3, the same samples.
    """
    mindformers_gpt2.train.train(
        *make_run(
            make_config(
                tmp_path / "mindspore", corpus_prefix, backend="mindspore", **OPTIMIZERS[name]
            )
        )
    )
    torch_gpt2.train.train(
        *make_run(make_config(tmp_path / "torch", corpus_prefix, **OPTIMIZERS[name]))
    )
    found, expected = rows_of(tmp_path / "mindspore"), rows_of(tmp_path / "torch")
    assert len(found) == 20
    if "clip on some" in name:
        limit = make_config(tmp_path, corpus_prefix, **OPTIMIZERS[name]).optimizer.clip_grad
        norms = [row["grad_norm"] for row in expected]
        assert min(norms) < limit < max(norms)
    np.testing.assert_allclose(
        [row["loss"] for row in found], [row["loss"] for row in expected], rtol=1e-4
    )
    np.testing.assert_allclose(
        [row["grad_norm"] for row in found], [row["grad_norm"] for row in expected], rtol=1e-3
    )
    for key in ("learning_rate", "consumed_samples", "sample_hash", "loss_scale"):
        assert [row[key] for row in found] == [row[key] for row in expected]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.campaign), "sgd"])
def test_two_hundred_steps_are_equal(tmp_path: Path, corpus_prefix: Path, optimizer: str) -> None:
    """AdamW with schedule, accumulation and a clip that acts on some steps; SGD without a clip:
    losses 1e-4, gradient norms 1e-3.
    """
    changes = {
        "adamw": {
            "optimizer": {
                "learning_rate": 0.003,
                "warmup_steps": 20,
                "weight_decay": 0.1,
                "clip_grad": 1.5,
            }
        },
        "sgd": {
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.1,
                "momentum": 0.9,
                "warmup_steps": 20,
                "clip_grad": 0.0,
            }
        },
    }[optimizer]
    for backend, train in (
        ("mindspore", mindformers_gpt2.train.train),
        ("torch", torch_gpt2.train.train),
    ):
        changes["backend"] = backend
        train(
            *make_run(
                make_config(tmp_path / backend, corpus_prefix, train__max_steps=200, **changes)
            )
        )
    found, expected = rows_of(tmp_path / "mindspore"), rows_of(tmp_path / "torch")
    norms = [row["grad_norm"] for row in expected]
    assert len(found) == 200 and (optimizer == "sgd" or min(norms) < 1.5 < max(norms))
    np.testing.assert_allclose(
        [row["loss"] for row in found], [row["loss"] for row in expected], rtol=1e-4
    )
    np.testing.assert_allclose([row["grad_norm"] for row in found], norms, rtol=1e-3)
    assert [row["sample_hash"] for row in found] == [row["sample_hash"] for row in expected]


@pytest.mark.parametrize("backend", ["mindspore", "torch"])
def test_sgd_resumes_with_and_without_momentum(
    tmp_path: Path, corpus_prefix: Path, backend: str
) -> None:
    train = {"mindspore": mindformers_gpt2.train.train, "torch": torch_gpt2.train.train}[backend]
    small: dict[str, Any] = {"model__num_layers": 1, "backend": backend}
    for steps, momentum in ((2, 0.0), (4, 0.0), (5, 0.9), (6, 0.0)):
        changes = small | {"optimizer": SGD | {"momentum": momentum}}
        train(
            *make_run(
                make_config(tmp_path / "run", corpus_prefix, train__max_steps=steps, **changes)
            )
        )
    train(
        *make_run(
            make_config(
                tmp_path / "whole",
                corpus_prefix,
                train__max_steps=4,
                **small,
                optimizer=SGD | {"momentum": 0.0},
            )
        )
    )
    assert [row["loss"] for row in rows_of(tmp_path / "run")][:4] == [
        row["loss"] for row in rows_of(tmp_path / "whole")
    ]


def test_resume_is_exact_and_moves_between_frameworks(tmp_path: Path, corpus_prefix: Path) -> None:
    """10 + 10 equal 20 bit for bit on MindSpore; 10 on torch, 10 on MindSpore and 10 on torch equal
    30 in one within 1e-4.
    """
    train = {"mindspore": mindformers_gpt2.train.train, "torch": torch_gpt2.train.train}

    def go(folder: str, backend: str, steps: int, **changes: Any) -> None:
        changes = {
            "train__max_steps": steps,
            "optimizer__decay_steps": 30,
            "backend": backend,
            **changes,
        }
        train[backend](*make_run(make_config(tmp_path / folder, corpus_prefix, **changes)))

    go("whole", "mindspore", 30, checkpoint__interval=10)
    go(
        "half",
        "mindspore",
        20,
        checkpoint__resume=str(tmp_path / "whole/checkpoints/step_00000010"),
    )
    keys = ("loss", "grad_norm", "learning_rate", "sample_hash")
    assert [[row[key] for key in keys] for row in rows_of(tmp_path / "half")] == [
        [row[key] for key in keys] for row in rows_of(tmp_path / "whole")[10:20]
    ]
    for step, backend in ((10, "torch"), (20, "mindspore"), (30, "torch")):
        go("mixed", backend, step)
    mixed, whole = rows_of(tmp_path / "mixed"), rows_of(tmp_path / "whole")
    np.testing.assert_allclose(
        [row["loss"] for row in mixed], [row["loss"] for row in whole], rtol=1e-4
    )
    assert mixed[-1]["sample_hash"] == whole[-1]["sample_hash"]
    results = []
    for module, backend in (
        (torch_gpt2.evaluate, "torch"),
        (mindformers_gpt2.evaluate, "mindspore"),
    ):
        # batches of 2, 2 and 1
        overrides = ["data.split=90,10,0", "validation.max_samples=5", f"backend={backend}"]
        module.evaluate(
            *make_run(load_config(tmp_path / "mixed" / "config.yaml", overrides), "eval")
        )
        results.append(json.loads((tmp_path / "mixed" / "evaluation.json").read_text()))
    for key in ("validation_loss", "validation_perplexity"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-5)

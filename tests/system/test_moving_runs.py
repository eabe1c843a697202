"""A run that stops on one framework and layout and resumes on another: every step is that of one
process that never stopped.

Started as a user starts it: torch on two data-parallel ranks, MindSpore on two tensor-parallel
ones, torch on two stages of two.
"""

import importlib.util
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("mindspore") is None:
    pytest.skip("MindSpore is not installed: pip install '.[mindspore]'", allow_module_level=True)

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest
from common.inputs import make_run
from common.run_config import load_config
from tests.run_scripts import ROOT, run_words, start_script
from tests.tiny import rows_of
from torch_gpt2.train import train

pytestmark = pytest.mark.long

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
LEGS = {
    "torch dp2": ("torch", {"data_parallel": 2, "model_parallel": 1, "pipeline_stage": 1}),
    "mindspore tp2": ("mindspore", {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 1}),
    "torch tp2 pp2": ("torch", {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 2}),
}
OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"learning_rate": 3e-3, "min_learning_rate": 3e-4, "weight_decay": 0.1},
    "sgd": {"learning_rate": 0.1, "min_learning_rate": 0.01, "weight_decay": 0.0, "momentum": 0.9},
}


def settings(optimizer: str, *, leg: int, clip: float, window: int) -> dict[str, object]:
    """A cosine after a warm-up that ends in the first leg, and a loss scale that grows every
    ``window`` steps, across the joints.

    The deviation is wide since gradients of biases would only be rounding otherwise.
    """
    words: dict[str, object] = {
        "model__initializer_range": 0.1,
        "optimizer__schedule": "cosine",
        "optimizer__warmup_steps": leg // 2,
        "optimizer__decay_steps": 3 * leg,
        "optimizer__clip_grad": clip,
        "loss_scale__mode": "dynamic",
        "loss_scale__window": window,
        "data__split": "100,0,0",  # without validation, which would be one more graph to compile
        "validation__interval": 0,
        "checkpoint__keep": 0,
    }
    rates = OPTIMIZERS[optimizer] | {"name": optimizer}
    return words | {f"optimizer__{name}": value for name, value in rates.items()}


@pytest.mark.parametrize(
    ("optimizer", "leg", "clip", "window"),
    [
        pytest.param("adamw", 4, 3.5, 3, id="adamw, 4 steps each"),
        pytest.param("adamw", 100, 1.5, 40, id="adamw, 100 steps each", marks=pytest.mark.campaign),
        pytest.param("sgd", 100, 1.5, 40, id="sgd, 100 steps each", marks=pytest.mark.campaign),
    ],
)
def test_a_run_changes_framework_and_layout(
    tmp_path: Path, corpus_prefix: Path, optimizer: str, leg: int, clip: float, window: int
) -> None:
    """Losses within 1e-4 and gradient norms within 1e-3 of one process of torch, as between the
    frameworks on one device; samples, schedule and loss scale are the same.
    """
    words = settings(optimizer, leg=leg, clip=clip, window=window)
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    more: dict[str, object] = {"train__max_steps": 3 * leg, "checkpoint__interval": leg}
    train(*make_run(load_config(ROOT / CONFIG, run_words(whole, corpus_prefix, **words, **more))))
    for number, (name, (backend, layout)) in enumerate(LEGS.items(), 1):
        changes = words | {f"parallel__{key}": value for key, value in layout.items()}
        changes |= {"backend": backend}
        overrides = run_words(run, corpus_prefix, **changes, train__max_steps=number * leg)
        launcher = start_script(
            "none", CONFIG, f"[0,{math.prod(layout.values())})", "train", *overrides, log=log
        )
        assert launcher.wait(timeout=600) == 0, f"{name}: {log.read_text()[-3000:]}"

    expected, found = rows_of(whole), rows_of(run)
    exact = "step sample_hash consumed_samples learning_rate loss_scale skipped"
    for key in exact.split():
        assert [row[key] for row in found] == [row[key] for row in expected], key
    assert [row["step"] for row in found] == list(range(1, 3 * leg + 1)), "every step is there once"
    assert len({row["loss_scale"] for row in found}) == 1 + (3 * leg - 1) // window
    norms = [row["grad_norm"] for row in expected]
    assert min(norms) < clip < max(norms), "the clip acts on some steps"
    for number, (backend, layout) in enumerate(LEGS.values(), 1):
        one, other = (
            read_manifest(folder / "checkpoints" / f"step_{number * leg:08d}")
            for folder in (whole, run)
        )
        assert other["versions"]["backend"] == backend
        assert other["config"]["parallel"].items() >= layout.items()
        assert other["state"] == one["state"]
        assert other["engine"]["loss_scale"] == one["engine"]["loss_scale"]
        if optimizer == "adamw":  # whose bias correction counts them
            steps = [each["engine"]["optimizer_steps"] for each in (one, other)]
            assert steps == [number * leg] * 2

    for key, limit in (("loss", 1e-4), ("grad_norm", 1e-3)):
        apart = [
            abs(row[key] / wanted[key] - 1) for row, wanted in zip(found, expected, strict=True)
        ]
        furthest = [f"{max(apart[first : first + leg]):.1e}" for first in range(0, 3 * leg, leg)]
        print(f"\n{optimizer}, {key}: furthest from one process in each leg {furthest}")
        assert max(apart) <= limit, key
    assert find_checkpoint(run) == run / "checkpoints" / f"step_{3 * leg:08d}"

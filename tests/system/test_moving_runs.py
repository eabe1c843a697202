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

from common.backends import make_run
from common.checkpoint.manifest import read_manifest
from common.run_config import load_config
from tests.run_scripts import ROOT, run_words, start_script
from tests.system.test_restarts import CONFIG
from tests.tiny import require_equal, rows_of
from torch_gpt2.train import train

pytestmark = pytest.mark.long

LEGS: dict[str, dict[str, int]] = {
    "torch dp2": {"data_parallel": 2, "model_parallel": 1, "pipeline_stage": 1},
    "mindspore tp2": {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 1},
    "torch tp2 pp2": {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 2},
}
LEG, CLIP, WINDOW = 4, 3.5, 3
SETTINGS: dict[str, object] = {
    # the deviation is wide since gradients of biases would only be rounding otherwise
    "model__initializer_range": 0.1,
    "optimizer__name": "adamw",
    "optimizer__learning_rate": 3e-3,
    "optimizer__min_learning_rate": 3e-4,
    "optimizer__weight_decay": 0.1,
    "optimizer__schedule": "cosine",
    "optimizer__warmup_steps": LEG // 2,
    "optimizer__decay_steps": 3 * LEG,
    "optimizer__clip_grad": CLIP,
    "loss_scale__mode": "dynamic",
    "loss_scale__window": WINDOW,
    "data__split": "100,0,0",  # without validation, which would be one more graph to compile
    "validation__interval": 0,
    "checkpoint__keep": 0,
}


def test_a_run_changes_framework_and_layout(tmp_path: Path, corpus_prefix: Path) -> None:
    """Losses within 1e-4 and gradient norms within 1e-3 of one process of torch, as between the frameworks on one
    device. A warm-up ends in the first leg, and the loss scale grows every three steps, across the joints.
    """
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    more: dict[str, object] = {"train__max_steps": 3 * LEG, "checkpoint__interval": LEG}
    train(*make_run(load_config(ROOT / CONFIG, run_words(whole, corpus_prefix, **SETTINGS, **more))))
    for number, (name, layout) in enumerate(LEGS.items(), 1):
        changes = SETTINGS | {f"parallel__{key}": value for key, value in layout.items()}
        changes |= {"backend": name.split()[0], "train__max_steps": number * LEG}
        ranks = f"[0,{math.prod(layout.values())})"
        overrides = run_words(run, corpus_prefix, **changes)
        launcher = start_script("none", CONFIG, ranks, "train", *overrides, log=log)
        assert launcher.wait(timeout=600) == 0, f"{name}: {log.read_text()[-3000:]}"

    require_equal(run, whole, 1e-4, grad_norm=1e-3)
    rows = rows_of(whole)
    assert [row["step"] for row in rows] == list(range(1, 3 * LEG + 1)), "every step is there once"
    assert len({row["loss_scale"] for row in rows}) == 1 + (3 * LEG - 1) // WINDOW
    norms = [row["grad_norm"] for row in rows]
    assert min(norms) < CLIP < max(norms), "the clip acts on some steps"
    for number, (name, layout) in enumerate(LEGS.items(), 1):
        one, other = (read_manifest(folder / "checkpoints" / f"step_{number * LEG:08d}") for folder in (whole, run))
        assert other["versions"]["backend"] == name.split()[0]
        assert other["config"]["parallel"].items() >= layout.items()
        assert other["state"] == one["state"]
        assert other["engine"]["loss_scale"] == one["engine"]["loss_scale"]
        # AdamW's bias correction counts them
        steps = [each["engine"]["optimizer_steps"] for each in (one, other)]
        assert steps == [number * LEG] * 2

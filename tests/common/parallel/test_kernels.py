"""Devices, frameworks and models whose attention is one kernel, positions whose logits exist at one
time, and the plan's bytes of both.
"""

import pytest

from common.accelerators import GIB, Hardware
from common.parallel.kernels import keeps_no_scores, loss_rows
from common.parallel.run import Run
from common.planner.plan import make_plan
from common.resolve.derive import resolve_config
from common.run_config import load_config
from tests.common.config.test_presets import ROOT

PRESET = ROOT / "configs/gpt2/run_gpt2_124m.yaml"
MINDSPORE = ("backend=mindspore", "model.attention_dropout=0", "precision.compute=bfloat16")
ACCELERATORS = ("Ascend 910A", "Ascend 910B2", "H100 SXM")


def config(*overrides: str, on: Hardware | None = None) -> Run:
    return resolve_config(load_config(PRESET, overrides), hardware=on)


def saved(run: Run) -> int:
    [stage] = make_plan(run).stages
    return stage.memory.activations


def scores(run: Run) -> int:
    """Bytes that attention written out keeps more: float32 probabilities, their half-precision
    form, and the causal mask, instead of a float32 for each row.
    """
    model, rows = run.model, run.train.micro_batch_size * run.model.seq_length * run.model.num_heads
    length = model.seq_length
    return model.num_layers * (rows * length * (4 + 2) + length * length - rows * 4)


PACKED = ("data.reset_attention_mask=true", "data.eod_id=50256")
DROPS = ("model.attention_dropout=0.1",)


@pytest.mark.parametrize("mask", [(), PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize("backend", ["torch", "mindspore"])
@pytest.mark.parametrize(
    ("kind", "name", "torch", "torch_drops", "mindspore"),
    [
        ("npu", "Ascend910B2", True, True, True),
        ("npu", "an Ascend of tomorrow", True, True, True),
        ("npu", "Ascend910A", False, False, False),
        ("npu", None, True, True, True),
        ("cuda", "NVIDIA H100 80GB HBM3", True, True, False),
        ("cpu", "AMD EPYC", True, False, False),
    ],
)
def test_device_framework_and_mask_decide(
    kind: str,
    name: str | None,
    torch: bool,
    torch_drops: bool,
    mindspore: bool,
    backend: str,
    mask: tuple[str, ...],
) -> None:
    """Whether the plan counts no scores. torch's kernel on a CPU has no dropout, MindSpore's none;
    both have masks, and so has the NPU's as bool (tests/torch_gpt2/npu_checks.py).
    """
    words = ("precision.compute=bfloat16", f"backend={backend}", "model.attention_dropout=0", *mask)
    for drops, fused in (
        ((), torch if backend == "torch" else mindspore),
        (DROPS, torch_drops and backend == "torch"),
    ):
        run = config(*words, *drops, on=Hardware(kind=kind, name=name))
        assert keeps_no_scores(run, run.hardware) is fused
        written = saved(config(*words, *drops, "train.fused_attention=false"))
        assert saved(run) < written if fused else saved(run) == written
        if not mask and not drops and backend == "mindspore":
            assert saved(run) == written - fused * scores(run)


@pytest.mark.parametrize(
    "override",
    [
        "precision.compute=float32",
        "precision.softmax=bfloat16",
        "model.attention_dropout=0.1",
        "model.num_heads=96",
    ],
)
def test_the_model_decides(override: str) -> None:
    """The plan counts the scores on an Atlas A2 too. torch's attention has no such limits but the
    float32 softmax.
    """
    written = "train.fused_attention=false"
    run = config(*MINDSPORE, override, on=Hardware(kind="auto", name="Ascend 910B2"))
    assert saved(run) == saved(config(*MINDSPORE, override, written))
    torch = [word for word in (*MINDSPORE, override) if word != "backend=mindspore"]
    fused = saved(config(*torch)) < saved(config(*torch, written))
    assert fused is ("softmax" not in override)


def test_a_named_accelerator_stands_for_the_device_of_the_run() -> None:
    run = config(*MINDSPORE)
    kinds = [*(Hardware(kind="auto", name=name) for name in ACCELERATORS), Hardware(kind="auto")]
    assert [keeps_no_scores(run, each) for each in kinds] == [False, True, False, True]


@pytest.mark.parametrize(
    ("overrides", "memory", "rows"),
    [
        ((), None, 1024),
        ((), 80 * GIB, 16_384),
        ((), 32 * GIB, 4096),
        ((), 8 * GIB, 1024),
        (("parallel.model_parallel=2",), 32 * GIB, 8192),
        (("train.loss_rows=100",), 80 * GIB, 100),
    ],
)
def test_logits_take_a_share_of_the_memory(
    overrides: tuple[str, ...], memory: int | None, rows: int
) -> None:
    ranks = 2 if overrides and "parallel" in overrides[0] else 1
    config = resolve_config(load_config(PRESET, overrides), world_size=ranks)
    assert loss_rows(config, memory) == rows


def test_the_plan_of_an_accelerator_counts_them() -> None:
    written = load_config(PRESET, ("precision=bf16", "train.micro_batch_size=12"))
    config = resolve_config(written)
    known = resolve_config(written, hardware=Hardware(kind="cuda", memory=80 * GIB))
    rows = config.train.micro_batch_size * config.model.seq_length
    assert 1024 < rows < 16_384
    more = make_plan(known).peak - make_plan(config).peak
    # float32 logits and their half-precision slope; and the head's gradient, which either has
    assert more == (rows - 1024) * config.vocab_rows * (4 + 4)

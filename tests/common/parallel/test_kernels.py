"""Devices, frameworks and models whose attention is one kernel, positions whose logits exist at one
time, and the plan's bytes of both.
"""

from typing import Any

import pytest

from common.accelerators import GIB, Hardware
from common.parallel.kernels import keeps_no_scores, loss_rows
from common.parallel.run import Run
from common.planner.plan import make_plan
from common.resolve.derive import resolve_config
from common.run_config import load_config
from tests.common.planner.runs import FOLDER

PRESET = FOLDER / "run_gpt2_124m.yaml"
MINDSPORE = ("backend=mindspore", "model.attention_dropout=0", "precision.compute=bfloat16")


def config(*overrides: str, on: Hardware | None = None) -> Run:
    return resolve_config(load_config(PRESET, overrides), hardware=on)


def saved(run: Run) -> int:
    [stage] = make_plan(run).stages
    return stage.activations


def scores(run: Run) -> int:
    """Bytes that attention written out keeps more: float32 probabilities, their half-precision
    form, and the causal mask, instead of a float32 for each row.
    """
    model, rows = run.model, run.train.micro_batch_size * run.model.seq_length * run.model.num_heads
    length = model.seq_length
    return model.num_layers * (rows * length * (4 + 2) + length * length - rows * 4)


PACKED = ("data.reset_attention_mask=true", "data.eod_id=50256")
DROPS, ON_MINDSPORE = ("model.attention_dropout=0.1",), ("backend=mindspore",)


@pytest.mark.parametrize("mask", [(), PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize(
    ("device", "torch", "torch_drops", "mindspore"),
    [
        (("npu", "Ascend910B2"), True, True, True),
        (("npu", "Ascend910A"), False, False, False),
        (("npu", None), True, True, True),
        (("cuda", "NVIDIA H100 80GB HBM3"), True, True, False),
        (("cpu", "AMD EPYC"), True, False, False),
        # a named accelerator stands for the device of the run
        (("auto", "Ascend 910A"), False, False, False),
        (("auto", "H100 SXM"), True, True, False),
    ],
)
def test_device_framework_and_mask_decide(
    device: Any, torch: bool, torch_drops: bool, mindspore: bool, mask: tuple[str, ...]
) -> None:
    """Whether the plan counts no scores. torch's kernel on a CPU has no dropout, MindSpore's none;
    both have masks, and so has the NPU's as bool (tests/torch_gpt2/npu_checks.py).
    """
    words = ("precision.compute=bfloat16", "model.attention_dropout=0", *mask)
    on = Hardware(kind=device[0], name=device[1])
    found = (((), torch), (DROPS, torch_drops), (ON_MINDSPORE, mindspore))
    for more, fused in (*found, ((*ON_MINDSPORE, *DROPS), False)):
        run = config(*words, *more, on=on)
        assert keeps_no_scores(run, run.hardware) is fused
        written = saved(config(*words, *more, "train.fused_attention=false"))
        assert saved(run) < written if fused else saved(run) == written
        if not mask and more == ON_MINDSPORE:
            assert saved(run) == written - fused * scores(run)


def test_the_model_decides() -> None:
    """The plan counts the scores on an Atlas A2 too. torch's attention has no such limits but the float32 softmax."""
    written, on = "train.fused_attention=false", Hardware(kind="auto", name="Ascend 910B2")
    for override in ("precision.compute=float32", "precision.softmax=bfloat16", "model.num_heads=96"):
        words = (*MINDSPORE, override)
        assert saved(config(*words, on=on)) == saved(config(*words, written))
        is_less = saved(config(*words, "backend=torch")) < saved(config(*words, "backend=torch", written))
        assert is_less is (override != "precision.softmax=bfloat16")


def test_logits_take_a_share_of_the_memory() -> None:
    for words, ranks, memory, rows in (
        ((), 1, None, 1024),
        ((), 1, 80 * GIB, 16_384),
        ((), 1, 8 * GIB, 1024),
        (("parallel.model_parallel=2",), 2, 32 * GIB, 8192),
        (("train.loss_rows=100",), 1, 80 * GIB, 100),
    ):
        assert loss_rows(resolve_config(load_config(PRESET, words), world_size=ranks), memory) == rows


def test_the_plan_of_an_accelerator_counts_them() -> None:
    written = load_config(PRESET, ("precision=bf16", "train.micro_batch_size=12"))
    config = resolve_config(written)
    known = resolve_config(written, hardware=Hardware(kind="cuda", memory=80 * GIB))
    rows = config.train.micro_batch_size * config.model.seq_length
    assert 1024 < rows < 16_384
    more = make_plan(known).peak - make_plan(config).peak
    # float32 logits and their half-precision slope; and the head's gradient, which either has
    assert more == (rows - 1024) * config.vocab_rows * (4 + 4)

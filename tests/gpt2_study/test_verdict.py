"""Planted faults: the verdict names the cell, what differs and from which step."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from gpt2_study.report import templates
from gpt2_study.results import CellResult, State
from gpt2_study.statistics import compare, noise_of, summarize
from gpt2_study.verdict import Departure, Kind, judge
from tests.gpt2_study.synthetic import MIB, TOKENS, cell, losses, measured, norms, prediction, speeds, study

EXACT = 3e-8
"""Rounding between layouts of the same arithmetic, as real runs show it."""


def good(name: str, speed: float = 10_000, **changes: Any) -> CellResult:
    """Return a cell whose losses differ from the reference by rounding only."""
    sign = 1 if len(name) % 2 else -1
    values = {
        "loss": [value * (1 + sign * EXACT) for value in losses()],
        "gradient_norm": [value * (1 - sign * EXACT) for value in norms()],
    }
    seed = changes.pop("seed", len(name))
    return cell(name, [measured(each, **values) for each in speeds(speed, 0.005, seed=seed)], **changes)


def planted(**changes: Any) -> Departure:
    """Return what the verdict says of a cell with this fault among three good ones."""
    cells = [good("dp"), good("tpp"), good("pppp")]
    cells.insert(1, cell("fault", [measured(**changes) for _ in range(3)]))
    verdict = judge(study(cells))
    (group,) = verdict.groups
    assert set(verdict.different) == {"fault"}
    assert (group["same"], group["reference"]) == (["dp", "tpp", "pppp"], "dp")
    return verdict.different["fault"]


def text_of(cells: list[CellResult], **changes: Any) -> str:
    """Return the lines of the verdict with their marks, each in both languages."""
    words = [templates().get_template(f"{language}.j2").module for language in ("en", "zh")]
    return "\n".join(
        f"{each['mark']}: {getattr(say, each['what'])(each)}"
        for each in judge(study(cells, **changes)).remarks
        for say in words
    )


def off_from(values: list[float], step: int, factor: float = math.nan) -> list[float]:
    return [value if at < step else factor * value for at, value in enumerate(values, 1)]


ONCE = [*norms()[:4], 1.01 * norms()[4], *norms()[5:]]


@pytest.mark.parametrize(
    ("changes", "kind", "step", "factor"),
    [
        ({"loss": losses(7), "gradient_norm": norms(7), "sample_hash": "b"}, Kind.SAMPLES, 1, None),
        ({"loss": losses(7), "sample_hash": None}, Kind.LOSS, 1, None),
        ({"sample_hash": "b" * 64}, Kind.SAMPLES, 0, None),
        ({"gradient_norm": off_from(norms(), 1, 1.01)}, Kind.NORM, 1, pytest.approx(1.01)),
        ({"gradient_norm": ONCE}, Kind.NORM, 5, None),
        ({"loss": off_from(losses(), 4, math.inf)}, Kind.LOSS, 4, None),
        ({"gradient_norm": off_from(norms(), 4)}, Kind.NORM, 4, None),
        ({"loss": off_from(losses(), 6, 1.001)}, Kind.LOSS, 6, None),
        ({"loss": losses()[:4], "gradient_norm": norms()[:4]}, Kind.STEPS, 0, None),
    ],
)
def test_a_planted_fault_is_named(changes: dict[str, Any], kind: Kind, step: int, factor: Any) -> None:
    """The gradient that is one percent off shows although its losses agree."""
    found = planted(**changes)
    assert (found.kind, found.step, found.factor) == (kind, step, factor)
    if kind in (Kind.LOSS, Kind.NORM):
        assert found.is_finite is (step != 4)
    if step == 6:
        assert found.relative == pytest.approx(1e-3 / 1.001, rel=1e-4)


def test_cells_without_figures_are_not_the_same() -> None:
    for changes in ({"loss": [math.nan] * 10}, {"gradient_norm": []}):
        verdict = judge(study([cell(name, [measured(**changes)] * 2) for name in ("a", "b")]))
        assert set(verdict.different) == {"a", "b"} and verdict.groups[0]["same"] == []


def test_steps_that_both_skipped_for_their_loss_scale_are_the_same() -> None:
    """Losses continue after them. Where they do not, or only one run has none, it is a fault."""
    values = norms()
    values[:2] = [math.nan, math.inf]
    same = [cell(name, [measured(gradient_norm=values)] * 2) for name in ("a", "b")]
    verdict = judge(study(same))
    assert not verdict.different and verdict.groups[0]["largest"][Kind.NORM] == 0

    def third(**changes: Any) -> Departure:
        found = judge(study([*same, cell("c", [measured(**changes)] * 2)])).different
        assert set(found) == {"c"}
        return found["c"]

    found = third()
    assert (found.kind, found.step, found.is_finite, found.factor) == (Kind.NORM, 1, False, None)
    scaled = third(gradient_norm=[0.99 * value for value in values])
    assert (scaled.step, scaled.factor) == (3, pytest.approx(0.99))


def test_a_repeat_that_differs_from_its_cell_is_named() -> None:
    cells = [cell("alone", [measured(), measured(), measured(loss=losses(3))], group=None)]
    found = judge(study(cells)).different["alone"]
    assert (found.repeat, found.kind) == (3, Kind.LOSS)
    assert "an earlier repeat of itself" in text_of(cells)


def test_groups_are_judged_apart_and_no_group_is_not_compared() -> None:
    """A faulty cell is named even where it comes first and is the baseline."""
    cells = [good("dp"), good("tpp"), cell("z", [measured(loss=losses(4))] * 2, group=None)]
    cells += [cell(name, [measured(loss=losses(3))] * 2, group="other") for name in "xy"]
    verdict = judge(study(cells))
    assert [group["same"] for group in verdict.groups] == [["dp", "tpp"], ["x", "y"]]
    assert not verdict.different
    assert 0 < verdict.groups[0]["largest"][Kind.LOSS] <= 2.1 * EXACT
    bad = cell("bad", [measured(loss=losses(7))] * 2, baseline="bad")
    assert set(judge(study([bad, good("dp", baseline="bad"), good("tpp", baseline="bad")])).different) == {"bad"}


def test_other_frameworks_have_a_tolerance_that_still_shows_a_scale() -> None:
    def other(factor: float, **changes: Any) -> CellResult:
        values = [factor * value for value in losses()]
        return cell("other", [measured(loss=values)] * 2, **changes)

    for changes in ({"backend": "mindspore"}, {"peer": "transformers"}):
        assert not judge(study([good("dp"), good("tpp"), other(1 + 5e-5, **changes)])).different
        assert judge(study([good("dp"), good("tpp"), other(1 + 2e-4, **changes)])).different
    assert judge(study([good("dp"), good("tpp"), other(1 + 5e-5)])).different


# ---- speed ----


def test_a_cell_slower_than_the_spread_is_behind_the_fastest() -> None:
    same = [good("one", seed=1), good("two", seed=2)]
    _, ranking = judge(study(same)).remarks
    assert len(ranking["cells"]) == 2
    assert "note: No difference: " in text_of(same) and "无差异" in text_of(same)
    cells = [good("slow", 8000, seed=1), good("fast", 10_000, seed=2)]
    _, ranking = judge(study(cells)).remarks
    assert (ranking["what"], ranking["first"], ranking["second"]) == ("fastest", "fast", "slow")
    assert ranking["ratio"] == pytest.approx(1.25, rel=0.02)
    once = [cell("a", [measured(8000)]), cell("b", [measured(10_000)])]
    assert "nothing says whether this is more than chance" in text_of(once)


@pytest.mark.parametrize("by", ["settings", "base"])
def test_models_of_other_sizes_are_ranked_apart(by: str) -> None:
    cells = []
    for seed, (size, name, speed) in enumerate(
        [("S", "dp", 9000), ("S", "tp", 7000), ("L", "dp", 900), ("L", "tp", 990)]
    ):
        model = {"base": size} if by == "base" else {"settings": {"model.num_layers": 2 + 6 * (size == "L")}}
        cells.append(good(f"{size}-{name}", speed, axes={"size": size, "layout": name}, seed=seed, **model))
    found = [(each["axes"], each["first"], each["second"]) for each in judge(study(cells)).remarks[1:]]
    assert found == [("size=S", "S-dp", "S-tp"), ("size=L", "L-tp", "L-dp")]


# ---- predictions ----


def test_memory_outside_ten_percent_is_named() -> None:
    cells = [good("right", prediction=prediction(329 * MIB)), good("wrong", prediction=prediction(360 * MIB))]
    for each in cells:
        for run in each.repeats:
            assert run.measured is not None
            run.measured.peak_memory_source = "torch.cuda.max_memory_allocated"
    assert [each["error"] for each in judge(study(cells)).memory] == pytest.approx([329 / 300 - 1, 0.2])
    assert "within 10 % of the measurement for 1 of 2 cells. Farthest off: `wrong` planned 360 MiB" in text_of(cells)
    # tensors that were counted are compared by kind
    expected = prediction(300 * MIB)
    expected.memory = [{"weights": 60 * MIB, "optimizer": 120 * MIB, "activations": 120 * MIB}]
    counted = measured(memory_parts={"state": 180 * MIB, "step": 240 * MIB})
    kinds = {each["kind"]: each["error"] for each in judge(study([cell("a", [counted], prediction=expected)])).memory}
    assert kinds == {"state": pytest.approx(0), "step": pytest.approx(-0.5)}


def test_an_order_that_the_plan_got_wrong_is_named() -> None:
    cells = [
        good("slow", 8000, seed=1, prediction=prediction(step_seconds=TOKENS / 2e6)),
        good("fast", 10_000, seed=2, prediction=prediction(step_seconds=TOKENS / 1e6)),
        good("same", 10_010, seed=4, prediction=prediction(step_seconds=TOKENS / 1.1e6)),
    ]
    order = judge(study(cells)).remarks[-1]
    assert (order["what"], order["count"]) == ("order", 2)  # fast and same cannot be told apart
    assert {pair[:2] for pair in order["wrong"]} == {("fast", "slow"), ("same", "slow")}
    assert "bad: Order by time: the plan is right about 0 of 2 pairs" in text_of(cells)


# ---- what did not run ----


def test_failures_are_named_and_never_compared() -> None:
    cells = [good("dp"), good("tpp"), cell("late", [measured(), State.TIMED_OUT, measured()])]
    cells += [cell("oom", [State.OUT_OF_MEMORY] * 3), cell("todo", [])]
    verdict = judge(study(cells))
    assert verdict.groups[0]["same"] == ["dp", "tpp", "late"] and not verdict.different
    found = text_of(cells)
    assert "No result, out of memory: `oom`" in found
    assert "Some repeats failed, others finished: `late`" in found
    assert "repeats are missing for 1 of 5 cells (`todo`)" in found


# ---- statistics, against numpy, printed tables and simulated repeats ----


def with_speeds(name: str, values: list[float], **changes: object) -> CellResult:
    return cell(name, [measured(value) for value in values], **changes)


def test_medians_spread_and_speed_up_are_numpys() -> None:
    """A speed-up is the median over pairs; efficiency counts ranks."""
    values = [9000.0, 11000.0, 10100.0, 9900.0]
    found = summarize(study([with_speeds("a", values)]))["a"]
    assert found.tokens_per_second == pytest.approx(np.median(values))
    assert sorted(found.speeds.values()) == pytest.approx(sorted(values))
    assert found.step_seconds == pytest.approx(np.median([4096 / value for value in values]))
    assert found.samples_per_second == pytest.approx(np.median(values) / 128)
    assert found.split["update"] == pytest.approx(0.08 * np.median([4096 / v for v in values]))
    one, four = [1000.0, 1100.0, 900.0], [3000.0, 3960.0, 2880.0]
    cells = [with_speeds("one", one, ranks=1, baseline="one"), with_speeds("four", four, ranks=4, baseline="one")]
    of_one, of_four = summarize(study(cells)).values()
    expected = np.median(np.array(four) / np.array(one))
    assert (of_four.speed_up, of_four.efficiency) == pytest.approx((expected, expected / 4))
    assert (of_one.speed_up, of_one.efficiency) == pytest.approx((1, 1))
    found = summarize(study([cell("a", [measured(step_seconds=[])], baseline="gone")]))["a"]
    assert found.tokens_per_second is None and found.speed_up is None


def test_pairs_are_the_repeats_that_both_finished() -> None:
    partly = cell("b", [measured(500.0), State.FAILED, measured(1500.0)], baseline="a")
    found = summarize(study([with_speeds("a", [1000.0, 2000.0, 3000.0]), partly]))
    comparison = compare(found["a"], found["b"])
    assert (comparison.pairs, comparison.ratio) == (2, pytest.approx(2))
    assert found["b"].speed_up == pytest.approx(0.5) and found["b"].failures[0].index == 2


def test_noise_is_the_residual_of_cells_and_rounds() -> None:
    """A slow round that hits all cells alike is not noise; what is left is numpy's residual."""
    table = np.log([[1000.0, 800, 1010], [2000, 1590, 2040], [1500, 1230, 1490]])
    rows = [with_speeds(f"c{n}", np.exp(row).tolist()) for n, row in enumerate(table)]
    cells = list(summarize(study(rows)).values())
    residual = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    assert noise_of(cells) == (pytest.approx(math.sqrt(2 * (residual**2).sum() / 4)), 4)
    assert noise_of(cells[:2]) == (pytest.approx(np.std(table[0] - table[1], ddof=1)), 2)


@pytest.mark.parametrize(("count", "repeats"), [(2, 2), (6, 3)])
def test_equal_cells_are_rarely_called_different(count: int, repeats: int) -> None:
    """A config against itself 300 times, with drift between rounds five times the noise: at most
    CONFIDENCE allows, here with room for chance (5 % of 300 is 15, its deviation 4).
    """
    noise = random.Random(count * repeats)
    called = 0
    comparisons = count * (count - 1) // 2
    for _ in range(300):
        rounds = [noise.gauss(0, 0.05) for _ in range(repeats)]
        made = [with_speeds(f"c{n}", [1000 * math.exp(r + noise.gauss(0, 0.01)) for r in rounds]) for n in range(count)]
        found = summarize(study(made)).values()
        first, *others = sorted(found, key=lambda each: -(each.tokens_per_second or 0))
        keys = {"noise": noise_of([first, *others]), "comparisons": comparisons}
        called += any(compare(first, other, **keys).is_faster for other in others)
    assert called <= 27


@pytest.mark.parametrize(("repeats", "comparisons", "quantile"), [(2, 1, 12.706), (5, 5, 4.604), (11, 1, 2.228)])
def test_the_margin_is_students_interval(repeats: int, comparisons: int, quantile: float) -> None:
    """Two-sided quantiles as printed in Abramowitz and Stegun, table 26.10."""
    one, other = (speeds(1000, 0.01, count=repeats, seed=seed) for seed in (1, 2))
    cells = summarize(study([with_speeds("one", one), with_speeds("other", other)]))
    found = compare(cells["one"], cells["other"], comparisons=comparisons)
    deviation = np.std(np.log(one) - np.log(other), ddof=1)
    expected = math.expm1(quantile * deviation / math.sqrt(repeats))
    assert found.margin == pytest.approx(expected, rel=3e-4)

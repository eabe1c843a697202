"""Planted faults: the verdict names the cell, what differs and from which step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.study.remarks import remarks
from common.study.report import templates
from common.study.results import CellResult, State
from common.study.same_losses import Departure, Kind
from common.study.statistics import summarize
from common.study.verdict import Verdict, judge
from tests.common.study.synthetic import (
    MIB,
    TOKENS,
    cell,
    losses,
    measured,
    norms,
    prediction,
    speeds,
    study,
)

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
    return cell(
        name, [measured(each, **values) for each in speeds(speed, 0.005, seed=seed)], **changes
    )


def planted(**changes: Any) -> Departure:
    """Return what the verdict says of a cell with this fault among three good ones."""
    cells = [good("dp"), good("tpp"), good("pppp")]
    cells.insert(1, cell("fault", [measured(**changes) for _ in range(3)]))
    verdict = judge(study(cells))
    (group,) = verdict.groups
    assert set(verdict.different) == {"fault"}
    assert group.same == ("dp", "tpp", "pppp") and group.reference == "dp"
    return verdict.different["fault"].departure


def text_of(cells: list[CellResult], **changes: Any) -> str:
    """Return the lines of the verdict with their marks, each in both languages."""
    made = study(cells, **changes)
    words = [templates().get_template(f"{language}.j2").module for language in ("en", "zh")]
    return "\n".join(
        f"{each['mark']}: {getattr(say, each['what'])(each)}"
        for each in remarks(made, summarize(made), judge(made))
        for say in words
    )


def off_from(values: list[float], step: int, factor: float = math.nan) -> list[float]:
    return [value if at < step else factor * value for at, value in enumerate(values, 1)]


ONCE = [*norms()[:4], 1.01 * norms()[4], *norms()[5:]]


@pytest.mark.parametrize(
    ("changes", "kind", "step", "factor"),
    [
        (
            {"loss": losses(7), "gradient_norm": norms(7), "sample_hash": "b" * 64},
            Kind.SAMPLES, 1, None,
        ),
        ({"loss": losses(7), "sample_hash": None}, Kind.LOSS, 1, None),
        ({"sample_hash": "b" * 64}, Kind.SAMPLES, 0, None),
        ({"gradient_norm": off_from(norms(), 1, 1.01)}, Kind.NORM, 1, pytest.approx(1.01)),
        ({"gradient_norm": ONCE}, Kind.NORM, 5, None),
        ({"loss": off_from(losses(), 4)}, Kind.LOSS, 4, None),
        ({"loss": off_from(losses(), 4, math.inf)}, Kind.LOSS, 4, None),
        ({"gradient_norm": off_from(norms(), 4)}, Kind.NORM, 4, None),
        ({"loss": off_from(losses(), 6, 1.001)}, Kind.LOSS, 6, None),
        ({"loss": losses()[:4], "gradient_norm": norms()[:4]}, Kind.STEPS, 0, None),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    changes: dict[str, Any], kind: Kind, step: int, factor: Any
) -> None:
    """The gradient that is one percent off shows although its losses agree."""
    found = planted(**changes)
    assert (found.kind, found.step, found.factor) == (kind, step, factor)
    if kind in (Kind.LOSS, Kind.NORM):
        assert found.is_finite is (step != 4)
    if step == 6:
        assert found.relative == pytest.approx(1e-3 / 1.001, rel=1e-4)


def test_two_cells_of_nan_are_not_the_same() -> None:
    broken = [measured(loss=[math.nan] * 10) for _ in range(2)]
    verdict = judge(study([cell("a", broken), cell("b", broken)]))
    assert set(verdict.different) == {"a", "b"}
    assert verdict.groups[0].same == ()
    assert "Same losses" not in text_of([cell("a", broken), cell("b", broken)])


def test_steps_that_both_skipped_for_their_loss_scale_are_the_same() -> None:
    """Losses continue after them. Where they do not, or only one run has none, it is a fault."""
    values = norms()
    values[:2] = [math.nan, math.inf]
    same = [cell(name, [measured(gradient_norm=values)] * 2) for name in ("a", "b")]
    verdict = judge(study(same))
    assert not verdict.different and verdict.groups[0].largest[Kind.NORM] == 0

    def third(**changes: Any) -> Departure:
        found = judge(study([*same, cell("c", [measured(**changes)] * 2)])).different
        assert set(found) == {"c"}
        return found["c"].departure

    found = third()
    assert (found.kind, found.step, found.is_finite, found.factor) == (Kind.NORM, 1, False, None)
    scaled = third(gradient_norm=[0.99 * value for value in values])
    assert (scaled.step, scaled.factor) == (3, pytest.approx(0.99))
    broken = norms()
    broken[-1] = math.nan
    last = [cell(name, [measured(gradient_norm=broken)] * 2) for name in ("a", "b")]
    assert set(judge(study(last)).different) == {"a", "b"}


def test_runs_without_steps_are_not_the_same() -> None:
    for changes in ({"loss": [], "gradient_norm": []}, {"gradient_norm": []}):
        empty = [measured(**changes)]
        assert set(judge(study([cell("a", empty), cell("b", empty)])).different) == {"a", "b"}


def test_a_repeat_that_differs_from_its_cell_is_named() -> None:
    runs = [measured(), measured(), measured(loss=losses(3))]
    verdict = judge(study([cell("alone", runs, group=None)]))
    found = verdict.different["alone"]
    assert (found.repeat, found.reference, found.departure.kind) == (3, "alone", Kind.LOSS)
    assert "an earlier repeat of itself" in text_of([cell("alone", runs, group=None)])


def test_the_faulty_cell_is_named_even_where_it_comes_first_and_is_the_baseline() -> None:
    bad = cell("bad", [measured(loss=losses(7))] * 2, baseline="bad")
    cells = [bad, good("dp", baseline="bad"), good("tpp", baseline="bad")]
    assert set(judge(study(cells)).different) == {"bad"}


def test_groups_are_judged_apart_and_no_group_is_not_compared() -> None:
    cells = [
        good("dp"), good("tpp"),
        cell("x", [measured(loss=losses(3))] * 2, group="other"),
        cell("y", [measured(loss=losses(3))] * 2, group="other"),
        cell("z", [measured(loss=losses(4))] * 2, group=None),
    ]  # fmt: skip
    verdict = judge(study(cells))
    assert [group.same for group in verdict.groups] == [("dp", "tpp"), ("x", "y")]
    assert not verdict.different
    assert 0 < verdict.groups[0].largest[Kind.LOSS] <= 2.1 * EXACT


def test_other_frameworks_have_a_tolerance_that_still_shows_a_scale() -> None:
    def other(factor: float, **changes: Any) -> CellResult:
        values = [factor * value for value in losses()]
        return cell("other", [measured(loss=values)] * 2, **changes)

    for changes in ({"backend": "mindspore"}, {"peer": "transformers"}):
        assert not judge(study([good("dp"), good("tpp"), other(1 + 5e-5, **changes)])).different
        assert judge(study([good("dp"), good("tpp"), other(1 + 2e-4, **changes)])).different
    assert judge(study([good("dp"), good("tpp"), other(1 + 5e-5)])).different


# ---- speed ----


def test_the_same_config_twice_does_not_differ() -> None:
    cells = [good("one", seed=1), good("two", seed=2)]
    (ranking,) = judge(study(cells)).rankings
    assert len(ranking.equal) == 1
    assert "note: No difference: " in text_of(cells)
    assert "无差异" in text_of(cells)


def test_a_cell_slower_than_the_spread_is_behind_the_fastest() -> None:
    cells = [good("slow", 8000, seed=1), good("fast", 10_000, seed=2)]
    (ranking,) = judge(study(cells)).rankings
    assert ranking.cells == ("fast", "slow") and ranking.equal == ()
    assert ranking.behind["slow"].ratio == pytest.approx(1.25, rel=0.02)
    assert "good: Fastest: `fast`" in text_of(cells)


def test_one_repeat_is_said_to_tell_nothing() -> None:
    cells = [cell("a", [measured(8000)]), cell("b", [measured(10_000)])]
    assert "nothing says whether this is more than chance" in text_of(cells)


@pytest.mark.parametrize("by", ["settings", "base"])
def test_models_of_other_sizes_are_ranked_apart(by: str) -> None:
    cells = [
        good(f"{size}-{name}", speed, axes={"size": size, "layout": name}, seed=number,
             **({"base": size} if by == "base" else {"settings": {"model.num_layers": layers}}))
        for number, (size, layers, name, speed) in enumerate(
            [("S", 2, "dp", 9000), ("S", 2, "tp", 7000), ("L", 8, "dp", 900), ("L", 8, "tp", 990)]
        )
    ]  # fmt: skip
    found = judge(study(cells)).rankings
    assert [(each.labels, each.cells) for each in found] == [
        ({"size": "S"}, ("S-dp", "S-tp")), ({"size": "L"}, ("L-tp", "L-dp")),
    ]  # fmt: skip


# ---- predictions ----


def test_memory_outside_ten_percent_is_named() -> None:
    cells = [
        good("right", prediction=prediction(329 * MIB)),
        good("wrong", prediction=prediction(360 * MIB)),
    ]
    for each in cells:
        for run in each.repeats:
            assert run.measured is not None
            run.measured.peak_memory_source = "torch.cuda.max_memory_allocated"
    checks = {check.cell: check for check in judge(study(cells)).memory}
    assert checks["right"].is_right and not checks["wrong"].is_right
    assert checks["wrong"].error == pytest.approx(0.2)
    assert "bad: Memory, peak of the fullest rank: the plan is within 10 %" in text_of(cells)


def test_counted_memory_is_compared_by_kind() -> None:
    expected = prediction(300 * MIB)
    expected.memory = [{"weights": 60 * MIB, "optimizer": 120 * MIB, "activations": 120 * MIB}]
    parts = {"state": 180 * MIB, "step": 240 * MIB}
    cells = [cell("a", [measured(memory_parts=parts)], prediction=expected)]
    found = {check.kind: check.error for check in judge(study(cells)).memory}
    assert found == {"state": pytest.approx(0), "step": pytest.approx(-0.5)}


def test_an_order_that_the_plan_got_wrong_is_named() -> None:
    cells = [
        good("slow", 8000, seed=1, prediction=prediction(step_seconds=TOKENS / 2e6)),
        good("fast", 10_000, seed=2, prediction=prediction(step_seconds=TOKENS / 1e6)),
        good("same", 10_010, seed=4, prediction=prediction(step_seconds=TOKENS / 1.1e6)),
    ]
    order = judge(study(cells)).order
    assert order is not None and order.pairs == 2  # fast and same cannot be told apart
    assert {pair[:2] for pair in order.wrong} == {("fast", "slow"), ("same", "slow")}
    assert "bad: Order by time: the plan is right about 0 of 2 pairs" in text_of(cells)


# ---- what did not run ----


def test_failures_are_named_and_never_compared() -> None:
    cells = [
        good("dp"), good("tpp"), cell("oom", [State.OUT_OF_MEMORY] * 3),
        cell("late", [measured(), State.TIMED_OUT, measured()]), cell("todo", []),
    ]  # fmt: skip
    verdict: Verdict = judge(study(cells))
    assert verdict.groups[0].same == ("dp", "tpp", "late") and not verdict.different
    found = text_of(cells)
    assert "No result, out of memory: `oom`" in found
    assert "Some repeats failed, others finished: `late`" in found
    assert "repeats are missing for 1 of 5 cells (`todo`)" in found

"""Statistics of a study against numpy, printed tables and simulated repeats."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from common.study.results import CellResult, State
from common.study.statistics import compare, noise_of, summarize
from tests.common.study.synthetic import cell, measured, speeds, study


def with_speeds(name: str, values: list[float], **changes: object) -> CellResult:
    return cell(name, [measured(value) for value in values], **changes)


def test_medians_and_spread_are_numpys() -> None:
    values = [9000.0, 11000.0, 10100.0, 9900.0]
    found = summarize(study([with_speeds("a", values)]))["a"]
    assert found.tokens_per_second == pytest.approx(np.median(values))
    assert (found.lowest, found.highest) == pytest.approx((9000, 11000))
    assert found.step_seconds == pytest.approx(np.median([4096 / value for value in values]))
    assert found.samples_per_second == pytest.approx(np.median(values) / 128)
    assert found.split["update"] == pytest.approx(0.08 * np.median([4096 / v for v in values]))


def test_speed_up_is_the_median_over_pairs_and_efficiency_counts_ranks() -> None:
    one, four = [1000.0, 1100.0, 900.0], [3000.0, 3960.0, 2880.0]
    found = summarize(
        study(
            [
                with_speeds("one", one, ranks=1, baseline="one"),
                with_speeds("four", four, ranks=4, baseline="one"),
            ]
        )
    )
    expected = np.median(np.array(four) / np.array(one))
    assert found["four"].speed_up == pytest.approx(expected)
    assert found["four"].efficiency == pytest.approx(expected / 4)
    assert (found["one"].speed_up, found["one"].efficiency) == pytest.approx((1, 1))


def test_pairs_are_the_repeats_that_both_finished() -> None:
    whole = with_speeds("a", [1000.0, 2000.0, 3000.0])
    partly = cell("b", [measured(500.0), State.FAILED, measured(1500.0)], baseline="a")
    found = summarize(study([whole, partly]))
    comparison = compare(found["a"], found["b"])
    assert (comparison.pairs, comparison.ratio) == (2, pytest.approx(2))
    assert found["b"].speed_up == pytest.approx(0.5)
    assert [run.index for run in found["b"].failures] == [2]


def test_noise_is_the_residual_of_cells_and_rounds() -> None:
    """A slow round that hits all cells alike is not noise; what is left is numpy's residual."""
    table = np.log([[1000.0, 800, 1010], [2000, 1590, 2040], [1500, 1230, 1490]])
    cells = list(
        summarize(
            study([with_speeds(f"c{n}", np.exp(row).tolist()) for n, row in enumerate(table)])
        ).values()
    )
    residual = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    deviation, freedom = noise_of(cells)
    assert freedom == 4
    assert deviation == pytest.approx(math.sqrt(2 * (residual**2).sum() / 4))
    pair = noise_of(cells[:2])
    assert pair == (pytest.approx(np.std(table[0] - table[1], ddof=1)), 2)


@pytest.mark.parametrize(("count", "repeats"), [(2, 2), (2, 3), (6, 3)])
def test_equal_cells_are_rarely_called_different(count: int, repeats: int) -> None:
    """A config against itself 300 times, with drift between rounds five times the noise: at most
    CONFIDENCE allows, here with room for chance (5 % of 300 is 15, its deviation 4).
    """
    noise = random.Random(count * repeats)
    called = 0
    comparisons = count * (count - 1) // 2
    for _ in range(300):
        rounds = [noise.gauss(0, 0.05) for _ in range(repeats)]
        cells = sorted(
            summarize(
                study(
                    [
                        with_speeds(
                            f"c{n}", [1000 * math.exp(r + noise.gauss(0, 0.01)) for r in rounds]
                        )
                        for n in range(count)
                    ]
                )
            ).values(),
            key=lambda each: -(each.tokens_per_second or 0),
        )
        pooled = noise_of(cells)
        called += any(
            compare(cells[0], other, noise=pooled, comparisons=comparisons).is_faster
            for other in cells[1:]
        )
    assert called <= 27


@pytest.mark.parametrize(
    ("repeats", "comparisons", "quantile"),
    # two-sided quantiles as printed in Abramowitz and Stegun, table 26.10
    [(2, 1, 12.706), (3, 1, 4.303), (5, 5, 4.604), (6, 5, 4.032), (11, 1, 2.228)],
)
def test_the_margin_is_students_interval(repeats: int, comparisons: int, quantile: float) -> None:
    one, other = (speeds(1000, 0.01, count=repeats, seed=seed) for seed in (1, 2))
    cells = summarize(study([with_speeds("one", one), with_speeds("other", other)]))
    found = compare(cells["one"], cells["other"], comparisons=comparisons)
    deviation = np.std(np.log(one) - np.log(other), ddof=1)
    expected = math.expm1(quantile * deviation / math.sqrt(repeats))
    assert found.margin == pytest.approx(expected, rel=3e-4)


def test_no_division_by_zero_ranks_or_steps() -> None:
    empty = measured(1000.0, step_seconds=[])
    found = summarize(study([cell("a", [empty], baseline="gone"), cell("b", [])]))
    assert found["a"].tokens_per_second is None and found["a"].speed_up is None
    assert found["b"].state is None

"""Plans of a study's cells, and the table of --plan."""

from pathlib import Path

import pytest

from common.accelerators import require_accelerator
from common.planner.fitting import resolve_on
from common.planner.plan import make_plan, time_of
from common.run_config import load_config
from common.study.cells import PlannedCell, expand
from common.study.definition import Definition
from common.study.planning import describe_cells, predict
from common.study.results import Machine
from common.study.this_machine import Rates, device_here, measure_rates

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml"
DEFINITION = Definition.model_validate(
    {
        "title": "Layouts",
        "base": str(TINY),
        "settings": {"train.micro_batch_size": 2},
        "axes": {
            "layout": {
                "one": {},
                "dp2": {"ranks": 2},
                "pp2": {"parallel.pipeline_stage": 2},
                "tp4": {"parallel.model_parallel": 4},
            }
        },
    }
)


def cells() -> dict[str, PlannedCell]:
    return {each.cell.id: each for each in expand(DEFINITION, ROOT / "study.yaml")}


def test_the_prediction_is_the_plan_of_the_same_run() -> None:
    device = require_accelerator("A100")
    found = predict(cells()["pp2"], device)
    words = ["parallel.pipeline_stage=2", "train.micro_batch_size=2", "train.max_steps=15"]
    config = resolve_on(load_config(TINY, words), device, world_size=2)
    plan = make_plan(config)
    assert found.peak == [stage.memory.peak for stage in plan.stages]
    assert [sum(parts.values()) for parts in found.memory] == [
        stage.memory.peak + stage.memory.shared for stage in plan.stages
    ]
    assert found.step_seconds == time_of(plan, config, device).total
    assert sum(found.step_parts.values()) == pytest.approx(found.step_seconds)
    assert (found.tokens_per_step, found.samples_per_step) == (8 * 128, 8)


def test_a_refused_cell_has_its_reason() -> None:
    found = predict(cells()["tp4"])
    assert "does not divide model.num_heads=6" in found.reason and not found.peak


def test_the_table_names_every_cell_and_starts_nothing() -> None:
    text = describe_cells(DEFINITION, list(cells().values()))
    lines = text.splitlines()
    assert lines[0] == "Layouts" and [line.split()[0] for line in lines[2:6]] == list(cells())
    assert lines[3].split()[2:5] == ["2", "1", "2x1x1"]
    assert "4 cells, 3 repeats: 9 runs of 3 + 10 steps" in text
    assert "refused: tp4: parallel.model_parallel=4 does not divide" in text


def test_ranks_share_the_processor() -> None:
    """Two ranks on the same cores compute no faster than one, and send messages besides."""
    machine = Machine(host="h", cpu="c", cores=2, memory=2**34)
    rates = Rates(flops=1e11, bandwidth=1e10, messages=1e9)
    one, two = device_here(machine, 1, rates), device_here(machine, 2, rates)
    assert one is not None and two is not None and one.single_flops == 2 * two.single_flops
    bound = device_here(machine, 1, rates, threads=1)
    assert bound is not None and bound.single_flops == two.single_flops
    alone, split = predict(cells()["one"], one), predict(cells()["dp2"], two)
    assert alone.step_seconds is not None and split.step_seconds is not None
    assert split.step_seconds > alone.step_seconds
    known = machine.model_copy(update={"accelerators": ["NVIDIA A100-SXM4-80GB"]})
    assert device_here(known, 8, rates) == require_accelerator("A100 80GB")
    unknown = machine.model_copy(update={"accelerators": ["Abacus"]})
    assert device_here(unknown, 8, rates) is None


def test_rates_of_this_machine_are_plausible() -> None:
    rates = measure_rates()
    assert 1e8 < rates.flops < 1e14
    assert 1e7 < rates.messages < 1e12 and 1e8 < rates.bandwidth < 1e13

"""Plans of a study's cells, and the table of --plan."""

from dataclasses import replace
from pathlib import Path

from common.accelerators import require_accelerator
from common.planner.fitting import resolve_on
from common.planner.plan import make_plan, time_of
from common.run_config import load_config
from common.study.cells import PlannedCell, expand
from common.study.definition import Definition
from common.study.planning import describe_cells, predict

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


def test_a_cell_without_room_on_the_device_is_said() -> None:
    planned, device = cells()["one"], require_accelerator("A100")
    (peak,) = predict(planned).peak
    for memory, said in ((device.memory, False), (peak, True)):
        text = describe_cells(DEFINITION, [planned], replace(device, memory=memory))
        assert ("does not fit" in text) is said


def test_the_key_that_limits_memory_counts() -> None:
    settings = {**DEFINITION.settings, "context.max_device_memory": "0.01GB"}
    limited = DEFINITION.model_copy(update={"settings": settings})
    planned = [*expand(limited, ROOT / "study.yaml")][:1]
    assert "does not fit" in describe_cells(limited, planned, require_accelerator("A100"))

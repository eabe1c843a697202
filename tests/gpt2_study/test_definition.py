"""The YAML of a study and messages about its faults; which cells there are, what they are called,
what they set and what is planned for them.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.accelerators import require_accelerator
from common.config.load import flatten
from common.errors import ConfigError
from common.planner.fitting import resolve_on
from common.planner.plan import make_plan, time_of
from common.run_config import load_config
from gpt2_study.cells import PlannedCell, expand, words_of
from gpt2_study.command import describe_cells, predict
from gpt2_study.loading import Definition, load_definition
from tools.config_schema import study_schema

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "configs" / "study").glob("*.yaml"))
TINY = str(ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml")

GOOD = f"""title: Two batches
base: {TINY}
axes:
  train.micro_batch_size: [4, 8]
  layout:
    one: {{}}
    two: {{ranks: 2, parallel.zero_stage: 1}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.mark.parametrize(("old", "new", "said"), REFUSALS)
def test_a_fault_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Without an old text the new one is a word of the command line."""
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1) if old else GOOD)
    with pytest.raises(ConfigError) as caught:
        expand(load_definition(path, () if old else (new,)), path)
    assert said in str(caught.value).replace(str(tmp_path), "")


def test_only_leaves_out_other_labels(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    found = expand(load_definition(path, only=["layout=one"]), path)
    assert [each.cell.axes["layout"] for each in found] == ["one", "one"]
    found = expand(load_definition(path, only=["layout=one", "layout=two"]), path)
    assert len(found) == 4
    with pytest.raises(ConfigError, match=r"--only layout=three: .* it has one, two"):
        load_definition(path, only=["layout=three"])
    with pytest.raises(ConfigError, match="--only layouts=one: expected AXIS=LABEL; the axes are"):
        load_definition(path, only=["layouts=one"])


def test_small_replaces_whole_sections_and_words_single_numbers_and_settings(tmp_path: Path) -> None:
    small = "small:\n  axes: {seed: [1, 2]}\n  repeats: 2\n"
    path = write(tmp_path, f"{GOOD}settings: {{train: {{recompute: full}}}}\n{small}")
    small, full = load_definition(path, small=True), load_definition(path)
    assert (list(small.axes), small.repeats) == (["seed"], 2)
    assert (list(full.axes), full.repeats) == (["train.micro_batch_size", "layout"], 3)
    found = load_definition(path, ["repeats=5", "time_limit=60", "train.recompute=none"])
    assert (found.repeats, found.time_limit, found.settings) == (5, 60.0, {"train.recompute": "none"})
    with pytest.raises(ConfigError, match="has no section small"):
        load_definition(write(tmp_path, GOOD), small=True)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_has_cells_for_32_cards_and_for_two_cores(path: Path) -> None:
    full = expand(load_definition(path), path)
    assert max(each.cell.ranks for each in full) == 32
    assert [each.refusal for each in full if each.refusal] == []
    small = expand(load_definition(path, small=True), path)
    assert max(each.cell.ranks for each in small) <= 4
    # the size with a pipeline does not fit on one card, as in the source
    refused = [each.cell.id for each in small if each.refusal]
    assert refused == (["345M-1p"] if path.stem == "modelzoo_8p" else [])
    for cells in (full, small):
        names = {each.cell.id for each in cells}
        assert {each.cell.baseline for each in cells} - {None} <= names


def test_the_size_names_of_oneflow_say_what_runs() -> None:
    """Its grammar: {nodes}n{devices}d_{dp}x{tp}x{pp}_{batch}_{hidden}x{layers}."""
    path = ROOT / "configs" / "study" / "oneflow_layouts.yaml"
    for each in expand(load_definition(path), path):
        cell, config = each.cell, each.config
        assert config is not None
        axes, model = config.parallel, config.model
        assert cell.id == (
            f"{cell.hosts}n{cell.ranks // cell.hosts}d-{axes.data_parallel}x{axes.model_parallel}x{axes.pipeline_stage}"
            f"-{config.train.global_batch_size}_{model.hidden_size}x{model.num_layers}"
        )


def test_the_schema_of_editors_is_up_to_date() -> None:
    path = ROOT / "configs" / "study" / "schema.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(study_schema())
    assert path.read_text() == study_schema(), "make golden"


# ---- cells ----


def cells(**sections: Any) -> list[PlannedCell]:
    tree = {"title": "t", "base": TINY, "settings": {"device": "cpu"}} | sections
    return expand(Definition.model_validate(tree), ROOT / "study.yaml")


def ids(**sections: Any) -> list[str]:
    return [each.cell.id for each in cells(**sections)]


AXES = {"parallel.data_parallel": [1, 2], "precision": ["float32", "bf16"], "train.recompute": ["none", "full"]}


def test_every_combination_is_a_cell_and_the_last_axis_runs_fastest() -> None:
    found = ids(axes=AXES)
    assert len(found) == 8 and found[:2] == ["dp1-float32-recompute_none", "dp1-float32-full"]
    kept = ids(axes=AXES, only=[{"precision": "bf16"}, {"parallel.data_parallel": 2}])
    assert len(kept) == 6 and "dp1-float32-full" not in kept
    gone = ids(axes=AXES, **{"except": [{"precision": "bf16", "train.recompute": ["full"]}]})
    assert len(gone) == 6 and not any(name.endswith("bf16-full") for name in gone)


def test_ids_are_safe_and_differ() -> None:
    assert ids(axes={"layout": {"a b/c": {}, "../x": {}}}) == ["a_b_c", ".._x"]
    assert ids(axes={}) == ["run"] and ids(axes={"logging.project": [""]}) == ["project_"]
    with pytest.raises(ConfigError, match=r"study\.yaml: .*1,000,000 combinations"):
        cells(axes={"seed": list(range(1000)), "train.max_skipped_steps": list(range(1, 1001))})


def test_settings_of_a_cell() -> None:
    axes = {"layout": {"two": {"ranks": 2, "hosts": 2, "parallel": {"zero_stage": 1}}}, "precision": ["bf16"]}
    settings = {"device": "cpu", "precision": "fp16", "train.micro_batch_size": 4}
    found = cells(axes=axes, settings=settings)[0]
    cell, config = found.cell, found.config
    assert (cell.ranks, cell.hosts, cell.base) == (2, 2, "configs/gpt2/run_gpt2_tiny.yaml")
    assert cell.settings["precision"] == "bf16"  # the axis wins over the settings
    # 3 of warm-up, 10, and 2 that are traced
    traced = ("train.max_steps", "profile.start", "profile.stop", "profile.memory")
    assert [cell.settings[key] for key in traced] == [15, 14, 15, True]
    assert config is not None and config.parallel.zero_stage == 1
    assert (config.checkpoint.resume, config.logging.plot) == ("never", False)
    assert "output_dir" not in cell.settings


def test_a_layout_that_the_resolver_refuses_is_a_cell_with_the_reason() -> None:
    """And ranks follow from the layout."""
    axes = {"parallel.model_parallel": [2, 4]}
    two, four = cells(axes=axes, settings={"train.micro_batch_size": 4})
    assert (two.cell.ranks, four.cell.ranks) == (2, 4)
    assert two.config is not None and four.config is None
    assert "parallel.model_parallel=4 does not divide model.num_heads=6" in four.refusal
    [odd] = cells(axes={"layout": {"x": {"ranks": 3, "hosts": 2}}})
    assert odd.refusal.startswith("3 ranks do not divide over 2 hosts")


def test_groups_and_baselines() -> None:
    same = {"along": ["parallel.data_parallel", "train.recompute"]}
    same |= {"except": [{"precision": "bf16", "train.recompute": "full"}]}
    baseline = {"parallel.data_parallel": 1, "train.recompute": "none"}
    by_name = {each.cell.id: each.cell for each in cells(axes=AXES, same_losses=same, baseline=baseline)}
    assert [by_name[name].group for name in by_name if "float32" in name] == ["float32"] * 4
    assert (by_name["dp1-bf16-full"].group, by_name["dp2-bf16-recompute_none"].group) == (None, "bf16")
    assert by_name["dp2-bf16-full"].baseline == "dp1-bf16-recompute_none"
    assert by_name["dp2-float32-full"].baseline == "dp1-float32-recompute_none"
    # a cell without others in its group is compared with nothing
    lonely = cells(axes={"seed": [1, 2]}, same_losses={"along": []})
    assert [each.cell.group for each in lonely] == [None, None]


def test_a_word_says_the_value() -> None:
    values = (7, True, 1e-05, None, ["0.3", "a: b", "0.7", "c"], [1, 3], "42", "a b: c")
    keys = "seed train.deterministic optimizer.learning_rate optimizer.decay_steps data.train parallel.stage_layers"
    for key, value in zip((*keys.split(), "logging.project", "logging.project"), values, strict=True):
        config = load_config(TINY, [*words_of({key: value})])
        assert dict(flatten(config.model_dump()))[key] == value


# ---- plans of cells, and the table of --plan ----


LAYOUTS = {
    "one": {}, "dp2": {"ranks": 2}, "pp2": {"parallel.pipeline_stage": 2}, "tp4": {"parallel.model_parallel": 4},
}  # fmt: skip
STUDY = Definition(title="Layouts", base=TINY, settings={"train.micro_batch_size": 2}, axes={"layout": LAYOUTS})


def planned() -> dict[str, PlannedCell]:
    return {each.cell.id: each for each in expand(STUDY, ROOT / "study.yaml")}


def test_the_prediction_is_the_plan_of_the_same_run() -> None:
    device = require_accelerator("A100")
    found = predict(planned()["pp2"], device)
    words = ["parallel.pipeline_stage=2", "train.micro_batch_size=2", "train.max_steps=15"]
    config = resolve_on(load_config(TINY, words), device, world_size=2)
    plan = make_plan(config)
    assert found.peak == [stage.peak for stage in plan.stages]
    assert [sum(parts.values()) for parts in found.memory] == [each.peak + each.shared for each in plan.stages]
    assert found.step_seconds == time_of(plan, device).total


def test_the_table_names_every_cell_and_starts_nothing() -> None:
    text = describe_cells(STUDY, list(planned().values()))
    lines = text.splitlines()
    assert lines[0] == "Layouts" and [line.split()[0] for line in lines[2:6]] == list(planned())
    assert lines[3].split()[2:5] == ["2", "1", "2x1x1"]
    assert "4 cells, 3 repeats: 9 runs of 3 + 10 steps" in text
    assert "refused: tp4: parallel.model_parallel=4 does not divide" in text
    refused = predict(planned()["tp4"])
    assert "does not divide model.num_heads=6" in refused.reason and not refused.peak


def test_a_cell_without_room_on_the_device_is_said() -> None:
    one, device = planned()["one"], require_accelerator("A100")
    (peak,) = predict(one).peak
    for memory, said in ((device.memory, False), (peak, True)):
        text = describe_cells(STUDY, [one], replace(device, memory=memory))
        assert ("does not fit" in text) is said
    limited = STUDY.model_copy(update={"settings": {"context.max_device_memory": "0.01GB"}})
    first, *_ = expand(limited, ROOT / "study.yaml")
    assert "does not fit" in describe_cells(limited, [first], device)

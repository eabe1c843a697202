"""The YAML of a study, and the messages about its faults."""

import os
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError
from common.study.cells import expand
from common.study.loading import load_definition
from tools.config_schema import study_schema

ROOT = Path(__file__).resolve().parents[3]
STUDIES = sorted((ROOT / "configs" / "study").glob("*.yaml"))
BASE = ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml"

GOOD = f"""title: Two batches
base: {BASE}
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
        load_definition(path, () if old else (new,))
    assert said in str(caught.value).replace(str(tmp_path), "")


def test_words_change_the_numbers_and_the_settings(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "settings: {train: {recompute: full}}\n")
    found = load_definition(path, ["repeats=5", "time_limit=60", "train.recompute=none"])
    assert (found.repeats, found.time_limit) == (5, 60.0)
    assert found.settings == {"train.recompute": "none"}


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


def test_small_replaces_whole_sections(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "small:\n  axes: {seed: [1, 2]}\n  repeats: 2\n")
    small, full = load_definition(path, small=True), load_definition(path)
    assert (list(small.axes), small.repeats) == (["seed"], 2)
    assert (list(full.axes), full.repeats) == (["train.micro_batch_size", "layout"], 3)
    with pytest.raises(ConfigError, match="has no section small"):
        load_definition(write(tmp_path, GOOD), small=True)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_has_cells_for_32_cards_and_for_two_cores(path: Path) -> None:
    full = expand(load_definition(path), path)
    assert max(each.cell.ranks for each in full) == 32
    assert any(each.cell.ranks <= 8 for each in full)
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
        devices, layout, size = each.cell.id.split("-")
        nodes, each_node = map(int, devices.removesuffix("d").split("n"))
        batch, shape = size.split("_")
        config = each.config
        assert config is not None
        assert (nodes, nodes * each_node) == (each.cell.hosts, each.cell.ranks)
        axes = ("data_parallel", "model_parallel", "pipeline_stage")
        assert layout == "x".join(str(getattr(config.parallel, axis)) for axis in axes)
        assert int(batch) == config.train.global_batch_size
        assert shape == f"{config.model.hidden_size}x{config.model.num_layers}"


def test_the_schema_of_editors_is_up_to_date() -> None:
    path = ROOT / "configs" / "study" / "schema.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(study_schema())
    assert path.read_text() == study_schema(), "make golden"

"""Files that a study leaves for its reader: complete, well-formed, self-contained, repeatable."""

from __future__ import annotations

import base64
import csv
import math
import os
import re
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.run_folder import LOCK
from common.structured_files import read_json_mapping
from gpt2_study.command import StudyRequest, run_study
from gpt2_study.report import write_outcome
from gpt2_study.results import State, Study, read_study, write_study
from tests.gpt2_study.synthetic import MIB, cell, losses, measured, prediction, speeds, study
from tests.html_page import Page

CELLS = 24


def many() -> Study:
    """Return a study with cells of every kind, and texts that a page must escape."""
    cells = []
    for n in range(1, CELLS - 4):
        runs = [measured(speed) for speed in speeds(1000 * n, 0.01, seed=n)]
        planned = prediction(step_seconds=1.0 / n)
        cells.append(cell(f"dp{n}-bf16", runs, ranks=n, baseline="dp1-bf16", prediction=planned))
    scale = measured(gradient_norm=[9.0] * 10, memory_parts={"state": 140 * MIB, "step": 120 * MIB})
    cells.append(cell("scale", [scale] * 3, prediction=prediction()))
    cells.append(cell("nan", [measured(loss=[*losses()[:5], *[math.nan] * 5])] * 3))
    cells.append(cell("oom", [State.OUT_OF_MEMORY] * 3))
    refused = prediction().model_copy(update={"peak": [], "reason": "3 ranks | 2 hosts </td>"})
    cells += [cell("refused", [State.REFUSED], prediction=refused), cell("todo", [])]
    return study(cells, title="布局 <layouts> & more", small=True, definition={"title": "布局", "axes": {}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("study")
    write_study(many(), place)
    write_outcome(read_study(place), place)
    return place


@pytest.mark.parametrize("name", ["report.md", "report_zh.md"])
def test_the_report_is_that_which_was_read(folder: Path, name: str) -> None:
    """Every kind of remark, table and failure in both languages; figures and names are equal."""
    golden = Path(__file__).with_name("golden") / name.replace(".md", ".txt")
    text = (folder / name).read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "make golden"


def test_the_page_is_well_formed_and_holds_all_that_it_shows(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    loads = page.values("src", "href", "data")
    assert loads and all(each.startswith("data:") for each in loads)
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "<layouts>" not in text and "&lt;layouts&gt; &amp; more" in text
    assert "<here>" not in text and "&lt;here&gt;" in text
    inlined = [base64.b64decode(each) for each in re.findall(r"image/png;base64,([^\"]+)", text)]
    files = {path.stem: path.read_bytes() for path in (folder / "plots").glob("*.png")}
    assert {*files} == {"throughput", "efficiency", "split", "memory", "loss", "loss_difference"}
    assert sorted(inlined) == sorted(files.values())


def test_the_sheet_holds_exact_figures(folder: Path) -> None:
    with (folder / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["cell"]: row for row in csv.DictReader(file)}
    assert list(rows) == [result.cell.id for result in many().cells]
    first = [run.measured for run in many().cells[0].repeats if run.measured]
    exact = sorted(each.tokens_per_step / each.step_seconds[1] for each in first)
    found = rows["dp1-bf16"]
    assert [float(found[f"tokens_per_second{which}"]) for which in ("_lowest", "")] == exact[:2]
    assert (found["speed_up"], found["predicted_step_seconds"]) == ("1.0", "1.0")
    assert (rows["nan"]["differs_in"], rows["nan"]["differs_from_step"]) == ("loss", "6")
    assert (rows["oom"]["state"], rows["refused"]["reason"]) == ("out of memory", "refused of refused <here>")


def test_making_it_again_gives_the_same(folder: Path, tmp_path: Path) -> None:
    """Also where there are no results: plots of an earlier state go."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    request = StudyRequest(config=Path("layouts.yaml"), output_dir=folder, report_only=True)
    assert run_study(request) == 0
    (folder / LOCK).unlink()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.png").write_bytes(b"of an earlier state")
    write_outcome(study([cell("a", [State.FAILED]), cell("b", [])], finished=None), tmp_path)
    assert not list((tmp_path / "plots").iterdir())


def test_a_damaged_study_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    text = (folder / "study.json").read_text(encoding="utf-8")
    no_cells = re.sub(r'"cells": \[.*\]', '"cells": []', text, flags=re.DOTALL)
    for damaged, said in ((text.replace('"finished"', '"done"'), r"cells\.0\.repeats\.0\.state"), (no_cells, "cells")):
        (tmp_path / "study.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"study\.json: {said}: .*"):
            read_study(tmp_path)
    assert read_json_mapping(folder / "study.json")  # JSON that any reader takes, with NaN
    found = read_study(folder).cells[-4].repeats[0].measured
    assert found is not None and math.isnan(found.loss[-1]) and not math.isnan(found.loss[0])

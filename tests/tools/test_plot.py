"""Curves that a comparison draws, read back from matplotlib; inputs that are not a run or
a metric.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import common.training.plot as module
from tools.plot import main

ROOT = Path(__file__).resolve().parents[2]


def write_run(folder: Path, losses: list[float | None]) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "tokens_per_second": 100.0 * step, "skipped": False}
        for step, loss in enumerate(losses, 1)
    ]
    rows.append({"step": len(losses), "validation_loss": 1.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_command_writes_a_png(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, [3.0, 2.0, 1.0])) for name in ("one", "two")]
    command = [
        sys.executable,
        str(ROOT / "tools" / "plot.py"),
        *runs,
        "--output",
        str(tmp_path / "sub" / "compare.png"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "sub" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_curves_are_the_moving_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A null, as metrics.jsonl holds for NaN, leaves a step out."""
    losses = [5.0, 4.0, None, 2.0, 6.0, 1.0]
    run = write_run(tmp_path / "one", losses)
    pyplot = module.open_pyplot()
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert (
        main(
            [str(run), "--output", str(tmp_path / "x.png"), "--metric", "loss", "--smoothing", "2"]
        )
        == 0
    )
    [axes] = pyplot.gcf().axes
    monkeypatch.undo()
    raw, smooth, valid = axes.lines
    steps, values = np.array([1, 2, 4, 5, 6]), np.array([5.0, 4.0, 2.0, 6.0, 1.0])
    np.testing.assert_array_equal(raw.get_data(), (steps, values))
    np.testing.assert_allclose(
        smooth.get_data(), (steps, np.r_[5.0, np.convolve(values, [0.5, 0.5], "valid")])
    )
    np.testing.assert_array_equal(valid.get_data(), ([6], [1.5]))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "one, validation"]
    assert axes.get_ylabel() == "loss (nats per token)" and axes.get_xlabel() == "step"
    pyplot.close("all")


def test_runs_of_the_same_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert module._names(folders) == [str(folder) for folder in folders]
    assert module._names([tmp_path / "a" / "one", tmp_path / "b" / "two"]) == ["one", "two"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["{run}", "{empty}", "--output", "{out}.png"],
            r"metrics\.jsonl: cannot be read: No such file.*expected the folder of a run",
        ),
        (
            ["{run}", "--output", "{out}.png", "--metric", "skipped"],
            r"no run has numbers called skipped; --metric may name loss, tokens",
        ),
        (["{run}", "--output", "{out}.pdf"], r"expected a name that ends with \.png"),
        (["{run}", "{run}", "--output", "{out}.png"], "a run is given twice"),
    ],
)
def test_bad_input_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    names = {
        "run": write_run(tmp_path / "run", [1.0]),
        "empty": tmp_path / "empty",
        "out": tmp_path / "out",
    }
    assert main([word.format(**names) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize(
    "words",
    [
        ["--metric", "loss,,mfu"],
        ["--metric", "loss,loss"],
        ["--smoothing", "0"],
        ["--smoothing", "x"],
    ],
)
def test_bad_options_are_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--output", "x.png", *words])
    assert stop.value.code == 2


@pytest.mark.parametrize(("steps", "single"), [(40, []), (150, ["_child0"])])
def test_a_run_draws_its_single_values_where_they_differ_from_the_mean(
    steps: int, single: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "one", [1 / step for step in range(1, steps + 1)])
    pyplot = module.open_pyplot()
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert module.plot_loss(run) == run / "loss.png"
    [axes] = pyplot.gcf().axes
    monkeypatch.undo()
    pyplot.close()
    shown = [line.get_label() for line in axes.lines]
    assert shown == [*single, "training loss", "validation loss"]

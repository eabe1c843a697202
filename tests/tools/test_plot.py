"""Curves that a comparison draws, read back from matplotlib."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import common.training.plot as module
from tools.plot import main


def write_run(folder: Path, losses: list[float | None]) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "tokens_per_second": 100.0 * step, "skipped": False}
        for step, loss in enumerate(losses, 1)
    ]
    rows.append({"step": len(losses), "validation_loss": 1.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_curves_are_the_moving_averages(tmp_path, monkeypatch) -> None:
    """A null, as metrics.jsonl holds for NaN, leaves a step out."""
    losses = [5.0, 4.0, None, 2.0, 6.0, 1.0]
    runs = [str(write_run(tmp_path / name / "run", losses)) for name in "ab"]
    pyplot = module.open_pyplot()
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    output = tmp_path / "sub" / "x.png"
    words = ["--output", str(output), "--metric", "loss", "--smoothing", "2"]
    assert main([*runs, *words]) == 0 and output.read_bytes().startswith(b"\x89PNG")
    [axes] = pyplot.gcf().axes
    monkeypatch.undo()
    raw, smooth, valid = axes.lines[:3]
    steps, values = np.array([1, 2, 4, 5, 6]), np.array([5.0, 4.0, 2.0, 6.0, 1.0])
    np.testing.assert_array_equal(raw.get_data(), (steps, values))
    np.testing.assert_allclose(smooth.get_data(), (steps, np.r_[np.convolve(values, [0.5, 0.5], "valid"), 1.0]))
    np.testing.assert_array_equal(valid.get_data(), ([6], [1.5]))
    # runs of the same name are told apart by their path
    named = [name for run in runs for name in (run, f"{run}, validation")]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == named
    assert axes.get_ylabel() == "loss (nats per token)" and axes.get_xlabel() == "step"
    pyplot.close("all")

"""tools/compare_runs.py names the first step at which two runs differ; tools/plot.py draws their curves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import common.training.plot as drawing
from tools import plot
from tools.compare_runs import main


def run_folder(folder: Path, *, steps: int = 6, first: int = 1, **changes: Any) -> Path:
    """Write a run: its loss falls by a tenth a step. changes: (step, key) as ``key_step``."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(first, first + steps):
        row = {"step": step, "loss": 10.0 - step / 10, "grad_norm": 2.0, "sample_hash": f"h{step}"}
        for name, value in changes.items():
            key, _, at = name.rpartition("_")
            row |= {key: value} if at == str(step) else {}
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "config.yaml").write_text(f"backend: torch\noutput_dir: {folder}\ntrain: {{max_steps: {steps}}}\n")
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: Path | str) -> tuple[int, str]:
    code = main(list(map(str, words)))
    out = capsys.readouterr()
    return code, out.out + out.err


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run has only the later steps; a loss may differ by the rounding of sums."""
    one = run_folder(tmp_path / "one")
    other = run_folder(tmp_path / "other", first=4, loss_5=9.5 * (1 + 2e-7))
    code, text = said(capsys, one, other)
    assert code == 0 and text.endswith("the same\n")
    assert "compared: 3 steps, 4 to 6; tolerance 1e-06" in text
    assert "loss: largest difference 2e-07, at step 5" in text
    assert "output_dir" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_3": 9.8}, "different: the loss differs from step 3: 9.8, expected 9.7"),
        ({f"grad_norm_{step}": 2.02 for step in range(1, 7)},
            "every gradient norm is 1.01 times the expected one from step 1"),
        ({"loss_2": None}, "the loss at step 2 is nan, expected 9.8"),
        ({"sample_hash_5": "x", "sample_hash_6": "y"}, "samples: others from step 5"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(tmp_path, capsys, changes, expected) -> None:
    one = run_folder(tmp_path / "one")
    code, text = said(capsys, one, run_folder(tmp_path / "other", **changes))
    assert code == 1 and expected in text, text


@pytest.mark.parametrize(
    ("backend", "factor", "tolerance", "expected"),
    [
        ("mindspore", 1 + 1e-5, "1e-6", "backend: torch -> mindspore"),
        ("torch", 1 + 2**-52, "0", "the loss differs from step 3"),
    ],
)
def test_the_tolerance_of_two_frameworks_is_wider_and_with_none_the_last_bit_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend, factor, tolerance, expected
) -> None:
    one = run_folder(tmp_path / "one")
    other = run_folder(tmp_path / "other", loss_3=9.7 * factor)
    (other / "config.yaml").write_text(f"backend: {backend}\n")
    assert said(capsys, one, other)[0] == 0
    code, text = said(capsys, one, other, "--tolerance", tolerance)
    assert code == 1 and expected in text and "step 3" in text


# ---- plot ----


def test_the_curves_are_the_moving_averages(tmp_path, monkeypatch, recwarn) -> None:
    """A null, as metrics.jsonl holds for NaN, leaves a step out. A name without a font is no warning."""
    losses = {f"loss_{step}": loss for step, loss in enumerate([5.0, 4.0, None, 2.0, 6.0, 1.0], 1)}
    runs = [str(run_folder(tmp_path / name / "run", **losses, validation_loss_6=1.5)) for name in ("甲", "乙")]
    pyplot = drawing.open_pyplot()
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    output = tmp_path / "sub" / "x.png"
    words = ["--output", str(output), "--metric", "loss", "--smoothing", "2"]
    assert plot.main([*runs, *words]) == 0 and output.read_bytes().startswith(b"\x89PNG")
    [axes] = pyplot.gcf().axes
    monkeypatch.undo()
    raw, smooth, valid = axes.lines[:3]
    steps, values = np.array([1, 2, 4, 5, 6]), np.array([5.0, 4.0, 2.0, 6.0, 1.0])
    np.testing.assert_array_equal(raw.get_data(), (steps, values))
    np.testing.assert_allclose(smooth.get_data(), (steps, np.r_[np.convolve(values, [0.5, 0.5], "valid"), 1.0]))
    np.testing.assert_array_equal(valid.get_data(), ([6], [1.5]))
    # runs of the same name are told apart by their path
    named = [name for run in runs for name in (run, f"{run}, validation")]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == named and not recwarn.list
    assert axes.get_ylabel() == "loss (nats per token)" and axes.get_xlabel() == "step"
    pyplot.close("all")

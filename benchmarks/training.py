"""A training step beside MindSpore, transformers' Trainer and a plain loop, as a study.

Needs no data: all programs read the same random tokens. Rows are medians over repeats, from the
lowest to the highest; ratios have Student's interval of the pairs. On an H100, each step of ours
stands beside the prediction of the roofline.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import Row
from common.dataset.indexed import IndexedWriter
from common.errors import ConfigError, RunError
from common.paths import ROOT
from common.planner.plan import three_digits as speed
from gpt2_study.report import size
from gpt2_study.results import Study, read_study
from gpt2_study.statistics import Summary, compare, noise_of
from gpt2_study.verdict import judge

PREDICTED = {
    "124m_b16-bf16-torch-eager": 295_000,
    "124m_b64-bf16-torch-compiled": 515_000,
    "345m_b16-bf16-torch-eager": 135_000,
    "345m_b48-bf16-torch-compiled": 185_000,
    "1558m_b4-bf16-torch-eager": 34_700,
    "1558m_b16-bf16-torch-compiled": 46_500,
}
"""Tokens a second on one H100 SXM, by cell, by the count of kernels in ``docs/compilation.md``. One H100 made 1.01
(124M), 1.08 (345M) and 1.00 (1558M) of the compiled ones. Eager figures are from operators counted one by one.
"""
_DOCUMENTS, _TOKENS, _VOCABULARY = 64, 1 << 17, 50257


def write_random_tokens(folder: Path) -> Path:
    """Write a data set of 8.4 million uniform tokens unless it is there; return its prefix."""
    prefix = folder / "random_tokens"
    if not prefix.with_suffix(".idx").exists():
        random = np.random.default_rng(0)
        with IndexedWriter(prefix, np.uint16) as writer:
            for _ in range(_DOCUMENTS):
                writer.append(random.integers(0, _VOCABULARY, _TOKENS), np.array([_TOKENS]))
    return prefix


def rows_of(study: Study) -> list[Row]:
    """Return a row for each cell beside its baseline; a cell that has no speed has its reason."""
    verdict = judge(study)
    cells, different = verdict.cells, verdict.different
    timed = [cell for cell in cells.values() if cell.speeds]
    rows: list[Row] = []
    for cell in cells.values():
        other = cells.get(cell.cell.baseline or "")
        if other is cell and cell.speeds:
            continue
        names = ", ".join(text for axis, text in cell.cell.axes.items() if axis != "program")
        compared, memory = "", ""
        if cell.id in different:
            compared = "other losses"
        elif other is not None and cell.speeds and other.speeds:
            found = compare(cell, other, noise=noise_of(timed))
            low, high = (found.ratio * (1 + (found.margin or 0.0)) ** sign for sign in (-1, 1))
            spread = f"{low:.2f} to {high:.2f} in {found.pairs}" if found.margin is not None else "1 pair"
            compared = f"{found.ratio:.2f} ({spread})"
            memory = " and ".join(size(max(each.peak_memory, default=0)) for each in (cell, other))
        peer = "" if other is None or other is cell else _described(other, study)
        rows.append((f"training step, {names}", _described(cell, study), peer, compared, memory))
    return rows


def _described(cell: Summary, study: Study) -> str:
    program = cell.cell.axes.get("program", cell.id)
    if not cell.tokens_per_second or cell.first is None:
        last = cell.failures[-1] if cell.failures else None
        return f"{program}: {f'{last.state}: {last.reason}' if last else 'not run'}"
    text = f"{program} {speed(cell.tokens_per_second)} tokens/s"
    if len(cell.speeds) > 1:
        text += f" ({speed(min(cell.speeds.values()))} to {speed(max(cell.speeds.values()))})"
    if cell.mfu:
        text += f", MFU {cell.mfu:.1%}"
    text += f", first step {cell.first.first_step_seconds or 0:.1f} s"
    predicted = PREDICTED.get(cell.id)
    if predicted and any("H100" in name for name in study.machine.accelerators):
        ratio = cell.tokens_per_second / predicted
        text += f", {ratio:.2f} of the {predicted:,} predicted"
    return text


def rows(device: str, folder: Path, repeats: int, only: Sequence[str], small: bool) -> Iterator[Row]:
    """Run or resume the study in ``folder``, and yield its rows.

    Raises ConfigError for bad arguments, and RunError if a cell has failed or has other losses.
    """
    name = "training_step_cuda" if device == "cuda" else "training_step"
    command = [sys.executable, str(ROOT / "tools" / "study.py"), f"repeats={repeats}"]
    command += [word for each in only for word in ("--only", each)] + ["--small"] * small
    command += ["--config", str(ROOT / "benchmarks" / f"{name}.yaml")]
    command += ["--output_dir", str(folder / name), f"data.train={write_random_tokens(folder)}"]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        kind = ConfigError if code == 2 else RunError
        raise kind("the study has ended; its message is above")
    study = read_study(folder / name)
    yield from rows_of(study)
    verdict = judge(study)
    if verdict.different or not all(cell.speeds for cell in verdict.cells.values()):
        raise RunError("a cell has failed or has other losses")

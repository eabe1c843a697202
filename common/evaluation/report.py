"""The result of an evaluation, in the run folder and in the log."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import atomic_write
from common.log import LOG
from common.parallel.resolved_run import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One task's figures with the protocol they were measured by.

    file_name: where they are kept, a file a task. record: as they are kept. lines: as they are
    printed.
    """

    file_name: str
    record: dict[str, Any]
    lines: list[str]


def report(config: ResolvedRun, checkpoint: Path, result: EvaluationResult) -> None:
    """Write the result into the run folder, and print it."""
    target = Path(config.output_dir) / result.file_name
    # JSON has no word for infinity, which is the perplexity of an untrained model on long words.
    record = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in result.record.items()
    }
    with atomic_write(target, "w") as file:
        json.dump({"checkpoint": str(checkpoint), **record}, file, indent=1, ensure_ascii=False)
    LOG.info(f"checkpoint {checkpoint}")
    for line in result.lines:
        LOG.info(line)
    LOG.info(f"written to {target}")


def table(rows: dict[str, float | None]) -> list[str]:
    """Names and figures in two columns; without those that are None."""
    width = max(map(len, rows))
    return [
        f"  {name:<{width}}  {value:>14,.6f}" for name, value in rows.items() if value is not None
    ]

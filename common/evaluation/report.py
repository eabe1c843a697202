"""Result of an evaluation, in the run folder and in the log."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import atomic_write
from common.log import LOG
from common.parallel.run import Run


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Figures of one task, with the protocol by which they were measured.

    file_name: of the task's own file. record: content of this file. lines: text for the log.
    """

    file_name: str
    record: dict[str, Any]
    lines: list[str]


def report(config: Run, checkpoint: Path, result: EvaluationResult) -> None:
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
    """Return names and figures in two columns, without figures that are None."""
    width = max(map(len, rows))
    return [
        f"  {name:<{width}}  {value:>14,.6f}" for name, value in rows.items() if value is not None
    ]

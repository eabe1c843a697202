"""What programs print: results, the log, which rank 0 writes, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

LOG = logging.getLogger("gpt2")

MAX_LISTED = 16
"""Names that one line of the log lists."""


class _LineAboveBar(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that prints log lines without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():
            from tqdm import tqdm

            with tqdm.external_write_mode(file=sys.stdout):
                super().emit(record)
        else:
            super().emit(record)


def start_log(*, rank: int = 0) -> None:
    """Send the project's log to standard output; ranks above 0 print only warnings."""
    LOG.handlers.clear()
    handler = _LineAboveBar(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    LOG.propagate = False


def show(text: str) -> None:
    """Print the result of a program, or what it does now, to standard output at once. Raises OSError."""
    sys.stdout.write(text)
    sys.stdout.flush()


def listed(texts: Sequence[str]) -> str:
    """Return texts as one list, shortened if there are very many."""
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more


def spans(numbers: Iterable[int], *, least: int = 2) -> str:
    """Return numbers as text: ``0-2, 8``. least: number of neighbours that form a span."""
    # neighbours differ from their places by as much
    groups = groupby(enumerate(sorted(numbers)), key=lambda at: at[1] - at[0])
    runs = [[number for _, number in group] for _, group in groups]
    words = [[f"{run[0]}-{run[-1]}"] if len(run) >= least else map(str, run) for run in runs]
    return ", ".join(word for run in words for word in run)


def rank_names(ranks: Collection[int]) -> str:
    """Return names such as ``rank 3`` or ``ranks 0-3, 8``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {spans(ranks) or 'none'}"


def progress_bar(*, total: int, initial: int = 0, unit: str = "step", description: str = "") -> Any:
    """Return a tqdm bar on standard error, silent unless that is a terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=unit == "B",
        desc=description,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    )

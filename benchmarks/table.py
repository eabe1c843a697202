"""The rows that benchmarks report: printed where they are found, and gathered by run.py."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

HEAD = ("what", "here", "peer", "times as fast (pairs)", "memory, peer's")
GATHER = "BENCHMARK_ROWS"
"""Environment variable: file to which rows are added, one JSON list a line."""

Row = Sequence[str]


def report(rows: Sequence[Row]) -> None:
    """Print rows of HEAD's columns, and add them to the file of GATHER."""
    print_table(HEAD, rows)
    if GATHER in os.environ:
        with Path(os.environ[GATHER]).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(list(row)) + "\n" for row in rows)


def print_table(head: Row, rows: Sequence[Row]) -> None:
    """Print rows as a Markdown table."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print(
            "| "
            + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            + " |",
            flush=True,
        )

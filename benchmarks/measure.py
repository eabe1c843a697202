"""Systems that take turns, so that all meet the same noise, and rows of their speed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

HEAD = ("what", "here", "peer", "times as fast (pairs)", "memory, peer's")
WARM_UP = 2

Row = Sequence[str]
Answer = dict[str, Any]


class Worker:
    """A child that does one piece of work for each line on its standard input and answers with one
    line of JSON.
    """

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self) -> Answer:
        """Raises SystemExit when the child has ended; its message is on standard error."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("turn\n")
            self.process.stdin.flush()
            answer: Answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            sys.exit(f"{' '.join(self.command)} ended; its message is above")
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def answer_turns(work: Callable[[], Answer]) -> None:
    """The child's side. Whatever else is printed meanwhile goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for _ in sys.stdin:
        print(json.dumps(work()), file=answers, flush=True)


def take_turns(
    commands: dict[str, list[str]], repeats: int
) -> tuple[dict[str, Answer], dict[str, list[Answer]]]:
    """The answers of each system's first turn, and of ``repeats`` turns after warming up, all
    systems in turn.
    """
    workers = {name: Worker(command) for name, command in commands.items()}
    first = {name: worker.turn() for name, worker in workers.items()}
    for _ in range(WARM_UP):
        for worker in workers.values():
            worker.turn()
    later: dict[str, list[Answer]] = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            later[name].append(worker.turn())
    for worker in workers.values():
        worker.end()
    return first, later


def compared(seconds: Sequence[float], peer: Sequence[float], digits: int = 2) -> str:
    """Return how many times as fast as the peer: median, least and greatest of the pairs."""
    ratios = [other / own for own, other in zip(seconds, peer, strict=True)]
    middle, least, most = (
        f"{each:.{digits}f}" for each in (statistics.median(ratios), min(ratios), max(ratios))
    )
    return f"{middle} ({least} to {most} in {len(ratios)})"


def table(rows: Sequence[Row], head: Row = HEAD) -> str:
    """Return rows as a Markdown table."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (head, ["-" * width for width in widths], *rows)
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |"
        for row in lines
    )

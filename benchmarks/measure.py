"""Systems that take turns, so that all meet the same noise, and rows of their speed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

from common.errors import RunError
from common.parallel.run import Run
from common.paths import ROOT
from common.systems.weights import Weight, Weights
from common.weights.names import initial_rows, parameter_shapes

HEAD = ("what", "here", "peer", "times as fast (pairs)", "memory, peer's")
WARM_UP = 2

Row = Sequence[str]
Answer = dict[str, Any]


def _turn(name: str, child: subprocess.Popen[str]) -> Answer:
    """Let a child do its piece of work once, for a line on its standard input.

    It answers with one line of JSON. Raises RunError when it has ended; its message is on standard error.
    """
    assert child.stdin is not None and child.stdout is not None
    try:
        os.write(child.stdin.fileno(), b"turn\n")  # a buffer would fail again when it is closed
        answer: Answer = json.loads(child.stdout.readline())
    except (OSError, ValueError):
        raise RunError(f"{name} ended; its message is above") from None
    return answer


def answer_turns(work: Callable[[], Answer]) -> None:
    """The child's side. Whatever else is printed meanwhile goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for _ in sys.stdin:
        print(json.dumps(work()), file=answers, flush=True)


def take_turns(commands: dict[str, list[str]], repeats: int) -> tuple[dict[str, Answer], dict[str, list[Answer]]]:
    """The answers of each system's first turn, and of ``repeats`` turns after warming up, all systems in turn."""
    with ExitStack() as stack:
        children: dict[str, subprocess.Popen[str]] = {}
        for name, command in commands.items():
            child = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
            children[name] = stack.enter_context(child)
            stack.callback(child.kill)
        turns = [{name: _turn(name, child) for name, child in children.items()} for _ in range(1 + WARM_UP + repeats)]
    later = turns[1 + WARM_UP :]
    return turns[0], {name: [turn[name] for turn in later] for name in commands}


def initial_weights(config: Run) -> Weights:
    """The weights that training begins with, each made when it is read."""
    tensors = {
        name: Weight(dtype="float32", shape=shape, load=partial(initial_rows, config.model, config.seed, name, shape))
        for name, shape in parameter_shapes(config.model).items()
    }
    return Weights(path=Path("initial"), format="random", model=config.model, tensors=tensors)


def compared(seconds: Sequence[float], peer: Sequence[float], digits: int = 2) -> str:
    """Return how many times as fast as the peer: median, least and greatest of the pairs."""
    ratios = [other / own for own, other in zip(seconds, peer, strict=True)]
    middle, least, most = (f"{each:.{digits}f}" for each in (statistics.median(ratios), min(ratios), max(ratios)))
    return f"{middle} ({least} to {most} in {len(ratios)})"


def table(rows: Sequence[Row], head: Row = HEAD) -> str:
    """Return rows as a Markdown table."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (head, ["-" * width for width in widths], *rows)
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |" for row in lines
    )

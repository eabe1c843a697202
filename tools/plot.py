"""Compare runs as curves over steps: one PNG with a panel for each metric.

    python tools/plot.py output/first output/two --output compare.png --metric loss --smoothing 5

Exit code 0: success; 2: bad arguments or metrics; 1: the picture could not be written.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import argparse
from dataclasses import dataclass
from pathlib import Path

from common.flags import at_least, flag
from common.program import command
from common.training.plot import plot_runs


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between, each once, found {text!r}")
    return names


@dataclass(kw_only=True)
class Request:
    runs: tuple[Path, ...] = flag(
        "RUN: folder of a run, or its metrics.jsonl", required=True, positional=True, nargs="+"
    )
    output: Path = flag("FILE.png: picture to write", required=True)
    metric: tuple[str, ...] = flag(
        "NAME,...: keys of metrics.jsonl, one panel each (default: loss,tokens_per_second); loss"
        " has the validation loss in it",
        default=("loss", "tokens_per_second"),
        type=_names,
        action="store",
    )
    smoothing: int = flag(
        "ROWS: rows of metrics.jsonl that a point averages (default: a fiftieth of a run)",
        default=0,
        type=at_least(1),
    )


@command(Request)
def main(request: Request) -> None:
    plot_runs(request.runs, request.output, request.metric, request.smoothing)
    print(request.output)

"""Compare runs as curves over steps: one PNG with a panel for each metric.

    python tools/plot.py output/first output/two --output compare.png --metric loss --smoothing 5

Exit code 0: success; 2: bad arguments or metrics; 1: the picture could not be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import GPT2Error, report
from common.training.plot import plot_runs
from common.whole_numbers import shortened, whole_number


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plot.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE.png", help="picture to write"
    )
    parser.add_argument(
        "--metric",
        type=_names,
        default=["loss", "tokens_per_second"],
        metavar="NAME,...",
        help="keys of metrics.jsonl, one panel each (default: loss,tokens_per_second); loss has the"
        " validation loss in it",
    )
    parser.add_argument(
        "--smoothing",
        type=_rows,
        default=0,
        metavar="ROWS",
        help="rows of metrics.jsonl that a point averages (default: a fiftieth of a run)",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        plot_runs(arguments.runs, arguments.output, arguments.metric, arguments.smoothing)
    except GPT2Error as error:
        return report(error)
    print(arguments.output)
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected names with commas between, each once, found {text!r}"
        )
    return names


def _rows(text: str) -> int:
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(
            f"expected a number of rows, 1 or more, found {shortened(text)!r}"
        )
    return number


if __name__ == "__main__":
    run_script(main)

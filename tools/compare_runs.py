"""Compare two runs step by step, and name the first step at which they differ.

    python tools/compare_runs.py output/first output/two
    python tools/compare_runs.py output/first output/twin --tolerance 1e-4

Samples (hash), losses and gradient norms are compared over the steps that both runs have. Norms are
compared because Adam hides a gradient of the wrong scale from the losses. Keys of the configuration
that differ and may matter are listed.

Exit code 0: the runs are the same within the tolerance; 1: they differ; 2: bad arguments or runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import GPT2Error
from common.study.sentences import describe_departure
from common.study.two_runs import Comparison, compare_runs, read_run


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_runs.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("one", type=Path, metavar="RUN", help="run folder that is the reference")
    parser.add_argument("other", type=Path, metavar="OTHER", help="run folder to compare with it")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="relative difference allowed (default: 1e-6, and 1e-4 between two frameworks)",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        found = compare_runs(
            read_run(arguments.one), read_run(arguments.other), arguments.tolerance
        )
    except GPT2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(describe(found)))
    return 0 if found.departure is None else 1


def describe(found: Comparison) -> Iterator[str]:
    """Yield the lines of the result."""
    for key, (one, other) in found.keys.items():
        yield f"{key}: {one} -> {other}"
    yield (
        f"compared: {len(found.steps)} steps, {found.steps[0]} to {found.steps[-1]}; tolerance"
        f" {found.tolerance:g}"
    )
    yield f"samples: {'the same' if found.samples is None else f'others from step {found.samples}'}"
    for kind, (size, step) in found.largest.items():
        yield f"{kind}: largest difference {size:.2g}, at step {step}"
    yield (
        "the same"
        if found.departure is None
        else f"different: {describe_departure(found.departure).en}"
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, found {text!r}")
    return value


if __name__ == "__main__":
    run_script(main)

"""Run inputs of one area and print the defects.

python -m tests.fuzz AREA [--seed N] [--count N] [--first N]   a range, in worker processes

python -m tests.fuzz AREA --seed N --only N                    one input, with its traceback

python -m tests.fuzz --list                                    the inputs of each area
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from typing import Any

from tests.fuzz.dice import Dice
from tests.fuzz.engine import AREAS, LIMIT_SECONDS, inputs_of, judge, run_area, work, work_folder
from tests.fuzz.listing import listing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("area", nargs="?", choices=AREAS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, help="3000 when left out, or all where they end")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT_SECONDS, help="from which on an input hangs"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--records", action="store_true", help="be a worker: write a line of JSON for each input"
    )
    arguments = parser.parse_args()
    if arguments.list or arguments.area is None:
        print(listing())
        return 0
    area, seed = arguments.area, arguments.seed
    logging.getLogger().addHandler(logging.NullHandler())
    if arguments.records:
        logging.disable(logging.INFO)
        work(area, seed, arguments.first, arguments.count, arguments.seconds, _write)
        return 0
    if arguments.only is not None:
        return _only(area, seed, arguments.only, arguments.seconds)
    count = arguments.count or inputs_of(area) or 3000
    result = run_area(
        area, seed=seed, count=count, first=arguments.first, seconds=arguments.seconds
    )
    print(result.report(most=1000))
    return 1 if result.defects else 0


def _write(record: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(record) + "\n")
    sys.__stdout__.flush()


def _only(area: str, seed: int, number: int, seconds: float) -> int:
    module = importlib.import_module(f"tests.fuzz.{area}")
    with work_folder() as folder:
        (folder / "whole").mkdir()
        (folder / "input").mkdir()
        prepared = module.prepare(folder / "whole")
        case = module.make(Dice(area, seed, number), prepared, folder / "input")
        print(f"{case.kind}: {case.about}")
        for path in sorted((folder / "input").rglob("*")):
            print(f"  {path}: {path.stat().st_size if path.exists() else '?'} bytes")
        run = case.run

        def shown() -> Any:
            try:
                return run()
            except BaseException:
                import traceback

                traceback.print_exc(limit=-12)
                raise

        case.run = shown
        outcome, detail = judge(case, seconds)
        print(f"{outcome}: {detail}")
    return 0 if outcome in ("refused", "accepted") else 1


if __name__ == "__main__":
    sys.exit(main())

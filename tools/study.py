"""Run a study: a matrix of runs, measured one after another and compared in a report.

    python tools/study.py --config configs/study/precision.yaml --small
        the variant for two CPU cores, minutes
    python tools/study.py --config configs/study/oneflow_layouts.yaml --plan
        the cells, their ranks, memory and layout; nothing starts
    python tools/study.py --config configs/study/oneflow_layouts.yaml data.train=data/my_document
        the whole of it; any key of the configuration may follow, for all cells
    python tools/study.py --config configs/study/oneflow_layouts.yaml --only devices=1n8d
        the cells for one server of 8
    python tools/study.py --config configs/study/scaling.yaml --hosts a,b --ssh
        cells over several hosts

What comes out is in output/study/NAME: study.json, tables, plots and the report. The same command
resumes a stopped study. repeats=1, warmup_steps=, measured_steps= and time_limit=
change the study's own numbers. In the script of a Slurm job, cells are started with srun. Exit code
0: the study is complete; 2: bad arguments; 1: no cell has finished; 128+n: stopped by signal n.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import GPT2Error
from common.log import start_log
from common.study.command import StudyRequest, run_study


def parse_arguments(words: list[str] | None = None) -> StudyRequest:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the study's YAML"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="run the variant for two CPU cores, the section small of the YAML",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="AXIS=LABEL",
        help="leave out cells with other labels on this axis; may be given several times",
    )
    parser.add_argument(
        "--plan", action="store_true", help="show the cells and what is expected; start nothing"
    )
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help='compute the study for devices that are not here, such as "Ascend 910A"; with --plan,'
        " add the time of a step on it",
    )
    parser.add_argument(
        "--redo",
        action="append",
        default=[],
        metavar="CELL",
        help="run this cell again; may be given several times",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        metavar="DIR",
        help="folder of runs and report (default: output/study/NAME)",
    )
    parser.add_argument(
        "--report_only",
        action="store_true",
        help="make tables, plots and report again from study.json; start nothing",
    )
    parser.add_argument(
        "--example",
        type=Path,
        metavar="DIR",
        help="with --report_only: copy table and pictures into a folder below DIR, without paths"
        " and commands, such as docs/study_example",
    )
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        help="print the commands of every cell for these hosts; start nothing without --ssh",
    )
    parser.add_argument("--ssh", action="store_true", help="run the cells on --hosts over ssh")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="keys of the configuration to set in all cells",
    )
    found = vars(parser.parse_intermixed_args(words))
    found |= {name: tuple(found[name]) for name in ("redo", "only", "overrides")}
    return StudyRequest(**found)


def main(words: list[str] | None = None) -> int:
    request = parse_arguments(words)
    start_log()
    try:
        return run_study(request, sys.stdout.write)
    except (GPT2Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


if __name__ == "__main__":
    run_script(main)

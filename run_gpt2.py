"""Front door of every run.

    python run_gpt2.py --config configs/gpt2/run_gpt2.yaml --run_mode train [section.key=value ...]

Exit code 0: success; 2: bad input or configuration; 1: failure at run time; 128+n: stopped by
signal n.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from common.program import start

    start(__file__)

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

# These imports load no library, so that --help answers at once.
from common.command_line import parse_arguments
from common.errors import GPT2Error, report
from common.interrupts import raise_interrupts
from common.modelarts.arguments import ModelArtsJob, translate
from common.processes.heartbeat import start_heartbeat

if TYPE_CHECKING:
    from common.systems.config import ConfigFile


def main(
    argv: list[str] | None = None, *, program: str = "run_gpt2.py", more: str = "", file: ConfigFile | None = None
) -> int:
    """Run what the arguments say, and return the exit code.

    program, more: for --help. file: the file of --config, if it has been read.
    """
    from common.launcher.request import is_asked

    environ = dict(os.environ)  # with the launcher's variables, which the next line takes out
    start_heartbeat()
    try:
        job = translate(sys.argv[1:] if argv is None else argv, environ)
        arguments = parse_arguments(job.argv, program=program, more=more)
        arguments.file = file
        if arguments.show_config:
            show_config(arguments)
        elif arguments.run_mode == "plan" or is_asked("DRY_RUN"):
            plan(arguments, environ)
        else:
            run(arguments, job, environ)
    except (GPT2Error, OSError) as error:  # OSError: a disk that is full or gone
        return report(error)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    return 0


def show_config(arguments: argparse.Namespace) -> None:
    """Print the configuration in this project's words, and start nothing."""
    from common.config.load import dump_config

    raise_interrupts()
    opened = read(arguments).open(arguments.overrides)
    sys.stdout.write(opened.yaml or dump_config(opened.config))


def plan(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Print what the run would be, and start nothing. Of a dry run of several ranks rank 0 does."""
    from common.cluster.environment import find_process
    from common.command_line import PLAN_FLAGS
    from common.planner.show import plan_text
    from common.run_config import load_config

    raise_interrupts()
    options = {name: getattr(arguments, name) for name in PLAN_FLAGS}
    if like := options.pop("like"):
        options["like"] = (Path(like), load_config(Path(like) / "config.yaml"))
    path, overrides = Path(arguments.config), arguments.overrides
    config = read(arguments).open(overrides).config
    text = plan_text(config, path, overrides, environ, **options)
    if arguments.run_mode == "plan" or find_process(environ).rank == 0:
        sys.stdout.write(text)


def read(arguments: argparse.Namespace) -> ConfigFile:
    from common.run_config import read_config

    return arguments.file or read_config(arguments.config)


def run(arguments: argparse.Namespace, job: ModelArtsJob, environ: Mapping[str, str]) -> None:
    """Read and resolve the configuration, and run the mode; ModelArts does more around it."""
    from common.backends import run_backend, serve_as_scheduler
    from common.cluster.environment import ALONE, find_process, in_modelarts, is_scheduler
    from common.log import LOG, start_log
    from common.modelarts.files import urls
    from common.modelarts.job import must_start_ranks, run_job

    raise_interrupts()
    process = ALONE if must_start_ranks(environ) else find_process(environ)
    start_log(rank=process.rank)
    if process.rank == 0:  # what is left out of its arguments
        for remark in (*job.remarks, *process.remarks):
            LOG.warning(remark)
    file, mode, overrides = read(arguments), arguments.run_mode, arguments.overrides
    opened = file.open(overrides)
    if process.rank == 0 and opened.remark:
        LOG.info(opened.remark)
    if is_scheduler(environ):  # msrun starts it with the same command as the ranks
        serve_as_scheduler(mode, opened.config)
    elif in_modelarts(environ) or job.output_url is not None or any(urls(opened.config)):
        run_job(file, opened, mode, overrides, job, process, environ)
    else:
        run_backend(mode, opened.config, process)

"""Start the ranks of this host and wait for them.

scripts/run_distribute.sh and scripts/run_standalone.sh call this program.

    bash scripts/run_distribute.sh RANK_TABLE CONFIG '[0,8]' train
        the devices 0-7 of this machine
    bash scripts/run_distribute.sh RANK_TABLE CONFIG '[8,16]' train 32
        the ranks 8-15 of 32, on each machine its own
    bash scripts/run_distribute.sh none CONFIG '[0,4]' train
        no rank table: GPUs, or processes on CPU
    bash scripts/run_distribute.sh --devices 0,1,4 none CONFIG train
                only these devices
    bash scripts/run_distribute.sh --master 10.0.0.1:29500 --nnodes 2 none CONFIG '[0,4]' train
        the same on each of two machines, which agree on who is which
    bash scripts/run_standalone.sh CONFIG DEVICE_ID train
        one process

section.key=value words at the end go to every rank. What rank 0 writes is shown, unless --quiet is
given. DRY_RUN=1 before the command shows what each rank would get and starts nothing; DETACH=1
returns at once. Exit code 0: all ranks ended well; 2: bad arguments; else that of the first rank
that failed, 128+n: signal n.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

import run_gpt2
from common import whole_numbers
from common.command_line import RUN_MODES
from common.errors import ConfigError, GPT2Error
from common.inputs import check_before_ranks
from common.launcher.attempts import RESTARTABLE
from common.launcher.host_list import run_over_ssh
from common.launcher.launch import Load, distribute, standalone
from common.launcher.request import (
    LaunchRequest,
    is_asked,
    parse_distribute,
    parse_standalone,
)
from common.launcher.terminal import open_standard_streams, tell
from common.run_config import read_config
from common.study.certificate import certify

_ABOUT_STANDALONE = """Start one process on one device and wait for it, from any folder.

    bash scripts/run_standalone.sh CONFIG DEVICE_ID train
        on device DEVICE_ID, counted from 0
    bash scripts/run_standalone.sh CONFIG 0 train train.max_steps=9
        any key of the configuration may follow

Its log is mf_standalone/mindformer.log in the run folder. DRY_RUN=1 before the command shows what
the process would get and starts nothing; DETACH=1 returns at once. Exit code 0: it ended well; 2:
bad arguments; else its own, 128+n: signal n.
"""


def parse_arguments(kind: str, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"run_{kind}.sh",
        description=_ABOUT_STANDALONE if kind == "standalone" else __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--log_dir",
        type=Path,
        metavar="DIR",
        help="folder for the logs, mf_parallel{rank}/ (default: output_dir of the config)",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="do not show what the first rank writes: progress, losses, results",
    )
    parser.add_argument(
        "--max_restarts",
        "--max-restarts",
        type=whole_numbers.argument(),
        metavar="N",
        help="times to start all ranks again after a failure, from the newest complete checkpoint"
        " (default: runtime.max_restarts of the config, 0)",
    )
    parser.add_argument(
        "--certify",
        type=whole_numbers.argument(1),
        metavar="N",
        help="train the first N steps twice, compare them bit for bit, and write certificate.json"
        " into output_dir",
    )
    # what happens anyway; scripts may still give it
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    # for tools/study.py: a script of another system that takes the words of run_gpt2.py
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no_pinning", action="store_true", help="let every rank use all cores")
    if kind == "distribute":
        parser.add_argument(
            "--master",
            metavar="IP:PORT",
            help="address of the host of rank 0 and a port, where the ranks meet",
        )
        parser.add_argument(
            "--devices",
            metavar="N,N",
            help="numbers of the devices of this machine, in place of the range",
        )
        parser.add_argument(
            "--nnodes",
            "--num_nodes",
            "--num-nodes",
            type=whole_numbers.argument(1),
            metavar="N",
            help="number of hosts, without a rank table",
        )
        parser.add_argument(
            "--node_rank",
            type=whole_numbers.argument(),
            metavar="K",
            help="number of this host, from 0, without a rank table (default: the host of --master"
            " is 0, the others are numbered by address)",
        )
        parser.add_argument(
            "--node_ips",
            "--node-ips",
            metavar="IP,IP",
            help="addresses of all hosts, that of rank 0 first, in place of --master, --nnodes and"
            " --node_rank; each host finds its own among them",
        )
        parser.add_argument(
            "--use_rdma",
            "--use-rdma",
            action="store_true",
            help="let NCCL talk to other hosts only over InfiniBand or RoCE; HCCL always does",
        )
        parser.add_argument(
            "--hosts", metavar="A,B", help="show the command of every host, that of rank 0 first"
        )
        parser.add_argument(
            "--ssh", action="store_true", help="run the commands of --hosts over ssh, and wait"
        )
        parser.add_argument(
            "--all_ranks", action="store_true", help="plan shows every rank's variables and command"
        )
        parser.add_argument(
            "--accelerator",
            metavar="NAME",
            help='plan estimates the time of a step on it, such as "Ascend 910A"',
        )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(words)


def main(words: list[str] | None = None) -> int:
    kind, *words = (sys.argv[1:] if words is None else words) or ["--help"]
    if kind in ("--help", "-h"):
        kind, words = "distribute", ["--help"]
    try:
        if kind == "over_ssh":  # this file again, once a host
            return run_over_ssh(*words)
        return launch(kind, words)
    except GPT2Error as error:
        tell(f"error: {error}", error=True)
        return error.exit_code
    except BrokenPipeError:  # the reader of what DRY_RUN or plan shows has seen enough
        _discard_output()
        return 0
    except OSError as error:  # also of a full disk under what DRY_RUN or plan shows
        tell(f"error: {error}", error=True)
        _discard_output()
        return 1


def launch(kind: str, words: list[str]) -> int:
    arguments = vars(parse_arguments(kind, words))
    positional = arguments.pop("words")
    arguments.pop("follow")
    argv = (kind, *words)
    request = (parse_standalone if kind == "standalone" else parse_distribute)(
        positional, RUN_MODES, argv=argv, **arguments
    )
    file = read_config(request.config)
    start = _certify if request.certify is not None else _start
    return start(kind, request, lambda words: file.open(words).config)


def _start(kind: str, request: LaunchRequest, load: Load) -> int:
    if kind == "standalone":
        return standalone(request, load, run_gpt2.main, check_before_ranks)
    return distribute(request, load, check_before_ranks)


def _certify(kind: str, request: LaunchRequest, load: Load) -> int:
    """Start the run twice and compare the two. Raises ConfigError."""
    several = request.hosts or request.node_ips or request.rank_size or (request.nnodes or 1) > 1
    if request.mode not in RESTARTABLE or several or is_asked("DETACH") or is_asked("DRY_RUN"):
        raise ConfigError(
            "--certify is for the modes train and finetune on one host, without DETACH and DRY_RUN;"
            " leave it out"
        )
    steps = request.certify or 1
    plain = replace(request, certify=None)
    return certify(
        load(request.overrides),
        steps,
        lambda more: _start(kind, replace(plain, overrides=(*request.overrides, *more)), load),
    )


def _discard_output() -> None:
    """Let what standard output still holds go nowhere, so that the interpreter's end does not fail
    at it and change the exit code.
    """
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    open_standard_streams()
    run_script(main)

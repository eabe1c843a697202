"""Check this machine before a run: versions, drivers, devices, ports, names, disk, limits; with
ranks, a real all-reduce over them.

    python tools/doctor.py
        this machine
    python tools/doctor.py --ranks 8
        and an all-reduce over its devices 0 to 7
    python tools/doctor.py --rank_table hccl_4s_32p.json
        on every server of the table, at about the same time
    python tools/doctor.py --master 10.0.0.1:29500 --nnodes 2 --node_rank 0
        the same without a table

Exit code 0: no errors; 2: errors, or bad arguments.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common import whole_numbers as whole
from common.cluster.places import parse_range
from common.cluster.rank_environment import parse_master
from common.doctor import software
from common.doctor.examine import LIBRARIES, DoctorRequest, examine
from common.doctor.report import as_json, as_table, exit_code
from common.errors import ConfigError, GPT2Error
from common.whole_numbers import MOST_RANKS, whole_number


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rank_table",
        type=Path,
        metavar="FILE",
        help="check this table, and all-reduce over its ranks",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        help="all-reduce over N ranks of this host, devices 0 to N-1; or over the devices '[4,8)';"
        " with --master, of each host (default then: its devices, 2 on a CPU)",
    )
    parser.add_argument(
        "--master",
        metavar="IP:PORT",
        help="where the hosts meet, without a rank table: an address of host 0",
    )
    parser.add_argument("--nnodes", type=whole.argument(1), metavar="N", help="how many hosts")
    parser.add_argument(
        "--node_rank",
        type=whole.argument(),
        metavar="K",
        help="which of them this is; host 0 has rank 0",
    )
    parser.add_argument(
        "--backend",
        choices=sorted(software.BACKENDS),
        help="(default: torch where it is installed)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", *LIBRARIES),
        default="auto",
        help="what the ranks compute on (default: what is there)",
    )
    parser.add_argument(
        "--time_limit",
        type=float,
        default=60.0,
        metavar="S",
        help="of the all-reduce, imports too (default: 60 s)",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where runs will write (default: here)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(words)
    if arguments.rank_table and (arguments.ranks or arguments.master or arguments.nnodes):
        parser.error(
            "--rank_table names the ranks and hosts; leave out --ranks, --master and --nnodes"
        )
    if not 0 < arguments.time_limit <= 86400:
        parser.error(f"--time_limit {arguments.time_limit:g}: expected seconds, above 0")
    if (arguments.nnodes is None) != (arguments.master is None):
        parser.error("--master IP:PORT and --nnodes N belong together")
    try:
        arguments.devices = device_range(arguments.ranks) if arguments.ranks else None
        arguments.address, arguments.port = parse_master(arguments.master)
    except ConfigError as reason:
        parser.error(str(reason))
    return arguments


def device_range(words: str) -> range:
    """The devices that ``--ranks`` names: ``8`` or ``[4,8)``. Raises ConfigError."""
    found = whole_number(words)
    devices = parse_range(words) if found is None else range(found)
    if not 0 < len(devices) <= MOST_RANKS:
        raise ConfigError(f"--ranks {words}: expected 1 or more, {MOST_RANKS} at most")
    return devices


def main(words: list[str] | None = None) -> int:
    arguments = vars(parse_arguments(words))
    as_program = arguments.pop("json")
    for name in ("ranks", "master"):  # read into devices, and address and port
        arguments.pop(name)
    # the children are ended on the way out
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        checks = examine(DoctorRequest(**arguments))
    except GPT2Error as reason:  # a MASTER_PORT that is none
        print(f"error: {reason}", file=sys.stderr)
        return reason.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    sys.stdout.write(
        as_json(checks) if as_program else as_table(checks, colour=sys.stdout.isatty())
    )
    return exit_code(checks)


if __name__ == "__main__":
    run_script(main)

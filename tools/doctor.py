"""Check this machine before a run.

It checks versions, drivers, devices, ports, names, disk and limits. With ranks, it also runs a real
all-reduce over them.

    python tools/doctor.py
        this machine
    python tools/doctor.py --ranks 8
        and an all-reduce over its devices 0 to 7
    python tools/doctor.py --rank_table hccl_4s_32p.json
        on every server of the table, at about the same time
    python tools/doctor.py --master 10.0.0.1:29500 --nnodes 2 --node_rank 0
        the same without a table
    python tools/doctor.py --explain output/RUN
        what the known errors in these logs (or in one log, or a code) mean, and the next steps
    python tools/doctor.py --bundle report.tar.gz --output_dir output/RUN
        logs, config, versions and rank table for a report, without secrets and addresses

Exit code 0: no errors; 2: errors, or bad arguments; 1: --explain found no known error.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, exit_at_sigterm, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common import whole_numbers as whole
from common.bundle import write_bundle
from common.cluster.places import parse_range
from common.cluster.rank_environment import parse_master
from common.doctor import software
from common.doctor.examine import LIBRARIES, DoctorRequest, examine
from common.doctor.report import as_json, as_table, exit_code
from common.errors import ConfigError, GPT2Error
from common.failures.catalogue import Language
from common.failures.explain import explain_code, explain_log, language_of
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
        help="address of host 0 and a port, where the hosts meet without a rank table",
    )
    parser.add_argument("--nnodes", type=whole.argument(1), metavar="N", help="number of hosts")
    parser.add_argument(
        "--node_rank",
        type=whole.argument(),
        metavar="K",
        help="number of this host, from 0; host 0 has rank 0",
    )
    parser.add_argument(
        "--backend",
        choices=sorted(software.BACKENDS),
        help="framework to check (default: torch where it is installed, else mindspore)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", *LIBRARIES),
        default="auto",
        help="kind of device that the ranks compute on (default: auto, what is there)",
    )
    parser.add_argument(
        "--time_limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that the all-reduce may take, imports included (default: 60)",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder that runs will write to, whose disk is checked (default: the current one)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON, for programs"
    )
    parser.add_argument(
        "--explain",
        metavar="LOG|CODE",
        help="explain the known errors in a log or a run folder, or one code or message; no checks",
    )
    parser.add_argument(
        "--language",
        choices=("en", "zh"),
        help="language of the explanation (default: that of the locale)",
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE.tar.gz",
        help="pack the run of --output_dir for a report; no checks",
    )
    parser.add_argument(
        "--with_addresses",
        action="store_true",
        help="keep IP addresses and the host name in the bundle (default: masked by stable names)",
    )
    arguments = parser.parse_args(words)
    if arguments.rank_table and (arguments.ranks or arguments.master or arguments.nnodes):
        parser.error(
            "--rank_table names the ranks and hosts; leave out --ranks, --master and --nnodes"
        )
    if arguments.explain is not None and arguments.bundle is not None:
        parser.error("--explain and --bundle are two commands; give one of them")
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


_REPORT = ("explain", "language", "bundle", "with_addresses")
_OF_RUN = ("output_dir", "rank_table")


def make_report(
    *,
    explain: str | None,
    language: Language | None,
    bundle: Path | None,
    with_addresses: bool,
    output_dir: Path,
    rank_table: Path | None,
) -> int:
    """Explain a log or a code, or pack a run, and return the exit code. Raises GPT2Error."""
    if bundle is not None:
        notes = write_bundle(
            bundle,
            run=output_dir,
            table=rank_table,
            environ=os.environ,
            with_addresses=with_addresses,
        )
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        print(f"{bundle}: {bundle.stat().st_size:,} bytes; look at its content before you send it")
        return 0
    assert explain is not None
    chosen = language or language_of(os.environ)
    if os.path.exists(explain):
        text, known = explain_log(Path(explain), chosen)
    else:
        text, known = explain_code(explain, chosen), True
    sys.stdout.write(text)
    return 0 if known else 1


def main(words: list[str] | None = None) -> int:
    arguments = vars(parse_arguments(words))
    report = {name: arguments.pop(name) for name in _REPORT}
    if report["explain"] is not None or report["bundle"] is not None:
        try:
            return make_report(**report, **{name: arguments[name] for name in _OF_RUN})
        except GPT2Error as reason:
            print(f"error: {reason}", file=sys.stderr)
            return reason.exit_code
    as_program = arguments.pop("json")
    for name in ("ranks", "master"):  # read into devices, and address and port
        arguments.pop(name)
    # the children are ended on the way out
    exit_at_sigterm()
    try:
        checks = examine(DoctorRequest(**arguments))
    except GPT2Error as reason:  # a MASTER_PORT that is none
        print(f"error: {reason}", file=sys.stderr)
        return reason.exit_code
    sys.stdout.write(
        as_json(checks) if as_program else as_table(checks, colour=sys.stdout.isatty())
    )
    return exit_code(checks)


if __name__ == "__main__":
    run_script(main)

"""Start the ranks of this host and wait for them: what scripts/run_distribute.sh and scripts/run_standalone.sh call.

    bash scripts/run_distribute.sh RANK_TABLE CONFIG '[0,8]' train                       the devices 0-7 of this machine
    bash scripts/run_distribute.sh RANK_TABLE CONFIG '[8,16]' train 32                   the ranks 8-15 of 32, on each machine its own
    bash scripts/run_distribute.sh none CONFIG '[0,4]' train                             no rank table: GPUs, or processes on CPU
    bash scripts/run_distribute.sh --master 10.0.0.1:29500 --nnodes 2 --node_rank 1 none CONFIG '[0,4]' train
    bash scripts/run_standalone.sh CONFIG DEVICE_ID train                                one process

section.key=value words at the end go to every rank. What rank 0 writes is shown, unless --quiet is given. DRY_RUN=1 before the command
shows what each rank would get and starts nothing; DETACH=1 returns at once. Exit code 0: all ranks ended well; 2: bad arguments; else
that of the first rank that failed, 128+n: signal n.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script
from common.parallel.resolved_run import ResolvedRun

if __name__ == "__main__":
    end_at_interrupts()

import run_gpt2
from common import whole_numbers
from common.accelerators import require_accelerator
from common.cluster.places import Placement, find_places, parse_range, places_of_table
from common.cluster.rank_environment import (
    DEFAULT_PORT,
    FOREIGN,
    given_port,
    is_own,
    make_rendezvous,
    parse_master,
    rank_command,
    shell_text,
)
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table, wait_for_table, write_table
from common.cluster.rank_table_formats import NotReadyError
from common.command_line import RUN_MODES
from common.config.load import load_config
from common.doctor.machine import npu_numbers
from common.errors import ConfigError, GPT2Error
from common.launcher.children import make_children, make_hosts
from common.launcher.control import Hosts
from common.launcher.host_list import HostCommand, divide, host_command, parse_hosts, run_over_ssh
from common.launcher.supervisor import Job, ProcessSpec, supervise
from common.launcher.terminal import tell
from common.planner.cluster import describe_cluster, layout_remarks
from common.resolve.derive import resolve_mode
from common.resolve.engine_checks import check_here
from common.run_folder import require_free_folder

NO_TABLE = ("none", "-")
TABLE_LIMIT = 1800.0
USAGE = (
    "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE] [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE]              for one machine\n"
    "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE] [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE] [RANK_SIZE]  for several machines\n"
    "section.key=value words may follow; RANK_TABLE_FILE none: no rank table; more: bash run_distribute.sh --help"
)
USAGE_STANDALONE = "Usage Help: bash run_standalone.sh [CONFIG_PATH] [DEVICE_ID] [RUN_MODE] [section.key=value ...]"


_ABOUT_STANDALONE = """Start one process on one device and wait for it, from any folder.

    bash scripts/run_standalone.sh CONFIG DEVICE_ID train                                on device DEVICE_ID, counted from 0
    bash scripts/run_standalone.sh CONFIG 0 train train.max_steps=9                      any key of the configuration may follow

Its log is mf_standalone/mindformer.log in the run folder. DRY_RUN=1 before the command shows what the process would get and starts
nothing; DETACH=1 returns at once. Exit code 0: it ended well; 2: bad arguments; else its own, 128+n: signal n.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the positional words ask for. table: its path, and None for none; numbers: devices, or with rank_size global ranks."""

    table: Path | None
    config: Path
    numbers: range
    mode: str
    rank_size: int | None
    overrides: tuple[str, ...]


def parse_arguments(kind: str, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"run_{kind}.sh",
        description=_ABOUT_STANDALONE if kind == "standalone" else __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--log_dir", type=Path, metavar="DIR", help="where mf_parallel{rank}/ goes (default: output_dir of the config)")
    parser.add_argument("--quiet", action="store_true", help="do not show what the first rank writes: progress, losses, results")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)  # what happens anyway; scripts may still give it
    parser.add_argument("--no_pinning", action="store_true", help="let every rank use all cores")
    if kind == "distribute":
        parser.add_argument("--master", metavar="IP:PORT", help="where the ranks meet: the host of rank 0, and a port")
        parser.add_argument("--nnodes", type=whole_numbers.argument(1), metavar="N", help="without a rank table: how many hosts there are")
        parser.add_argument(
            "--node_rank", type=whole_numbers.argument(), metavar="K", help="without a rank table: which of them this is, from 0"
        )
        parser.add_argument("--hosts", metavar="A,B", help="show the command of every host, that of rank 0 first")
        parser.add_argument("--ssh", action="store_true", help="run the commands of --hosts over ssh, and wait")
        parser.add_argument("--all_ranks", action="store_true", help="plan shows every rank's variables and command")
        parser.add_argument("--accelerator", metavar="NAME", help='plan estimates the time of a step on it, such as "Ascend 910A"')
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(words)


def main(words: list[str] | None = None) -> int:
    kind, *words = (sys.argv[1:] if words is None else words) or ["--help"]
    if kind in ("--help", "-h"):
        kind, words = "distribute", ["--help"]
    try:
        if kind == "over_ssh":  # this file again, once a host
            return run_over_ssh(*words)
        arguments = parse_arguments(kind, words)
        return (standalone if kind == "standalone" else distribute)(arguments, [kind, *words])
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
    except KeyboardInterrupt:
        return 130


def _discard_output() -> None:
    """Let what standard output still holds go nowhere, so that the interpreter's end does not fail at it and change the exit code."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def distribute(arguments: argparse.Namespace, words: list[str]) -> int:
    order = _order(arguments.words)
    if arguments.ssh and arguments.hosts is None:
        raise ConfigError("--ssh needs --hosts: the names of the hosts")
    for name in ("all_ranks", "accelerator"):
        if getattr(arguments, name) and order.mode != "plan":
            raise ConfigError(f"--{name} is for the mode plan, not {order.mode}; leave it out")
    starts = order.mode != "plan" and not _asked("DRY_RUN") and arguments.hosts is None
    try:
        table = _read_table(order.table, wait=starts and not _asked("DETACH")) if order.table else None
    except NotReadyError:
        if not starts:
            raise
        return _detach(_log_folder(arguments, load_config(order.config, order.overrides).output_dir), words)  # the waiting too
    if arguments.hosts is not None:
        return _start_hosts(arguments, order, table, words)
    master, port = parse_master(arguments.master)
    places = find_places(
        order.numbers, rank_size=order.rank_size, table=table, master=master, nodes=arguments.nnodes, node_rank=arguments.node_rank
    )
    config = resolve_mode(load_config(order.config, order.overrides), order.mode, world_size=places.world_size)
    if order.mode == "plan":
        known = (order.table, table) if order.table and table else None
        text = describe_cluster(
            config,
            places,
            config_path=order.config,
            overrides=order.overrides,
            table=known,
            all_ranks=arguments.all_ranks,
            environ=os.environ,
            device=require_accelerator(arguments.accelerator) if arguments.accelerator else None,
        )
        sys.stdout.write(text)
        return 0
    if starts and table is not None and config.backend == "mindspore" and config.device == "auto" and not npu_numbers():
        tell("warning: device=auto became cpu: this machine shows no Ascend (/dev/davinciN), for which the rank table is", error=True)
    kind = check_here(config) if starts else config.device  # what is only shown may be for other machines
    folder = _log_folder(arguments, config.output_dir)
    table_path = order.table
    if table is not None and table.version == "0":
        table_path = folder / "rank_table.json"  # MindSpore reads no version 0
        if starts:
            folder.mkdir(parents=True, exist_ok=True)
            write_table(table, table_path)
    _warn(places, config, table)
    on_cpu = kind == "cpu"
    meeting = make_rendezvous(places, port=port, table=table_path, backend=config.backend, environ=os.environ, on_cpu=on_cpu)
    command = rank_command(order.config, order.mode, order.overrides)
    children = make_children(places, meeting, command, environ=os.environ, pinned=not arguments.no_pinning)
    ranks = ", ".join(f"{place.rank} on device {place.device_id}" for place in places.own)
    line = f"ranks of {places.own_host}: {ranks}; of {places.world_size} in all"
    if starts:
        _refuse_second_run(config, order.mode, first_host=places.own[0].rank == 0)
        tell(line)
    else:
        print(f"# {line}", flush=True)
    return _run(_job(arguments, config, order.mode, children, make_hosts(places, meeting)), words)


def standalone(arguments: argparse.Namespace, words: list[str]) -> int:
    given = arguments.words
    if len(given) < 3:
        raise ConfigError(f"{len(given)} arguments, expected CONFIG_PATH DEVICE_ID RUN_MODE\n{USAGE_STANDALONE}")
    config_path = _config_path(given[0])
    device = whole_numbers.whole_number(given[1], most_digits=9)
    if device is None:
        raise ConfigError(f"device_id={whole_numbers.shortened(given[1])} is not a number")
    _check_mode(given[2])
    overrides = (f"context.device_id={device}", *given[3:])
    command = rank_command(config_path, given[2], overrides)
    config = resolve_mode(load_config(config_path, overrides), given[2], world_size=1)
    if given[2] == "plan":
        return run_gpt2.main(list(command[2:]))  # in this process: one more would outlive a launcher that is killed
    places = find_places(range(device, device + 1))
    meeting = make_rendezvous(places, port=None, table=None, backend=config.backend, environ=os.environ)
    if not _asked("DRY_RUN"):
        _refuse_second_run(config, given[2], first_host=True)
    child = make_children(places, meeting, command, environ=os.environ, pinned=not arguments.no_pinning)[0]
    return _run(_job(arguments, config, given[2], (replace(child, folder="mf_standalone"),)), words)


def _job(
    arguments: argparse.Namespace, config: ResolvedRun, mode: str, children: tuple[ProcessSpec, ...], hosts: Hosts | None = None
) -> Job:
    return Job(
        children=children,
        log_folder=_log_folder(arguments, config.output_dir),
        stall_limit=config.runtime.stall_limit,
        follow=not arguments.quiet,
        steps=config.train.max_steps if mode in ("train", "finetune") else None,
        hosts=hosts,
    )


def _order(words: Sequence[str]) -> LaunchRequest:
    """In the order of the checks that users of run_distribute.sh know."""
    if len(words) < 4:
        raise ConfigError(f"{len(words)} arguments, expected 4 or 5\n{USAGE}")
    table = None
    if words[0] not in NO_TABLE:
        table = _absolute(words[0])
        if not table.is_file():
            raise ConfigError(f"RANK_TABLE_FILE={table} is not a file")
    config = _config_path(words[1])
    numbers = parse_range(words[2])
    _check_mode(words[3])
    more = list(words[4:])
    rank_size = whole_numbers.whole_number(more[0], most_digits=9) if more else None
    more = more if rank_size is None else more[1:]
    return LaunchRequest(table=table, config=config, numbers=numbers, mode=words[3], rank_size=rank_size, overrides=tuple(more))


def _config_path(word: str) -> Path:
    path = _absolute(word)
    if not path.is_file():
        raise ConfigError(f"config_path={path} is not a file")
    return path


def _check_mode(word: str) -> None:
    if word not in RUN_MODES:
        raise ConfigError(f"RUN_MODE is {word!r}, expected {', '.join(RUN_MODES[:-1])} or {RUN_MODES[-1]}")


def _absolute(word: str) -> Path:
    return Path(os.path.abspath(word))  # as realpath -m, but a link stays a link: a config's base files lie beside it


def _read_table(path: Path, *, wait: bool) -> RankTable:
    """A platform may still be filling the file."""
    try:
        return read_table(path)
    except NotReadyError as error:
        if not wait:
            raise
        filling = "initializing" in path.read_text(encoding="utf-8", errors="replace")
        limit = TABLE_LIMIT if filling else 10.0
        tell(f"{error}; waiting up to {limit:g} s", error=True)
        return wait_for_table(path, limit)


def _refuse_second_run(config: ResolvedRun, mode: str, *, first_host: bool) -> None:
    """Before anything is written beside the first run's files. Rank 0 holds the folder, so other hosts would see their own run's hold.

    Raises ConfigError.
    """
    if first_host and mode in ("train", "finetune"):
        require_free_folder(Path(config.output_dir))


def _log_folder(arguments: argparse.Namespace, output_dir: str) -> Path:
    return _absolute(str(arguments.log_dir or output_dir))


def _warn(places: Placement, config: ResolvedRun, table: RankTable | None) -> None:
    found = layout_remarks(places, config.topology)
    if table is not None and table.version != "2.0" and not is_own(places.own_host):
        found.append(f"{places.own_host} is no address of this machine: is this the range of another one, or the table of another cluster?")
    if "RANK_TABLE_FILE" in os.environ and table is None:
        found.append(f"RANK_TABLE_FILE={os.environ['RANK_TABLE_FILE']} of your environment is not used: the first argument is none")
    for remark in found:
        tell(f"warning: {remark}", error=True)


def _start_hosts(arguments: argparse.Namespace, order: LaunchRequest, table: RankTable | None, kept: list[str]) -> int:
    """Show, or run over ssh, one run_distribute.sh a host."""
    if arguments.nnodes is not None or arguments.node_rank is not None:
        raise ConfigError("--nnodes and --node_rank follow from --hosts; leave them out")
    address, port = parse_master(arguments.master)
    parts = divide(
        parse_hosts(arguments.hosts),
        order.numbers,
        rank_size=order.rank_size,
        table=places_of_table(table) if table is not None and table.version != "2.0" else (),
        master=address,
        port=port or given_port(os.environ) or DEFAULT_PORT,
    )
    options = [word for name in ("quiet", "no_pinning") if getattr(arguments, name) for word in (f"--{name}",)]
    options += ["--log_dir", str(_absolute(str(arguments.log_dir)))] if arguments.log_dir else []
    after = [order.mode, *([] if order.rank_size is None else [str(order.rank_size)]), *order.overrides]
    commands = []
    for node, part in enumerate(parts):
        ranks = f"[{part.numbers.start},{part.numbers.stop})"
        words = [*options, *part.options, str(order.table or NO_TABLE[0]), str(order.config), ranks, *after]
        commands.append(host_command(part.host, words, os.environ))
        print(f"# host {node}: {part.host}\n{commands[-1].text}", flush=True)
    if not arguments.ssh or _asked("DRY_RUN"):
        return 0
    config = load_config(order.config, order.overrides)  # the layout is checked on each host
    children = tuple(_over_ssh(node, command) for node, command in enumerate(commands))
    return _run(
        Job(
            children=children,
            log_folder=_log_folder(arguments, config.output_dir),
            stall_limit=inf,
            follow=not arguments.quiet,
            over_ssh=True,
        ),
        kept,
    )


def _over_ssh(node: int, command: HostCommand) -> ProcessSpec:
    words = (sys.executable, str(Path(__file__).resolve()), "over_ssh", command.host, command.text)
    return ProcessSpec(rank=node, command=words, environment={}, folder=f"host_{command.host}", title=f"host {command.host}")


def _run(job: Job, words: list[str]) -> int:
    """Supervise the job, unless DRY_RUN asks to show it, or DETACH to leave that to another process."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    if _asked("DRY_RUN"):
        for child in job.children:
            cores = f", on cores {','.join(map(str, child.cores))}" if child.cores else ""
            print(f"\n# {child}: logs in {job.log_folder / child.log_folder}{cores}")
            print(shell_text(child.environment, child.command), end="", flush=True)
        return 0
    return _detach(job.log_folder, words) if _asked("DETACH") else supervise(job)


def _detach(folder: Path, words: list[str]) -> int:
    """Start all this again in a process that outlives the terminal."""
    log = folder / "launcher.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} ====\n")
            file.flush()
            environment = {name: value for name, value in os.environ.items() if name != "DETACH"}
            command = [sys.executable, str(Path(__file__).resolve()), words[0], "--quiet", *words[1:]]  # the ranks have logs of their own
            supervisor = subprocess.Popen(  # noqa: S603 - this file again, with the same words
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
    except OSError as error:
        raise ConfigError(f"{log}: cannot be written: {error.strerror or error}; give --log_dir DIR") from None
    tell(f"started in the background: process {supervisor.pid}, messages in {log}")
    tell(f"stop it, so that its ranks save: kill {supervisor.pid}")
    return 0


def _asked(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "n", "off", "false")


def _open_standard_streams() -> None:
    """Those that were closed before the start, as by ``>&-``: else the next file that is opened, or a socket, would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


if __name__ == "__main__":
    _open_standard_streams()
    run_script(main)

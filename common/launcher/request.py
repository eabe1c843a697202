"""Arguments of run_distribute.sh and run_standalone.sh, parsed and checked."""

from __future__ import annotations

import os
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cluster.environment import in_pod
from common.cluster.places import parse_devices, parse_range
from common.errors import ConfigError
from common.flags import at_least, flag
from common.launcher.host_list import parse_hosts
from common.whole_numbers import whole_number

NO_TABLE = ("none", "-")
USAGE = (
    "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE] [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE]  "
    "            for one machine\nUsage Help: bash run_distribute.sh [RANK_TABLE_FILE]"
    " [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE] [RANK_SIZE]  for several machines\nsection.key=value"
    " words may follow; RANK_TABLE_FILE none: no rank table; more: bash run_distribute.sh --help"
)
USAGE_STANDALONE = "Usage Help: bash run_standalone.sh [CONFIG_PATH] [DEVICE_ID] [RUN_MODE] [section.key=value ...]"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of run_standalone.sh."""

    log_dir: Path | None = flag("DIR: folder for the logs, mf_parallel{rank}/ (default: output_dir of the config)")
    quiet: bool = flag("do not show what the first rank writes: progress, losses, results")
    max_restarts: int | None = flag(
        "N: times to start all ranks again after a failure, from the newest complete checkpoint"
        " (default: runtime.max_restarts of the config, 0)",
        *("--max_restarts", "--max-restarts"),
        type=at_least(0),
    )
    program: Path | None = flag(SUPPRESS)
    """For tools/study.py: a script of another system that takes the words of run_gpt2.py."""
    no_pinning: bool = flag("let every rank use all cores")
    words: tuple[str, ...] = flag(SUPPRESS, positional=True, nargs="*")


@dataclass(frozen=True, kw_only=True)
class DistributeOptions(Options):
    """Options of run_distribute.sh."""

    master: str | None = flag("IP:PORT: address of the host of rank 0 and a port, where the ranks meet")
    devices: str | None = flag("N,N: numbers of the devices of this machine, in place of the range")
    nnodes: int | None = flag(
        "N: number of hosts, without a rank table", *("--nnodes", "--num_nodes", "--num-nodes"), type=at_least(1)
    )
    node_rank: int | None = flag(
        "K: number of this host, from 0, without a rank table (default: the host of --master is 0,"
        " the others are numbered as they come)",
        type=at_least(0),
    )
    node_ips: str | None = flag(
        "IP,IP: addresses of all hosts, that of rank 0 first, in place of --master, --nnodes and"
        " --node_rank; each host finds its own among them",
        *("--node_ips", "--node-ips"),
    )
    use_rdma: bool = flag(
        "let NCCL talk to other hosts only over InfiniBand or RoCE; HCCL always does", *("--use_rdma", "--use-rdma")
    )
    hosts: str | None = flag("A,B: show the command of every host, that of rank 0 first")
    ssh: bool = flag("run the commands of --hosts over ssh, and wait")
    all_ranks: bool = flag("plan shows every rank's variables and command")
    accelerator: str | None = flag('NAME: plan estimates the time of a step on it, such as "Ascend 910A"')


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(DistributeOptions):
    """Options and positional arguments.

    argv: all arguments, to start the same launch again. table: its path; None for none. numbers:
    devices, or with rank_size a range of global ranks. folder: of the log; empty for that of a
    rank. addresses: those of ``--node_ips``, that of rank 0 first.
    """

    argv: tuple[str, ...]
    table: Path | None = None
    config: Path
    numbers: Sequence[int]
    mode: str
    rank_size: int | None = None
    overrides: tuple[str, ...]
    folder: str = ""
    addresses: tuple[str, ...] = ()


def parse_distribute(options: DistributeOptions, modes: Sequence[str], argv: tuple[str, ...]) -> LaunchRequest:
    """Return the request. Raises ConfigError, in the order that users of the script know."""
    words, devices = options.words, options.devices
    if devices is not None:  # a list in place of the range
        if len(words) > 2 and words[2].strip()[:1] in ("[", "("):
            raise ConfigError(
                f"--devices {devices} and DEVICE_RANGE {words[2]} both name devices; leave one of them out"
            )
        words = (*words[:2], devices, *words[2:])
    if len(words) < 4:
        raise ConfigError(f"{len(words)} arguments, expected 4 or 5\n{USAGE}")
    table = None if words[0] in NO_TABLE else absolute(words[0])
    # in a pod a platform may not have mounted it yet
    if table and not (in_pod(os.environ) and table.parent.is_dir() and not os.path.lexists(table)):
        _file(words[0], "RANK_TABLE_FILE")
    config = _file(words[1], "config_path")
    numbers = parse_range(words[2]) if devices is None else parse_devices(devices)
    mode = _mode(words[3], modes)
    rank_size = whole_number(words[4]) if len(words) > 4 else None
    if devices is not None and rank_size is not None:
        raise ConfigError(
            f"--devices {devices} with RANK_SIZE={rank_size}: RANK_SIZE makes the range"
            " one of ranks; leave RANK_SIZE out and give --nnodes N, or give a range of ranks"
        )
    return LaunchRequest(
        **vars(options),
        argv=argv,
        table=table,
        config=config,
        numbers=numbers,
        mode=mode,
        rank_size=rank_size,
        overrides=tuple(words[4 if rank_size is None else 5 :]),
        addresses=() if options.node_ips is None else parse_hosts(options.node_ips, "--node_ips"),
    )


def parse_standalone(options: Options, modes: Sequence[str], argv: tuple[str, ...]) -> LaunchRequest:
    """Return the request for one device. Raises ConfigError."""
    words = options.words
    if len(words) < 3:
        raise ConfigError(f"{len(words)} arguments, expected CONFIG_PATH DEVICE_ID RUN_MODE\n{USAGE_STANDALONE}")
    config = _file(words[0], "config_path")
    device = whole_number(words[1])
    if device is None:
        raise ConfigError(f"device_id={words[1]} is not a number of 18 digits or fewer")
    return LaunchRequest(
        **vars(options),
        argv=argv,
        config=config,
        numbers=range(device, device + 1),
        mode=_mode(words[2], modes),
        overrides=(f"context.device_id={device}", *words[3:]),
        folder="mf_standalone",
        nnodes=1,  # whatever a pod or a step of Slurm says
    )


def is_asked(name: str) -> bool:
    """Tell whether a variable such as DRY_RUN is set to anything but a word for no."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "n", "off", "false")


def absolute(word: str) -> Path:
    """Make a path absolute, but keep links: a config's base files lie beside it."""
    return Path(os.path.abspath(word))


def _file(word: str, name: str) -> Path:
    path = absolute(word)
    if not path.is_file():
        raise ConfigError(f"{name}={path} is not a file")
    return path


def _mode(word: str, modes: Sequence[str]) -> str:
    if word not in modes:
        raise ConfigError(f"RUN_MODE is {word!r}, expected {', '.join(modes[:-1])} or {modes[-1]}")
    return word

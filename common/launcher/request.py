"""Arguments of run_distribute.sh and run_standalone.sh, parsed and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cluster.places import parse_devices, parse_range
from common.cluster.pods import in_pod
from common.errors import ConfigError
from common.processes.addresses import may_be_host
from common.whole_numbers import shortened, whole_number

NO_TABLE = ("none", "-")
USAGE = (
    "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE] [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE]  "
    "            for one machine\nUsage Help: bash run_distribute.sh [RANK_TABLE_FILE]"
    " [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE] [RANK_SIZE]  for several machines\nsection.key=value"
    " words may follow; RANK_TABLE_FILE none: no rank table; more: bash run_distribute.sh --help"
)
USAGE_STANDALONE = (
    "Usage Help: bash run_standalone.sh [CONFIG_PATH] [DEVICE_ID] [RUN_MODE]"
    " [section.key=value ...]"
)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Positional arguments, and the named options as --help explains them.

    table: its path; None for none. numbers: devices, or with rank_size a range of global ranks.
    argv: all arguments, to start the same launch again. program: what the ranks run in place of
    run_gpt2.py, with its arguments.
    """

    argv: tuple[str, ...]
    table: Path | None = None
    config: Path
    numbers: Sequence[int]
    mode: str
    rank_size: int | None = None
    overrides: tuple[str, ...]
    log_dir: Path | None = None
    quiet: bool = False
    max_restarts: int | None = None
    certify: int | None = None
    no_pinning: bool = False
    master: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    node_ips: tuple[str, ...] = ()
    use_rdma: bool = False
    hosts: str | None = None
    ssh: bool = False
    all_ranks: bool = False
    accelerator: str | None = None
    program: Path | None = None


def parse_distribute(
    words: Sequence[str],
    modes: Sequence[str],
    *,
    devices: str | None = None,
    node_ips: str | None = None,
    **options: Any,
) -> LaunchRequest:
    """Return the request for the ranks of this host.

    devices: a list that replaces the range among the arguments. Raises ConfigError, in the order of
    checks that users of run_distribute.sh know.
    """
    if devices is not None:
        words = _with_devices(words, devices)
    if len(words) < 4:
        raise ConfigError(f"{len(words)} arguments, expected 4 or 5\n{USAGE}")
    table = None if words[0] in NO_TABLE else _table(words[0])
    config = _file(words[1], "config_path")
    numbers = parse_range(words[2]) if devices is None else parse_devices(devices)
    mode = _mode(words[3], modes)
    rank_size = whole_number(words[4], most_digits=9) if len(words) > 4 else None
    if devices is not None and rank_size is not None:
        raise ConfigError(
            f"--devices {shortened(devices)} with RANK_SIZE={rank_size}: RANK_SIZE makes the range"
            " one of ranks; leave RANK_SIZE out and give --nnodes N, or give a range of ranks"
        )
    more = tuple(words[4 if rank_size is None else 5 :])
    return LaunchRequest(
        table=table,
        config=config,
        numbers=numbers,
        mode=mode,
        rank_size=rank_size,
        overrides=more,
        node_ips=() if node_ips is None else _parse_addresses(node_ips),
        **options,
    )


def _with_devices(words: Sequence[str], devices: str) -> list[str]:
    """Return the arguments with the list in place of the range. Raises ConfigError if both are
    given.
    """
    if len(words) > 2 and words[2].strip()[:1] in ("[", "("):
        raise ConfigError(
            f"--devices {shortened(devices)} and DEVICE_RANGE {shortened(words[2])} both name"
            " devices; leave one of them out"
        )
    return [*words[:2], devices, *words[2:]]


def _parse_addresses(text: str) -> tuple[str, ...]:
    """Return the hosts of ``--node_ips``, that of rank 0 first. Raises ConfigError."""
    found = tuple(word.strip() for word in text.split(","))
    if not all(map(may_be_host, found)):
        raise ConfigError(
            f"--node_ips {shortened(text)!r}: expected addresses with commas between, without"
            " ports, such as 10.0.0.1,10.0.0.2"
        )
    for address in found:
        if found.count(address) > 1:
            raise ConfigError(f"--node_ips: {shortened(address)} is there twice; name it once")
    return found


def parse_standalone(words: Sequence[str], modes: Sequence[str], **options: Any) -> LaunchRequest:
    """Return the request for one device. Raises ConfigError."""
    if len(words) < 3:
        raise ConfigError(
            f"{len(words)} arguments, expected CONFIG_PATH DEVICE_ID RUN_MODE\n{USAGE_STANDALONE}"
        )
    config = _file(words[0], "config_path")
    device = whole_number(words[1], most_digits=9)
    if device is None:
        problem = "is too large" if re.fullmatch("[0-9]+", words[1]) else "is not a number"
        raise ConfigError(f"device_id={shortened(words[1])} {problem}")
    overrides = (f"context.device_id={device}", *words[3:])
    return LaunchRequest(
        config=config,
        numbers=range(device, device + 1),
        mode=_mode(words[2], modes),
        overrides=overrides,
        **options,
    )


def is_asked(name: str) -> bool:
    """Tell whether a variable such as DRY_RUN is set to anything but a word for no."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "n", "off", "false")


def absolute(word: str) -> Path:
    """Make a path absolute as realpath -m does, but keep links: a config's base files lie beside
    it.
    """
    return Path(os.path.abspath(word))


def _file(word: str, name: str) -> Path:
    path = absolute(word)
    if not path.is_file():
        raise ConfigError(f"{name}={path} is not a file")
    return path


def _table(word: str) -> Path:
    """Return the path of the rank table, which a platform may not have mounted yet in a pod."""
    if in_pod(os.environ) and absolute(word).parent.is_dir() and not os.path.lexists(word):
        return absolute(word)
    return _file(word, "RANK_TABLE_FILE")


def _mode(word: str, modes: Sequence[str]) -> str:
    if word not in modes:
        raise ConfigError(f"RUN_MODE is {word!r}, expected {', '.join(modes[:-1])} or {modes[-1]}")
    return word

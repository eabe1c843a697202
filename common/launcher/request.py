"""What a user asks run_distribute.sh and run_standalone.sh for, checked as far as words go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cluster.places import parse_range
from common.errors import ConfigError
from common.whole_numbers import shortened, whole_number

NO_TABLE = ("none", "-")
USAGE = (
    "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE] [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE]              for one machine\n"
    "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE] [CONFIG_PATH] [DEVICE_RANGE] [RUN_MODE] [RANK_SIZE]  for several machines\n"
    "section.key=value words may follow; RANK_TABLE_FILE none: no rank table; more: bash run_distribute.sh --help"
)
USAGE_STANDALONE = "Usage Help: bash run_standalone.sh [CONFIG_PATH] [DEVICE_ID] [RUN_MODE] [section.key=value ...]"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The named options, as --help explains them. argv: all words, to start the same once more."""

    argv: tuple[str, ...]
    log_dir: Path | None = None
    quiet: bool = False
    no_pinning: bool = False
    master: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    hosts: str | None = None
    ssh: bool = False
    all_ranks: bool = False
    accelerator: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the positional words ask for.

    table: its path; None for none. numbers: devices, or with rank_size global ranks.
    """

    table: Path | None
    config: Path
    numbers: range
    mode: str
    rank_size: int | None
    overrides: tuple[str, ...]


def parse_distribute(words: Sequence[str], modes: Sequence[str]) -> LaunchRequest:
    """Raises ConfigError, in the order of the checks that users of run_distribute.sh know."""
    if len(words) < 4:
        raise ConfigError(f"{len(words)} arguments, expected 4 or 5\n{USAGE}")
    table = None
    if words[0] not in NO_TABLE:
        table = absolute(words[0])
        if not table.is_file():
            raise ConfigError(f"RANK_TABLE_FILE={table} is not a file")
    config = _config_path(words[1])
    numbers = parse_range(words[2])
    _check_mode(words[3], modes)
    more = list(words[4:])
    rank_size = whole_number(more[0], most_digits=9) if more else None
    more = more if rank_size is None else more[1:]
    return LaunchRequest(table=table, config=config, numbers=numbers, mode=words[3], rank_size=rank_size, overrides=tuple(more))


def parse_standalone(words: Sequence[str], modes: Sequence[str]) -> LaunchRequest:
    """Return the request for one device. Raises ConfigError."""
    if len(words) < 3:
        raise ConfigError(f"{len(words)} arguments, expected CONFIG_PATH DEVICE_ID RUN_MODE\n{USAGE_STANDALONE}")
    config = _config_path(words[0])
    device = whole_number(words[1], most_digits=9)
    if device is None:
        raise ConfigError(f"device_id={shortened(words[1])} is not a number")
    _check_mode(words[2], modes)
    return LaunchRequest(
        table=None,
        config=config,
        numbers=range(device, device + 1),
        mode=words[2],
        rank_size=None,
        overrides=(f"context.device_id={device}", *words[3:]),
    )


def is_asked(name: str) -> bool:
    """Whether a variable such as DRY_RUN is set to anything but a word for no."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "n", "off", "false")


def absolute(word: str) -> Path:
    """As realpath -m, but a link stays a link: a config's base files lie beside it."""
    return Path(os.path.abspath(word))


def _config_path(word: str) -> Path:
    path = absolute(word)
    if not path.is_file():
        raise ConfigError(f"config_path={path} is not a file")
    return path


def _check_mode(word: str, modes: Sequence[str]) -> None:
    if word not in modes:
        raise ConfigError(f"RUN_MODE is {word!r}, expected {', '.join(modes[:-1])} or {modes[-1]}")

"""Contiguous parts of a corpus, each preprocessed by a process of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

MAX_SHARDS = 99_999
_BLOCKS = 16
"""Blocks of a shard, at least, as far as documents allow."""
_MIN_BLOCK = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``number`` (from 1) of ``count``, by the bytes of the corpus on disk."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def part_of(self, at: int, total: int) -> int:
        """Return the part, from 1, of a block before which ``at`` of ``total`` bytes were read."""
        return min(at * self.count // max(total, 1), self.count - 1) + 1

    def block_bytes(self, total: int, most: int) -> int:
        """Return the size of blocks, which is equal in all parts."""
        return min(most, max(_MIN_BLOCK, total // (_BLOCKS * self.count)))

    def prefix(self, prefix: Path) -> Path:
        """Return the prefix of this part's files."""
        return prefix.with_name(f"{prefix.name}.shard-{self.number:05d}-of-{self.count:05d}")


def parse_shard(text: str, environ: Mapping[str, str]) -> Shard:
    """Return the part that ``2/8`` names, or ``slurm`` by the variables of an array job.

    Raises ConfigError.
    """
    if text == "slurm":
        try:
            task, first, count = (int(environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT"))
        except (KeyError, ValueError):
            raise ConfigError(
                "--shard slurm: SLURM_ARRAY_TASK_ID, _MIN and _COUNT are not set; start it by"
                " sbatch --array=1-8, or give --shard 1/8"
            ) from None
        number = task - first + 1
        if number > count:
            raise ConfigError(
                f"--shard slurm: task {task} of {count} that begin at {first}; number the tasks"
                " without gaps, such as --array=1-8"
            )
    elif found := re.fullmatch(r"(\d{1,6})/(\d{1,6})", text):
        number, count = int(found[1]), int(found[2])
    else:
        raise ConfigError(f"--shard {text}: expected I/N, such as 2/8, or slurm")
    if not 1 <= number <= count <= MAX_SHARDS:
        raise ConfigError(f"--shard {number}/{count}: expected a number from 1 to N, and N up to {MAX_SHARDS}")
    return Shard(number=number, count=count)

"""Description of one process of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start. environment: added to the variables of this process.

    cores: those to pin it to; empty for none. name: set for a helper beside the ranks, such as
    MindSpore's scheduler, which sends no heartbeat and is ended after the ranks. folder: of its
    logs, within the job's. title: its name in messages; empty for ``rank 3`` or its name. log_link:
    another name of its log, in the job's folder.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    name: str = ""
    folder: str = ""
    title: str = ""
    log_link: str = ""

    def __str__(self) -> str:
        return self.title or self.name or f"rank {self.rank}"

    @property
    def log_folder(self) -> str:
        return self.folder or f"mf_parallel{f'_{self.name}' if self.name else self.rank}"

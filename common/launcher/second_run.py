"""Whether another run writes into a folder, asked before the ranks of a second one are started."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from pathlib import Path

from common.errors import ConfigError
from common.training.setup import LOCK


def require_free_folder(folder: Path) -> None:
    """Raise ConfigError where a run holds ``folder``, as ``owned_folder`` does on its rank 0. Nothing is written.

    A file system without locks holds nobody back: there rank 0 decides.
    """
    with suppress(OSError), (folder / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that ask do not see each other
        except BlockingIOError:
            raise ConfigError(f"output_dir={folder}: another run is writing here; wait for it or choose another folder") from None

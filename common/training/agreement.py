"""Agreement of all ranks on one checkpoint, which every host must find complete."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from common.checkpoint.folders import MANIFEST, read_manifest
from common.errors import CheckpointError
from common.parallel.world import WorldBase
from common.tensor_files.checksummed import file_checksum
from common.training.opened_checkpoint import Checkpoint


def identity_of(checkpoint: Checkpoint) -> str:
    """Return a fingerprint of a checkpoint, by which hosts compare the files that they see."""
    path = checkpoint.path
    try:
        if checkpoint.is_foreign:
            return fingerprint(path)
        return f"{path} {file_checksum(path / MANIFEST):08x}"
    except OSError:
        return f"{path}, not there"


def fingerprint(path: Path) -> str:
    """Return names and sizes of the files, to compare them between hosts. Raises OSError."""
    if path.parent.name == "snapshots":  # of huggingface_hub, where the name tells the content
        return path.resolve(strict=True).name
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files if file.is_file()}
    return f"{path} {sizes}"


def check_everywhere(
    world: WorldBase, checkpoint: Checkpoint | None, what: str = "the checkpoint to begin with"
) -> None:
    """Raise on every rank unless all of them read the same complete checkpoint.

    Rank 0 has compared the checksums of its choice. Among ranks that see other files, or files on
    another host, the first one compares them for all.
    """
    if world.size == 1:
        return
    world.require_equal({what: "none" if checkpoint is None else identity_of(checkpoint)})
    if checkpoint is None or checkpoint.is_foreign:
        return  # foreign files have no checksums
    views = world.gather(_view_of(checkpoint.path))
    fault = None
    if world.rank and views.index(views[world.rank]) == world.rank:
        try:
            read_manifest(checkpoint.path)
        except CheckpointError as error:
            fault = f"rank {world.rank}: {error}"
    faults = [found for found in world.gather(fault) if found is not None]
    if faults:
        raise CheckpointError(faults[0])


def _view_of(checkpoint: Path) -> Any:
    """Return a value that is equal for processes that read the same files on the same host."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        files = {path.name: path.stat() for path in checkpoint.iterdir()}
    except OSError:
        return uuid.uuid4().hex  # reads by itself, and fails then
    return host, sorted(
        (name, file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()
    )

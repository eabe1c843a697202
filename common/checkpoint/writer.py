"""Checkpoint folders: complete or absent, the newest named by ``latest``, written in a thread.

    checkpoints/latest                   the name of the newest complete folder
    checkpoints/step_00000100/
        model.safetensors                float32 weights, true vocabulary, names of
                                         common.weights.names
        optimizer.safetensors            NAME.exp_avg, NAME.exp_avg_sq or NAME.momentum_buffer
        manifest.json                    state, resolved config, tokenizer, versions; sizes and
                                         checksums of the files

Where several ranks hold different parts, each writes model.rank_00003.safetensors and optimizer.rank_00003.safetensors
with its rectangles of the tensors. Its rank_00003.json describes them, and rank 0 copies these descriptions into the
manifest when all are there.

A folder is written under a temporary name, fsynced and renamed. Then ``latest`` is replaced, and old folders are
removed last. The next writer on rank 0 removes the temporary files of one that died.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.folders import point_latest, step_of, surplus, whole_checkpoints
from common.checkpoint.manifest import MANIFEST, write_manifest
from common.errors import CheckpointError, GPT2Error, StorageError
from common.files import atomic_write, clean_up, fsync_folder, put_in_place, reading
from common.log import LOG
from common.run_folder import LostFolderError
from common.structured_files import MalformedError, parse_json
from common.tensor_files.safetensors_file import Tensors, write_safetensors
from common.weights.names import parameter_of
from common.weights.pieces import Rectangle, file_of_rank

PATIENCE_AFTER_FAILURE = 60.0
"""Seconds that rank 0 waits for the parts of others after its own run has failed, since they may be dead."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part of a snapshot that ``ranks`` write together, as rectangles that do not overlap."""

    rank: int
    ranks: int
    rectangles: Mapping[str, Rectangle]
    """Rectangles by parameter; moments have the same as their parameter."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything needed to resume a run, copied out of the framework and written while training continues."""

    files: Mapping[str, Tensors]
    """File name -> tensors by name."""
    manifest: Mapping[str, Any]
    """Plain data, including ``state``."""
    part: Part | None = None
    ready: Callable[[], None] = lambda: None
    """Function that waits until tensors which a device copies are there."""
    also_write: Callable[[Path], None] | None = None
    """Function that writes another form, called on each rank with the complete checkpoint's folder."""


class CheckpointWriter:
    """Writer that saves snapshots under ``folder`` in order, in a thread. Unless ``asynchronous``, ``save`` waits.

    It knows the checkpoints that existed at its start and those it has written. It keeps the newest
    ``keep`` of them (0: all), and the newest one whose weights are known to be good.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 0,
        asynchronous: bool = True,
        active: bool = True,
        patience: float = 3600.0,
        require_folder: Callable[[], None] = lambda: None,
        after_saving: Callable[[Path], None] | None = None,
    ) -> None:
        """Create a writer.

        active: False on ranks other than 0, which must not change the folder. patience: seconds within which all ranks
        must have written their parts after rank 0. require_folder: raises LostFolderError if the folder is no longer
        this run's. after_saving: called on rank 0 with each complete checkpoint, before the next one begins. Raises
        CheckpointError if the folder cannot be read.
        """
        self._patience = patience
        self.folder = Path(folder)
        self.require_folder = require_folder
        self._after_saving = after_saving
        self._keep = keep
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._known: set[str] = set()
        self._newest = self._good = self._sane = -1
        """Steps of the newest checkpoint, of the newest good one before it, and of the last good weights."""
        if active:
            with reading(self.folder, CheckpointError):
                clean_up(self.folder, "step_*")
            self._known = {path.name for path in whole_checkpoints(self.folder)}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, value: object, *_: object) -> None:
        """Wait for the current save. A failure here does not hide the error that ends the run."""
        if value is not None:
            self._patience = min(self._patience, PATIENCE_AFTER_FAILURE)
        try:
            self.wait()
        except GPT2Error as error:
            if value is None:
                raise
            LOG.error(str(error))

    def save(self, snapshot: Snapshot) -> Path:
        """Wait for the previous save, and begin to write ``step_<step>``.

        Raises StorageError, also for the previous save.
        """
        self.wait()
        self.require_folder()
        self._good = self._newest_good()
        self._newest = snapshot.manifest["state"]["step"]
        target = self.folder / f"step_{self._newest:08d}"

        def write() -> None:
            try:
                self._write(target, snapshot)
            except Exception as error:  # raised again in the training thread
                self._failure = error

        self._thread = threading.Thread(target=write, name="checkpoint-writer")
        self._thread.start()
        if not self._asynchronous:
            self.wait()
        return target

    def resume(self, step: int) -> None:
        """Record the checkpoint from which the run resumes as the newest and as a good one."""
        self._newest = self._sane = step

    def confirm(self, step: int) -> None:
        """Record that the weights after ``step`` are good, and so are those of earlier checkpoints."""
        self._sane = max(self._sane, step)

    def _newest_good(self) -> int:
        return self._newest if self._newest <= self._sane else self._good

    def wait(self) -> None:
        """Return when no save is in progress. Raises the error of the last save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a finished save, without waiting for a save in progress."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, target: Path, snapshot: Snapshot) -> None:
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            self.require_folder()  # otherwise the next line would create it again
            self._write_folder(temporary, snapshot)
            self.require_folder()
            if snapshot.part is None or snapshot.part.rank == 0:
                put_in_place(temporary, target)
                point_latest(target)
                self._prune(target)
        except LostFolderError:
            raise
        except (OSError, StorageError, MalformedError) as error:
            self.require_folder()
            _remove(temporary, snapshot.part)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StorageError(
                f"{target}: the checkpoint could not be written: {reason}; earlier checkpoints are whole"
            ) from error
        if snapshot.also_write is not None:
            self._wait(
                lambda: not temporary.exists() and (target / MANIFEST).is_file(),
                lambda: f"{target}: rank 0, whose log says why, has not made it whole",
            )
            snapshot.also_write(target)
        is_first = snapshot.part is None or snapshot.part.rank == 0
        if is_first and self._after_saving is not None:
            self._after_saving(target)

    def _write_folder(self, temporary: Path, snapshot: Snapshot) -> None:
        snapshot.ready()
        part = snapshot.part
        if part is None:
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, exist_ok=True)
        files: dict[str, dict[str, Any]] = {}
        for stem, tensors in snapshot.files.items():
            name = stem if part is None else file_of_rank(stem, part.rank)
            checksum = write_safetensors(temporary / name, tensors)
            files[name] = {"bytes": (temporary / name).stat().st_size, "crc32": checksum}
            if part is not None:
                files[name]["pieces"] = {tensor: part.rectangles[parameter_of(tensor)] for tensor in tensors}
        if part is not None:
            with atomic_write(temporary / f"rank_{part.rank:05d}.json", "w") as file:
                json.dump(files, file)
            if part.rank > 0:
                return
            files = self._collect_parts(temporary, part.ranks)
        write_manifest(temporary, {**snapshot.manifest, "files": files})
        fsync_folder(temporary)

    def _collect_parts(self, temporary: Path, ranks: int) -> dict[str, dict[str, Any]]:
        """Wait for all ranks, and return their descriptions. Raises StorageError naming missing ranks."""
        paths = [temporary / f"rank_{rank:05d}.json" for rank in range(ranks)]

        def absent() -> list[int]:  # what is there is complete: it was renamed
            return [rank for rank, path in enumerate(paths) if not path.is_file()]

        self._wait(lambda: not absent(), lambda: f"ranks {absent()} have not written their parts")
        files: dict[str, dict[str, Any]] = {}
        for path in paths:
            files |= parse_json(path.read_bytes())
            path.unlink()
        return files

    def _wait(self, is_done: Callable[[], bool], late: Callable[[], str]) -> None:
        """Wait, but not longer than the patience. late: what to say then."""
        began = time.monotonic()
        while not is_done():
            if time.monotonic() > began + self._patience:  # which a failure of the run shortens
                raise StorageError(f"{late()} within {self._patience:g} s")
            time.sleep(0.05)

    def _prune(self, written: Path) -> None:
        self._known.add(written.name)
        there = [name for name in self._known if (self.folder / name).is_dir()]
        for name in surplus(there, written.name, self._keep, step_of):
            if step_of(name) == self._newest_good():
                continue
            # rename first, so that a half-deleted folder never looks complete
            renamed = self.folder / f".{name}.doomed.tmp"
            os.replace(self.folder / name, renamed)
            shutil.rmtree(renamed, ignore_errors=True)
            self._known.discard(name)


def _remove(temporary: Path, part: Part | None) -> None:
    """Remove the files of this rank.

    The folder stays while others may be writing: without it they would fail too, and be blamed.
    """
    if part is None:
        shutil.rmtree(temporary, ignore_errors=True)
        return
    with suppress(OSError):
        for path in temporary.glob(f"*rank_{part.rank:05d}.*"):
            path.unlink()

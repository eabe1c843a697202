"""Files of a run at URLs: input and earlier output are copied here before it, the output back after."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from common.checkpoint.folders import LATEST, find_checkpoint, point_latest, step_of, whole_checkpoints
from common.checkpoint.manifest import MANIFEST
from common.cluster.environment import in_modelarts
from common.config.load import flatten
from common.config.schema import RunConfig
from common.errors import CheckpointError, ConfigError, StorageError, report
from common.files import atomic_write
from common.log import LOG
from common.modelarts import stores
from common.modelarts.arguments import is_url
from common.modelarts.stores import base_name, join

_DATA_KEYS = ("data.train", "data.validation")
_CHECKPOINT_KEYS = ("checkpoint.resume", "checkpoint.init_from", "checkpoint.load")
_FILE_KEYS = (
    "data.tokenizer.folder",
    "data.tokenizer.vocab_file",
    "data.tokenizer.merge_file",
    "predict.prompt_file",
    "evaluation.file",
)
_METRICS = "metrics.jsonl"
_OF_A_RANK = re.compile(r"mf_parallel(\d+)/.*|profile/.*_rank_(\d+)\.json\.gz")
"""Files of other ranks than 0, and their ranks: launchers' logs, and traces."""


def bring_files(
    config: RunConfig, overrides: Sequence[str], url: str | None, ranks: Sequence[int], environ: Mapping[str, str]
) -> list[str]:
    """Copy input, and output of an earlier start, to this host. Returns overrides that name the copies.

    url: where the output goes. ranks: whose output this process copies, see ``bring_output``. The output lies in the
    output_dir of ``overrides``, else in a folder for it: a config's own output_dir is a folder of another machine.
    """
    found = bring_input(config, environ)
    if url is not None:
        given = [
            value
            for key, _, value in (item.partition("=") for item in overrides)
            if key == "output_dir" and not is_url(value)
        ]
        folder = Path(given[-1]) if given else local_folder(url, environ).with_name("output")
        bring_output(url, folder, ranks)
        found.append(f"output_dir={folder}")
    return found


# ---- input ----


def bring_input(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Return overrides with local paths, for keys whose value is a URL.

    Raises ConfigError for a key that cannot be a URL, CheckpointError, StorageError.
    """

    def brought(url: str) -> str:
        return str(stores.pull_once(url, local_folder(url, environ)))

    found = []
    for key, value in urls(config):
        if key in _DATA_KEYS:
            local = [brought(item) if is_url(item) else item for item in value]
            text = local[0] if len(local) == 1 else json.dumps(local, ensure_ascii=False)
        elif key in _CHECKPOINT_KEYS:
            found_url = find_checkpoint_url(value)
            if found_url is None:
                raise CheckpointError(
                    f"{key}={value}: no complete checkpoint there; expected the URL of a run folder, of its"
                    " checkpoints folder or of a step_... folder"
                )
            text = brought(found_url)
        elif key in _FILE_KEYS:
            text = brought(value)
        elif key == "output_dir":
            continue
        else:
            raise ConfigError(
                f"{key}={value}: a URL cannot be written to; give a folder or file of this host,"
                " such as one in output_dir"
            )
        found.append(f"{key}={text}")
    return found


def urls(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys whose value is a URL, or a blend of data with one."""
    for key, value in flatten(config.model_dump()):
        if any(map(is_url, (value or ()) if key in _DATA_KEYS else (value,))):
            yield key, value


def find_checkpoint_url(url: str) -> str | None:
    """Return the step folder that ``latest`` names, else the newest complete one, else None.

    url: of that folder, a run folder, its checkpoints or their ``latest``, which may name another folder: a warning.
    """
    folder = url.rstrip("/").removesuffix(f"/{LATEST}")
    names = {name for name, *_ in stores.files(folder)}
    if MANIFEST in names:
        return folder
    if any(name.startswith("checkpoints/") for name in names):
        folder, names = (join(folder, "checkpoints"), {name.removeprefix("checkpoints/") for name in names})
    steps = (name.partition("/") for name in names)
    whole = [step for step, _, rest in steps if rest == MANIFEST and step_of(step) >= 0]
    whole.sort(key=step_of)
    if not whole:
        return None
    named = stores.read(join(folder, LATEST)).decode(errors="replace").strip() if LATEST in names else whole[-1]
    if named in whole:
        return join(folder, named)
    LOG.warning(
        f"{join(folder, LATEST)} names {named!r}, which is not a complete checkpoint there; using {whole[-1]} instead"
    )
    return join(folder, whole[-1])


def local_folder(url: str, environ: Mapping[str, str]) -> Path:
    """Return where a job keeps its copy of a URL: on ModelArts' large disk /cache, else among temporary files."""
    has_cache = in_modelarts(environ) and os.access("/cache", os.W_OK)
    base = Path("/cache" if has_cache else environ.get("TMPDIR") or tempfile.gettempdir())
    job = environ.get("MA_VJ_NAME") or environ.get("JOB_ID") or ""
    name = hashlib.sha256(f"{job}\n{url}".encode()).hexdigest()[:16]
    return base / f"gpt2_files_{os.getuid()}" / name / (base_name(url) or "files")


# ---- output ----


def bring_output(url: str, folder: Path, ranks: Sequence[int]) -> None:
    """Copy the output of an earlier start of the run from the URL into the run folder.

    A host without a run folder gets everything. Any other host gets only the newest checkpoint, and
    only if ``ranks`` are copied from here at the end. The host of rank 0 gets it only if its own is
    older, because another host had rank 0 then. Raises StorageError.
    """
    if not folder.exists():
        if stores.files(url):
            stores.pull_once(url, folder)
        return
    newest = find_checkpoint_url(url) if ranks else None
    if newest is None:
        return
    checkpoints = folder / "checkpoints"
    mine = max((step_of(path.name) for path in whole_checkpoints(checkpoints)), default=0)
    here = checkpoints / base_name(newest)
    if 0 in ranks:
        if mine >= step_of(here.name):
            return
        LOG.warning(
            f"{folder} holds {f'step {mine}' if mine else 'no checkpoint'}; {newest} is newer, and copied there"
        )
    held = b""
    with suppress(OSError):
        held = (here / MANIFEST).read_bytes()
    if not held or held != stores.read(join(newest, MANIFEST)):
        stores.pull_once(newest, here)
    if 0 in ranks:
        if stores.files(join(url, _METRICS)):
            with atomic_write(folder / _METRICS) as file:
                file.write(stores.read(join(url, _METRICS)))
        point_latest(here)


def send_checkpoint(url: str, folder: Path) -> None:
    """Copy the checkpoint that a restart resumes from to the URL, unless it is there already.

    Hosts with a disk of their own get it by ``bring_output``. Raises StorageError.
    """
    newest = find_checkpoint(folder)
    if newest is None:
        return
    wanted: tuple[str, ...] = (f"checkpoints/{LATEST}",)
    manifest = join(url, f"checkpoints/{newest.name}/{MANIFEST}")
    is_there = bool(stores.files(manifest))
    if not is_there or stores.read(manifest) != (newest / MANIFEST).read_bytes():
        wanted += (f"checkpoints/{newest.name}/",)
    stores.push(folder, url, wanted=lambda name: name.startswith(wanted))


@contextmanager
def output_copied(url: str | None, output_dir: Path, ranks: Sequence[int]) -> Iterator[None]:
    """Copy ``output_dir`` to ``url`` when the block ends, however it ends.

    All of it is copied if rank 0 is among ``ranks``, else the files of these ranks; rank 0 has newer ones of the rest.
    A SIGTERM in the block ends the program, with a copy. Inside the training loop its own handler, which saves, comes
    first. Raises StorageError if the copy fails. An error of the block itself takes precedence; the failed copy is then
    reported on standard error.
    """
    if url is None or not ranks:
        yield
        return

    def push() -> None:
        def is_wanted(name: str) -> bool:
            rank = _OF_A_RANK.fullmatch(name)
            return 0 in ranks or (rank is not None and int(rank[1] or rank[2]) in ranks)

        stores.push(output_dir, url, wanted=is_wanted)

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)  # not StopRequested, which means that all ranks have agreed

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        try:
            yield
        finally:
            # the remaining time is for the copy
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except BaseException:
        try:
            push()
        except (StorageError, ConfigError) as error:
            report(error)
        raise
    else:
        push()
    finally:
        signal.signal(signal.SIGTERM, previous)

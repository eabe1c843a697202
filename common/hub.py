"""Models by name: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION, on the Hugging Face hub.

huggingface_hub fetches them; its variables apply (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from common.log import LOG
from common.paths import install, looked_in, require_package

_WORD = r"[A-Za-z0-9_][\w.-]{0,95}"
_EXPLICIT = re.compile(rf"hf:/+((?:{_WORD}/)?{_WORD})(?:@(\w[\w./-]*))?", re.ASCII)
"""Repository and revision; a Path makes hf:/ of hf://."""
_SNAPSHOT = re.compile(r".*/models--(\w[\w.-]*)/snapshots/([0-9a-f]{40})", re.ASCII)
"""A folder in huggingface_hub's cache, as runs record it."""
_BARE = re.compile(rf"({_WORD})/\w[\w-]{{0,95}}(?:\.\d[\w-]*)*", re.ASCII)
"""OWNER/NAME without the ending of a file, such as a/model.safetensors."""
_FOLDERS_HERE = ("output", "data")
"""Folders of our own commands. Their names are never looked up on the hub."""

SMALL = (
    "*config.json", "*token*", "*vocab*", "*merges*", "encoder.json", "*.model", "chat_template*",
)  # fmt: skip
"""Files of the model's sizes, its tokenizer and its way to generate."""
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)
"""Files of weights, the second row only where there are none of the first. One of the first two
files of a row is always there.
"""

COMMITS = "GPT2_HUB_COMMITS"
"""Variable with the commit of each name that this process has looked up. The ranks that it starts
inherit it, so that they read the same commit without asking again.
"""


def located(path: Path, *, weights: bool = True) -> Path:
    """Return the folder of a model that ``path`` names on the hub, after fetching what is missing there, and any other
    path as it is.

    A name is hf://..., or a folder in huggingface_hub's cache that is no longer there, or with ``weights`` OWNER/NAME
    where neither this path nor OWNER exists. weights: fetch these too, else only the tokenizer's files, and return a
    lost folder that cannot be fetched again as it is. Processes of one host that fetch the same file wait for each
    other. Raises ConfigError for a malformed name, and CheckpointError for a model that cannot be fetched.
    """
    name = _parse(path, weights)
    if name is None:
        return path
    repository, revision, said = name
    key = f"{repository}@{revision}"
    known = dict(word.split("=") for word in os.environ.get(COMMITS, "").split())
    try:
        require_package("huggingface_hub", extra="hub", purpose="which fetches models by name")
        folder = _fetch(repository, known.get(key, revision), weights, key in known)
    except Exception as error:  # of the network, of the disk, of the library
        if not (weights or path.as_posix().startswith("hf:")):
            return path
        raise CheckpointError(f"{said}: {_reason(error, repository, revision)}") from None
    if weights and not _has_weights(folder):
        raise CheckpointError(
            f"{said}: no weights there that are read by name: expected model.safetensors or"
            f" pytorch_model.bin at the top of the repository (looked in {folder})"
        )
    if key not in known:
        LOG.info(f"hf://{repository} at commit {folder.name} is in {folder}")
        os.environ[COMMITS] = f"{os.environ.get(COMMITS, '')} {key}={folder.name}"
    return folder


def _parse(path: Path, bare: bool) -> tuple[str, str, str] | None:
    """Return repository, revision and the beginning of an error, None for a path. bare: take OWNER/NAME too."""
    text = path.as_posix()
    if text.startswith("hf:"):
        found = _EXPLICIT.fullmatch(text)
        if found is None or ".." in text:
            raise ConfigError(
                f"{text}: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, such as hf://openai-community/gpt2"
            )
        return found[1], found[2] or "main", f"hf://{text[3:].lstrip('/')}"
    if found := _SNAPSHOT.fullmatch(text):
        repository, revision = found[1].replace("--", "/", 1), found[2]
    elif bare and (found := _BARE.fullmatch(text)) and found[1] not in _FOLDERS_HERE:
        repository, revision, path = text, "main", path.parent
    else:
        return None
    absent = f"{text}: there is no such file or folder{looked_in(text)}"
    return None if path.exists() else (repository, revision, f"{absent}; as hf://{repository}")


def _fetch(repository: str, revision: str, weights: bool, is_here: bool) -> Path:
    """Return the folder of a revision after fetching what is missing.

    is_here: look in the cache first, and ask the hub only for what it lacks.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    folder = Path()
    for files in _WEIGHTS if weights else ((),):
        wanted = {"allow_patterns": [*SMALL, *files], "ignore_patterns": ["*/*"]}
        get: Any = partial(snapshot_download, repository, revision=revision, **wanted)
        if is_here:
            try:
                folder = Path(get(local_files_only=True))
            except LocalEntryNotFoundError:
                is_here = False
        if not is_here:  # one by one in this thread, which Ctrl-C stops; snapshot_download would wait for its threads
            missing: list[Any] = []
            with disable_progress_bars(), suppress(DryRunError):
                missing = [file for file in get(dry_run=True) if file.will_download]
            for file in missing:
                hf_hub_download(repository, file.filename, revision=file.commit_hash)
            with disable_progress_bars():
                folder = Path(get())  # which says why, where nothing can be read
        revision = folder.name
        if _has_weights(folder):
            break
    return folder


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for files in _WEIGHTS for name in files[:2])


def _reason(error: Exception, repository: str, revision: str) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, ImportError):  # tokenizers is content with an older one
        return f"the package huggingface_hub is too old ({error}); {install('hub')}"
    from huggingface_hub import constants, errors, get_token

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    give = "give a token that may read it (HF_TOKEN, or hf auth login)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        lacks = f"{cache} does not hold all of its files"
        copy = "copy that folder from a host that has fetched the model"
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set, and {lacks}; unset it, or {copy}"
        cause = error.__cause__
        if not isinstance(cause, errors.HfHubHTTPError):
            why = _first_line(cause or error)
            return f"{hub} does not answer ({why}), and {lacks}; check the network, or {copy}"
        error = cause
    if isinstance(error, errors.GatedRepoError):
        return f"only some accounts may read it; ask at {hub}/{repository}, and {give}"
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "that the token may read it" if get_token() else f"or {give}"
        return f"{hub}/{repository} does not exist, or is private; check the name, {what}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {revision} there; give one of {hub}/{repository}/commits/main"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"{hub} refuses the token ({error.response.status_code}); {give}"
    return f"it could not be fetched into {cache}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

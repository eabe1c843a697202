"""Models by name: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION, on the Hugging Face hub.

huggingface_hub fetches them; its variables apply (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.log import LOG
from common.packages import require_package
from common.paths import looked_in

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


@dataclass(frozen=True)
class _Name:
    repository: str
    revision: str
    said: str
    """Beginning of a message about it."""


def is_name(path: Path) -> bool:
    """Tell whether a path names a model on the hub: as hf://..., as a folder in huggingface_hub's
    cache that is no longer there, or as OWNER/NAME where neither this path nor OWNER exists.

    Raises ConfigError for hf:// with anything else behind it.
    """
    return _parse(path) is not None


def located(path: Path, *, weights: bool = True) -> Path:
    """Return the folder of a model that ``path`` names on the hub, after fetching what is missing
    there, and any other path as it is.

    weights: fetch these, else only the tokenizer's files, and only for hf://. Processes of one host
    that fetch the same file wait for each other. Raises ConfigError for a malformed name or without
    huggingface_hub, and CheckpointError for a model that cannot be fetched.
    """
    name = _parse(path) if weights or path.as_posix().startswith("hf:") else None
    if name is None:
        return path
    try:
        require_package("huggingface_hub", extra="hub", purpose="which fetches models by name")
    except ConfigError as error:
        raise ConfigError(f"{name.said}: {error}") from None
    key = f"{name.repository}@{name.revision}"
    known = dict(word.split("=") for word in os.environ.get(COMMITS, "").split())
    try:
        folder = _fetch(name.repository, known.get(key, name.revision), weights, key in known)
    except Exception as error:  # of the network, of the disk, of the library
        raise CheckpointError(f"{name.said}: {_reason(error, name)}") from None
    if weights and not _has_weights(folder):
        raise CheckpointError(
            f"{name.said}: no weights there that are read by name: expected model.safetensors or"
            f" pytorch_model.bin at the top of the repository (looked in {folder})"
        )
    if key not in known:
        LOG.info(f"hf://{name.repository} at commit {folder.name} is in {folder}")
        os.environ[COMMITS] = f"{os.environ.get(COMMITS, '')} {key}={folder.name}"
    return folder


def _parse(path: Path) -> _Name | None:
    text = path.as_posix()
    if text.startswith("hf:"):
        found = _EXPLICIT.fullmatch(text)
        if found is None or ".." in text:
            raise ConfigError(
                f"{text}: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, such as"
                " hf://openai-community/gpt2"
            )
        repository, revision = found[1], found[2] or "main"
        return _Name(
            repository, revision, f"hf://{repository}" + (f"@{found[2]}" if found[2] else "")
        )
    if found := _SNAPSHOT.fullmatch(text):
        repository, revision = found[1].replace("--", "/", 1), found[2]
        said = f"hf://{repository}@{revision}"
    elif (found := _BARE.fullmatch(text)) and found[1] not in _FOLDERS_HERE:
        repository, revision, said = text, "main", f"hf://{text}"
        path = path.parent
    else:
        return None
    if path.exists():
        return None
    return _Name(
        repository,
        revision,
        f"{text}: there is no such file or folder{looked_in(text)}; as {said}",
    )


def _fetch(repository: str, revision: str, weights: bool, is_here: bool) -> Path:
    """Return the folder of a revision after fetching what is missing.

    is_here: look in the cache first, and ask the hub only for what it lacks.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    folder = Path()
    for files in _WEIGHTS if weights else ((),):
        wanted = {"allow_patterns": [*SMALL, *files], "ignore_patterns": ["*/*"]}
        get = partial(snapshot_download, repository, revision=revision, **wanted)
        if is_here:
            try:
                folder = Path(get(local_files_only=True))
            except LocalEntryNotFoundError:
                is_here = False
        if not is_here:
            with nullcontext() if sys.stderr.isatty() else disable_progress_bars():
                folder = Path(get())
        revision = folder.name
        if _has_weights(folder):
            break
    return folder


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for files in _WEIGHTS for name in files[:2])


def _reason(error: Exception, name: _Name) -> str:
    """Return why a model could not be fetched, and what to do."""
    from huggingface_hub import constants, errors, get_token

    page, cache = f"{constants.ENDPOINT}/{name.repository}", constants.HF_HUB_CACHE
    give = "a token that may read it (HF_TOKEN, or hf auth login)"
    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return (
                f"HF_HUB_OFFLINE is set, and {cache} does not hold all of its files; unset it, or"
                " copy that folder from a host that has fetched the model"
            )
        if not isinstance(cause, errors.HfHubHTTPError):
            return (
                f"{constants.ENDPOINT} does not answer ({_first_line(cause or error)}), and"
                f" {cache} does not hold all of its files; check the network and HTTPS_PROXY, or"
                " copy that folder from a host that has fetched the model"
            )
        error = cause
    if isinstance(error, errors.GatedRepoError):
        return f"its owner lets only some accounts read it; ask at {page}, and give {give}"
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "that the token may read it" if get_token() else f"or give {give}"
        return f"{page} does not exist, or is private; check the name, {what}"
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"it has no revision {name.revision}; give a branch, a tag or a commit, as"
            f" {page}/commits/main lists them"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"{constants.ENDPOINT} refuses the token ({error.response.status_code}); give {give}"
    return f"it could not be fetched into {cache}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

"""Find the parts of a language model at a path: format of the weights, sizes, tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import MANIFEST, read_manifest
from common.config.resolved import ResolvedModel
from common.conversion.export import FORMAT_VERSION, RECORD
from common.errors import CheckpointError, ConfigError, TokenizerError
from common.files import reading
from common.hub import located
from common.structured_files import read_json_mapping, shown
from common.systems.hugging_face.weights import CONFIG, read_config
from common.systems.strangers import stranger_at
from common.systems.table import FORMATS, detect, explain
from common.systems.weights import checked_model
from common.tokenizer import Tokenizer, load_tokenizer
from common.tokenizer.folder import VOCABULARIES
from common.training.data import describe_tokenizer

PROGRAMS = {
    "onnx": ("onnx", "common.inference.runner:open_onnx"),
    "pt2": ("torch", "torch_gpt2.export:open_program"),
    "mindir": ("mindspore", "mindformers_gpt2.export:open_mindir"),
}
"""Formats of exports that run without conversion: the backend that runs each, and the function that opens it. Others
are weights, which a backend loads.
"""
_OWN = "torch_gpt2"
_OF_HUGGING_FACE = (".safetensors", ".bin", ".json")
"""Endings of files that may be given in place of their folder."""


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    """Path of the weights: a checkpoint, a folder or a file."""
    format: str
    """A key of ``FORMATS`` or of ``PROGRAMS``."""
    model: ResolvedModel
    tokenizer: Mapping[str, Any]
    """Kind, vocab_size, sha256 and paths of the tokenizer of the training, as far as known."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The config of the run, where one is known."""

    @property
    def is_program(self) -> bool:
        return self.format in PROGRAMS

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def find_source(path: Path, *, verify: bool = False) -> Source:
    """Look at a run folder, a checkpoint, an export, weights of another system, or a model by name.

    verify: compare the SHA-256 of the files of an export. Raises CheckpointError and ConfigError
    if none of these is there, or if it is broken.
    """
    path = located(path)
    folder = path.parent
    if path.is_file() and (
        any((folder / name).is_file() for name in (RECORD, MANIFEST))
        or (path.name.endswith(_OF_HUGGING_FACE) and FORMATS["hf"].detects(folder))
    ):
        path = folder
    if (path / RECORD).is_file():
        return _of_export(path, verify=verify)
    if (checkpoint := find_checkpoint(path)) is not None:
        manifest = read_manifest(checkpoint, checksums=False)
        run = manifest["config"]
        return Source(
            path=checkpoint,
            format=_OWN,
            model=checked_model(checkpoint / MANIFEST, run.get("model", {})),
            tokenizer=((run.get("data") or {}).get("tokenizer") or {}) | (manifest.get("tokenizer") or {}),
            run=run,
        )
    try:
        format = detect(path)
    except ConfigError:
        reason = stranger_at(path) or (
            "expected a run folder, a checkpoint, an export, or weights that tools/convert_weight.py reads"
            if path.exists()
            else explain(path, "a model")
        )
        raise CheckpointError(f"{path}: no model here: {reason}") from None
    if format == "onnx":  # a graph beside transformers' config.json, as optimum writes it
        model = read_config((path if path.is_dir() else path.parent) / CONFIG)
        return Source(path=path, format="onnx", model=model, tokenizer={})
    if (opened := FORMATS[format].open) is None:
        raise CheckpointError(f"{path}: {explain(path, 'a model')}")
    with reading(path, CheckpointError):
        weights = opened(path)
    run, record = (weights.run or {}).get("config", {}), weights.tokenizer or {}
    return Source(path=weights.path, format=format, model=weights.model, tokenizer=record, run=run)


def _of_export(folder: Path, *, verify: bool) -> Source:
    record = read_export(folder, verify=verify)
    format = record["format"]
    if format not in (*PROGRAMS, *(name for name, each in FORMATS.items() if each.open)):
        raise CheckpointError(
            f"{folder / RECORD}: format {format!r} is not run here; expected"
            f" {', '.join(PROGRAMS)} or weights; run llama.cpp for gguf, or update the toolkit"
        )
    return Source(
        path=folder,
        format=format,
        model=checked_model(folder / RECORD, record["model"]),
        tokenizer=record.get("tokenizer") or {},
        run={name: record.get(name) for name in ("precision", "predict")},
    )


def open_tokenizer(source: Source, given: str | os.PathLike[str] | Tokenizer | None) -> Tokenizer:
    """Load the given tokenizer, else the files beside the weights, else those of the training.

    Raises TokenizerError unless it fits the model.
    """
    if isinstance(given, str | os.PathLike):
        tokenizer = load_tokenizer(None, located(Path(given), weights=False), model=source.path)
    elif given is not None:
        tokenizer = given
    else:
        files = tokenizer_files(source)
        if files is None:
            raise TokenizerError(
                f"{source.path}: no files of a tokenizer beside the model, and it names none; copy"
                " vocab.json and merges.txt (or other tokenizer files) there, or name their folder"
            )
        vocabulary = files["vocab_file"] or files["folder"] or ""
        tokenizer = load_tokenizer(files["type"], vocabulary, files["merge_file"], model=source.path)
    require_same_tokenizer(source, describe_tokenizer(tokenizer))
    return tokenizer


def require_same_tokenizer(source: Source, record: Mapping[str, Any]) -> None:
    """Raise TokenizerError unless a tokenizer fits the model and is that of its training, if known.

    record: kind, vocab_size and sha256 of the tokenizer.
    """
    size, trained = source.model.vocab_size, source.tokenizer
    if record["vocab_size"] > size:
        raise TokenizerError(
            f"{source.path}: the model has {size} tokens and the tokenizer"
            f" {record['vocab_size']} ({record['kind']}); give the one it was trained with"
        )
    if trained.get("sha256", record["sha256"]) != record["sha256"]:
        raise TokenizerError(
            f"{source.path}: trained with tokenizer {trained.get('kind')} of {trained.get('vocab_size')} tokens"
            f" (sha256 {str(trained['sha256'])[:12]}), the one given is {record['kind']} of {record['vocab_size']}"
            f" tokens (sha256 {record['sha256'][:12]}); give the files it was trained with"
        )


def tokenizer_files(source: Source) -> dict[str, str | None] | None:
    """Return the section data.tokenizer of a source, or None if no files are known.

    Files beside the weights come before those of the training.
    """
    record = source.tokenizer
    found = dict.fromkeys(("type", "folder", "vocab_file", "merge_file"))
    found["type"] = record.get("kind") or record.get("type")
    if any((source.folder / name).is_file() for name in VOCABULARIES):
        return found | {"folder": str(source.folder)}
    names = {name: record.get(name) for name in ("folder", "vocab_file", "merge_file")}
    if not (names["folder"] or names["vocab_file"]):
        return None
    return found | {name: str(_still_there(Path(str(file)), source.folder)) for name, file in names.items() if file}


def _still_there(path: Path, folder: Path) -> Path:
    """Return the path of a run's file. A relative path is looked up in the working directory, then
    in the folders above the run. A model's folder that came from the hub is fetched again.
    """
    if path.is_absolute() or path.exists():
        return located(path, weights=False)
    places = (above / path for above in folder.resolve().parents)
    return next((place for place in places if place.exists()), path)


def read_export(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return the content of the ``export.json`` that ``--run_mode export`` writes. Its files are
    all there with their sizes.

    verify: compare their SHA-256 too. Raises CheckpointError.
    """
    path = folder / RECORD
    record = read_json_mapping(path, error=CheckpointError)
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {shown(version)}, this program reads {FORMAT_VERSION};"
            " export the checkpoint again with this version, or update the toolkit"
        )
    try:
        files = {name: (file["bytes"], file["sha256"]) for name, file in record["files"].items()}
        is_whole = bool(files) and isinstance(record["model"], dict) and bool(record["format"])
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{path}: is broken; copy the folder again, or export again")
    for name, (size, sha256) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, {RECORD} names it; copy the whole folder, or export again")
        if (found := path.stat().st_size) != size:
            raise CheckpointError(
                f"{path}: {found} bytes, {RECORD} says {size}; copy the folder again, or export again"
            )
        if not verify:
            continue
        with reading(path, CheckpointError), path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != sha256:
            raise CheckpointError(f"{path}: its bytes have changed since it was exported; copy the folder again")
    return record

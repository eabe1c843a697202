"""Preprocess corpora into MindRecord, by way of .bin/.idx pairs in a temporary folder beside the
output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from common.dataset.mindrecord import EXTENSION
from common.dataset.mindrecord_output import earlier_files
from common.dataset.preprocess import PreprocessOptions, Progress, preprocess
from common.dataset.samples import GPTDataset
from common.dataset.token_files import with_extension
from common.errors import ConfigError, StorageError
from common.files import temporary_folder
from common.paths import install


def preprocess_mindrecord(
    options: PreprocessOptions,
    seq_length: int,
    shards: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[list[Any], Progress]:
    """Write a set of ``shards`` files for each key, as ``preprocess`` writes pairs. Returns a
    ``WrittenMindRecord`` of mindformers_gpt2 for each.

    Raises ConfigError too if MindSpore, which writes the files, is not installed.
    """
    writer = _writer()
    prefix = options.output_prefix
    writer.check_mindrecord(prefix, shards)
    for key in {*options.json_keys, "text"}:  # plain text has only this key, whatever was asked for
        options.keep_inputs(earlier_files(with_extension(options.prefix_of(key), EXTENSION)))
    with _pairs_folder(prefix) as folder:
        result = preprocess(replace(options, output_prefix=folder / prefix.name), on_progress)
        for pair in result.prefixes:  # check all, before the first set is written
            GPTDataset(
                pair,
                split="train",
                split_weights=(1, 0, 0),
                seq_length=seq_length,
                seed=0,
                shuffle=False,
            )
        sets = [
            writer.write_mindrecord(
                pair, prefix.with_name(f"{pair.name}{EXTENSION}"), seq_length, shards
            )
            for pair in result.prefixes
        ]
        return sets, result.progress


@contextmanager
def _pairs_folder(prefix: Path) -> Iterator[Path]:
    """Yield a temporary folder for the pairs. Raises StorageError if the disk fails."""
    try:
        with temporary_folder(prefix.with_name(f"{prefix.name}.pairs")) as folder:
            yield folder
    except OSError as error:
        raise StorageError(f"{prefix}: could not be written: {error.strerror or error}") from error


def _writer() -> ModuleType:
    os.environ.setdefault("GLOG_v", "3")  # MindSpore warns of absent devices
    try:
        return import_module("mindformers_gpt2.mindrecord")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mindspore":
            raise
        raise ConfigError(
            "--format mindrecord is written by MindSpore, which is not installed; install it with:"
            f" {install('mindspore')}, or leave the option out: both backends train from"
            " .bin/.idx pairs too"
        ) from None

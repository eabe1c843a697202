"""File of an evaluation, and its result in the run folder and in the log."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.schema import EvaluationConfig
from common.dataset.blocks import KEY_ADVICE, read_blocks
from common.dataset.corpus import open_corpus
from common.dataset.documents import documents_of
from common.errors import ConfigError, DataError
from common.evaluation.rows import ScoredRow, Scores
from common.files import atomic_write
from common.log import LOG
from common.parallel.run import Run
from common.paths import looked_in


@dataclass(frozen=True, kw_only=True)
class EvaluationFile:
    """Documents of a file.

    texts: those with more than white space, or the whole of a plain text. is_json: whether each
    item of the file is a text. record: its path, SHA-256 and size.
    """

    path: Path
    texts: list[str]
    is_json: bool
    record: dict[str, Any]


def find_evaluation_file(config: EvaluationConfig) -> Path:
    """Return evaluation.file. Raises ConfigError without it, and DataError for a bad path."""
    if config.file is None:
        raise ConfigError(f"evaluation.task={config.task} needs a file; set evaluation.file=PATH")
    path = Path(config.file)
    if not path.is_file():
        found = "is not a file" if path.exists() else f"not found{looked_in(path)}"
        raise DataError(f"evaluation.file={path}: {found}; check the path")
    return path


def read_evaluation_file(config: EvaluationConfig) -> EvaluationFile:
    """Read evaluation.file whole.

    Raises as ``find_evaluation_file`` does, and DataError, with line and column, if it cannot be read or holds no text.
    """
    path = find_evaluation_file(config)
    texts: list[str] = []
    try:
        corpus = open_corpus(path)
        for block in read_blocks(corpus, "file", ("text",)):
            for documents in documents_of(block, ("text",)):
                texts += documents.written()
    except DataError as error:
        said = str(error).replace(KEY_ADVICE, "; evaluation reads the field text, rename yours")
        raise DataError(f"evaluation.file={said}") from None
    if not texts:
        raise DataError(f"evaluation.file={path}: holds nothing but white space; expected text")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    record = {"file": str(path), "sha256": sha256, "bytes": path.stat().st_size}
    return EvaluationFile(path=path, texts=texts, is_json=corpus.format != "text", record=record)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Figures of one task, with the protocol by which they were measured.

    file_name: of the task's own file. record: content of this file. lines: text for the log.
    """

    file_name: str
    record: dict[str, Any]
    lines: list[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTask:
    """A task on the rows of a file. result: makes the figures from the scores of all rows."""

    tokenizer_record: dict[str, Any]
    rows: list[ScoredRow]
    result: Callable[[Scores], EvaluationResult]
    unit: str
    """Name of a row in the progress bar."""


def report(config: Run, checkpoint: Path, result: EvaluationResult) -> None:
    """Write the result into the run folder, and print it."""
    target = Path(config.output_dir) / result.file_name
    # JSON has no word for infinity, which is the perplexity of an untrained model on long words.
    record = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in result.record.items()
    }
    with atomic_write(target, "w") as file:
        json.dump({"checkpoint": str(checkpoint), **record}, file, indent=1, ensure_ascii=False)
    LOG.info(f"checkpoint {checkpoint}")
    for line in result.lines:
        LOG.info(line)
    LOG.info(f"written to {target}")


def table(rows: dict[str, float | None]) -> list[str]:
    """Return names and figures in two columns, without figures that are None."""
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {value:>14,.6f}" for name, value in rows.items() if value is not None]

"""Record of the origin of a .bin/.idx pair, in PREFIX.meta.json.

It is optional for readers, because pairs written by Megatron have none.

The vocabularies of the data, of data.tokenizer and of the model are compared before the first step.

Contiguous parts of a corpus (``Shard``) are each preprocessed by a process of its own, and recorded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from common.files import atomic_write
from common.structured_files import read_json_mapping

METADATA_EXTENSION = ".meta.json"
SHARD_OPTION = "shard"
"""Key of ``Metadata.options`` that names the part of a corpus, such as 2/8."""
_FORMAT = "gpt2-toolkit dataset"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Content of a PREFIX.meta.json.

    tokenizer: its kind. tokenizer_sha256: digest of its vocabulary. eod_id: None if no
    end-of-document token was appended.
    documents, sequences, tokens: counts in the pair. empty_documents: texts without a token.
    sources: name without folder, bytes on disk and format of each input.
    options: the settings that shaped the content. The number of workers never does.
    """

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: str
    eod_id: int | None
    documents: int
    sequences: int
    tokens: int
    empty_documents: int
    sources: tuple[dict[str, Any], ...]
    options: dict[str, str | bool] = field(default_factory=dict)


def write_metadata(path: Path, metadata: Metadata) -> None:
    """Write the record beside the pair. Raises StorageError if the disk fails."""
    with atomic_write(path, "w") as file:
        json.dump({"format": _FORMAT, "version": _VERSION, **asdict(metadata)}, file, ensure_ascii=False, indent=1)
        file.write("\n")


def read_metadata(path: Path) -> Metadata | None:
    """Return the record, or None without the file.

    Raises DataError for a file that ``write_metadata`` would not write.
    """
    if not os.path.lexists(path):
        return None
    try:
        raw = read_json_mapping(path, error=DataError)
        if raw.pop("format", None) != _FORMAT or raw.pop("version", None) != _VERSION:
            raise DataError(f"{path}: format must be {_FORMAT!r} and version {_VERSION}")
        metadata = Metadata(**raw)
        eod = () if metadata.eod_id is None else (metadata.eod_id,)
        counts = (metadata.documents, metadata.sequences, metadata.tokens, metadata.empty_documents)
        if not (
            all(type(number) is int and number >= 0 for number in (*counts, metadata.vocab_size, *eod))
            and type(metadata.tokenizer) is type(metadata.tokenizer_sha256) is str
            and isinstance(metadata.options, dict)
        ):
            raise TypeError("a value is of another type")
        return replace(metadata, sources=tuple(map(dict, metadata.sources)))
    except (DataError, TypeError, ValueError) as error:
        where = "" if isinstance(error, DataError) else f"{path}: "
        raise DataError(
            f"{where}{str(error)[:200]}; the file does not describe token files: delete it (it is"
            " optional) or preprocess again"
        ) from None


PADDING = 128
"""Multiple to which tables are padded. Fewer rows than this beyond the tokens give no warning."""


def vocabulary_remarks(
    made_with: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any] | None,
    vocab_size: int,
    *,
    share_of_row: float = 0.0,
) -> list[str]:
    """Return warnings. Raises ConfigError for a tokenizer with more tokens than the model has rows,
    where the data's has not.

    made_with: kind, sha256 and vocab_size of the tokenizer of the data; None if unknown.
    tokenizer: the same facts about data.tokenizer.
    vocab_size: the model's, without padding. share_of_row: part of all parameters in one row of the
    table.
    """
    remarks = []
    if made_with is not None and tokenizer is not None and made_with["sha256"] != tokenizer["sha256"]:
        remarks.append(
            f"the data were made with {_describe(made_with)}, and data.tokenizer is {_describe(tokenizer)}: the model"
            " learns the tokens of the data, and predict with the other would be refused; set data.tokenizer to the"
            " folder of the data's, or preprocess again"
        )
        if tokenizer["vocab_size"] > vocab_size:
            raise ConfigError(remarks[0])
    record = made_with or tokenizer
    if record is not None and vocab_size > -(-record["vocab_size"] // PADDING) * PADDING:
        tokens = record["vocab_size"]
        share = f", {(vocab_size - tokens) * share_of_row:.0%} of all parameters" if share_of_row else ""
        remarks.append(
            f"model.vocab_size={vocab_size}, but the tokenizer has {tokens} tokens: no token"
            f" uses {vocab_size - tokens} rows of the embedding{share}; a new model avoids"
            f" them with model.vocab_size={tokens}"
        )
    return remarks


def _describe(record: Mapping[str, Any]) -> str:
    return f"{record['kind']} of {record['vocab_size']} tokens (sha256 {record['sha256'][:12]})"


MAX_SHARDS = 99_999


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``number`` (from 1) of ``count``, by the bytes of the corpus on disk."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def part_of(self, at: int, total: int) -> int:
        """Return the part, from 1, of a block before which ``at`` of ``total`` bytes were read."""
        return min(at * self.count // max(total, 1), self.count - 1) + 1


def parse_shard(text: str) -> Shard:
    """Return the part that ``2/8`` names. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count <= MAX_SHARDS:
        raise ConfigError(
            f"--shard {text}: expected I/N, such as 2/8: a number from 1 to N, and N up to {MAX_SHARDS}; in a job of"
            " sbatch --array=1-8 it is $SLURM_ARRAY_TASK_ID/8"
        )
    return Shard(number=number, count=count)

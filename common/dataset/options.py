"""Options of a preprocessing run, which tools/preprocess_data.py takes."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.dataset.blocks import BLOCK_BYTES, DocumentRule
from common.dataset.corpus import UTF_8, CorpusFormat
from common.dataset.encodings import DOCUMENT_BYTES, checked_encoding
from common.dataset.metadata import Shard, parse_shard
from common.errors import ConfigError, DataError
from common.files import refuse_to_overwrite
from common.flags import at_least, flag
from common.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

DEFAULT_SEQ_LENGTH, DEFAULT_PIECES = 1024, 100


@dataclass(kw_only=True)
class PreprocessOptions:
    """Settings of a preprocessing run, as the command line names them.

    Raises ConfigError or DataError for options that do not go together, and for an impossible name of an output.
    """

    inputs: tuple[Path, ...] = flag(
        "FILE: corpora: .txt, .jsonl, .json (array), each also .gz; .parquet, .arrow, a folder of"
        " *.parquet or of datasets' save_to_disk; with --input-format ids also a folder",
        "--input",
        required=True,
        nargs="+",
        group="input",
    )
    dataset_split: str | None = flag("NAME: split to read of a folder that datasets saved with several, such as train")
    input_format: CorpusFormat | None = flag("format of the corpora (default: told by content)")
    encoding: str = flag(
        "NAME: encoding of the input, such as gbk, big5 or utf-16", default=UTF_8, type=checked_encoding
    )
    min_length: int = flag(
        "N: leave out documents of N characters or fewer (default: 0)",
        *("--min-length", "--min_length"),
        default=0,
        type=at_least(0),
    )
    json_keys: tuple[str, ...] = flag(
        "KEY: keys of a JSON object, or columns of a table, to extract, one output each",
        *("--json-keys", "--json-key"),
        default=("text",),
        nargs="+",
    )
    documents: DocumentRule = flag("what separates documents in plain text", default="blank_line")
    split_sentences: bool = flag("write one sequence per sentence, as PREFIX_{key}_sentence")
    keep_newlines: bool = flag("with --split-sentences: keep the white space between sentences")
    document_bytes: int = flag(
        "N: refuse a document of more MiB: it is held in memory whole, several times"
        f" (default: {DOCUMENT_BYTES >> 20})",
        "--max-document-mib",
        default=DOCUMENT_BYTES,
        type=lambda text: at_least(1)(text) << 20,
    )
    tokenizer_type: str | None = flag(
        f"KIND: kind of tokenizer: {', '.join(TOKENIZERS)}, or the name that Megatron or"
        " transformers has for it; told from the files when left out",
        group="tokenizer",
    )
    vocab_file: Path = flag(
        "FILE: vocab.json, vocab.txt, a SentencePiece .model, tokenizer.json, or their folder",
        *("--vocab-file", "--vocab", "--tokenizer-model"),
        required=True,
    )
    merge_file: Path | None = flag("FILE: merges.txt, for a vocab.json; not needed where --vocab-file is a folder")
    tokenizer_backend: Literal["auto", "gigatoken", "tiktoken", "tokenizers"] = flag(
        "library that does the work; all give the same ids; auto takes the fastest that is installed", default="auto"
    )
    append_eod: bool = flag(
        "put the tokenizer's marks around each document: <|endoftext|> behind it for GPT-2, [MASK]"
        " before and [CLS] behind it for vocab.txt (default: on)",
        default=True,
    )
    special_tokens: Literal["tokens", "text"] | None = flag(
        "what special tokens written in a document are, <|endoftext|> too: tokens as in a prompt,"
        " or ordinary text, which no document can use to end itself (default: tokens for a"
        " tokenizer with marks beyond its end, such as <|user|> or BERT's; else text)"
    )
    output_prefix: Path = flag(
        "PREFIX: path and start of the names of the files to write", required=True, group="output"
    )
    format: Literal["indexed", "fleetx", "pieces", "mindrecord"] = flag(
        "format of the output (default: indexed, a .bin/.idx pair)", default="indexed"
    )
    seq_length: int | None = flag(
        "N: mindrecord: tokens a row predicts; a row has N + 1, its last one begins the next (default: 1024)",
        type=at_least(1),
    )
    num_splits: int | None = flag("N: mindrecord: files to spread the rows over (default: 1)", type=at_least(1))
    num_pieces: int | None = flag(
        "N: pieces: files to divide the documents over (default: 100)",
        *("--num-pieces", "--num_pieces"),
        type=at_least(1),
    )
    dataset_impl: Literal["lazy", "cached", "mmap"] = flag(
        "Megatron's choice of an implementation; only mmap is written", default="mmap"
    )
    shard: Shard | None = flag(
        "I/N: write only part I of N, for tools/merge_datasets.py; a part that is there already is kept",
        group="run",
        type=parse_shard,
    )
    workers: int = flag("N: processes that tokenize; the output does not depend on it", default=1)
    log_interval: int = flag("N: documents between progress lines", default=10000)
    block_bytes: int = BLOCK_BYTES
    """Text per step and worker."""

    def __post_init__(self) -> None:
        mindrecord = self.format == "mindrecord"
        refusals = (
            (
                self.dataset_impl != "mmap",
                f"--dataset-impl {self.dataset_impl}: only mmap is written; Megatron removed lazy and"
                " cached in 2023, and whatever reads them reads mmap too; leave the option out",
            ),
            (
                self.keep_newlines and not self.split_sentences,
                "--keep-newlines only means something with --split-sentences; without it newlines are always kept",
            ),
            (
                mindrecord and self.split_sentences,
                "--split-sentences with --format mindrecord: rows of equal length know no sentences; leave one of them"
                " out",
            ),
            (
                self.num_pieces is not None and self.format != "pieces",
                "--num-pieces only means something with --format pieces",
            ),
            (
                self.shard is not None and self.format != "indexed",
                f"--shard with --format {self.format}: only a .bin/.idx pair is merged; leave one of them out",
            ),
            (
                not mindrecord and (self.seq_length is not None or self.num_splits is not None),
                "--seq-length and --num-splits only mean something with --format mindrecord; a"
                " .bin/.idx pair suits every length",
            ),
            (self.workers < 1, f"--workers={self.workers}: expected 1 or more"),
        )
        for refused, message in refusals:
            if refused:
                raise ConfigError(message)
        if self.output_prefix.name in ("", ".."):
            raise ConfigError(
                f"--output-prefix {self.output_prefix}: is a folder, expected how the files begin, such as data/mine"
            )
        for key in self.json_keys:
            if os.sep in key or "\0" in key:
                raise DataError(
                    f"--json-keys {key!r}: a key is a part of the output's name, where {os.sep!r}"
                    " cannot be; rename the key"
                )

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file, self.tokenizer_backend)

    def prefix_of(self, key: str) -> Path:
        """Return the prefix of the names of a key's files."""
        if self.format == "pieces":
            return self.output_prefix
        level = "sentence" if self.split_sentences else "document"
        part = f".shard-{self.shard.number:05d}-of-{self.shard.count:05d}" if self.shard else ""
        return self.output_prefix.with_name(f"{self.output_prefix.name}{part}_{key}_{level}")

    def keep_inputs(self, outputs: Iterable[Path]) -> None:
        """Raise ConfigError if a file to be written or replaced is also an input."""
        inputs = (*self.inputs, self.vocab_file, self.merge_file)
        refuse_to_overwrite(inputs, outputs, "choose another --output-prefix")

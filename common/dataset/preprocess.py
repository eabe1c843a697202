"""Preprocess corpora with a tokenizer into PREFIX_{key}_{document|sentence}.{bin,idx,meta.json}, streaming.

The names are those of Megatron's preprocess_data.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.dataset.blocks import BLOCK_BYTES, Block, DocumentRule, read_blocks
from common.dataset.corpus import TABLES, Corpus, CorpusFormat, files_of, open_corpus
from common.dataset.encode import EncodingRules
from common.dataset.encodings import DOCUMENT_BYTES
from common.dataset.fleetx import IDS, INDEX, FleetXWriter, fleetx_dtype
from common.dataset.id_files import PiecesWriter, numbered_files
from common.dataset.indexed import IndexedWriter, token_dtype
from common.dataset.metadata import (
    METADATA_EXTENSION,
    SHARD_OPTION,
    Metadata,
    Shard,
    SourceFile,
    read_metadata,
    write_metadata,
)
from common.dataset.tables import check_table
from common.dataset.token_files import TokenWriter, with_extension
from common.dataset.workers import TokenizerChoice, encode_blocks
from common.errors import ConfigError, DataError
from common.files import refuse_to_overwrite
from common.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_MUCH = 1 / 3
"""Share of a text beyond which leaving it out for its length is warned of."""


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(EncodingRules):
    """Settings of a preprocessing run.

    inputs: files and folders of tables in reading order. output_prefix: its folder is created if
    absent; existing outputs are replaced.
    dataset_split: the one to read of a folder that has several. encoding: of the inputs.
    shard: part of the corpus to write, under a prefix of its own; None writes all of it.
    block_bytes: text per step and worker. document_bytes: maximum size of a document, which must
    fit in memory.
    Raises ConfigError or DataError for an impossible name of an output.
    """

    inputs: tuple[Path, ...]
    output_prefix: Path
    tokenizer: TokenizerChoice
    input_format: CorpusFormat | None = None
    dataset_split: str | None = None
    documents: DocumentRule = DocumentRule.BLANK_LINE
    encoding: str = "utf-8"
    pieces: int = 100
    workers: int = 1
    block_bytes: int = BLOCK_BYTES
    shard: Shard | None = None
    document_bytes: int = DOCUMENT_BYTES

    def __post_init__(self) -> None:
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

    def prefix_of(self, key: str) -> Path:
        """Return the prefix of the names of a key's files."""
        if self.format == "pieces":
            return self.output_prefix
        level = "sentence" if self.split_sentences else "document"
        prefix = self.shard.prefix(self.output_prefix) if self.shard else self.output_prefix
        return prefix.with_name(f"{prefix.name}_{key}_{level}")

    def keep_inputs(self, outputs: Iterable[Path]) -> None:
        """Raise ConfigError if a file to be written or replaced is also an input."""
        inputs = (*self.inputs, self.tokenizer.vocab_file, self.tokenizer.merge_file)
        refuse_to_overwrite(inputs, outputs, "choose another --output-prefix")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counts so far, summed over the keys.

    empty: texts without a token: empty documents, and blank pieces of plain text, which are not
    counted as documents. short: documents left out; short_bytes: their part of text_bytes.
    read_bytes: bytes of total_bytes that were taken from disk. seconds: time since the start.
    """

    documents: int = 0
    empty: int = 0
    short: int = 0
    short_bytes: int = 0
    tokens: int = 0
    text_bytes: int = 0
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0

    def rates(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return f"{self.documents / seconds:.0f} docs/s, {self.text_bytes / seconds / 1e6:.2f} MB/s"

    @property
    def short_share(self) -> float:
        """Return the part of the text that was left out for its length, 0 to 1."""
        return self.short_bytes / max(self.text_bytes, 1)

    def left_out(self) -> str:
        """Return the texts that gave no tokens in words, empty without such texts."""
        empty = f", {self.empty} empty or blank (no token)" if self.empty else ""
        share = f" ({100 * self.short_share:.0f} % of the text)"
        return empty + (f", {self.short} short ones left out{share}" if self.short else "")


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """Result of a run. prefixes: of the pairs written, one per key.

    kept: whether they were there already, which is so for a finished shard.
    """

    prefixes: tuple[Path, ...]
    kept: bool = False
    progress: Progress = field(default_factory=Progress)


def preprocess(
    options: PreprocessOptions, on_progress: Callable[[Progress], None] = lambda progress: None
) -> PreprocessResult:
    """Write the pairs. ``on_progress`` is called after each block.

    After a failure nothing is left under a final name. Raises DataError (input), TokenizerError
    (vocabulary), ConfigError (options) and StorageError (output).
    """
    if options.workers < 1:
        raise ConfigError(f"--workers={options.workers}: expected 1 or more")
    started = time.monotonic()
    corpora = _open(options)
    keys = _keys(options.json_keys, corpora)
    for corpus, _ in _in_reach(corpora, options.shard):
        if corpus.format in TABLES:
            check_table(corpus.path, keys)
    if options.format == "pieces" and len(keys) > 1:
        raise ConfigError(
            f"--json-keys {' '.join(keys)}: pieces have one key; run once for each, with another --output-prefix"
        )
    tokenizer = options.tokenizer.load()
    marks_as = options.special_tokens or ("tokens" if tokenizer.has_marks else "text")
    options = replace(options, json_keys=keys, special_tokens=marks_as)
    prefixes = tuple(map(options.prefix_of, keys))
    extensions = (*_EXTENSIONS[options.format], METADATA_EXTENSION)
    options.keep_inputs(with_extension(prefix, extension) for prefix in prefixes for extension in extensions)
    progress = Progress(total_bytes=sum(corpus.size for corpus in corpora))
    if options.shard is not None and (kept := _finished(options, tokenizer, corpora, keys)):
        kept = replace(kept, total_bytes=progress.total_bytes)
        return PreprocessResult(prefixes=prefixes, kept=True, progress=kept)
    empty, short, marks = [0] * len(keys), [0] * len(keys), Counter[str]()
    with ExitStack() as stack:
        writers = [_writer(options, prefix, tokenizer.vocab_size) for prefix in prefixes]
        if isinstance(writers[0], PiecesWriter):
            options.keep_inputs(map(writers[0].path, range(options.pieces)))
        for writer in writers:
            stack.enter_context(writer)
        # closing: a failure must end the worker processes before the error is reported
        blocks = _blocks(corpora, options, keys, tokenizer.eod_id)
        stream = closing(encode_blocks(blocks, tokenizer, options.tokenizer, options, options.workers))
        for encoded in stack.enter_context(stream):
            for n, part in enumerate(encoded):
                writers[n].append(part.tokens, part.sizes, part.documents)
                empty[n] += part.empty
                short[n] += part.short
                marks.update(part.marks)
            progress = replace(
                progress,
                documents=sum(writer.document_count for writer in writers),
                empty=sum(empty),
                short=sum(short),
                short_bytes=progress.short_bytes + sum(part.short_bytes for part in encoded),
                tokens=sum(writer.token_count for writer in writers),
                text_bytes=progress.text_bytes + sum(part.text_bytes for part in encoded),
                read_bytes=progress.read_bytes + encoded[0].read_bytes,
                seconds=time.monotonic() - started,
            )
            on_progress(progress)
        for n, writer in enumerate(writers):
            if writer.token_count == 0 and options.shard is None:
                names = ", ".join(str(path) for path in options.inputs)
                if short[n]:
                    raise DataError(
                        f"{names}: none of the {short[n]} documents has more than"
                        f" {options.min_length} characters, nothing to write; lower --min-length"
                    )
                raise DataError(
                    f"{names}: all {empty[n]} documents under {keys[n]!r} are empty, nothing to"
                    " write; check the input and --json-keys"
                )
    _warn(options, corpora, progress, marks)
    for n, writer in enumerate(writers):
        metadata = Metadata(
            documents=writer.document_count,
            sequences=writer.sequence_count,
            tokens=writer.token_count,
            empty_documents=empty[n],
            **_record(options, tokenizer, corpora, keys[n]),
        )
        write_metadata(with_extension(writer.prefix, METADATA_EXTENSION), metadata)
    progress = replace(progress, seconds=time.monotonic() - started)
    return PreprocessResult(prefixes=prefixes, progress=progress)


def _warn(options: PreprocessOptions, corpora: list[Corpus], progress: Progress, marks: Counter[str]) -> None:
    """Warn of text that was left out, and of ``marks`` that stay text."""
    if marks:
        mark, _ = marks.most_common(1)[0]
        _log.warning(
            "the documents spell a special token %d times, most often %r, and it stays text:"
            " --special-tokens tokens makes it the token that a prompt has there",
            *(marks.total(), mark),
        )
    if progress.short_share > _MUCH:
        remedy = (
            "lines or paragraphs were documents of their own; add --documents file to keep each file whole"
            if any(corpus.format is CorpusFormat.TEXT for corpus in corpora)
            and options.documents is not DocumentRule.FILE
            else "lower it to keep more"
        )
        _log.warning(
            "--min-length %d left out %.0f %% of the text: %s",
            *(options.min_length, 100 * progress.short_share, remedy),
        )


_EXTENSIONS = {"indexed": (".bin", ".idx"), "fleetx": (IDS, INDEX), "pieces": ()}


def _open(options: PreprocessOptions) -> list[Corpus]:
    inputs = list(options.inputs)
    if options.input_format is CorpusFormat.IDS:
        inputs = [file for path in inputs for file in numbered_files(path)]
    inputs = files_of(inputs, options.dataset_split)
    if not inputs:
        raise DataError("no input files; name at least one with --input")
    return [open_corpus(path, options.input_format, options.encoding) for path in inputs]


def _writer(options: PreprocessOptions, prefix: Path, vocab_size: int) -> TokenWriter:
    if options.format == "pieces":
        return PiecesWriter(prefix, options.pieces)
    if options.format == "fleetx":
        return FleetXWriter(prefix, fleetx_dtype(vocab_size))
    return IndexedWriter(prefix, token_dtype(vocab_size))


def _keys(asked: tuple[str, ...], corpora: list[Corpus]) -> tuple[str, ...]:
    """Return the keys of the outputs. Plain text has only ``text``, whatever was asked for.

    Raises DataError for text together with JSON whose key is not ``text``.
    """
    if len(set(asked)) != len(asked) or not all(asked):
        raise DataError(f"--json-keys {' '.join(asked)}: each key may be named once, and none may be empty")
    texts = [corpus.path for corpus in corpora if corpus.format is CorpusFormat.TEXT]
    if not texts or asked == ("text",):
        return asked
    if len(texts) == len(corpora):
        _log.warning(
            "--json-keys %s has no effect: plain text has no keys, the output is named 'text'", " ".join(asked)
        )
        return ("text",)
    raise DataError(
        f"{texts[0]}: is plain text and has no keys, but --json-keys asks for {' '.join(asked)};"
        " preprocess text and JSON in two runs"
    )


def _blocks(corpora: list[Corpus], options: PreprocessOptions, keys: tuple[str, ...], end_id: int) -> Iterator[Block]:
    shard, total = options.shard, sum(corpus.size for corpus in corpora)
    block_bytes = shard.block_bytes(total, options.block_bytes) if shard else options.block_bytes
    for corpus, at in _in_reach(corpora, shard):
        for block in read_blocks(corpus, options.documents, keys, block_bytes, options.document_bytes, end_id):
            part = shard.part_of(at, total) if shard else 0
            if shard and part > shard.number:
                return
            if not shard or part == shard.number:
                yield block
            at += block.read_bytes


def _in_reach(corpora: list[Corpus], shard: Shard | None) -> Iterator[tuple[Corpus, int]]:
    """Yield the files that can hold something of a shard, each with the bytes before it."""
    total, at = sum(corpus.size for corpus in corpora), 0
    for corpus in corpora:
        end = at + corpus.size
        if shard is None or shard.part_of(at, total) <= shard.number <= shard.part_of(end, total):
            yield corpus, at
        at = end


def _record(options: PreprocessOptions, tokenizer: Tokenizer, corpora: list[Corpus], key: str) -> dict[str, Any]:
    """Return the fields of Metadata that are known before a document is read."""
    # shards of tables were once divided by rows: the two divisions have other borders
    division = " by blocks" if any(corpus.format in TABLES for corpus in corpora) else ""
    return {
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "eod_id": tokenizer.eod_id if options.append_eod else None,
        "sources": tuple(
            SourceFile(name=corpus.path.name, bytes=corpus.size, format=corpus.format.value) for corpus in corpora
        ),
        "options": {
            "key": key,
            "documents": options.documents.value,
            "append_eod": options.append_eod,
            "split_sentences": options.split_sentences,
            "keep_newlines": options.keep_newlines,
            **({"special_tokens": "tokens"} if options.special_tokens == "tokens" else {}),
            **({"min_length": str(options.min_length)} if options.min_length else {}),
            **({SHARD_OPTION: f"{options.shard}{division}"} if options.shard else {}),
        },
    }


def _finished(
    options: PreprocessOptions, tokenizer: Tokenizer, corpora: list[Corpus], keys: tuple[str, ...]
) -> Progress | None:
    """Return the counts of this shard if an earlier run has written it from the same inputs."""
    found = Progress()
    for key in keys:
        prefix = options.prefix_of(key)
        metadata = read_metadata(with_extension(prefix, METADATA_EXTENSION))
        if metadata is None or not all(with_extension(prefix, extension).exists() for extension in (".bin", ".idx")):
            return None
        wanted = _record(options, tokenizer, corpora, key)
        if any(getattr(metadata, name) != value for name, value in wanted.items()):
            return None
        found = replace(
            found,
            documents=found.documents + metadata.documents,
            tokens=found.tokens + metadata.tokens,
            empty=found.empty + metadata.empty_documents,
        )
    return found

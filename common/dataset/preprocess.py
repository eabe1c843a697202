"""Preprocess corpora with a tokenizer into PREFIX_{key}_{document|sentence}.{bin,idx,meta.json} or into MindRecord.

The names are those of Megatron's preprocess_data.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from common.dataset.blocks import Block, read_blocks
from common.dataset.corpus import TABLES, Corpus, files_of, open_corpus
from common.dataset.encode import encode_blocks
from common.dataset.fleetx import IDS, INDEX, FleetXWriter, fleetx_dtype
from common.dataset.id_files import PiecesWriter, numbered_files
from common.dataset.indexed import IndexedWriter, token_dtype
from common.dataset.metadata import (
    METADATA_EXTENSION,
    SHARD_OPTION,
    Metadata,
    Shard,
    read_metadata,
    write_metadata,
)
from common.dataset.mindrecord import EXTENSION, earlier_files, new_folder
from common.dataset.options import DEFAULT_PIECES, DEFAULT_SEQ_LENGTH, PreprocessOptions
from common.dataset.samples import GPTDataset
from common.dataset.tables import check_table
from common.dataset.token_files import TokenWriter, with_extension
from common.errors import ConfigError, DataError
from common.paths import require_package
from common.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_MIN_BLOCK = 1 << 12
_MUCH = 1 / 3
"""Share of a text beyond which leaving it out for its length is warned of."""


@dataclass(kw_only=True)
class Progress:
    """Counts so far, summed over the keys.

    prefixes: of the pairs, one per key. kept: whether they were there already, which is so for a finished shard.
    empty: texts without a token: empty documents, and blank pieces of plain text, which are not counted as documents.
    unknown: tokens of text that the vocabulary lacks. short: documents left out; short_bytes: their part of text_bytes.
    read_bytes: bytes of total_bytes that were taken from disk. seconds: time since the start.
    """

    prefixes: tuple[Path, ...]
    kept: bool = False
    documents: int = 0
    empty: int = 0
    unknown: int = 0
    short: int = 0
    short_bytes: int = 0
    tokens: int = 0
    text_bytes: int = 0
    read_bytes: int = 0
    total_bytes: int
    seconds: float = 0.0

    def rates(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return f"{self.documents / seconds:.0f} docs/s, {self.text_bytes / seconds / 1e6:.2f} MB/s"

    @property
    def short_share(self) -> float:
        """Return the part of the text that was left out for its length, 0 to 1."""
        return self.short_bytes / max(self.text_bytes, 1)

    def left_out(self) -> str:
        """Return in words what the tokens do not hold, empty where they hold all text."""
        unknown = f", {self.unknown} of them unknown (the vocabulary lacks their text)" if self.unknown else ""
        empty = f", {self.empty} empty or blank (no token)" if self.empty else ""
        share = f" ({100 * self.short_share:.0f} % of the text)"
        return unknown + empty + (f", {self.short} short ones left out{share}" if self.short else "")


def preprocess(options: PreprocessOptions, on_progress: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Write the pairs. ``on_progress`` is called after each block.

    The folder of the prefix is created if absent, existing outputs are replaced, and a failure leaves no final name.
    Raises DataError (input), TokenizerError (vocabulary), ConfigError (options) and StorageError (output).
    """
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
    tokenizer = options.load_tokenizer()
    marks_as = options.special_tokens or ("tokens" if tokenizer.has_marks else "text")
    options = replace(options, json_keys=keys, special_tokens=marks_as)
    prefixes = tuple(map(options.prefix_of, keys))
    pieces = [f"_{number}.txt" for number in range(options.num_pieces or DEFAULT_PIECES)]
    extensions = {"indexed": [".bin", ".idx"], "fleetx": [IDS, INDEX], "pieces": pieces}[options.format]
    outputs = (with_extension(prefix, each) for prefix in prefixes for each in (*extensions, METADATA_EXTENSION))
    options.keep_inputs(outputs)
    progress = Progress(prefixes=prefixes, total_bytes=sum(corpus.size for corpus in corpora))
    records = [_record(options, tokenizer, corpora, key) for key in keys]
    if options.shard is not None and _is_finished(progress, records):
        return progress
    empty, short, marks = [0] * len(keys), [0] * len(keys), Counter[str]()
    with ExitStack() as stack:
        writers = [_writer(options, prefix, tokenizer.vocab_size) for prefix in prefixes]
        for writer in writers:
            stack.enter_context(writer)
        # closing: a failure must end the worker processes before the error is reported
        stream = closing(encode_blocks(_blocks(corpora, options, keys, tokenizer.eod_id), tokenizer, options))
        for encoded in stack.enter_context(stream):
            for n, part in enumerate(encoded):
                writers[n].append(part.tokens, part.sizes, part.documents)
                empty[n] += part.empty
                short[n] += part.short
                marks.update(part.marks)
                progress.unknown += part.unknown
                progress.short_bytes += part.short_bytes
                progress.text_bytes += part.text_bytes
            progress.documents = sum(writer.document_count for writer in writers)
            progress.tokens = sum(writer.token_count for writer in writers)
            progress.empty, progress.short = sum(empty), sum(short)
            progress.read_bytes += encoded[0].read_bytes
            progress.seconds = time.monotonic() - started
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
    for writer, record, without in zip(writers, records, empty, strict=True):
        metadata = replace(
            record,
            documents=writer.document_count,
            sequences=writer.sequence_count,
            tokens=writer.token_count,
            empty_documents=without,
        )
        write_metadata(with_extension(writer.prefix, METADATA_EXTENSION), metadata)
    progress.seconds = time.monotonic() - started
    return progress


def _warn(options: PreprocessOptions, corpora: list[Corpus], progress: Progress, marks: Counter[str]) -> None:
    """Warn of text that was left out, and of ``marks`` that stay text."""
    if marks.total():
        mark, _ = marks.most_common(1)[0]
        _log.warning(
            "the documents spell a special token %d times, most often %r, and it stays text:"
            " --special-tokens tokens makes it the token that a prompt has there",
            *(marks.total(), mark),
        )
    if progress.short_share > _MUCH:
        remedy = (
            "lines or paragraphs were documents of their own; add --documents file to keep each file whole"
            if any(corpus.format == "text" for corpus in corpora) and options.documents != "file"
            else "lower it to keep more"
        )
        _log.warning(
            "--min-length %d left out %.0f %% of the text: %s",
            *(options.min_length, 100 * progress.short_share, remedy),
        )


_NO_COUNTS: dict[str, Any] = {"documents": 0, "sequences": 0, "tokens": 0, "empty_documents": 0}


def _open(options: PreprocessOptions) -> list[Corpus]:
    inputs = list(options.inputs)
    if options.input_format == "ids":
        inputs = [file for path in inputs for file in numbered_files(path)]
    files = files_of(inputs, options.dataset_split)
    return [open_corpus(path, options.input_format, options.encoding) for path in files]


def _writer(options: PreprocessOptions, prefix: Path, vocab_size: int) -> TokenWriter:
    if options.format == "pieces":
        return PiecesWriter(prefix, options.num_pieces or DEFAULT_PIECES)
    if options.format == "fleetx":
        return FleetXWriter(prefix, fleetx_dtype(vocab_size))
    return IndexedWriter(prefix, token_dtype(vocab_size))


def _keys(asked: tuple[str, ...], corpora: list[Corpus]) -> tuple[str, ...]:
    """Return the keys of the outputs. Plain text has only ``text``, whatever was asked for.

    Raises DataError for text together with JSON whose key is not ``text``.
    """
    if len(set(asked)) != len(asked) or not all(asked):
        raise DataError(f"--json-keys {' '.join(asked)}: each key may be named once, and none may be empty")
    texts = [corpus.path for corpus in corpora if corpus.format == "text"]
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
    block_bytes = options.block_bytes
    if shard:  # equal in all parts, and 16 of them or more in each, as far as documents allow
        block_bytes = min(block_bytes, max(_MIN_BLOCK, total // (16 * shard.count)))
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


def _record(options: PreprocessOptions, tokenizer: Tokenizer, corpora: list[Corpus], key: str) -> Metadata:
    """Return the record of an output before a document is read."""
    return Metadata(
        tokenizer=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
        eod_id=tokenizer.eod_id if options.append_eod else None,
        **_NO_COUNTS,
        sources=tuple({"name": corpus.path.name, "bytes": corpus.size, "format": corpus.format} for corpus in corpora),
        options={
            "key": key,
            "documents": options.documents,
            "append_eod": options.append_eod,
            "split_sentences": options.split_sentences,
            "keep_newlines": options.keep_newlines,
            **({"special_tokens": "tokens"} if options.special_tokens == "tokens" else {}),
            **({"min_length": str(options.min_length)} if options.min_length else {}),
            **({SHARD_OPTION: str(options.shard)} if options.shard else {}),
        },
    )


def _is_finished(progress: Progress, records: list[Metadata]) -> bool:
    """Return whether an earlier run has written this shard from the same inputs; ``progress`` then has its counts."""
    there = []
    for prefix, wanted in zip(progress.prefixes, records, strict=True):
        found = read_metadata(with_extension(prefix, METADATA_EXTENSION))
        if found is None or not all(with_extension(prefix, extension).exists() for extension in (".bin", ".idx")):
            return False
        if replace(found, **_NO_COUNTS) != wanted:
            return False
        there.append(found)
    progress.kept, progress.documents = True, sum(each.documents for each in there)
    progress.tokens, progress.empty = sum(each.tokens for each in there), sum(each.empty_documents for each in there)
    return True


def preprocess_mindrecord(
    options: PreprocessOptions, on_progress: Callable[[Progress], None]
) -> tuple[list[str], Progress]:
    """Write a set of files for each key, as ``preprocess`` writes pairs. Returns what was written for each, in words.

    Raises ConfigError too if MindSpore, which writes the files, is not installed.
    """
    os.environ.setdefault("GLOG_v", "3")  # MindSpore warns of absent devices
    purpose = "which writes --format mindrecord (without the option, both backends train from the .bin/.idx pair)"
    require_package("mindspore", extra="mindspore", purpose=purpose)
    writer = import_module("mindformers_gpt2.mindrecord")
    prefix, shards = options.output_prefix, options.num_splits or 1
    seq_length = options.seq_length or DEFAULT_SEQ_LENGTH
    writer.check_mindrecord(prefix, shards)
    for key in {*options.json_keys, "text"}:  # plain text has only this key, whatever was asked for
        options.keep_inputs(earlier_files(with_extension(options.prefix_of(key), EXTENSION)))
    with new_folder(prefix.with_name(f"{prefix.name}.pairs")) as folder:
        pairs = replace(options, format="indexed", seq_length=None, num_splits=None, output_prefix=folder / prefix.name)
        progress = preprocess(pairs, on_progress)
        for pair in progress.prefixes:  # check all, before the first set is written
            GPTDataset(pair, split="train", split_weights=(1, 0, 0), seq_length=seq_length, seed=0, shuffle=False)
        sets = [
            writer.write_mindrecord(pair, prefix.with_name(f"{pair.name}{EXTENSION}"), seq_length, shards)
            for pair in progress.prefixes
        ]
        return sets, progress

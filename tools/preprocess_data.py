"""Tokenize text corpora into Megatron's .bin/.idx, or into the formats of other systems.

    python tools/preprocess_data.py --input corpus.txt --output-prefix data/my \\
            --vocab-file vocab.json --merge-file merges.txt
        PREFIX_{key}_{document|sentence}.{bin,idx}
    ... --format fleetx
        PREFIX_{key}_document{_ids.npy,_idx.npz}, as PaddleFleetX reads
    ... --format pieces --num-pieces 100
        PREFIX_{0 ... 99}.txt of ids, as GPT2-Chinese reads; --input-format ids reads them
    ... --format mindrecord --seq-length 1024 [--num-splits N]
        PREFIX_{key}_document.mindrecord[0 ... N-1], each with its .db
    ... --input crawl/ --json-keys content
        a folder of *.parquet, or one of datasets' save_to_disk, by a column of text
    ... --shard 2/8
        the second of eight parts, as PREFIX.shard-00002-of-00008_{key}_document

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import gc
import logging
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.dataset.blocks import DocumentRule
from common.dataset.corpus import CorpusFormat
from common.dataset.encodings import DOCUMENT_BYTES, checked_encoding
from common.dataset.metadata import METADATA_EXTENSION, parse_shard, read_metadata
from common.dataset.mindrecord_output import preprocess_mindrecord
from common.dataset.preprocess import PreprocessOptions, Progress, preprocess
from common.dataset.token_files import with_extension
from common.dataset.workers import TokenizerChoice, limit_tokenizer_threads
from common.errors import ConfigError
from common.flags import flag
from common.hub import located
from common.log import progress_bar
from common.program import command
from common.tokenizer import TOKENIZERS
from common.whole_numbers import argument

DEFAULT_SEQ_LENGTH = 1024
DEFAULT_PIECES = 100


@dataclass(kw_only=True)
class Request:
    input: tuple[Path, ...] = flag(
        "FILE: corpora: .txt, .jsonl, .json (array), each also .gz; .parquet, .arrow, a folder of"
        " *.parquet or of datasets' save_to_disk; with --input-format ids also a folder",
        required=True,
        nargs="+",
        group="input",
    )
    dataset_split: str | None = flag("NAME: split to read of a folder that datasets saved with several, such as train")
    input_format: CorpusFormat | None = flag(
        "format of the corpora (default: told by content)", type=None, choices=[item.value for item in CorpusFormat]
    )
    encoding: str = flag("NAME: encoding of the input, such as gbk, big5 or utf-16", default="utf-8")
    min_length: int = flag(
        "N: leave out documents of N characters or fewer (default: 0)",
        *("--min-length", "--min_length"),
        default=0,
        type=argument(),
    )
    json_keys: tuple[str, ...] = flag(
        "KEY: keys of a JSON object, or columns of a table, to extract, one output each",
        *("--json-keys", "--json-key"),
        default=("text",),
        nargs="+",
    )
    documents: str = flag(
        "what separates documents in plain text", default="blank_line", choices=[rule.value for rule in DocumentRule]
    )
    split_sentences: bool = flag("write one sequence per sentence, as PREFIX_{key}_sentence")
    keep_newlines: bool = flag("with --split-sentences: keep the white space between sentences")
    max_document_mib: int = flag(
        "N: refuse a document of more MiB: it is held in memory whole, several times",
        default=DOCUMENT_BYTES >> 20,
        type=argument(1),
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
        type=argument(1),
    )
    num_splits: int | None = flag("N: mindrecord: files to spread the rows over (default: 1)", type=argument(1))
    num_pieces: int | None = flag(
        "N: pieces: files to divide the documents over (default: 100)",
        *("--num-pieces", "--num_pieces"),
        type=argument(1),
    )
    dataset_impl: Literal["lazy", "cached", "mmap"] = flag(
        "Megatron's choice of an implementation; only mmap is written", default="mmap"
    )
    shard: str | None = flag(
        "I/N: write only part I of N, for tools/merge_datasets.py; a part that is there already is kept",
        group="run",
    )
    workers: int = flag("N: processes that tokenize; the output does not depend on it", default=1)
    log_interval: int = flag("N: documents between progress lines", default=10000)


class _Display:
    """A bar where a person watches, else one line every ``interval`` documents."""

    def __init__(self, interval: int) -> None:
        self._interval = max(1, interval)
        self._next = self._interval
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
        elif progress.documents >= self._next:
            self._next = (progress.documents // self._interval + 1) * self._interval
            share = 100 * progress.read_bytes / max(1, progress.total_bytes)
            print(f"processed {progress.documents} documents, {share:.0f} % ({progress.rates()})", file=sys.stderr)

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = progress_bar(total=progress.total_bytes, unit="B")
        self._bar.set_postfix_str(f"{progress.documents} documents", refresh=False)
        self._bar.update(progress.read_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@command(Request, stopped="; no output is left in part", dashes=True)
def main(request: Request) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in ("common", "gpt2"):  # not all libraries, which log each request
        logging.getLogger(name).setLevel(logging.INFO)
    with closing(_Display(request.log_interval)) as display:
        options = _options(request)
        limit_tokenizer_threads()
        # nothing here makes cycles; looking for them costs 0.1 s while the vocabulary loads
        gc.disable()
        done = _mindrecord if request.format == "mindrecord" else _token_files
        text = done(request, options, display)
    print(text, file=sys.stderr)


def _mindrecord(request: Request, options: PreprocessOptions, display: _Display) -> str:
    """Write MindRecord files, and return what was written."""
    seq_length, shards = request.seq_length or DEFAULT_SEQ_LENGTH, request.num_splits or 1
    sets, progress = preprocess_mindrecord(options, seq_length, shards, display)
    return f"wrote {'; '.join(_set(found, seq_length) for found in sets)}; {_counts(progress)}"


def _token_files(request: Request, options: PreprocessOptions, display: _Display) -> str:
    """Write another format, and return what was written or was there."""
    result = preprocess(options, display)
    endings = "_ids.npy/_idx.npz" if request.format == "fleetx" else ".bin/.idx"
    pairs = ", ".join(f"{prefix}{endings}" for prefix in result.prefixes)
    if request.format == "pieces":
        pairs = f"{options.output_prefix}_{{0 ... {options.pieces - 1}}}.txt"
    if result.kept:
        return f"kept {pairs}, which is there already"
    return f"wrote {pairs}: {_counts(result.progress)}{_how_split(options, result.prefixes[0])}"


def _set(found: Any, seq_length: int) -> str:
    files = found.files
    names = str(files[0]) if len(files) == 1 else f"{files[0]} ... {files[-1].name}"
    return f"{names}: {found.rows} rows of {seq_length + 1} tokens, {found.left_over} tokens left over at the end"


def _counts(done: Progress) -> str:
    return f"{done.documents} documents, {done.tokens} tokens{done.left_out()}, {done.seconds:.1f} s ({done.rates()})"


def _how_split(options: PreprocessOptions, prefix: Path) -> str:
    """Return what separated the documents of plain text where nobody chose it: a count of documents does not tell."""
    metadata = read_metadata(with_extension(prefix, METADATA_EXTENSION))
    usual = DocumentRule.BLANK_LINE
    if metadata is None or options.documents is not usual:
        return ""
    if all(source.format != CorpusFormat.TEXT.value for source in metadata.sources):
        return ""
    others = ", ".join(rule.value for rule in DocumentRule if rule is not usual)
    return f"\nplain text: each blank line ended a document (--documents {usual.value}; the others: {others})"


def _options(args: Request) -> PreprocessOptions:
    mindrecord = args.format == "mindrecord"
    refusals = (
        (
            args.dataset_impl != "mmap",
            f"--dataset-impl {args.dataset_impl}: only mmap is written; Megatron removed lazy and"
            " cached in 2023, and whatever reads them reads mmap too; leave the option out",
        ),
        (
            args.keep_newlines and not args.split_sentences,
            "--keep-newlines only means something with --split-sentences; without it newlines are always kept",
        ),
        (
            mindrecord and args.split_sentences,
            "--split-sentences with --format mindrecord: rows of equal length know no sentences; leave one of them out",
        ),
        (
            args.num_pieces is not None and args.format != "pieces",
            "--num-pieces only means something with --format pieces",
        ),
        (
            args.shard is not None and args.format != "indexed",
            f"--shard with --format {args.format}: only a .bin/.idx pair is merged; leave one of them out",
        ),
        (
            not mindrecord and (args.seq_length is not None or args.num_splits is not None),
            "--seq-length and --num-splits only mean something with --format mindrecord; a"
            " .bin/.idx pair suits every length",
        ),
    )
    for refused, message in refusals:
        if refused:
            raise ConfigError(message)
    return PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer=TokenizerChoice(
            kind=args.tokenizer_type,
            vocab_file=located(args.vocab_file, weights=False),
            merge_file=args.merge_file,
            backend=args.tokenizer_backend,
        ),
        json_keys=tuple(args.json_keys),
        encoding=checked_encoding(args.encoding),
        min_length=args.min_length,
        format=args.format if args.format in ("fleetx", "pieces") else "indexed",
        pieces=args.num_pieces or DEFAULT_PIECES,
        input_format=CorpusFormat(args.input_format) if args.input_format else None,
        dataset_split=args.dataset_split,
        documents=DocumentRule(args.documents),
        append_eod=args.append_eod,
        special_tokens=args.special_tokens,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        workers=args.workers,
        shard=parse_shard(args.shard) if args.shard else None,
        document_bytes=args.max_document_mib << 20,
    )

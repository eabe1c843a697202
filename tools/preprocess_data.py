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
    ... --engine ray --shards 64
        all parts as tasks of a Ray cluster, merged; started again, it keeps finished parts

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, outside_imports, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.dataset.blocks import DocumentRule
from common.dataset.corpus import CorpusFormat
from common.dataset.encodings import checked_encoding
from common.dataset.limits import DOCUMENT_BYTES
from common.dataset.metadata import METADATA_EXTENSION, read_metadata
from common.dataset.preprocess import PreprocessOptions, PreprocessResult, Progress, preprocess
from common.dataset.preprocess_mindrecord import RecordSet, preprocess_mindrecord
from common.dataset.shards import parse_shard
from common.dataset.token_files import with_extension
from common.dataset.workers import TokenizerChoice, limit_tokenizer_threads
from common.errors import ConfigError, GPT2Error, StopRequested, report
from common.hub import located
from common.log import progress_bar
from common.tokenizer import TOKENIZERS

DEFAULT_SEQ_LENGTH = 1024
DEFAULT_PIECES = 100
_SEPARATORS = {
    DocumentRule.BLANK_LINE: "each blank line ended a document",
    DocumentRule.LINE: "each line was a document",
    DocumentRule.FILE: "each file was one document",
    DocumentRule.EOT: "each <|endoftext|> ended a document",
}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in ("common", "gpt2"):  # not all libraries, which log each request
        logging.getLogger(name).setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, outside_imports(_stop))
    display = _Display(arguments.log_interval)
    try:
        options = _options(arguments)
        limit_tokenizer_threads()
        # nothing here makes cycles; looking for them costs 0.1 s while the vocabulary loads
        gc.disable()
        if arguments.format == "mindrecord":
            seq_length, shards = (
                arguments.seq_length or DEFAULT_SEQ_LENGTH,
                arguments.num_splits or 1,
            )
            sets, progress = preprocess_mindrecord(options, seq_length, shards, display)
            files = f"{'; '.join(_set(found, seq_length) for found in sets)}; {_counts(progress)}"
        else:
            result = _preprocess(options, arguments.shards, display)
            endings = "_ids.npy/_idx.npz" if arguments.format == "fleetx" else ".bin/.idx"
            pairs = ", ".join(f"{prefix}{endings}" for prefix in result.prefixes)
            if arguments.format == "pieces":
                pairs = f"{options.output_prefix}_{{0 ... {options.pieces - 1}}}.txt"
            files = f"{pairs}: {_counts(result.progress)}{_how_split(options, result.prefixes[0])}"
            if result.kept:
                display.close()
                print(f"kept {pairs}, which is there already", file=sys.stderr)
                return 0
    except GPT2Error as error:
        display.close()
        return report(error)
    except KeyboardInterrupt:
        display.close()
        print("stopped by Ctrl-C; no output is left in part", file=sys.stderr)
        return 130
    display.close()
    print(f"wrote {files}", file=sys.stderr)
    return 0


def _preprocess(
    options: PreprocessOptions, shards: int | None, display: _Display
) -> PreprocessResult:
    if shards is None:
        return preprocess(options, display)
    from common.dataset.ray_engine import preprocess_on_ray

    return preprocess_on_ray(options, shards, display)


def _set(found: RecordSet, seq_length: int) -> str:
    files = found.files
    names = str(found.target) if len(files) == 1 else f"{files[0]} ... {files[-1].name}"
    return (
        f"{names}: {found.rows} rows of {seq_length + 1} tokens, {found.left_over} tokens left"
        " over at the end"
    )


def _counts(done: Progress) -> str:
    return (
        f"{done.documents} documents, {done.tokens} tokens{done.left_out()}, {done.seconds:.1f} s"
        f" ({done.rates()})"
    )


def _how_split(options: PreprocessOptions, prefix: Path) -> str:
    """Return what separated the documents of plain text, which a count of documents does not
    tell.
    """
    metadata = read_metadata(with_extension(prefix, METADATA_EXTENSION))
    if metadata is None or all(
        source.format != CorpusFormat.TEXT.value for source in metadata.sources
    ):
        return ""
    others = ", ".join(rule.value for rule in DocumentRule if rule is not options.documents)
    return (
        f"\nplain text: {_SEPARATORS[options.documents]} (--documents"
        f" {options.documents.value}; the others: {others})"
    )


def _parser() -> argparse.ArgumentParser:
    # Abbreviations off: Megatron's users write --vocab and --json-key, which are aliases here and
    # not guesses.
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="FILE",
        help="corpora: .txt, .jsonl, .json (array), each also .gz; .parquet, .arrow, a folder of"
        " *.parquet or of datasets' save_to_disk; with --input-format ids also a folder",
    )
    group.add_argument(
        "--dataset-split",
        metavar="NAME",
        help="split to read of a folder that datasets saved with several, such as train",
    )
    group.add_argument(
        "--input-format",
        choices=[item.value for item in CorpusFormat],
        help="format of the corpora (default: told by content)",
    )
    group.add_argument(
        "--encoding",
        default="utf-8",
        metavar="NAME",
        help="encoding of the input, such as gbk, big5 or utf-16 (default: utf-8)",
    )
    group.add_argument(
        "--min-length",
        "--min_length",
        type=int,
        default=0,
        metavar="N",
        help="leave out documents of N characters or fewer (default: 0)",
    )
    group.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a JSON object, or columns of a table, to extract, one output each (default:"
        " text)",
    )
    group.add_argument(
        "--documents",
        choices=[rule.value for rule in DocumentRule],
        default="blank_line",
        help="what separates documents in plain text (default: blank_line)",
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="write one sequence per sentence, as PREFIX_{key}_sentence",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: keep the white space between sentences",
    )
    group.add_argument(
        "--max-document-mib",
        type=int,
        default=DOCUMENT_BYTES >> 20,
        metavar="N",
        help="refuse a document of more MiB: it is held in memory whole, several times (default:"
        f" {DOCUMENT_BYTES >> 20})",
    )
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        metavar="KIND",
        help=f"kind of tokenizer: {', '.join(TOKENIZERS)}, or the name that Megatron or"
        " transformers has for it; told from the files when left out",
    )
    group.add_argument(
        "--vocab-file",
        "--vocab",
        "--tokenizer-model",
        required=True,
        type=Path,
        metavar="FILE",
        help="vocab.json, vocab.txt, a SentencePiece .model, tokenizer.json, or their folder",
    )
    group.add_argument(
        "--merge-file",
        type=Path,
        metavar="FILE",
        help="merges.txt, for a vocab.json; not needed where --vocab-file is a folder",
    )
    group.add_argument(
        "--tokenizer-backend",
        choices=("auto", "gigatoken", "tiktoken", "tokenizers"),
        default="auto",
        help="library that does the work; all give the same ids; auto takes the fastest that is"
        " installed (default: auto)",
    )
    group.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the tokenizer's marks around each document: <|endoftext|> behind it for GPT-2,"
        " [MASK] before and [CLS] behind it for vocab.txt (default: on)",
    )
    group.add_argument(
        "--special-tokens",
        choices=("tokens", "text"),
        help="what special tokens written in a document are, <|endoftext|> too: tokens as in a"
        " prompt, or ordinary text, which no document can use to end itself (default: tokens for a"
        " tokenizer with marks beyond its end, such as <|user|> or BERT's; else text)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        type=Path,
        metavar="PREFIX",
        help="path and start of the names of the files to write",
    )
    group.add_argument(
        "--format",
        choices=("indexed", "fleetx", "pieces", "mindrecord"),
        default="indexed",
        help="format of the output (default: indexed, a .bin/.idx pair)",
    )
    group.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="mindrecord: tokens a row predicts; a row has N + 1, its last one begins the next"
        " (default: 1024)",
    )
    group.add_argument(
        "--num-splits",
        type=int,
        metavar="N",
        help="mindrecord: files to spread the rows over (default: 1)",
    )
    group.add_argument(
        "--num-pieces",
        "--num_pieces",
        type=int,
        metavar="N",
        help="pieces: files to divide the documents over (default: 100)",
    )
    group.add_argument(
        "--dataset-impl",
        choices=("lazy", "cached", "mmap"),
        default="mmap",
        help="Megatron's choice of an implementation; only mmap is written (default: mmap)",
    )
    group = parser.add_argument_group("run")
    group.add_argument(
        "--shard",
        metavar="I/N",
        help="write only part I of N, for tools/merge_datasets.py; slurm takes the numbers of an"
        " array job; a part that is there already is kept",
    )
    group.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this process and its --workers; ray: --shards tasks on the Ray cluster of"
        " $RAY_ADDRESS or of this host, else on this host (default: local)",
    )
    group.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="with --engine ray: parts of the corpus, a few for each CPU of the cluster",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that tokenize; the output does not depend on it (default: 1)",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=10000,
        metavar="N",
        help="documents between progress lines (default: 10000)",
    )
    return parser


def _options(args: argparse.Namespace) -> PreprocessOptions:
    mindrecord = args.format == "mindrecord"
    small = [
        name
        for name in ("seq_length", "num_splits", "num_pieces")
        if (value := getattr(args, name)) is not None and value < 1
    ]
    refusals = (
        (
            args.dataset_impl != "mmap",
            f"--dataset-impl {args.dataset_impl}: only mmap is written; Megatron removed lazy and"
            " cached in 2023, and whatever reads them reads mmap too; leave the option out",
        ),
        (
            args.max_document_mib < 1,
            f"--max-document-mib={args.max_document_mib}: expected 1 or more",
        ),
        (
            args.keep_newlines and not args.split_sentences,
            "--keep-newlines only means something with --split-sentences; without it newlines are"
            " always kept",
        ),
        (
            mindrecord and args.split_sentences,
            "--split-sentences with --format mindrecord: rows of equal length know no sentences;"
            " leave one of them out",
        ),
        (
            bool(small),
            "".join(
                f"--{name.replace('_', '-')}={getattr(args, name)}: expected 1 or more"
                for name in small[:1]
            ),
        ),
        (
            args.num_pieces is not None and args.format != "pieces",
            "--num-pieces only means something with --format pieces",
        ),
        (
            args.shard is not None and args.format != "indexed",
            f"--shard with --format {args.format}: only a .bin/.idx pair is merged; leave one of"
            " them out",
        ),
        (
            (args.engine == "ray") != (args.shards is not None),
            "--engine ray and --shards N belong together: give both or none",
        ),
        (
            args.engine == "ray" and (args.format != "indexed" or args.shard is not None),
            "--engine ray writes and merges the shards of a .bin/.idx pair; leave --shard and"
            " --format out",
        ),
        (
            args.engine == "ray" and args.workers != 1,
            f"--workers {args.workers} with --engine ray: each shard is one process; leave"
            " --workers out and give more --shards",
        ),
        (
            args.min_length < 0,
            f"--min-length={args.min_length}: expected 0 or more",
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
        shard=parse_shard(args.shard, os.environ) if args.shard else None,
        document_bytes=args.max_document_mib << 20,
    )


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
            print(
                f"processed {progress.documents} documents, {share:.0f} % ({progress.rates()})",
                file=sys.stderr,
            )

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = progress_bar(total=progress.total_bytes, unit="B")
        self._bar.set_postfix_str(f"{progress.documents} documents", refresh=False)
        self._bar.update(progress.read_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopRequested(number, "; no output is left in part")


if __name__ == "__main__":
    run_script(main)

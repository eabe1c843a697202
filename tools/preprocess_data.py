"""Tokenize text corpora into Megatron's .bin/.idx: PREFIX_{key}_{document|sentence}.{bin,idx}, or into MindSpore's MindRecord.

    python tools/preprocess_data.py --input corpus.txt --output-prefix data/my --vocab-file vocab.json --merge-file merges.txt
    ... --format mindrecord --seq-length 1024 [--num-splits N]    PREFIX_{key}_document.mindrecord[0 ... N-1], each with its .db

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.dataset import GPTDataset
from common.dataset.blocks import DocumentRule
from common.dataset.corpus import CorpusFormat
from common.dataset.limits import DOCUMENT_BYTES
from common.dataset.metadata import METADATA_EXTENSION, read_metadata
from common.dataset.mindrecord import EXTENSION
from common.dataset.mindrecord_output import earlier_files
from common.dataset.preprocess import PreprocessOptions, Progress, preprocess
from common.dataset.token_files import with_extension
from common.dataset.workers import TokenizerChoice, limit_tokenizer_threads
from common.errors import ConfigError, GPT2Error, StopRequested, StorageError
from common.files import temporary_folder
from common.tokenizer import TOKENIZERS

if TYPE_CHECKING:
    from mindformers_gpt2.data import WrittenMindRecord

DEFAULT_SEQ_LENGTH = 1024


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _stop)
    display = _Display(args.log_interval)
    try:
        options = _options(args)
        limit_tokenizer_threads()
        gc.disable()  # nothing here makes cycles; looking for them costs 0.1 s while the vocabulary loads
        files = _mindrecord(args, options, display) if args.format == "mindrecord" else _indexed(options, display)
    except GPT2Error as error:
        display.close()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        display.close()
        print("error: stopped by Ctrl-C; no output is left in part", file=sys.stderr)
        return 130
    print(f"wrote {files}", file=sys.stderr)
    return 0


def _indexed(options: PreprocessOptions, display: _Display) -> str:
    result = preprocess(options, display)
    display.close()
    names = ", ".join(f"{prefix}.bin/.idx" for prefix in result.prefixes)
    return f"{names}: {_counts(result.progress)}{_how_split(options, result.prefixes[0])}"


def _how_split(options: PreprocessOptions, prefix: Path) -> str:
    """What separated the documents of plain text, which a count of documents does not tell."""
    metadata = read_metadata(with_extension(prefix, METADATA_EXTENSION))
    if metadata is None or all(source.format != CorpusFormat.TEXT.value for source in metadata.sources):
        return ""
    others = ", ".join(rule.value for rule in DocumentRule if rule is not options.documents)
    return f"\nplain text: {_SEPARATORS[options.documents]} (--documents {options.documents.value}; the others: {others})"


_SEPARATORS = {
    DocumentRule.BLANK_LINE: "each blank line ended a document",
    DocumentRule.LINE: "each line was a document",
    DocumentRule.FILE: "each file was one document",
    DocumentRule.EOT: "each <|endoftext|> ended a document",
}


def _mindrecord(args: argparse.Namespace, options: PreprocessOptions, display: _Display) -> str:
    """By way of pairs in a folder of its own beside the output, which goes again."""
    check, write = _mindrecord_writer()
    seq_length, shards = args.seq_length or DEFAULT_SEQ_LENGTH, args.num_splits or 1
    prefix = options.output_prefix
    check(prefix, shards)
    for key in {*options.json_keys, "text"}:  # the second whatever was asked, where the corpus is plain text
        options.keep_inputs(earlier_files(with_extension(options.prefix_of(key), EXTENSION)))
    with _pairs_folder(prefix) as folder:
        result = preprocess(replace(options, output_prefix=folder / prefix.name), display)
        display.close()
        for pair in result.prefixes:  # all, before the first is written
            GPTDataset(pair, split="train", split_weights=(1, 0, 0), seq_length=seq_length, seed=0, shuffle=False)
        texts = []
        for pair in result.prefixes:
            target = prefix.with_name(f"{pair.name}{EXTENSION}")
            written = write(pair, target, seq_length, shards)
            names = str(target) if shards == 1 else f"{written.files[0]} ... {written.files[-1].name}"
            texts.append(f"{names}: {written.rows} rows of {seq_length + 1} tokens, {written.left_over} tokens left over at the end")
        return f"{'; '.join(texts)}; {_counts(result.progress)}"


@contextmanager
def _pairs_folder(prefix: Path) -> Iterator[Path]:
    """Raises StorageError when the disk refuses."""
    try:
        with temporary_folder(prefix.with_name(f"{prefix.name}.pairs")) as folder:
            yield folder
    except OSError as error:
        raise StorageError(f"{prefix}: could not be written: {error.strerror or error}") from error


def _mindrecord_writer() -> tuple[Callable[[Path, int], None], Callable[[Path, Path, int, int], WrittenMindRecord]]:
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's warnings about devices that this machine does not have
    try:
        from mindformers_gpt2.data import check_mindrecord, write_mindrecord
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mindspore":
            raise
        raise ConfigError(
            "--format mindrecord is written by MindSpore, which is not installed; install it with: pip install '.[mindspore]', "
            "or leave the option out: both backends train from .bin/.idx pairs too"
        ) from None
    return check_mindrecord, write_mindrecord


def _counts(done: Progress) -> str:
    return f"{done.documents} documents, {done.tokens} tokens, {done.empty} empty documents skipped, {done.seconds:.1f} s ({done.rates()})"


def _parser() -> argparse.ArgumentParser:
    # Abbreviations off: Megatron's users write --vocab and --json-key, which are aliases here and not guesses.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, type=Path, metavar="FILE", help=".txt, .jsonl, .json (array), each also .gz")
    group.add_argument("--input-format", choices=[item.value for item in CorpusFormat], help="do not judge the format by content")
    group.add_argument("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY", help="keys to extract, one output each")
    group.add_argument(
        "--documents", choices=[rule.value for rule in DocumentRule], default="blank_line", help="what separates documents in plain text"
    )
    group.add_argument("--split-sentences", action="store_true", help="one sequence per sentence, written as _sentence")
    group.add_argument("--keep-newlines", action="store_true", help="with --split-sentences: keep the white space between sentences")
    group.add_argument(
        "--max-document-mib",
        type=int,
        default=DOCUMENT_BYTES >> 20,
        metavar="N",
        help=f"refuse a document of more MiB: it is held in memory whole, several times (default: {DOCUMENT_BYTES >> 20})",
    )
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        default="GPT2BPETokenizer",
        metavar="KIND",
        help=f"kind of tokenizer: {', '.join(sorted(TOKENIZERS))} (byte-level BPE; default)",
    )
    group.add_argument("--vocab-file", "--vocab", required=True, type=Path, metavar="FILE", help="vocab.json, or a folder with both files")
    group.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt")
    group.add_argument(
        "--tokenizer-backend",
        choices=("auto", "gigatoken", "tiktoken", "tokenizers"),
        default="auto",
        help="library that does the work; all give the same ids; auto takes the fastest that is installed (default: auto)",
    )
    group.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True, help="put <|endoftext|> behind each document (default: on)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, type=Path, metavar="PREFIX")
    group.add_argument("--format", choices=("indexed", "mindrecord"), default="indexed", help="default: indexed, a .bin/.idx pair")
    group.add_argument("--seq-length", type=int, metavar="N", help="mindrecord: rows of N + 1 tokens that share one (default: 1024)")
    group.add_argument("--num-splits", type=int, metavar="N", help="mindrecord: files to spread the rows over (default: 1)")
    group.add_argument("--dataset-impl", choices=("lazy", "cached", "mmap"), default="mmap", help="only mmap is written")
    group = parser.add_argument_group("run")
    group.add_argument("--workers", type=int, default=1, help="processes; the output does not depend on it (default: 1)")
    group.add_argument("--log-interval", type=int, default=10000, metavar="N", help="documents between progress lines (default: 10000)")
    return parser


def _options(args: argparse.Namespace) -> PreprocessOptions:
    if args.dataset_impl != "mmap":
        raise ConfigError(
            f"--dataset-impl {args.dataset_impl}: only mmap is written; Megatron removed lazy and cached in 2023, and whatever reads "
            "them reads mmap too; leave the option out"
        )
    if args.max_document_mib < 1:
        raise ConfigError(f"--max-document-mib={args.max_document_mib}: expected 1 or more")
    if args.keep_newlines and not args.split_sentences:
        raise ConfigError("--keep-newlines only means something with --split-sentences; without it newlines are always kept")
    if args.format == "mindrecord":
        if args.split_sentences:
            raise ConfigError("--split-sentences with --format mindrecord: rows of equal length know no sentences; leave one of them out")
        for name, value in (("--seq-length", args.seq_length), ("--num-splits", args.num_splits)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected 1 or more")
    elif args.seq_length is not None or args.num_splits is not None:
        raise ConfigError("--seq-length and --num-splits only mean something with --format mindrecord; a .bin/.idx pair suits every length")
    return PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer=TokenizerChoice(
            kind=args.tokenizer_type, vocab_file=args.vocab_file, merge_file=args.merge_file, backend=args.tokenizer_backend
        ),
        json_keys=tuple(args.json_keys),
        input_format=CorpusFormat(args.input_format) if args.input_format else None,
        documents=DocumentRule(args.documents),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        workers=args.workers,
        document_bytes=args.max_document_mib << 20,
    )


class _Display:
    """A bar where a person watches, else one line every ``interval`` documents."""

    def __init__(self, interval: int) -> None:
        self._interval = max(1, interval)
        self._next = self._interval
        self._bar: Any = None
        self._wants_bar = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        if self._wants_bar:
            self._draw(progress)
        elif progress.documents >= self._next:
            self._next = (progress.documents // self._interval + 1) * self._interval
            share = 100 * progress.read_bytes / max(1, progress.total_bytes)
            print(f"processed {progress.documents} documents, {share:.0f} % ({progress.rates()})", file=sys.stderr)

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                self._wants_bar = False
                return
            self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, file=sys.stderr)
        self._bar.set_postfix_str(f"{progress.documents} documents", refresh=False)
        self._bar.update(progress.read_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopRequested(number, f"stopped by signal {number}; no output is left in part")


if __name__ == "__main__":
    run_script(main)

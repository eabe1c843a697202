"""Train a tokenizer on own text, into a folder that data.tokenizer takes.

    python tools/train_tokenizer.py --input corpus.txt --output-folder data/tokenizer \\
            --vocab-size 20000 --type GPT2BPETokenizer

    GPT2BPETokenizer            byte-level BPE: vocab.json and merges.txt
    BertWordPieceLowerCase      Chinese characters and pieces of words: vocab.txt
    BertWordPieceCase           the same, upper case kept
    SentencePieceTokenizer      unigram model, with /bpe behind it a BPE one: tokenizer.model

The same text and options give the same files.

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.config.tokenizer_kinds import kind_named
from common.dataset.blocks import DocumentRule
from common.dataset.encodings import checked_encoding
from common.dataset.texts import read_texts
from common.errors import ConfigError, GPT2Error, report
from common.files import atomic_write, refuse_to_overwrite
from common.log import progress_bar
from common.tokenizer import load_tokenizer
from common.tokenizer.folder import CONFIG
from common.tokenizer.training import LEAST, TRAINERS


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        print(_train(arguments), file=sys.stderr)
    except GPT2Error as error:
        return report(error)
    return 0


def _train(arguments: argparse.Namespace) -> str:
    kind = str(kind_named(arguments.type))
    if kind not in TRAINERS:
        raise ConfigError(f"--type {arguments.type}: expected {', '.join(TRAINERS)}")
    if arguments.vocab_size < LEAST.get(kind, 3):
        raise ConfigError(
            f"--vocab-size={arguments.vocab_size}: {kind} has at least {LEAST.get(kind, 3)}"
        )
    encoding = checked_encoding(arguments.encoding)
    size = sum(path.stat().st_size for path in arguments.input if path.is_file())

    def texts() -> Iterator[str]:
        with progress_bar(total=size, unit="B", description="reading") as bar:
            yield from read_texts(
                arguments.input,
                encoding=encoding,
                keys=(arguments.json_key,),
                rule=DocumentRule.LINE,
                on_bytes=bar.update,
            )

    started = time.monotonic()
    files = TRAINERS[kind](texts, arguments.vocab_size)
    if kind == "BertWordPieceCase":
        files[CONFIG] = json.dumps({"do_lower_case": False}).encode()
    folder = arguments.output_folder
    refuse_to_overwrite(
        arguments.input, [folder / name for name in files], "choose another --output-folder"
    )
    for name, content in files.items():
        with atomic_write(folder / name) as file:
            file.write(content)
    tokenizer = load_tokenizer(kind.partition("/")[0], folder)
    return (
        f"wrote {' and '.join(str(folder / name) for name in files)}: {tokenizer.vocab_size}"
        f" tokens, {time.monotonic() - started:.1f} s; set data.tokenizer={folder} and"
        f" model.vocab_size={tokenizer.vocab_size}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="FILE",
        help="texts: .txt, .jsonl, .json (array), each also .gz",
    )
    parser.add_argument(
        "--output-folder",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="folder for the tokenizer's files",
    )
    parser.add_argument(
        "--vocab-size",
        required=True,
        type=int,
        metavar="N",
        help="number of tokens, special ones included",
    )
    parser.add_argument(
        "--type",
        default="GPT2BPETokenizer",
        metavar="KIND",
        help=f"kind of tokenizer: {', '.join(TRAINERS)}, or the name that Megatron or"
        " transformers has for it (default: GPT2BPETokenizer)",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key of JSON objects that holds the text (default: text)",
    )
    parser.add_argument(
        "--encoding", default="utf-8", metavar="NAME", help="encoding of the input (default: utf-8)"
    )
    return parser


if __name__ == "__main__":
    run_script(main)

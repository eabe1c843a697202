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

if __name__ == "__main__":
    import as_script  # noqa: F401

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.config.values import kind_named
from common.dataset.documents import read_texts
from common.dataset.encodings import checked_encoding
from common.errors import ConfigError
from common.files import atomic_write, refuse_to_overwrite
from common.flags import flag
from common.log import progress_bar
from common.program import command
from common.tokenizer import load_tokenizer
from common.tokenizer.bpe_files import END_OF_TEXT
from common.tokenizer.folder import CONFIG
from common.tokenizer.training import LEAST, TRAINERS


@dataclass(kw_only=True)
class Request:
    input: tuple[Path, ...] = flag("FILE: texts: .txt, .jsonl, .json (array), each also .gz", required=True, nargs="+")
    output_folder: Path = flag("FOLDER: folder for the tokenizer's files", required=True)
    vocab_size: int = flag("N: number of tokens, special ones included", required=True)
    type: str = flag(
        f"KIND: kind of tokenizer: {', '.join(TRAINERS)}, or the name that Megatron or transformers has for it",
        default="GPT2BPETokenizer",
    )
    json_key: str = flag("KEY: key of JSON objects that holds the text", default="text")
    encoding: str = flag("NAME: encoding of the input", default="utf-8")


@command(Request, dashes=True)
def main(arguments: Request) -> None:
    kind = str(kind_named(arguments.type))
    if kind not in TRAINERS:
        raise ConfigError(f"--type {arguments.type}: expected {', '.join(TRAINERS)}")
    if arguments.vocab_size < LEAST.get(kind, 3):
        raise ConfigError(f"--vocab-size={arguments.vocab_size}: {kind} has at least {LEAST.get(kind, 3)}")
    encoding = checked_encoding(arguments.encoding)
    size = sum(path.stat().st_size for path in arguments.input if path.is_file())

    def texts() -> Iterator[str]:
        with progress_bar(total=size, unit="B", description="reading") as bar:
            found = read_texts(
                arguments.input,
                encoding=encoding,
                keys=(arguments.json_key,),
                rule="line",
                on_bytes=bar.update,
            )
            yield from (text for text in found if text.strip() != END_OF_TEXT)

    started = time.monotonic()
    files = TRAINERS[kind](texts, arguments.vocab_size)
    if kind == "BertWordPieceCase":
        files[CONFIG] = json.dumps({"do_lower_case": False}).encode()
    folder = arguments.output_folder
    refuse_to_overwrite(arguments.input, [folder / name for name in files], "choose another --output-folder")
    for name, content in files.items():
        with atomic_write(folder / name) as file:
            file.write(content)
    tokenizer = load_tokenizer(kind.partition("/")[0], folder)
    print(
        f"wrote {' and '.join(str(folder / name) for name in files)}: {tokenizer.vocab_size} tokens,"
        f" {time.monotonic() - started:.1f} s; set data.tokenizer={folder} and model.vocab_size={tokenizer.vocab_size}",
        file=sys.stderr,
    )

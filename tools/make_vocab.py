"""Write the vocabulary of a Chinese corpus, one token a line.

The file begins with [SEP] [CLS] [MASK] [PAD] [UNK]. The characters of the corpus follow, the most
frequent ones first.

    python tools/make_vocab.py --raw_data_path data/train.json --vocab_file cache/vocab_user.txt \\
            --vocab_size 50000

The file has --vocab_size lines and five more, fewer where the corpus has not so many characters.
Letters within words stand there as ##a too, so that no text of the corpus becomes [UNK].

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import sys
from dataclasses import dataclass
from pathlib import Path

from common.dataset.documents import read_texts
from common.dataset.encodings import checked_encoding
from common.errors import ConfigError
from common.files import atomic_write, refuse_to_overwrite
from common.flags import flag
from common.log import progress_bar
from common.program import command
from common.tokenizer.training import FIRST, count_characters, count_words, most_frequent


@dataclass(kw_only=True)
class Request:
    raw_data_path: tuple[Path, ...] = flag(
        "FILE: corpora: .json (array of texts), .jsonl or .txt, each also .gz",
        *("--raw_data_path", "--raw-data-path"),
        default=(Path("data/train.json"),),
        nargs="+",
    )
    vocab_file: Path = flag(
        "FILE: vocabulary to write", *("--vocab_file", "--vocab-file"), default=Path("vocab_processed.txt")
    )
    vocab_size: int = flag(
        "N: tokens to keep, without the special ones", *("--vocab_size", "--vocab-size"), default=50000
    )
    segment: bool = flag("take words instead of characters, for BertWordLevel")
    cased: bool = flag("keep upper case, for BertWordPieceCase")
    encoding: str = flag("NAME: encoding of the corpus", default="utf-8")


@command(Request)
def main(arguments: Request) -> None:
    if arguments.vocab_size < 1:
        raise ConfigError(f"--vocab_size={arguments.vocab_size}: expected 1 or more")
    target = arguments.vocab_file
    encoding = checked_encoding(arguments.encoding)
    refuse_to_overwrite(arguments.raw_data_path, [target], "choose another --vocab_file")
    size = sum(path.stat().st_size for path in arguments.raw_data_path if path.is_file())
    with progress_bar(total=size, unit="B") as bar:
        texts = read_texts(arguments.raw_data_path, encoding=encoding, on_bytes=bar.update)
        counts = count_words(texts) if arguments.segment else count_characters(texts, lower_case=not arguments.cased)
    tokens = most_frequent(counts, arguments.vocab_size)
    with atomic_write(target, "w") as file:
        file.write("".join(f"{token}\n" for token in tokens))
    share = sum(counts[token] for token in tokens) / max(1, counts.total())
    print(
        f"wrote {target}: {len(tokens)} lines, {len(FIRST)} special tokens and"
        f" {len(tokens) - len(FIRST)} of {len(counts)} tokens found, which are {share:.2%} of the"
        f" corpus; set model.vocab_size={len(tokens)}",
        file=sys.stderr,
    )

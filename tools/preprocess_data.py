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
from typing import Any, get_args

from common.dataset.blocks import DocumentRule
from common.dataset.encode import limit_tokenizer_threads
from common.dataset.metadata import METADATA_EXTENSION, read_metadata
from common.dataset.options import DEFAULT_PIECES, PreprocessOptions
from common.dataset.preprocess import Progress, preprocess, preprocess_mindrecord
from common.dataset.token_files import with_extension
from common.hub import located
from common.log import progress_bar
from common.program import command


class _Display:
    """A bar where a person watches, else one line every ``interval`` documents."""

    def __init__(self, interval: int) -> None:
        self._interval = self._next = max(1, interval)
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = progress_bar(total=progress.total_bytes, unit="B")
            self._bar.set_postfix_str(f"{progress.documents} documents", refresh=False)
            self._bar.update(progress.read_bytes - self._bar.n)
        elif progress.documents >= self._next:
            self._next = (progress.documents // self._interval + 1) * self._interval
            share = 100 * progress.read_bytes / max(1, progress.total_bytes)
            print(f"processed {progress.documents} documents, {share:.0f} % ({progress.rates()})", file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@command(PreprocessOptions, stopped="; no output is left in part", dashes=True)
def main(options: PreprocessOptions) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in ("common", "gpt2"):  # not all libraries, which log each request
        logging.getLogger(name).setLevel(logging.INFO)
    options.vocab_file = located(options.vocab_file, weights=False)
    limit_tokenizer_threads()
    # nothing here makes cycles; looking for them costs 0.1 s while the vocabulary loads
    gc.disable()
    with closing(_Display(options.log_interval)) as display:
        if options.format == "mindrecord":
            written, done = preprocess_mindrecord(options, display)
            text = f"wrote {'; '.join(written)}; {_counts(done)}"
        else:
            text = _token_files(options, preprocess(options, display))
    print(text, file=sys.stderr)


def _token_files(options: PreprocessOptions, done: Progress) -> str:
    """Return what was written in another format, or was there."""
    endings = "_ids.npy/_idx.npz" if options.format == "fleetx" else ".bin/.idx"
    pairs = ", ".join(f"{prefix}{endings}" for prefix in done.prefixes)
    if options.format == "pieces":
        pairs = f"{options.output_prefix}_{{0 ... {(options.num_pieces or DEFAULT_PIECES) - 1}}}.txt"
    if done.kept:
        return f"kept {pairs}, which is there already"
    text = f"wrote {pairs}: {_counts(done)}"
    # a count of documents does not tell what separated them, where nobody chose it
    metadata = read_metadata(with_extension(done.prefixes[0], METADATA_EXTENSION))
    usual, *others = get_args(DocumentRule)
    if metadata and options.documents == usual and any(source["format"] == "text" for source in metadata.sources):
        text += f"\nplain text: each blank line ended a document (--documents {usual}; the others: {', '.join(others)})"
    return text


def _counts(done: Progress) -> str:
    return f"{done.documents} documents, {done.tokens} tokens{done.left_out()}, {done.seconds:.1f} s ({done.rates()})"

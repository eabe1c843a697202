"""Encode documents into token ids with their boundaries, in bulk, in this process or in new processes.

Only the tokenizer runs once per document.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.dataset.blocks import Block
from common.dataset.documents import Documents, documents_of
from common.dataset.id_files import parse_ids
from common.dataset.options import PreprocessOptions
from common.errors import RunError
from common.processes.heartbeat import die_with_parent
from common.tokenizer import Framing, Tokenizer
from common.tokenizer.text_tokenizer import encode_documents

_Ids = npt.NDArray[np.int32]
_Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """Tokens of a block under one key.

    tokens: (sum of sizes,). sizes: (sequences,) tokens of each, at least 1. documents: (documents,)
    sequences of each; 0 for a text without a token, as in Megatron's preprocess_data.py, and for the format ``pieces``
    for a document that was left out.
    empty: number of those, and of blank pieces of plain text, which are not counted as documents.
    unknown: tokens of text that the vocabulary lacks. short: documents skipped; short_bytes: their text. text_bytes:
    bytes of text read. read_bytes: bytes taken from disk. marks: how often each special token stays text.
    """

    tokens: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    text_bytes: int
    read_bytes: int
    empty: int = 0
    unknown: int = 0
    short: int = 0
    short_bytes: int = 0
    marks: Mapping[str, int] = field(default_factory=dict)


def limit_tokenizer_threads() -> None:
    """Let the tokenizer libraries use one thread in this process, or one worker would take every core.

    Call it before the first of them is imported: they read these variables when their thread pool starts.
    """
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encode_blocks(
    blocks: Iterable[Block], tokenizer: Tokenizer, options: PreprocessOptions
) -> Generator[list[EncodedBlock], None, None]:
    """Yield the encoded blocks in the order of ``blocks``. At most two for each worker are in memory.

    Raises the error of a worker, or RunError if a worker died.
    """
    if options.workers == 1:
        yield from (encode_block(block, tokenizer, options) for block in blocks)
        return
    # Imported here: a run of one worker starts faster without them.
    import multiprocessing
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(
        options.workers,
        # fork would copy the locks of threads of any library that the caller has loaded
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(options, os.getpid()),
    )
    waiting: deque[Future[list[EncodedBlock]]] = deque()
    try:
        for block in blocks:
            # workers inherit the mask: Ctrl-C reaches the whole group, and the parent ends them
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting.append(pool.submit(_encode_in_worker, block))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if len(waiting) >= 2 * options.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(f"a preprocessing worker died ({error}); was it out of memory? try fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, PreprocessOptions] | None = None


def _start_worker(options: PreprocessOptions, parent: int) -> None:
    """Load a tokenizer, and end with the parent: a killed one cannot end its pool, whose pipes do not report it."""
    global _worker
    if not die_with_parent(parent):
        os._exit(1)
    limit_tokenizer_threads()
    _worker = options.load_tokenizer(), options


def _encode_in_worker(block: Block) -> list[EncodedBlock]:
    assert _worker is not None
    return encode_block(block, *_worker)


def encode_block(block: Block, tokenizer: Tokenizer, options: PreprocessOptions) -> list[EncodedBlock]:
    """Return one entry per key.

    This is a pure function, so that any number of workers writes the same bytes.
    Raises DataError naming file, line and column.
    """
    if block.format != "ids":
        found = documents_of(block, options.json_keys)
        return [_encode(documents, tokenizer, options, block.read_bytes) for documents in found]
    assert isinstance(block.data, bytes)
    ids, sizes = parse_ids(block.data, str(block.path), block.offset, tokenizer.vocab_size, tokenizer.eod_id)
    every, text_bytes = np.ones(len(sizes), dtype=np.int64), len(block.data)
    return [EncodedBlock(tokens=ids, sizes=sizes, documents=every, text_bytes=text_bytes, read_bytes=block.read_bytes)]


def _encode(documents: Documents, tokenizer: Tokenizer, options: PreprocessOptions, read_bytes: int) -> EncodedBlock:
    texts, places, short_bytes = documents.texts, documents.places, 0
    if options.min_length:
        # like GPT2-Chinese, count each line end as the characters of `` [SEP] ``
        line_end = 0 if tokenizer.framing.newline is None else len(" [SEP] ") - 1
        kept = [n for n, text in enumerate(texts) if len(text) + line_end * text.count("\n") > options.min_length]
        texts, places = [texts[n] for n in kept], [places[n] for n in kept]
        short_bytes = len("".join(documents.texts).encode()) - len("".join(texts).encode())
    short = len(documents.texts) - len(texts)
    counts = np.ones(len(texts), dtype=np.int64)
    if options.split_sentences:
        sentences = [split_sentences(text, keep_newlines=options.keep_newlines) for text in texts]
        counts = np.array([len(found) for found in sentences], dtype=np.int64)
        texts = [sentence for found in sentences for sentence in found]
    is_token = options.special_tokens == "tokens"
    packed = encode_documents(tokenizer, texts, special=is_token)
    ids, sizes = packed.ids, packed.lengths
    if not sizes.all():
        held = np.concatenate([[0], np.cumsum(sizes > 0)])[np.cumsum(counts)]
        sizes, counts = sizes[sizes > 0], np.diff(held, prepend=0)
    if options.append_eod and len(sizes):
        ids, sizes = _frame(ids, sizes, counts[counts > 0], tokenizer.framing)
    empty = documents.blank + int(np.count_nonzero(counts == 0))
    if options.format == "pieces":
        every = np.zeros(len(documents.texts) + documents.blank, dtype=np.int64)
        every[places] = counts
        counts = every
    return EncodedBlock(
        tokens=ids,
        sizes=sizes,
        documents=counts,
        empty=empty,
        unknown=np.count_nonzero(ids == tokenizer.unknown_id),
        short=short,
        short_bytes=short_bytes,
        text_bytes=documents.size,
        read_bytes=read_bytes,
        marks={} if is_token else {mark: sum(text.count(mark) for text in texts) for mark in tokenizer.special},
    )


def _frame(ids: _Ids, sizes: _Sizes, counts: _Sizes, framing: Framing) -> tuple[_Ids, _Sizes]:
    """Put the prefix before the first sequence of each document, the suffix after its last one."""
    ends = np.cumsum(counts)
    first, last = ends - counts, ends - 1
    stops = np.cumsum(sizes)
    prefix, suffix = (np.array(marks, ids.dtype) for marks in (framing.prefix, framing.suffix))
    # at one place the end of a document comes before the begin of the next, since it is named first
    places = np.concatenate([stops[last].repeat(len(suffix)), (stops - sizes)[first].repeat(len(prefix))])
    framed = sizes.copy()
    framed[first] += len(prefix)
    framed[last] += len(suffix)
    return np.insert(ids, places, np.concatenate([np.tile(suffix, len(ends)), np.tile(prefix, len(ends))])), framed


# ---- sentences by rule ----


_ABBREVIATIONS = """
    mr mrs ms dr prof rev hon st sr jr messrs mme mlle capt col gen lt sgt maj cmdr gov sen rep pres
    vol vols ch chap fig figs p pp ed eds cf vs viz approx e.g i.e a.m p.m u.s u.k inc ltd co corp
    jan feb mar apr jun jul aug sep sept oct nov dec
"""
_KNOWN = frozenset(_ABBREVIATIONS.split())
_CLOSING = "\"'\u201d\u2019)\\]}»」』\uff09】》"
_BOUNDARY = re.compile(
    # The match begins where a run of signs begins, and does not backtrack. Otherwise a run of a
    # million signs would take hours.
    rf"(?P<latin>(?<![.!?…])[.!?…]++[{_CLOSING}]*+)(?=\s)"
    rf"|(?:[。\uff01\uff1f]+|……)[{_CLOSING}]*"
    r"|(?=\n[ \t]*\n)"
)
_SPACE = re.compile(r"\s*")
_LAST_WORD = re.compile(r"([^\s(\[\"'\u201c\u2018]+)\.$")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Return the sentences of ``text`` in order, without empty ones.

    Rules need no model to download (nltk's punkt does) and give the same result everywhere. A sentence ends
    * at . ! ? or an ellipsis, with its closing quotes and brackets, if white space follows,
      - but not after a known abbreviation ("Mr.", "e.g."), after a single capital letter ("J.
        Smith"), or before a small letter ("etc. and so on");
    * at a Chinese full stop, exclamation or question mark (not a semicolon), with its closing
      quotes, even without a space;
    * at a blank line.
    keep_newlines: False drops the white space between sentences, like Megatron's
    ``--split-sentences``. True leaves it at the end of the sentence before, so that the joined
    sentences equal the text.
    """
    ends = [match.end() for match in _BOUNDARY.finditer(text) if _is_end(text, match)]
    if keep_newlines:  # white space goes to the sentence before; what leads the text goes to the first one
        begin = len(text) - len(text.lstrip())
        ends = [found.end() for end in ends if end > begin and (found := _SPACE.match(text, end))]
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [piece if keep_newlines else piece.strip() for piece in pieces if piece and not piece.isspace()]


def _is_end(text: str, match: re.Match[str]) -> bool:
    if match["latin"] is None:
        return True
    after = text[match.end() : match.end() + 200].lstrip()
    if after[:1].islower():
        return False
    if match["latin"] != ".":
        return True
    word = _LAST_WORD.search(text, max(0, match.start() - 40), match.end())
    if word is None:
        return True
    name = word.group(1)
    return name.lower() not in _KNOWN and not (len(name) == 1 and name.isupper() and name != "I")

"""Tasks on a file: text, its perplexity in sliding windows, and lambada, the last word of passages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from common.errors import DataError
from common.evaluation.corpus import EvaluationFile, EvaluationResult, RowTask, table
from common.evaluation.rows import ScoredRow, Scores, sliding_windows
from common.parallel.run import Run
from common.tokenizer import Tokenizer
from common.tokenizer.text_tokenizer import encode_documents, encode_prompt
from common.training.data import describe_tokenizer
from common.training.loop import perplexity


def open_text(file: EvaluationFile, tokenizer: Tokenizer, config: Run) -> RowTask:
    """Return the task to measure the perplexity of a text in sliding windows.

    A plain text is one stream of tokens, in which ``<|endoftext|>`` is that token. Every token but
    the first is scored once, as in Hugging Face's guide and in Megatron. Each has more than
    window - stride tokens before it, unless it is nearer to the beginning.

    The texts of a .jsonl file are scored one by one. The first context of each is the end-of-text
    token, so that all its tokens are scored, as in lm-eval. The last window of a long document
    differs: lm-eval moves it back to full length. Raises DataError for a plain text of one token.
    """
    settings, window = config.evaluation, config.model.seq_length
    stride = settings.stride or window
    texts = [DETOKENIZERS[settings.detokenize](text) for text in file.texts]
    if file.is_json:
        encoded = encode_documents(tokenizer, texts).rows()
        start = np.array(tokenizer.framing.begin or (tokenizer.eod_id,), np.int32)
        streams = [np.concatenate((start, ids)) for ids in encoded]
    else:
        encoded = streams = [encode_prompt(tokenizer, texts[0])]
    every = [row for each in streams for row in sliding_windows(each, window, stride)]
    if not every:
        raise DataError(f"{file.path}: holds a single token, and the first is not scored; expected a longer text")
    rows = every[: settings.max_samples or None]
    whole = len(rows) == len(every)
    text_bytes = sum(len(text.encode()) for text in file.texts)
    # A part of a changed text, or an unknown token, does not tell its bytes in the file.
    scored_bytes = text_bytes if whole else 0
    if not whole and settings.detokenize == "none" and tokenizer.unknown_id is None:
        scored_bytes = sum(len(tokenizer.decode_bytes(row.tokens[-row.scored :].tolist())) for row in rows)
    tokens = sum(map(len, encoded))
    tokenizer_record = describe_tokenizer(tokenizer)

    def result(scores: Scores) -> EvaluationResult:
        """Return the figures. Those per word are None if ``max_samples`` cut the file."""
        nats, scored = float(scores.losses.sum()), sum(row.scored for row in rows)
        loss = nats / scored
        # lm-eval's tasks/wikitext counts the empty words at both ends of a page too
        count = re.compile(r"\s+").split if file.is_json else str.split
        words = sum(len(count(text)) for text in file.texts)
        # Megatron's count of words: newlines between spaces are words too, as in WikiText's own
        # count. The first word of a plain text does not count.
        originals = sum(len(text.strip().split(" ")) for text in file.texts) - (not file.is_json)
        token_ratio = scored / originals if whole and originals else None
        figures: dict[str, float | None] = {
            "loss": loss,
            "perplexity": perplexity(loss),
            "word_perplexity": perplexity(nats / words) if whole else None,
            "bits_per_byte": nats / math.log(2) / scored_bytes if scored_bytes else None,
            "adjusted_perplexity": perplexity(loss * token_ratio) if token_ratio else None,
            "token_ratio": token_ratio,
        }
        first = "end-of-text token" if file.is_json else "none: the first token is not scored"
        record = {
            "task": "text",
            **file.record,
            "documents": len(file.texts),
            "text_bytes": text_bytes,
            "scored_bytes": scored_bytes or None,
            "words": words,
            "tokens": tokens,
            "scored_tokens": scored,
            "whole": whole,
            "detokenize": settings.detokenize,
            "tokenizer": tokenizer_record,
            "window": window,
            "stride": stride,
            "windows": len(rows),
            "first_context": first,
            **figures,
        }
        lines = [
            f"{file.path}: {scored:,} of {tokens:,} tokens scored, {words:,} words, {len(file.texts):,} documents;"
            f" windows of {window}, stride {stride}, first context {first}, detokenize {settings.detokenize}",
            *table({name.replace("_", " "): value for name, value in figures.items()}),
        ]
        if token_ratio:
            lines.append(
                f" validation results on {file.path.name} | avg loss: {loss:.4E} | ppl: {perplexity(loss):.4E} |"
                f" adjusted ppl: {perplexity(loss * token_ratio):.4E} | token ratio: {token_ratio} |"
            )
        return EvaluationResult(file_name="evaluation_text.json", record=record, lines=lines)

    return RowTask(tokenizer_record=tokenizer_record, rows=rows, result=result, unit="window")


def detokenize_wikitext(text: str) -> str:
    """Remove the spaces that WikiText puts around punctuation, and the marks @-@ @,@ @.@ inside words and numbers.

    Rules and order are those of Megatron-LM, tasks/zeroshot_gpt/detokenizer.py, and of lm-eval's task wikitext. One
    rule is left out: it looks for ' between slashes, which no text has.
    """
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for pattern, replacement in _PAIRS:
        text = pattern.sub(replacement, text)
    for length in (4, 3, 2):
        text = text.replace(" ".join("=" * length), "=" * length)
    for spaced, plain in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(spaced, plain)
    return text


_PAIRS = [
    (re.compile(rf"\{opening}\s*([^\{closing}]*?)\s*\{closing}"), rf"{opening}\1{closing}")
    for opening, closing in ("()", "[]", "{}")
] + [(re.compile(rf"{quote}\s*([^{quote}]*?)\s*{quote}"), rf"{quote}\1{quote}") for quote in "\"'"]

DETOKENIZERS: dict[str, Callable[[str], str]] = {"none": str, "wikitext": detokenize_wikitext}
"""Functions by the values of evaluation.detokenize."""


def open_lambada(file: EvaluationFile, tokenizer: Tokenizer, config: Run) -> RowTask:
    """Return the task to predict the last word of each passage (Paperno et al. 2016), as lm-eval's lambada_openai.

    The word begins after the last space and is encoded together with its context. It is right when each of its tokens
    is the most probable one after those before it. The perplexity is of words, not of tokens. Raises DataError for a
    plain text, a passage of one word, and a last word that is longer than the window.
    """
    if not file.is_json:
        raise DataError(
            f'{file.path}: is plain text; LAMBADA is read from JSON Lines, {{"text": "..."}} for each passage'
        )
    passages = file.texts[: config.evaluation.max_samples or None]
    contexts = [passage.rstrip().rpartition(" ")[0].rstrip() for passage in passages]
    for number, (passage, context) in enumerate(zip(passages, contexts, strict=True), 1):
        if not context:
            raise DataError(
                f"{file.path}: passage {number} is one word, {passage[:40]!r}; expected a context and a last word"
            )
    window = config.model.seq_length
    rows, cut = [], 0
    encoded = encode_documents(tokenizer, [passage.rstrip() for passage in passages]).rows()
    for number, (tokens, context_ids) in enumerate(
        zip(encoded, encode_documents(tokenizer, contexts).rows(), strict=True), 1
    ):
        scored = len(tokens) - len(context_ids)
        if not 0 < scored <= window:
            raise DataError(
                f"{file.path}: the last word of passage {number} has {scored} tokens, expected 1 to"
                f" model.seq_length={window}; remove the passage"
            )
        rows.append(ScoredRow(tokens=tokens[-(window + 1) :], scored=scored))
        cut += len(tokens) > window + 1
    tokenizer_record = describe_tokenizer(tokenizer)

    def result(scores: Scores) -> EvaluationResult:
        right = int(sum(hits == row.scored for hits, row in zip(scores.hits, rows, strict=True)))
        count, loss = len(rows), float(scores.losses.mean())
        record = {
            "task": "lambada",
            **file.record,
            "passages": count,
            "cut_passages": cut,
            "last_word_tokens": sum(row.scored for row in rows),
            "tokenizer": tokenizer_record,
            "window": window,
            "correct": right,
            "accuracy": right / count,
            "loss": loss,
            "perplexity": perplexity(loss),
        }
        lines = [
            f"{file.path}: last word of {count:,} passages; {cut} cut to the window of {window}",
            *table({"accuracy": right / count, "loss of a word": loss, "perplexity": perplexity(loss)}),
            f" validation results on LAMBADA | number correct: {right:.4E} | total examples:"
            f" {count:.4E} | avg accuracy: {right / count:.4E}",
        ]
        return EvaluationResult(file_name="evaluation_lambada.json", record=record, lines=lines)

    return RowTask(tokenizer_record=tokenizer_record, rows=rows, result=result, unit="passage")

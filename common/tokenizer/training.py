"""Training of tokenizers, and counts of a corpus's tokens, for vocabularies of characters or words.

The same text gives the same files on every machine.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from common.errors import ConfigError, TokenizerError
from common.paths import require_package
from common.structured_files import parse_json
from common.tokenizer.bert import ALONE, CONTINUES, SPACES, bert_steps, word_cutter
from common.tokenizer.bpe_files import END_OF_TEXT

FIRST = ("[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]")
"""Special tokens in the order of GPT2-Chinese's make_vocab.py."""
_RUN = re.compile(f"[^{ALONE}{SPACES}]+")
_CHUNK = 1000
"""Characters of a line before it is cut. SentencePiece drops lines longer than its buffer."""
Texts = Callable[[], Iterable[str]]
Trainer = Callable[[Texts, int], dict[str, bytes]]


def count_characters(texts: Iterable[str], *, lower_case: bool = True) -> Counter[str]:
    """Count the tokens that BERT's tokenizer makes of single characters.

    These are Chinese characters, signs and first letters of words. Other letters of words have ``##`` in front.
    """
    characters: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
        runs.update(_RUN.findall(text))
    inside = re.compile(f"[{ALONE}]")
    counts = Counter({char: n for char, n in characters.items() if inside.fullmatch(char)})
    for word, number in _words(runs, lower_case=lower_case, split_chinese=True):
        counts[word[0]] += number
        for letter in word[1:]:
            counts[CONTINUES + letter] += number
    return counts


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Count the words of Chinese text. Raises TokenizerError if the library that cuts it is not installed."""
    found, counts = Counter(chain.from_iterable(map(word_cutter(), texts))), Counter[str]()
    for word, number in _words(found, lower_case=True, split_chinese=False):
        counts[word] += number
    return counts


def _words(runs: Counter[str], *, lower_case: bool, split_chinese: bool) -> Iterable[tuple[str, int]]:
    """Yield the words that BERT's tokenizer cuts into pieces, and how often the run of each occurs."""
    normalizer, pre_tokenizer = bert_steps(lower_case, split_chinese)
    for run, number in runs.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(run)):
            yield word, number


def most_frequent(counts: Counter[str], size: int) -> list[str]:
    """Return the special tokens, then the ``size`` most frequent tokens.

    Tokens of equal frequency are in the order of their code points.
    """
    ordered = sorted(((-number, token) for token, number in counts.items() if token not in FIRST))
    return [*FIRST, *(token for _, token in ordered[:size])]


def _train_bpe(texts: Texts, size: int) -> dict[str, bytes]:
    """Train byte-level BPE like GPT-2's: 256 bytes, merges, and the end of text as the last id."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=alphabet, min_frequency=2, show_progress=sys.stderr.isatty()
    )
    model.train_from_iterator(texts(), trainer)
    content = parse_json(model.to_str())["model"]
    ids = content["vocab"] | {END_OF_TEXT: len(content["vocab"])}
    merges = "".join(f"{left} {right}\n" for left, right in content["merges"])
    return {
        "vocab.json": json.dumps(ids, ensure_ascii=False).encode(),
        "merges.txt": f"#version: 0.2\n{merges}".encode(),
    }


def _train_wordpiece(texts: Texts, size: int, *, lower_case: bool) -> dict[str, bytes]:
    """Train vocab.txt: special tokens, the characters, then pieces of words.

    Chinese characters stay tokens of their own.
    """
    from tokenizers import Tokenizer, models, trainers

    counts = count_characters(texts(), lower_case=lower_case)
    letters = sorted(counts, key=lambda token: (-counts[token], token))
    first = [*FIRST, *(token for token in letters if token not in FIRST)]
    if len(first) >= size:
        return {"vocab.txt": _lines(first[:size])}
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    model.normalizer, model.pre_tokenizer = bert_steps(lower_case, split_chinese=True)
    # The library would number the letters in the order of a hash table, which differs in each run.
    # Special tokens get ids in the order of their list.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=first,
        continuing_subword_prefix=CONTINUES,
        min_frequency=2,
        show_progress=sys.stderr.isatty(),
    )
    model.train_from_iterator(texts(), trainer)
    ids = model.get_vocab()
    return {"vocab.txt": _lines(sorted(ids, key=ids.__getitem__))}


def _lines(tokens: Iterable[str]) -> bytes:
    return "".join(f"{token}\n" for token in tokens).encode()


def _train_sentencepiece(texts: Texts, size: int, *, kind: str) -> dict[str, bytes]:
    """Train tokenizer.model. Text is not normalized, and rare characters become bytes.

    SentencePiece's default NFKC would turn Chinese punctuation into half-width signs, and line ends into spaces.
    """
    purpose = "which trains such a model"
    sentencepiece = require_package("sentencepiece", extra="chinese", purpose=purpose, error=TokenizerError)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                line[at : at + _CHUNK]
                for text in texts()
                for line in text.split("\n")
                for at in range(0, len(line), _CHUNK)
            ),
            model_writer=model,
            vocab_size=size,
            model_type=kind,
            byte_fallback=True,
            character_coverage=0.9998,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=2,  # a fixed number, which determines the order of sums
            train_extremely_large_corpus=True,
            minloglevel=2,
        )
    except RuntimeError as error:  # the library's message: the size is too large or too small
        reason = str(error).rsplit("] ", 1)[-1].partition(" or decrease")[0].strip()  # by an option of its own
        raise ConfigError(f"--vocab-size={size}: SentencePiece says: {reason}") from None
    return {"tokenizer.model": model.getvalue()}


TRAINERS: dict[str, Trainer] = {
    "GPT2BPETokenizer": _train_bpe,
    "BertWordPieceLowerCase": partial(_train_wordpiece, lower_case=True),
    "BertWordPieceCase": partial(_train_wordpiece, lower_case=False),
    "SentencePieceTokenizer": partial(_train_sentencepiece, kind="unigram"),
    "SentencePieceTokenizer/bpe": partial(_train_sentencepiece, kind="bpe"),
}
"""Training function of each kind.

It turns texts, which may be read more than once, and a vocabulary size into the content of files.
Raises ConfigError for an impossible size.
"""
LEAST = {"GPT2BPETokenizer": 257, "BertWordPieceLowerCase": 6, "BertWordPieceCase": 6}
"""Number of tokens that a kind has before any training."""

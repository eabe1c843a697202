"""Rows and figures of the tasks against counts and formulas by hand, and WikiText's spelling."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError, DataError
from common.evaluation import text
from common.evaluation.corpus import RowTask, read_evaluation_file
from common.evaluation.rows import RowScores
from common.evaluation.task import open_task
from common.evaluation.text import detokenize_wikitext
from common.parallel.run import Run
from common.tokenizer.base import Framing, Ids, PackedIds
from tests.tiny import tiny_config


class Characters:
    """A tokenizer whose ids can be read: one a character, and <|endoftext|>."""

    kind, sha256, vocab_size, eod_id = "Characters", "0" * 64, 101, 100
    framing, unknown_id, has_marks = Framing(suffix=(100,)), None, False

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        parts = text.split("<|endoftext|>") if allow_special else [text]
        ids = [[min(ord(character) - 9, 99) for character in part] for part in parts]
        return np.array([*ids[0], *(each for part in ids[1:] for each in (100, *part))], np.int32)

    def encode_packed(self, texts: list[str], allow_special: bool = False) -> PackedIds:
        rows = [self.encode(text, allow_special) for text in texts]
        offsets = np.cumsum([0, *map(len, rows)])
        return PackedIds(ids=np.concatenate(rows), offsets=offsets)

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Decode é for all other characters."""
        return "".join(
            "é" if each == 99 else "<|endoftext|>" if each == 100 else chr(each + 9) for each in ids
        ).encode()


def make_config(folder: Path, window: int = 8, **evaluation: Any) -> Run:
    return tiny_config(folder, model__seq_length=window, evaluation=evaluation)


def open_text(folder: Path, name: str, content: str, **settings: Any) -> RowTask:
    (folder / name).write_text(content, encoding="utf-8")
    config = make_config(folder, task="text", file=str(folder / name), **settings)
    file = read_evaluation_file(config.evaluation)
    return text.open_text(file, Characters(), config)  # type: ignore[arg-type]


def open_lambada(folder: Path, passages: list[str], **settings: Any) -> RowTask:
    (folder / "passages.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    config = make_config(folder, task="lambada", file=str(folder / "passages.jsonl"), **settings)
    file = read_evaluation_file(config.evaluation)
    return text.open_lambada(file, Characters(), config)  # type: ignore[arg-type]


def scores(nats: list[float], hits: list[int]) -> RowScores:
    return RowScores(nats=np.array(nats), hits=np.array(hits))


def test_figures_of_a_plain_text(tmp_path: Path) -> None:
    # 20 characters, 21 bytes, 3 words; 5 between spaces, an empty one and a newline with them
    text = "Zwölf  Boxer\n jagen\n"
    task = open_text(tmp_path, "a.txt", text)
    assert [row.scored for row in task.rows] == [8, 8, 3]
    record = task.result(scores([10.0, 5.0, 4.0], [0, 0, 0])).record
    names = ("tokens", "text_bytes", "words", "scored_tokens", "documents")
    assert [record[name] for name in names] == [20, 21, 3, 19, 1]
    assert record["loss"] == 1.0 and record["perplexity"] == pytest.approx(math.e)
    assert record["word_perplexity"] == pytest.approx(math.exp(19 / 3))
    assert record["bits_per_byte"] == pytest.approx(19 / math.log(2) / 21)
    originals = len(text.strip().split(" "))  # Megatron: exp(loss x (tokens - 1) / (words - 1))
    assert originals == 4
    assert record["token_ratio"] == pytest.approx((20 - 1) / (originals - 1))
    assert record["adjusted_perplexity"] == pytest.approx(math.exp(19 / (originals - 1)))


def test_marks_in_a_plain_text_are_tokens_and_detokenized_words_are_counted_before(tmp_path: Path) -> None:
    task = open_text(tmp_path, "a.txt", "ab , c<|endoftext|>d", detokenize="wikitext")
    assert task.rows[0].tokens.tolist() == [
        *Characters().encode("ab, c").tolist(),
        100,
        *Characters().encode("d").tolist(),
    ]
    assert task.result(scores([1.0], [0])).record["words"] == 3


def test_documents_of_a_jsonl_begin_with_the_end_of_text(tmp_path: Path) -> None:
    content = '{"text": "abc"}\n{"text": "  "}\n\n{"text": "0123456789"}\n'
    task = open_text(tmp_path, "a.jsonl", content, stride=4)
    assert [row.tokens[0] == 100 for row in task.rows] == [True, True, False]
    record = task.result(scores([1.0, 1.0, 1.0], [0, 0, 0])).record
    assert sum(row.scored for row in task.rows) == record["tokens"] == 13
    assert record["documents"] == 2 and record["first_context"] == "end-of-text token"
    page = open_text(tmp_path, "b.jsonl", '{"text": " a \\n b "}')  # lm-eval: "", a, b, ""
    assert page.result(scores([1.0], [0])).record["words"] == 4
    assert record["word_perplexity"] == pytest.approx(math.exp(3 / 2)) == record["adjusted_perplexity"]


def test_a_part_of_a_text_has_no_figures_of_the_whole(tmp_path: Path) -> None:
    """Bits a byte count the bytes of its tokens: windows of 8 targets each, behind a first token
    that is not scored; a character of two bytes among them.
    """
    part = scores([8.0, 8.0], [0, 0])
    result = open_text(tmp_path, "a.txt", "a" + "aaaé" * 9, max_samples=2).result(part)
    record = result.record
    assert record["scored_tokens"] == 16 and record["loss"] == 1.0 and record["whole"] is False
    names = ("word_perplexity", "adjusted_perplexity", "token_ratio")
    assert [record[key] for key in names] == [None] * 3
    assert record["bits_per_byte"] == pytest.approx(16 / math.log(2) / 20)
    assert record["scored_bytes"] == 20 and any("bits per byte" in line for line in result.lines)
    changed = open_text(tmp_path, "a.txt", "x" * 30, max_samples=2, detokenize="wikitext")
    assert changed.result(part).record["bits_per_byte"] is None
    whole = open_text(tmp_path, "a.txt", "x" * 17, max_samples=2)
    assert whole.result(part).record["whole"] is True


def test_last_words(tmp_path: Path) -> None:
    """The word keeps its space, a run of white space before it counts to the word, and the
    beginning is what gets cut.
    """
    task = open_lambada(tmp_path, ["to be or", "a b ", "so\n then", "ab cd ef gh"], window=6)
    spaced = [" or", " b", "\n then", " gh"]
    assert [row.tokens[-row.scored :].tolist() for row in task.rows] == [
        Characters().encode(word).tolist() for word in spaced
    ]
    assert [len(row.tokens) for row in task.rows] == [7, 3, 7, 7]
    result = task.result(scores([1.0, 2.0, 3.0, 6.0], [3, 1, 6, 2]))
    record = result.record
    assert (record["correct"], record["accuracy"], record["passages"]) == (2, 0.5, 4)
    assert record["cut_passages"] == 3
    assert record["loss"] == 3.0 and record["perplexity"] == pytest.approx(math.exp(3.0))
    assert "number correct: 2.0000E+00 | total examples: 4.0000E+00 | avg accuracy: 5.0000E-01" in result.lines[-1]
    assert len(open_lambada(tmp_path, ["a b", "c d", "e"], max_samples=2).rows) == 2


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        (["a b", "word"], "passage 2 is one word, 'word'"),
        (["a bcdefghi"], "passage 1 has 9 tokens, expected 1 to model.seq_length=8"),
    ],
)
def test_passages_without_context_or_room_are_refused(tmp_path: Path, passages: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_lambada(tmp_path, passages)


MISSING = "the key 'text' is missing, the keys present are 'body'; evaluation reads"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Path(__file__).parent, "is not a file; check the path"),
        (Path("/absent"), "not found; check the path"),
        ('{"body": "a"}', f"line 1, column 1: {MISSING} the field text"),
        ('[{"text": "a"}, {"body": "b"}]', f"item 2: {MISSING}"),
        ('{"text": 1}', "line 1, column 1: the value of 'text' is a number, expected a string"),
        ("", "is empty"),
    ],
)
def test_errors_speak_of_the_evaluations_own_settings(tmp_path: Path, content: str | Path, message: str) -> None:
    path = tmp_path / "a.jsonl" if isinstance(content, str) else content
    if isinstance(content, str):
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_evaluation_file(make_config(tmp_path, task="text", file=str(path)).evaluation)
    assert str(caught.value).startswith(f"evaluation.file={path}: {message}")
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file": "a.txt"}, r"evaluation.file=a.txt is for task text or lambada, and evaluation.task=validation"),
        ({"task": "lambada", "file": "a", "stride": 3}, "evaluation.stride=3 is for task text,"),
        ({"task": "text"}, "evaluation.task=text needs a file"),
        ({"task": "text", "file": "a", "stride": 9}, "evaluation.stride=9 is above model.seq_length=8"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_task(make_config(tmp_path, **settings))


@pytest.mark.parametrize(
    ("spelt", "expected"),
    [
        (" \n = = Description = = \n \n The claws", "\n== Description ==\n\nThe claws"),
        ("\n = = = Range = = = \n", "\n=== Range ===\n"),
        ("known as \" H. americanus \" , 60 cm ( 24 in ) long ; it", 'known as "H. americanus", 60'
            ' cm (24 in) long; it'),
        ("1 @,@ 000 @-@ 2 @.@ 5 g at 5 ° C . Why ? No : [ sic ] ! So", "1,000-2.5 g at 5°C. Why?"
            " No: [sic]! So"),
        ("The dogs ' bowl", "The dogs' bowl"),
        ("Tom 's bowl", "Tom's bowl"),
        ("it said ' yes ' twice", "it said 'yes' twice"),
        ("a { b } c", "a {b} c"),
        ("an ordinary line, with (nothing) to mend", "an ordinary line, with (nothing) to mend"),
    ],
)  # fmt: skip
def test_wikitext(spelt: str, expected: str) -> None:
    assert detokenize_wikitext(spelt) == expected

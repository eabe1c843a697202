"""Rows and figures of the tasks against counts and formulas by hand; WikiText's spelling; windows against the loop of
Hugging Face's guide, and scores against a model in plain numpy.
"""

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from common.errors import ConfigError, DataError
from common.evaluation import text
from common.evaluation.corpus import RowTask, read_evaluation_file
from common.evaluation.rows import RowBatch, ScoredRow, Scores, score_rows, sliding_windows
from common.evaluation.task import open_task
from common.evaluation.text import detokenize_wikitext
from common.parallel.run import Run
from common.tokenizer import load_tokenizer
from tests.reference import write_vocabulary
from tests.tiny import tiny_config


@functools.cache
def characters() -> Any:
    """A tokenizer of one id a byte, with one for each of the two letters of two bytes in these texts."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(None, write_vocabulary(Path(folder) / "vocabulary", ["Ã ©", "Ã ¶"]))


def make_config(folder: Path, window: int = 8, **evaluation: Any) -> Run:
    return tiny_config(folder, model__seq_length=window, evaluation=evaluation)


def open_text(folder: Path, name: str, content: str, task: str = "text", **settings: Any) -> RowTask:
    (folder / name).write_text(content, encoding="utf-8")
    config = make_config(folder, task=task, file=str(folder / name), **settings)
    opened: Any = {"text": text.open_text, "lambada": text.open_lambada}[task]
    return opened(read_evaluation_file(config.evaluation), characters(), config)


def open_lambada(folder: Path, passages: list[str], **settings: Any) -> RowTask:
    content = "".join(json.dumps({"text": passage}) + "\n" for passage in passages)
    return open_text(folder, "passages.jsonl", content, "lambada", **settings)


def scores(nats: list[float], hits: list[int]) -> Scores:
    return Scores(losses=np.array(nats), hits=np.array(hits))


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
    assert characters().decode_bytes(task.rows[0].tokens.tolist()) == b"ab, c<|endoftext|>d"
    assert task.result(scores([1.0], [0])).record["words"] == 3


def test_documents_of_a_jsonl_begin_with_the_end_of_text(tmp_path: Path) -> None:
    content = '{"text": "abc"}\n{"text": "  "}\n\n{"text": "0123456789"}\n'
    task = open_text(tmp_path, "a.jsonl", content, stride=4)
    assert [row.tokens[0] == characters().eod_id for row in task.rows] == [True, True, False]
    record = task.result(scores([1.0, 1.0, 1.0], [0, 0, 0])).record
    assert sum(row.scored for row in task.rows) == record["tokens"] == 13
    assert record["documents"] == 2 and record["first_context"] == "end-of-text token"
    page = open_text(tmp_path, "b.jsonl", '{"text": " a \\n b "}')  # lm-eval: "", a, b, ""
    assert page.result(scores([1.0], [0])).record["words"] == 4
    assert record["word_perplexity"] == pytest.approx(math.exp(3 / 2)) == record["adjusted_perplexity"]


def test_a_part_of_a_text_has_no_figures_of_the_whole(tmp_path: Path) -> None:
    """Bits a byte count the bytes of its tokens: two windows of 8 targets, with characters of two bytes."""
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
    """The word keeps its space, a run of white space before it counts to the word, and the beginning gets cut."""
    task = open_lambada(tmp_path, ["to be or", "a b ", "so\n then", "ab cd ef gh"], window=6)
    words = [row.tokens[-row.scored :].tolist() for row in task.rows]
    assert words == [characters().encode(word).tolist() for word in (" or", " b", "\n then", " gh")]
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
    [(["a b", "word"], "2 is one word, 'word'"), (["a bcdefghi"], "1 has 9 tokens, expected 1 to model.seq_length=8")],
)
def test_passages_without_context_or_room_are_refused(tmp_path: Path, passages: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"passage {message}"):
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
        ('known as " H. americanus " , 60 cm ( 24 in ) ; it', 'known as "H. americanus", 60 cm (24 in); it'),
        ("1 @,@ 000 @-@ 2 @.@ 5 g at 5 ° C . Why ? No : [ sic ] ! So", "1,000-2.5 g at 5°C. Why? No: [sic]! So"),
        ("The dogs ' bowl", "The dogs' bowl"),
        ("Tom 's bowl", "Tom's bowl"),
        ("it said ' yes ' twice", "it said 'yes' twice"),
        ("a { b } c", "a {b} c"),
        ("an ordinary line, with (nothing) to mend", "an ordinary line, with (nothing) to mend"),
    ],
)
def test_wikitext(spelt: str, expected: str) -> None:
    assert detokenize_wikitext(spelt) == expected


# ---- windows and scores ----


def guide(length: int, max_length: int, stride: int) -> list[tuple[int, int, int]]:
    """begin, end and new tokens of each window, as the guide on perplexity of fixed-length models has them."""
    found, previous_end = [], 0
    for begin in range(0, length, stride):
        end = min(begin + max_length, length)
        found.append((begin, end, end - previous_end))
        previous_end = end
        if end == length:
            break
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 80), st.integers(1, 20), st.data())
def test_every_token_but_the_first_is_scored_once_in_the_guides_windows(
    length: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    rows = sliding_windows(np.arange(length, dtype=np.int32), window, stride)
    scored = np.concatenate([row.tokens[-row.scored :] for row in rows])
    np.testing.assert_array_equal(scored, np.arange(1, length))
    for row in rows:
        inputs, first = len(row.tokens) - 1, int(row.tokens[-row.scored])
        assert row.scored <= inputs <= window
        assert inputs - row.scored + 1 >= min(first, window - stride + 1), "tokens before the first scored one"
    expected = guide(length, window + 1, stride)
    # the guide counts the very first token, whose loss it then shifts away
    expected[0] = (0, expected[0][1], expected[0][2] - 1)
    assert [(int(row.tokens[0]), int(row.tokens[-1]) + 1, row.scored) for row in rows] == expected


def numpy_scores(batch: RowBatch) -> Scores:
    """A model that predicts from the running sum of its inputs; it gives nonsense for padding."""
    state = np.cumsum(batch.ids, axis=1, dtype=np.int64).reshape(-1)[batch.places]
    losses = ((state * 7 + batch.targets) % 13).astype(np.float32)
    hits = losses < 4
    losses[len(batch.owners) :], hits[len(batch.owners) :] = np.nan, True
    return Scores(losses=losses, hits=hits)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_scores_do_not_depend_on_the_batch(batch_size: int) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for length in (2, 9, 5, 3, 9):
        tokens = generator.integers(0, 50, length).astype(np.int32)
        rows.append(ScoredRow(tokens=tokens, scored=int(generator.integers(1, length))))
    shapes = set()

    def scorer(batch: RowBatch) -> Scores:
        shapes.add((batch.ids.shape, batch.targets.shape))
        return numpy_scores(batch)

    found = score_rows(rows, scorer, batch_size)
    for row, nats, hits in zip(rows, found.losses, found.hits, strict=True):
        each = [(int(row.tokens[:at].sum()) * 7 + int(row.tokens[at])) % 13 for at in range(1, len(row.tokens))]
        each = each[-row.scored :]
        assert nats == sum(each) and hits == sum(loss < 4 for loss in each)
    assert len(shapes) == 1, "a graph is compiled for one shape"


@pytest.mark.parametrize("batch_size", [1, 8])
def test_few_positions_without_a_target_pass_the_head(batch_size: int) -> None:
    """Padding is up to the batch with the most targets: the one with the first window, which is scored whole."""
    rows = sliding_windows(np.arange(1000, dtype=np.int32), 64, 16)
    sizes, scored = [], 0

    def scorer(batch: RowBatch) -> Scores:
        nonlocal scored
        sizes.append(len(batch.targets))
        scored += len(batch.owners)
        return numpy_scores(batch)

    score_rows(rows, scorer, batch_size)
    assert scored == 999 and set(sizes) == {64 + (batch_size - 1) * 16}
    assert batch_size == 1 or sum(sizes) < 2 * scored

"""The rules of the sentence splitter."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from common.dataset.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        (
            "Mr. Smith met J. Doe at 3.14 p.m. yesterday.",
            ["Mr. Smith met J. Doe at 3.14 p.m. yesterday."],
        ),
        ("He said, “Stop.” Then he left.", ["He said, “Stop.”", "Then he left."]),
        ("apples, etc. and so on. End", ["apples, etc. and so on.", "End"]),
        ("Wait... what? Yes... No", ["Wait... what?", "Yes...", "No"]),
        ("你好。他说：“走！”我们走了……好吗？", ["你好。", "他说：“走！”", "我们走了……", "好吗？"]),
        ("Title\n\nBody of text", ["Title", "Body of text"]),
        ("It was I. Then", ["It was I.", "Then"]),
        ("  ", []),
    ],
)
def test_rules(text, expected) -> None:
    assert split_sentences(text) == expected


@given(st.text(st.sampled_from("aB .!?\n。”'1"), max_size=40))
def test_keeping_newlines_keeps_everything(text) -> None:
    kept = split_sentences(text, keep_newlines=True)
    assert "".join(kept) == (text if text.strip() else "")
    assert [sentence.strip() for sentence in kept] == split_sentences(text)


def test_a_long_run_of_signs_takes_no_longer_than_a_text() -> None:
    text = "One" + "." * 30_000 + "two"
    before = time.monotonic()
    assert split_sentences(text) == [text]
    assert time.monotonic() - before < 1, "30 s where each sign begins a search of its own"

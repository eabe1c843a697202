"""Vocabularies of data, data.tokenizer and model that do not fit each other."""

from typing import Any

import pytest

from common.dataset.vocabulary import vocabulary_remarks
from common.errors import ConfigError


def record(size: int, letter: str = "a") -> dict[str, Any]:
    return {"kind": "GPT2BPETokenizer", "sha256": letter * 64, "vocab_size": size}


@pytest.mark.parametrize(
    ("data", "tokenizer", "vocab_size"),
    [
        ([], None, 50257),
        ([None], None, 50257),
        ([record(50257)], record(50257), 50257),
        ([record(50257)], None, 50304),
        ([None], record(101), 128),
        ([record(101), record(101), None], record(101), 101),
    ],
)
def test_matching_vocabularies_give_no_warning(
    data: list[Any], tokenizer: Any, vocab_size: int
) -> None:
    assert vocabulary_remarks(data, tokenizer, vocab_size) == []


def test_data_made_with_another_tokenizer() -> None:
    (remark,) = vocabulary_remarks([record(8000, "b"), record(8000, "b")], record(8010), 8010)
    assert "made with GPT2BPETokenizer of 8000 tokens (sha256 bbbbbbbbbbbb)" in remark
    assert "data.tokenizer is GPT2BPETokenizer of 8010 tokens (sha256 aaaaaaaaaaaa)" in remark


def test_rows_that_no_token_reaches() -> None:
    """A model of 11,453,760 parameters, 192 wide, with a tokenizer of 8000: 42,257 rows are 71 % of
    it.
    """
    (remark,) = vocabulary_remarks([None], record(8000), 50257, share_of_row=192 / 11_453_760)
    assert "no token uses 42257 rows of the embedding, 71% of all parameters" in remark
    assert remark.endswith("model.vocab_size=8000")
    assert vocabulary_remarks([record(8000)], None, 8065)[0].startswith(
        "model.vocab_size=8065, but the tokenizer has 8000 tokens"
    )


def test_a_tokenizer_larger_than_the_model() -> None:
    for data, tokenizer in (([record(101)], None), ([None], record(101))):
        with pytest.raises(
            ConfigError,
            match=r"has 101 tokens and model\.vocab_size=100 is less; set model\.vocab_size=101",
        ):
            vocabulary_remarks(data, tokenizer, 100)
    # the fault is not the model's size
    with pytest.raises(
        ConfigError,
        match=r"the data were made with .* of 100 tokens .* set data\.tokenizer to the folder",
    ):
        vocabulary_remarks([record(100, "b")], record(101), 100)

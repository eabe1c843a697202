"""Vocabularies of data, data.tokenizer and model that do not fit each other."""

import re
from typing import Any

import pytest

from common.dataset.metadata import vocabulary_remarks
from common.errors import ConfigError


def record(size: int, letter: str = "a") -> dict[str, Any]:
    return {"kind": "GPT2BPETokenizer", "sha256": letter * 64, "vocab_size": size}


TOO_SMALL = r"has 101 tokens and model\.vocab_size=100 is less; set model\.vocab_size=101"


@pytest.mark.parametrize(
    ("data", "tokenizer", "vocab_size", "said"),
    [
        ([], None, 50257, None),
        ([None], None, 50257, None),
        ([record(50257)], record(50257), 50257, None),
        ([record(50257)], None, 50304, None),
        ([None], record(101), 128, None),
        (
            [record(8000, "b"), record(8000, "b")],
            record(8010),
            8010,
            r"made with GPT2BPETokenizer of 8000 tokens \(sha256 bbbbbbbbbbbb\).*data\.tokenizer is"
            r" GPT2BPETokenizer of 8010 tokens \(sha256 aaaaaaaaaaaa\)",
        ),
        (
            [None],
            record(8000),
            50257,
            # of a model of 11,453,760 parameters, 192 wide
            "no token uses 42257 rows of the embedding, 71% of all param.*model.vocab_size=8000$",
        ),
        ([record(8000)], None, 8065, r"^model\.vocab_size=8065, but the tokenizer has 8000 tokens"),
        ([record(101)], None, 100, TOO_SMALL),
        ([None], record(101), 100, TOO_SMALL),
        (
            [record(100, "b")],
            record(101),
            100,
            r"the data were made with .* of 100 tokens .* set data\.tokenizer to the folder",
        ),
    ],
)
def test_what_is_said_of_vocabularies(data, tokenizer, vocab_size, said) -> None:
    """Of a vocabulary beyond the model as an error, of others as one remark, of equal ones
    nothing.
    """
    share = 192 / 11_453_760
    if vocab_size == 100:
        with pytest.raises(ConfigError, match=str(said)):
            vocabulary_remarks(data, tokenizer, vocab_size)
        return
    remarks = vocabulary_remarks(data, tokenizer, vocab_size, share_of_row=share)
    assert len(remarks) == (said is not None)
    assert all(re.search(str(said), remark) for remark in remarks)

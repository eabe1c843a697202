"""WikiText's spelling, undone by hand."""

import pytest

from common.evaluation.text import detokenize_wikitext


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

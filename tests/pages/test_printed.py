"""The comparison of outputs, and the reading of pages."""

import pytest

from tests.pages.blocks import blocks, commands
from tests.pages.printed import missing

PRINTED = """
03:14:55 model: 4 layers x 192, 11,453,760 parameters
03:15:00 step 1/10 | loss 10.8709 | lr 1.000e-04 | 210 tokens/s | 4884 ms | eta 0:00:45
03:15:06 step 2/10 | loss 10.6691 | lr 2.000e-04 | 181 tokens/s | 5654 ms | eta 0:00:41
sample hash b4babda94acf67fe; written to /tmp/x/home/gpt2/output/first/evaluation.json
"""


@pytest.mark.parametrize(
    ("shown", "named"),
    [
        ("12:00:00 step 1/10 | loss 10.90 | lr 1.0e-4 | 1,500 tokens/s | 600 ms | eta 0:00:04", None),
        ("model: ...\n...\nsample  hash 00babda94acf67ff; ... /home/you/first/evaluation.json", None),
        ("model: 4 layers x 192, 11,453,761 parameters", "11,453,761"),
        ("step 1/10 | loss 11.2 | ...", "11.2"),
        ("step 2/10 | ...\nstep 1/10 | ...", "line 2"),
        ("... written to /home/you/gpt2/output/first/other.json", "other.json"),
    ],
)
def test_a_line_that_differs_is_named(shown: str, named: str | None) -> None:
    found = missing(shown, PRINTED)
    assert found is None if named is None else named in (found or "")


def test_lines_whose_numbers_are_free() -> None:
    assert missing("step 1/300 | loss 5.1 | ...", PRINTED, any_number=True) is None
    assert missing("step 1/300 | loss 5.1 | ...", PRINTED, free="validation")


PAGE = """
# One
```bash
# a comment
A=1 python a.py "b  # c" \\
    d    # e
for x in 1 2; do
    echo $x
done
```
It prints:
```text
1
```
## Two
```text
no output
```
"""


def test_blocks_with_their_output_and_commands() -> None:
    shell, text = blocks(PAGE)
    assert (shell.kind, shell.heading, shell.prints, text.prints) == ("bash", "One", "1\n", None)
    assert commands(shell) == ['A=1 python a.py "b  # c" d', "for x in 1 2; do\n    echo $x\ndone"]

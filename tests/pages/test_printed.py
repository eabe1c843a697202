"""The comparison of outputs, and the reading of pages."""

import pytest

from tests.pages.blocks import blocks, commands, comparable
from tests.pages.printed import missing

PRINTED = """
03:14:55 model: 4 layers x 192, 11,453,760 parameters
03:15:00 step 1/10 | loss 10.8709 | lr 1.000e-04 | 210 tokens/s | 4884 ms | eta 0:00:45
03:15:06 step 2/10 | loss 10.6691 | lr 2.000e-04 | 181 tokens/s | 5654 ms | eta 0:00:41
sample hash b4babda94acf67fe; written to /tmp/x/home/gpt2/output/first/evaluation.json
The king\tis dead.
"""


@pytest.mark.parametrize(
    "shown",
    [
        "12:00:00 step 1/10 | loss 10.90 | lr 1.0e-4 | 1,500 tokens/s | 600 ms | eta 0:00:04",
        "model: ...\n...\nsample hash 00babda94acf67ff; ... /home/you/first/evaluation.json",
        "step 2/10 | loss 10.6691 | …\nThe king   is dead.",
    ],
)
def test_lines_that_agree(shown: str) -> None:
    assert missing(shown, PRINTED) is None


@pytest.mark.parametrize(
    ("shown", "named"),
    [
        ("model: 4 layers x 192, 11,453,761 parameters", "11,453,761"),
        ("step 1/10 | loss 11.2 | ...", "11.2"),
        ("step 1/10 | loss nan | ...", "nan"),
        ("step 1/10 | loss 10.8709 | lr 1.100e-04 | ...", "lr 1.100e-04"),
        ("step 2/10 | ...\nstep 1/10 | ...", "line 2"),
        ("... written to /home/you/gpt2/output/first/other.json", "other.json"),
        ("The king is", "'The king is'"),
    ],
)
def test_lines_that_differ_are_named(shown: str, named: str) -> None:
    assert named in (missing(shown, PRINTED) or "")


def test_lines_whose_numbers_are_free() -> None:
    assert missing("step 1/300 | loss 5.1 | ...", PRINTED, any_number=True) is None
    assert missing("step 1/300 | loss 5.1 | ...", PRINTED, free="loss") is None
    assert missing("step 1/300 | loss 5.1 | ...", PRINTED, free="validation")


PAGE = """
# One
```bash
# a comment
source .venv/bin/activate
A=1 python a.py "b  # c" \\
    d    # e
for x in 1 2; do
    echo $x
done
curl -d '{
  "a": 1}' URL
```
It prints:
```text
1
```
## Two
```text
no output
```
   ```python
   # a comment
   a = 1
   ```
"""


def test_blocks_with_their_output_and_commands() -> None:
    shell, text, python = blocks(PAGE)
    assert (shell.kind, shell.line, shell.heading, shell.prints) == ("bash", 3, "One", "1\n")
    assert (text.kind, text.heading, text.prints) == ("text", "Two", None)
    assert python.text == "# a comment\na = 1\n"
    assert commands(shell) == [
        'A=1 python a.py "b  # c" d',
        "for x in 1 2; do\n    echo $x\ndone",
        "curl -d '{\n  \"a\": 1}' URL",
    ]
    assert comparable(python) == ("python", "a = 1", "")

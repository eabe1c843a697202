"""Offences against the house rule of English, one planted in each kind of text."""

from pathlib import Path

import pytest

from tools.check_words import offences, passages

LONG = "word " * 26


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.py", 'def f():\n    """Of a rank."""\n', "opening"),
        ("a.py", 'class A:\n    b = 1\n    """Those of a rank."""\n', "opening"),
        ("a.py", 'def test_what_is_read():\n    """Read a file."""\n', "opening"),
        ("a.py", 'def test_a_run_goes_on():\n    """Resume a run."""\n', "'goes on'"),
        ("a.py", "# a rank that\n# writes alone\n", "'alone'"),
        ("a.py", 'raise E(f"{path} is no file; name one")\n', "'is no'"),
        ("a.py", f'"""{LONG}"""\n', "sentence"),
        ("a.sh", "# the run begins anew\n", "'anew'"),
        ("a.yaml", "#   model: 1\n# mend the file\n", "'mend'"),
        ("a.md", f"- One item.\n- {LONG}\n", "sentence"),
        ("a.md", "| key | ends; begins; ends |\n", "more than one semicolon"),
    ],
)
def test_an_offence_is_found(tmp_path: Path, name: str, text: str, rule: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    (found,) = [rule for passage in passages(path) for rule, _ in offences(passage)]
    assert found.startswith(rule)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.py",
            f'"""Read: {"word " * 20}\n\n{"word " * 20}"""\nx = f"{{y}} is no longer there"\n',
        ),
        ("a.py", "x = 1  # noqa: S603\n"),
        ("a.py", 'def test_how_many():\n    """How many tokens fit."""\n'),
        ("a.md", f"```\n{LONG}goes on alone\n```\nSee [{'word ' * 9}](a) and `{LONG}`.\n"),
        ("a.sh", f"#!/bin/sh\n#   {LONG}\n"),
        ("a_zh.md", LONG),
        ("a.bin", "is no text"),
    ],
)
def test_other_text_is_not(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert not [rule for passage in passages(path) for rule, _ in offences(passage)]

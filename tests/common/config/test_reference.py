"""The generated page of all keys: it is current, whole, and right about the backends."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from common.config.hints import schema_keys
from common.config.reference import COMPILED_TOO, TORCH_ONLY, config_reference
from tests.common.resolve.test_refusals import TABLE
from tools.config_schema import main

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "config_reference.md"


def test_the_page_is_current_and_has_a_row_for_every_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(config_reference(), encoding="utf-8")
    assert main(["--reference"]) == 0
    page = PAGE.read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "make golden"
    keys = {key for key, is_section in schema_keys().items() if not is_section or "." in key}
    found = re.findall(r"^\| `(\S+)` (?:\| .+ ){4}\|$", page.partition("\n## Other")[0], re.M)
    assert sorted(found) == sorted(key.partition(".")[2] or key for key in keys | {"base"})


def test_keys_of_pytorch_are_refused_on_mindspore() -> None:
    """By rows of tests/common/resolve/refusals.yaml."""
    words = " ".join(row[0] for row in TABLE["of torch"])
    assert [key for key in TORCH_ONLY | COMPILED_TOO if f"{key}=" not in words] == ["deepspeed"]

"""Configurations that are refused with one line, one row of refusals.yaml each."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.common.config.test_load import MINIMAL, error_of

TABLE: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("row", "place"),
    [*((row, "words") for row in TABLE["words"]), *((row, "file") for row in TABLE["files"])],
    ids=lambda row: row[0][:60] if isinstance(row, list) else row,
)
def test_refused(tmp_path: Path, row: list[str], place: str) -> None:
    """The text stands behind a good file, of which lines with its first key are blank."""
    text, *said = row
    assert said
    words, key = (text.split(), "") if place == "words" else ([], text.partition(":")[0])
    kept = ["" if key and line.startswith(f"{key}:") else line for line in MINIMAL.splitlines()]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(kept if words else [*kept, text]) + "\n", encoding="utf-8")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    error = error_of(path, *words)
    assert [each for each in said if each not in error] == [] and "\n" not in error

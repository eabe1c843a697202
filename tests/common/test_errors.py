"""Messages of any length."""

from pathlib import Path

import pytest

from common.errors import ConfigError, DataError
from common.run_config import load_config


def test_a_long_line_loses_its_middle() -> None:
    text = "data.json: found " + "9" * 5000 + ", expected a number; fix the file"
    shown = str(DataError(f"{text}\na second line"))
    assert shown.startswith("data.json: found 999")
    assert shown.endswith("fix the file\na second line")
    assert len(shown) < 1000 and f"({len(text) - 900} characters left out)" in shown
    assert str(DataError("x" * 1000)) == "x" * 1000


def test_a_config_error_quotes_a_value_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {num_heads: '" + "9" * 100_000 + "'}")
    with pytest.raises(ConfigError, match=r"model\.num_heads") as error:
        load_config(path)
    assert all(len(line) < 1000 for line in str(error.value).split("\n"))

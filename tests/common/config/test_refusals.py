"""Configurations that are refused with one line, one row of refusals.yaml each."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import ConfigError
from common.run_config import load_config

MINIMAL = """output_dir: out
model: {num_layers: 2, hidden_size: 8, num_heads: 2, seq_length: 16, vocab_size: 100}
optimizer: {learning_rate: 6e-4}
train: {max_steps: 3, micro_batch_size: 2}
logging: {interval: 1}
"""
BOMB = "x0: &x0 [y, y, y, y, y, y, y, y, y]\n" + "".join(
    f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
LONG = [
    [BOMB, "values once aliases are followed"],
    [f"base: [{', '.join(['a.yaml'] * 65)}]", "a list of at most 64 files, found 65 entries"],
    ["x: " + "[" * 3000, "not valid YAML: nested deeper than 64 levels"],
    ["seed: " + "9" * 5000, "run.yaml:6:7: not valid YAML: '999", "does not fit its tag !!int"],
]
TABLE: dict[str, list[Any]] = yaml.safe_load(
    Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8")
)


def error_of(path: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("row", TABLE["words"], ids=lambda row: row[0])
def test_refused_words(tmp_path: Path, row: list[str]) -> None:
    words, *said = row
    (tmp_path / "run.yaml").write_text(MINIMAL)
    error = error_of(tmp_path / "run.yaml", *words.split())
    assert [each for each in said if each not in error] == [] and "\n" not in error


@pytest.mark.parametrize("row", TABLE["files"] + LONG, ids=lambda row: row[0][:60])
def test_refused_files(tmp_path: Path, row: list[str]) -> None:
    """The text stands behind a good file, of which lines with its first key are blank."""
    text, *said = row
    assert said
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    key = text.partition(":")[0]
    kept = ["" if line.startswith(f"{key}:") else line for line in MINIMAL.splitlines()]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join([*kept, text]) + "\n", encoding="utf-8")
    error = error_of(path)
    assert [each for each in said if each not in error] == [] and "\n" not in error

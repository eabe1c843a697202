"""Config files that are endless, twisted or of wrong types: one error each, within a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.run_config import load_config

MINIMAL = """
output_dir: out
model: {num_layers: 2, hidden_size: 8, num_heads: 2, seq_length: 16, vocab_size: 100}
optimizer: {learning_rate: 6e-4}
"""
TRAIN = "train: {max_steps: 3, micro_batch_size: 2}\n"
BOMB = "x0: &x0 [y, y, y, y, y, y, y, y, y]\n" + "".join(
    f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, r"values once aliases are followed"),
        (
            "seed: !!timestamp x",
            r"run\.yaml:6:7: not valid YAML: the tag !!timestamp is not supported",
        ),
        (
            "seed: !!bool maybe",
            r"run\.yaml:6:7: not valid YAML: 'maybe' does not fit its tag !!bool",
        ),
        ("seed: !!float ''", "'' does not fit its tag !!float"),
        ("seed: !!map [1]", "the tag !!map is not supported"),
        (
            "parallel_config: 5",
            r"run\.yaml:6: parallel_config: expected keys and values, found a number",
        ),
        ("parallel_config: [1, 2]", "parallel_config: expected keys and values, found a list"),
        (
            "parallel: null\nparallel_config: {data_parallel: 2}",
            r"run\.yaml:6: parallel: expected keys and values, found null",
        ),
        (r'base: "a\0b"', "a null byte cannot be part of a path"),
        ("base: loop.yaml", r"loop\.yaml: cannot be read: Too many levels of symbolic links"),
        ("base: /dev/zero", "/dev/zero: is a device"),
        (
            f"base: [{', '.join(['a.yaml'] * 65)}]",
            "base: expected a list of at most 64 files, found 65 entries",
        ),
    ],
    ids=str,
)
def test_a_twisted_file_is_one_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL.lstrip("\n") + TRAIN + "logging: {interval: 1}\n" + text)
    with pytest.raises(ConfigError, match=problem):
        load_config(path)


def test_another_name_with_a_number_that_is_none(tmp_path: Path) -> None:
    """NaN differs from itself."""
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + TRAIN + "recompute_config: {recompute: .nan}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:6: train\.recompute"):
        load_config(path)


@pytest.mark.parametrize("train", ["train: 5\n", "train: x\n", "train: [1]\n"])
def test_a_section_that_another_name_points_into_is_not_a_section(
    tmp_path: Path, train: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(train + "recompute_config: {recompute: true}\n" + MINIMAL)
    with pytest.raises(
        ConfigError,
        match=r"run\.yaml:1: train: expected keys and values, found (a number|text|a list)",
    ):
        load_config(path)


def test_a_config_that_links_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.symlink_to("run.yaml")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        load_config(path)


def test_bases_that_name_the_next_twice_are_read_once_each(tmp_path: Path) -> None:
    """With a read for each mention, the 30 files would be read 2^30 times."""
    for number in range(30):
        text = f"base: [{number + 1}.yaml, {number + 1}.yaml]\nseed: {number}\n"
        (tmp_path / f"{number}.yaml").write_text(text)
    (tmp_path / "30.yaml").write_text(MINIMAL + TRAIN)
    assert load_config(tmp_path / "0.yaml").seed == 0


def test_bases_in_a_long_chain(tmp_path: Path) -> None:
    for number in range(80):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    with pytest.raises(ConfigError, match="more than 64 levels"):
        load_config(tmp_path / "0.yaml")


def test_a_base_of_two_files_is_not_changed_by_the_first(tmp_path: Path) -> None:
    """The second of two files with one base wins with what it says itself, and with what the base
    says.
    """
    (tmp_path / "base.yaml").write_text(
        MINIMAL + "train: {max_steps: 3, micro_batch_size: 2, accumulation_steps: 4}\n"
    )
    (tmp_path / "a.yaml").write_text(
        "base: base.yaml\ntrain: {micro_batch_size: 5, max_steps: 7}\n"
    )
    (tmp_path / "b.yaml").write_text("base: base.yaml\ntrain: {max_steps: 9}\n")
    (tmp_path / "main.yaml").write_text("base: [a.yaml, b.yaml]\n")
    train = load_config(tmp_path / "main.yaml").train
    assert (train.max_steps, train.micro_batch_size, train.accumulation_steps) == (9, 2, 4)

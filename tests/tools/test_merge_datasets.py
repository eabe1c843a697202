"""The command that joins pairs: its words, its exit codes, and what it leaves."""

from pathlib import Path

import numpy as np
import pytest

from common.dataset import IndexedDataset, IndexedWriter
from tools.merge_datasets import main


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    for number, name in enumerate(("b", "a"), 1):
        with IndexedWriter(tmp_path / "pairs" / name, np.uint16) as writer:
            writer.append(np.full(3 * number, number), np.full(number, 3))
    return tmp_path / "pairs"


def test_pairs_follow_one_another_as_named(pairs: Path, tmp_path, capsys) -> None:
    # as a pattern of a shell names them, each with both of its files
    named = [str(pairs / name) for name in ("b.bin", "b.idx", "a.bin", "a.idx")]
    assert main(["--input", *named, "--output-prefix", str(tmp_path / "out")]) == 0
    assert IndexedDataset(tmp_path / "out").tokens.tolist() == [1] * 3 + [2] * 6
    assert capsys.readouterr().err.endswith("out.bin/.idx: 3 documents, 9 tokens of 2 inputs\n")
    assert main(["--input", str(pairs), "--output-prefix", str(tmp_path / "sorted.bin")]) == 0
    assert IndexedDataset(tmp_path / "sorted").tokens.tolist() == [2] * 6 + [1] * 3
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        f"{name}.{ending}" for name in ("out", "sorted") for ending in ("bin", "idx")
    ]


def test_a_broken_pair_is_named_and_nothing_is_left(pairs: Path, tmp_path, capsys) -> None:
    (pairs / "a.bin").write_bytes(b"12")
    assert main(["--input", str(pairs), "--output-prefix", str(tmp_path / "out")]) == 2
    assert "a.bin: is smaller (cut short?) than a.idx says" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))

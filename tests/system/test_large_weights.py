"""Weights of 1.5 billion parameters are converted in the memory of a few tensors."""

from pathlib import Path

import pytest

from benchmarks.data import make_source, measure, row

LIMIT = 10**9
"""Bytes of anonymous memory beyond the imports; the weights have 6.2 GB."""


@pytest.mark.campaign
def test_memory_of_a_large_conversion(tmp_path: Path) -> None:
    # 25 do not divide by 2
    make_source("configs/gpt2/run_gpt2_1558m.yaml", tmp_path / "source", ["model.num_heads=20"])
    for wanted in ("mindspore", "mindformers", "megatron:2x2"):
        found = measure(tmp_path / "source", tmp_path, wanted, repeats=1)
        print(*row(wanted, found), sep="; ")
        assert found.size > 6e9 and found.peak < LIMIT

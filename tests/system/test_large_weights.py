"""Weights of 1.5 billion parameters are converted in the memory of a few tensors."""

from pathlib import Path

import pytest

from benchmarks.data import make_source, measure

LIMIT = 1000
"""MB of anonymous memory beyond the imports; the weights have 6.2 GB."""


@pytest.mark.campaign
def test_memory_of_a_large_conversion(tmp_path: Path) -> None:
    make_source(Path("configs/gpt2/run_gpt2_1558m.yaml"), tmp_path / "source")
    for wanted in ("mindspore", "mindformers", "megatron:5x2"):  # 25 heads
        found = measure(tmp_path / "source", tmp_path, wanted, repeats=1)
        print(*found, sep="; ")
        size, peak = (float(found[place].split()[0]) for place in (0, 4))
        assert size > 6 and peak < LIMIT

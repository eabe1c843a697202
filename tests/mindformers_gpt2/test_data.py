"""Batches through GeneratorDataset against the sampler's own, and a fault in the data on its way through."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")

from common.errors import DataError
from common.training.data import open_data
from common.training.state import TrainState
from mindformers_gpt2.data import training_batches
from tests.mindformers_gpt2.test_model import make_config


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_the_samplers_from_any_place(corpus_prefix: Path, prefetch: int) -> None:
    config = make_config(data={"train": str(corpus_prefix), "split": "90,10,0", "prefetch": prefetch})
    data, _ = open_data(config)
    expected = [next(batches) for batches in [data.batches(TrainState())] for _ in range(50)]
    state = TrainState(consumed_samples=expected[9].consumed_samples, sample_hash=expected[9].sample_hash)
    threads = threading.active_count()
    with training_batches(data, state) as batches:
        for batch in expected[10:]:
            found = next(batches)
            np.testing.assert_array_equal(found.tokens, batch.tokens)
            assert (found.consumed_samples, found.sample_hash) == (batch.consumed_samples, batch.sample_hash)
            assert found.tokens.dtype == np.int32
    assert threading.active_count() == threads


def test_a_fault_in_the_data_arrives_as_it_is(corpus_prefix: Path) -> None:
    """The corpus holds tokens up to 100; a vocabulary of 50 does not."""
    data, _ = open_data(make_config(data={"train": str(corpus_prefix), "split": "90,10,0"}, model__vocab_size=50))
    with training_batches(data, TrainState()) as batches, pytest.raises(DataError, match="vocab_size"):
        for _ in range(50):
            next(batches)

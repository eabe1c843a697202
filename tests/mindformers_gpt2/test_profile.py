"""MindSpore's profiler around two steps."""

import tests.needs_mindspore  # noqa: F401

# isort: split
import gzip
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from mindformers_gpt2.train import make_trace
from tests.mindformers_gpt2.test_engine import batches, bits, make_config, make_engine


def test_a_trace_of_two_steps(tmp_path: Path) -> None:
    """The head's matrix product of every micro batch, forward and twice backward, and results as
    without.
    """
    config = make_config()
    engine, plain = make_engine(config), make_engine(config)
    path = tmp_path / "profile" / "steps_2_3_rank_0.json.gz"
    steps = iter(batches(4))
    first = engine.run(steps, 1)
    with make_trace(config, engine.device)(path):
        middle = engine.run(steps, 2)
    last = engine.run(steps, 1)
    assert bits([*first, *middle, *last]) == bits(plain.run(iter(batches(4)), 4))
    with gzip.open(path) as file:
        events = [event for event in json.load(file) if event["ph"] == "X"]
    products = [event["name"] for event in events if "MatMul" in event["name"]]
    assert len(products) % (2 * 2) == 0 and len(products) >= 2 * 2 * 3
    assert list(
        path.parent.glob("steps_2_3_rank_0_*_ascend_ms/FRAMEWORK/cpu_op_type_info_0.csv")
    ), "MindSpore's own tables stay"


def test_allocations_are_for_accelerators() -> None:
    config = make_config(profile={"start": 1, "memory": True})
    with pytest.raises(ConfigError, match=r"profile\.memory=true: .*leave it out on a CPU"):
        make_trace(config, make_engine(config).device)

"""parallel.async_tensor_parallel: which messages join a product, and losses of one process."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.load import build_config
from common.errors import DeviceError
from common.resolve.derive import resolve_config
from tests.layouts import PIPELINE, SPLIT, TOLERANCE, TORCH
from tests.ranks import run_ranks
from tests.tiny import require_equal, rows_of
from tests.torch_gpt2.parallel.test_layouts import ASYNC, SMALL, joined_products
from torch_gpt2.device import TorchDevice, check_support, select_device

STEPS = 3
COMPILED = {
    "train__compile": True,
    "train__max_steps": STEPS,
    "train__micro_batch_size": 6,
    "model__num_layers": 1,
}
CASES = {
    "recomputed": (2, {"train__recompute": "full"}),
    "zero3": (4, SPLIT | {"train__micro_batch_size": 3}),
    "pipeline": (4, PIPELINE | {"model__num_layers": 2}),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", CASES)
def test_every_message_of_a_block_joins_its_product(
    tmp_path: Path, corpus_prefix: Path, name: str
) -> None:
    """test_layouts.py has the plain layout."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which torch.compile needs on a CPU: g++ is not on PATH")
    ranks, changes = CASES[name]
    settings = SMALL | COMPILED | changes
    alone = {key: value for key, value in settings.items() if not key.startswith("parallel")}
    run_ranks(
        ranks,
        [
            TORCH.job(tmp_path / "async", corpus_prefix, **settings, **ASYNC),
            TORCH.job(
                tmp_path / "one", corpus_prefix, ranks=1, **alone | {"train__compile": False}
            ),
        ],
        watched="joined_products",
        seconds=120.0,
    )
    assert len(rows_of(tmp_path / "one")) == STEPS
    require_equal(tmp_path / "async", tmp_path / "one", TOLERANCE)
    # two micro batches a step; two regions a pass, with a gather and a scatter each
    passes = STEPS * 2 * (3 if name == "recomputed" else 2)
    for rank in range(ranks):
        counts = joined_products(tmp_path / "async", rank)
        if ranks == 2:
            assert set(counts) == {2 * passes}
        else:  # a pipeline runs a stage once before its first step
            assert min(counts) >= 2 * passes


def test_devices_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ASYNC | {"train__compile": True, "train__micro_batch_size": 1}
    tree = TORCH.job(Path("unused"), Path("unused"), **settings)
    config = resolve_config(build_config(tree), world_size=2)
    with pytest.raises(DeviceError, match="and the key needs CUDA GPUs"):
        check_support(config, select_device("cpu"))
    monkeypatch.setattr(TorchDevice, "compiles", property(lambda device: False))
    device = replace(select_device("cpu"), kind="cuda", name="NVIDIA H100")
    with pytest.raises(DeviceError, match="NVIDIA H100 without Triton, a C compiler or Python"):
        check_support(config, device)

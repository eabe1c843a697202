"""device=cuda in a process that has the H100 of tests/fake_cuda, which computes nothing: started by test_npu.py."""

from typing import Any

import numpy as np
import pytest
import torch

from common.dataset.sampler import Batch
from common.parallel.run import Run
from common.training.start import Start
from tests.fake_cuda.device import fake_device
from tests.host_waits import counted
from tests.layouts import BF16_WEIGHTS
from tests.packed_corpus import FLAGS
from tests.tiny import tiny_config
from torch_gpt2.data import BlockAttention
from torch_gpt2.device import open_device
from torch_gpt2.engine import Engine
from torch_gpt2.model import build_model
from torch_gpt2.predict import Decoder, Slots

TRAININGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd with momentum": {"optimizer__name": "sgd", "optimizer__momentum": 0.9},
    "fp16 with loss scale": {"precision": "fp16"},
    "bf16 weights": {"precision": BF16_WEIGHTS},
    "recompute full": {"train__recompute": "full"},
    "recompute selective": {"train__recompute": "selective", "model__dropout": 0.1},
    "deterministic": {"train__deterministic": True},
    "attention written out": {"train__fused_attention": False},
    "float8 head": {"precision": {"compute": "bfloat16", "float8_head": True}},
    "activations on the host": {"train__offload_activations": True, "precision": "bf16"},
    "documents kept apart": FLAGS | {"precision": "bf16", "data__eod_id": 3},
}


def make_config(**changes: Any) -> Run:
    usual: dict[str, Any] = {"device": "cuda", "model__num_layers": 1, "model__num_heads": 2, "train__max_steps": 2}
    return tiny_config(**(usual | {"optimizer": {"learning_rate": 0.1, "schedule": "constant"}} | changes))


def train(config: Run) -> list[Any]:
    """Two steps of two micro batches; what waited in each."""
    tokens = np.zeros((4, 17), np.int32)
    batch = Batch(tokens=tokens, samples=4, consumed_samples=0, sample_hash="")
    with fake_device():
        engine = Engine(config, open_device(config))
        engine.begin(Start())
        with counted() as waits:
            rows = engine.run(iter([engine.prepare_batch(batch)] * 2), 2)
            rows += engine.finish()
        assert [row.seconds for row in rows] == [0.001] * 2  # from events of the device
    return waits.steps[1:]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_mixes_no_devices_and_reads_nothing(name: str) -> None:
    try:
        waits = train(make_config(**TRAININGS[name]))
        assert torch.are_deterministic_algorithms_enabled() == (name == "deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [dict(found) for found in waits] == [{}, {}]


@pytest.fixture(autouse=True)
def plain_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention has no operators to look at; gpu_checks.py compiles it."""
    monkeypatch.setattr(BlockAttention, "suits", staticmethod(lambda config, device: False))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_validation_generation_and_serving_mix_no_devices(precision: str) -> None:
    config = make_config(precision=precision)
    with fake_device():
        Engine(config, open_device(config)).evaluate([np.zeros((2, 17), np.int32)] * 2)
        device = open_device(config, lengths_vary=True)
        model = build_model(config, device)
        decoder = Decoder(model, device, rows=3)
        shapes = [decoder.start([[1, 2, 3], [4], [5, 6]], room=4).shape]
        shapes += [decoder.step([7, 8, 9]).shape for _ in range(2)]
        decoder.reorder([2, 0, 0])
        shapes.append(decoder.step([7, 8, 9]).shape)
        slots = Slots(model, device, count=3)
        seen: list[int] = []
        slots.admit(0, [1, 2, 3], reuse=0, observe=None)
        slots.admit(2, [1, 2, 3, 4], reuse=2, observe=lambda place, _: seen.append(place))
        slots.copy(2, 1, 3)
        shapes.append(slots.step([0, 1, 2], [1, 2, 3], [3, 3, 4]).shape)
        captures = device.capture(lambda: torch.ones(1, device="cuda"), None)
        assert captures().shape == (1,)
        with pytest.raises(AssertionError, match=r"lift_fresh.* in a CUDA graph"):
            device.capture(lambda: torch.tensor([1.0], device="cuda"), None)
    assert shapes == [(3, 101)] * 5 and seen == [2]
    assert not torch.backends.cuda.cudnn_sdp_enabled()

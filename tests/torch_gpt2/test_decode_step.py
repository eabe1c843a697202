"""The step of fixed shape that accelerators take, on a CPU, against transformers and the growing
step of a CPU.
"""

import gc
import math
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from common.config.schema import PredictConfig
from common.generation.generate import generate
from common.generation.prompts import Prompt
from tests.mixed_load import prompts as mixed_prompts, run
from tests.torch_gpt2.test_predict import prompts, theirs
from tests.twins import random_model
from torch_gpt2 import decode_step
from torch_gpt2.device import TorchDevice, select_device
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder, Slots


class Accelerator(TorchDevice):
    """A CPU that is taken for an accelerator."""

    runs_ahead = True
    compiled = False

    def capture(self, step: Callable[[], Tensor], memory: Any) -> Callable[[], Tensor]:
        captured.append(step)
        return torch.compile(step, backend="eager", fullgraph=True) if self.compiled else step


class Compiling(Accelerator):
    compiled = True


captured: list[Callable[[], Tensor]] = []
CPU = select_device("cpu")
ACCELERATOR, COMPILING = (
    kind(kind="cpu", index=0, name="none", module=CPU.module) for kind in (Accelerator, Compiling)
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> GPT2:
    monkeypatch.setattr(decode_step, "_MIN_KEYS", 8)
    captured.clear()
    return random_model()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_tokens_equal_transformers(model: GPT2, batch: int) -> None:
    """Prompts of 18, 1, 7 and 12 tokens, 30 new ones: 8, 16, 32 and 48 columns, each once."""
    given = [Prompt(text="", ids=ids, new_tokens=30) for ids in prompts()]
    decoder = Decoder(model, ACCELERATOR, batch)
    found = generate(decoder, given, PredictConfig(), seed=0, ends=())
    assert [each.tokens for each in found] == theirs(model, prompts())
    assert len(captured) == (4 if batch == 1 else 3 if batch == 3 else 2)


@pytest.mark.parametrize(("device", "tolerance"), [(ACCELERATOR, 2e-6), (COMPILING, 2e-6)])
def test_logits_equal_the_growing_step(
    model: GPT2, monkeypatch: pytest.MonkeyPatch, device: TorchDevice, tolerance: float
) -> None:
    """float32, largest logit 2. Rows are exchanged once. A graph for each power of two, and none
    again, shows that nothing is read on the host: that would break it.
    """
    if device is COMPILING:  # a GPU's products: oneDNN's have no form that torch.compile knows
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        torch._dynamo.reset()
        counters.clear()
    one, other = Decoder(model, CPU, 3), Decoder(model, device, 3)
    rows = prompts()[:3]
    expected, found = one.start(rows, 29), other.start(rows, 29)
    for number in range(29):
        if number == 10:
            one.reorder([2, 0, 0])
            other.reorder([2, 0, 0])
        tokens = expected.argmax(1).tolist()
        expected, found = one.step(tokens), other.step(tokens)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert len(captured) == 2
    if device is COMPILING:
        assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_a_full_row_does_not_change_its_neighbours(model: GPT2) -> None:
    ids = np.random.default_rng(0).integers(0, 101, 47).tolist()
    rows = [Prompt(text="", ids=ids, new_tokens=1), Prompt(text="", ids=[3], new_tokens=47)]
    found = generate(Decoder(model, ACCELERATOR, 2), rows, PredictConfig(), seed=0, ends=())
    assert [each.tokens for each in found] == [
        theirs(model, [ids], max_new_tokens=1)[0],
        theirs(model, [[3]], max_new_tokens=47)[0],
    ]


def test_nan_of_an_earlier_text_ends_with_it(model: GPT2) -> None:
    """A text with float16 that overflows leaves NaN, and 0 times NaN is NaN."""
    decoder, slots = Decoder(model, ACCELERATOR, 1), Slots(model, ACCELERATOR, 2)
    expected = Decoder(model, CPU, 1)
    first = expected.start([[5, 6, 7]], 2)[0], expected.step([8])[0]
    for blocks in (decoder._layers.blocks, slots._layers.blocks):
        for layer in blocks:
            layer.keys[:, :, : model.config.max_positions] = math.nan
            layer.values[:, :, : model.config.max_positions] = math.nan
    of_decoder = decoder.start([[5, 6, 7]], 2)[0], decoder.step([8])[0]
    of_slots = slots.admit(1, [5, 6, 7], 0, None), slots.step([1], [8], [3])[0]
    for found in (of_decoder, of_slots):
        np.testing.assert_allclose(found, first, rtol=0, atol=2e-6)


def test_a_decoder_that_is_dropped_gives_its_memory_back(model: GPT2) -> None:
    decoder = Decoder(model, ACCELERATOR, 1)
    decoder.start([[1]], 2)
    decoder.step([1])
    keys = weakref.ref(decoder._layers.blocks[0].keys)
    captured.clear()
    gc.disable()  # which does not look at an accelerator's memory
    try:
        del decoder
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("window", [None, 20])
def test_a_mixed_load_in_slots(model: GPT2, window: int | None) -> None:
    given = mixed_prompts(101, None if window else 48)
    settings = PredictConfig(stop_at_end_of_text=False)
    alone = generate(Decoder(model, CPU, 1), given, settings, seed=0, ends=(), window=window)
    found, _ = run(Slots(model, ACCELERATOR, 4), given, window)
    assert found == [each.tokens for each in alone]
    assert len(captured) <= 4


def test_a_gpu_replays_what_it_has_captured() -> None:
    """The order that torch asks for (docs/source/notes/cuda.rst, CUDA Graphs): a run on a stream
    aside, the capture, then replays only. The memory of two graphs is one.
    """
    said: list[str] = []

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def within(name: str, *_: Any, **options: Any) -> Any:
        said.append(" ".join(["begin", name, *map(str, options.values())]))
        yield
        said.append(f"end {name}")

    def stream(name: str) -> Any:
        return SimpleNamespace(wait_stream=lambda other: said.append(f"{name} waits"))

    module = SimpleNamespace(
        CUDAGraph=Graph,
        current_stream=lambda: stream("current"),
        Stream=lambda: stream("aside"),
        stream=lambda _: within("stream"),
        graph=lambda _, **options: within("graph", pool=options["pool"]),
        graph_pool_handle=lambda: 7,
    )
    device = TorchDevice(kind="cuda", index=0, name="NVIDIA H100", module=module)
    number = torch.zeros(())

    def step() -> Tensor:
        said.append("step")
        return number

    before = ["aside waits", "begin stream", "step", "end stream", "current waits"]
    before += ["begin graph 7", "step", "end graph"]
    memory = device.graph_memory()
    for _ in range(2):
        said.clear()
        run = device.capture(step, memory)
        assert said == before
        assert run() is number and run() is number
        assert said == [*before, "replay", "replay"]

"""Generation against transformers.generate on the same weights: one prompt at a time, in batches of
different lengths, in slots, and with the step of fixed shape that accelerators take.
"""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from common.config.schema import PrecisionConfig, PredictConfig
from common.generation.beam_search import search_beams
from common.generation.generate import Continuation, generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from tests.mixed_load import prompts as mixed_prompts, run
from tests.reference import hugging_face_model
from tests.twins import random_model
from torch_gpt2 import predict
from torch_gpt2.device import TorchDevice, select_device
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder, Slots

LENGTHS, POSITIONS = (18, 1, 7, 12), 48


class Accelerator(TorchDevice):
    """A CPU that is taken for an accelerator. Its name says whether it compiles a step."""

    runs_ahead = True

    def capture(self, step: Callable[[], Tensor], memory: Any) -> Callable[[], Tensor]:
        captured.append(step)
        return torch.compile(step, backend="eager", fullgraph=True) if self.name == "compiles" else step


captured: list[Callable[[], Tensor]] = []
CPU = select_device("cpu")
ACCELERATOR, COMPILING = (
    Accelerator(kind="cpu", index=0, name=name, module=CPU.module) for name in ("none", "compiles")
)
on_both = pytest.mark.parametrize("device", [CPU, ACCELERATOR], ids=["cpu", "accelerator"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> GPT2:
    monkeypatch.setattr(predict, "_MIN_KEYS", 8)
    captured.clear()
    return random_model()


def prompts() -> list[list[int]]:
    """Each holds token 50, by which transformers' batches are padded: else a penalty for repetition would differ."""
    return [[50, *np.random.default_rng(length).integers(0, 101, length - 1).tolist()] for length in LENGTHS]


def continued(
    model: GPT2,
    rows: Sequence[list[int]],
    new_tokens: int = 30,
    *,
    batch: int | None = None,
    ends: Sequence[int] = (),
    device: TorchDevice = CPU,
    **settings: Any,
) -> list[Continuation]:
    """batch: sequences at once; all, if None. settings: of PredictConfig, and more arguments of ``generate``."""
    given = {"stream", "vocab_size", "window"} & settings.keys()
    words, biases = {name: settings.pop(name) for name in given}, settings.pop("biases", None)
    config = PredictConfig.model_validate(settings)
    rules = LogitRules(config, ends=ends, biases=biases)
    prompts = [Prompt(text="", ids=ids, new_tokens=new_tokens) for ids in rows]
    by_beams = config.strategy == "beam_search"
    batch = batch or len(rows) * (config.num_beams if by_beams else 1)
    decoder = Decoder(model, device, batch)
    if by_beams:
        return list(search_beams(decoder, prompts, rules, **words))
    return list(generate(decoder, prompts, rules, seed=0, **words))


@torch.no_grad()
def continued_by_transformers(
    net: Any, rows: list[list[int]], new_tokens: int, ends: list[int], pad: int, **settings: Any
) -> tuple[list[list[int]], Any]:
    """Return new tokens of a batch padded on the left, without what follows an end, and all that transformers says."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    usual = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    said = net.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else pad, **usual, **settings,
    )  # fmt: skip
    tokens = [row[longest:].tolist() for row in said.sequences]
    places = [[n for n, token in enumerate(row) if token in ends] or [len(row)] for row in tokens]
    return [row[: at[0] + 1] for row, at in zip(tokens, places, strict=True)], said


def ours(model: GPT2, rows: list[list[int]], batch: int = 1, **more: Any) -> list[list[int]]:
    return [each.tokens for each in continued(model, rows, batch=batch, **more)]


def theirs(model: GPT2, rows: list[list[int]], ends: Any = (), **settings: Any) -> list[list[int]]:
    """transformers' greedy tokens of a batch, without the ends."""
    net = hugging_face_model(model.config, dict(model.named_parameters()))
    found, _ = continued_by_transformers(net, rows, 30, [*ends], 50, **settings)
    return [row[:-1] if row[-1] in ends else row for row in found]


@on_both
@pytest.mark.parametrize(("batch", "penalty"), [(1, 1.0), (3, 1.0), (3, 1.5), (8, 1.5)])
def test_greedy_equals_transformers_token_for_token(
    model: GPT2, batch: int, penalty: float, device: TorchDevice
) -> None:
    """Batches of one, of three and one, and of all four: 8, 16, 32 and 48 columns, each once."""
    expected = theirs(model, prompts(), repetition_penalty=penalty)
    assert expected == [row for ids in prompts() for row in theirs(model, [ids], repetition_penalty=penalty)]
    assert ours(model, prompts(), batch, device=device, repetition_penalty=penalty) == expected
    assert min(len(set(row)) for row in expected) > 3
    assert device is CPU or len(captured) == {1: 4, 3: 3, 8: 2}[batch]


def test_another_activation_gives_the_tokens_of_transformers() -> None:
    model = random_model(activation="quick_gelu")
    assert ours(model, prompts(), 3) == theirs(model, prompts()) != ours(random_model(), prompts(), 3)


@pytest.mark.parametrize(("batch", "window"), [(1, 48), (3, 16), (8, 16), (8, 2)])
def test_a_sliding_window_equals_a_loop_over_transformers(model: GPT2, batch: int, window: int) -> None:
    """Each token follows the last window - 1 ones, as GPT2-Chinese's generate.py takes them;
    prompts of 18, 1, 7 and 12 tokens, one of which is above 16 from the start.
    """
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    expected = []
    for prompt in prompts():
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(60):
                context = torch.tensor([ids[-(window - 1) :]])
                ids.append(int(reference(context).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert ours(model, prompts(), batch, new_tokens=60, window=window) == expected
    end = expected[1][25]
    cut = [row[: row.index(end)] if end in row else row for row in expected]
    assert ours(model, prompts(), batch, new_tokens=60, window=window, ends=[end]) == cut
    assert len({len(row) for row in cut}) > 1 or window == 2


@pytest.mark.parametrize("least", [0, 3, 20])
def test_the_end_of_text_equals_transformers(model: GPT2, least: int) -> None:
    """Rows that end early do not change the others; the end does not come before min_new_tokens."""
    rows = ours(model, prompts())
    ends = [rows[0][5], rows[1][9]]
    minimum = {"min_new_tokens": least} if least else {}
    expected = theirs(model, prompts(), ends=ends, **minimum)
    for batch in (1, 8):
        assert ours(model, prompts(), batch, ends=ends, min_new_tokens=least) == expected
    assert len({len(row) for row in expected}) > 1 and all(len(row) >= least for row in expected)
    whole = ours(model, prompts(), 8, ends=ends, stop_at_end_of_text=False)
    assert {len(row) for row in whole} == {30}


def test_a_sequence_depends_only_on_seed_prompt_and_number(model: GPT2) -> None:
    """float32. Other batches, other neighbours of other lengths, more sequences: the same."""
    words = {"strategy": "sampling", "temperature": 1.5, "top_p": 0.95}
    expected = ours(model, prompts(), 1, num_sequences=3, **words)
    assert len({tuple(row) for row in expected}) == 12
    assert ours(model, prompts(), 5, num_sequences=3, **words) == expected
    assert ours(model, prompts(), 8, **words) == expected[::3]


@pytest.mark.parametrize(("types", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_narrow_types_give_the_model_s_own_logits(types: str, tolerance: float, batch: int) -> None:
    """Against the model's forward pass in the same type. Both round everywhere: some units of the last place."""
    softmax = "float16" if types == "float16" else "float32"
    precision = PrecisionConfig.model_validate({"compute": types, "softmax": softmax})
    model = random_model(precision=precision)
    decoder, text = Decoder(model, CPU, batch), prompts()[0]
    with torch.no_grad():
        expected = model.logits(model.eval()(torch.tensor([text]))).numpy()[0]
    logits, bound = decoder.start([text[: 5 + row] for row in range(batch)], 10), np.abs(expected)
    for at in range(4, 14):
        wanted = expected[at : at + batch]
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=tolerance * bound.max())
        logits = decoder.step(text[at + 1 : at + 1 + batch])


def test_padded_ids_are_never_chosen(model: GPT2) -> None:
    with torch.no_grad():
        model.wte.weight[101:] = 100.0 * model.wte.weight[0]
    assert max(ours(model, [[1, 2, 3]], strategy="sampling", temperature=50.0)[0]) < 101


@pytest.mark.parametrize(("device", "window"), [(CPU, None), (CPU, POSITIONS), (ACCELERATOR, None), (ACCELERATOR, 20)])
def test_a_mixed_load_equals_single_requests(model: GPT2, device: TorchDevice, window: int | None) -> None:
    """24 sequences that come and go in four slots, float32. A slot between those of a step keeps its longer text."""
    given = mixed_prompts(101, None if window else POSITIONS)
    rules = LogitRules(PredictConfig(stop_at_end_of_text=False), ends=())
    alone = generate(Decoder(model, CPU, 1), given, rules, seed=0, window=window)
    found, engine = run(Slots(model, device, 4), given, window)
    assert found == [each.tokens for each in alone]
    assert (engine.counts["reused_prompt_tokens"] > 100) == (window != 20)
    assert len(captured) <= 4
    slots, decoder = Slots(model, device, 3), Decoder(model, CPU, 1)
    for slot, ids in enumerate(([5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 7])):
        slots.admit(slot, ids, 0, None)
    decoder.start([[5, 6, 7, 8, 9]], 2)
    slots.step([0, 2], [10, 10], [3, 3])
    np.testing.assert_allclose(slots.step([1], [10], [5]), decoder.step([10]), rtol=0, atol=2e-6)


def test_a_captured_step_gives_the_logits_of_the_growing_one(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, largest logit 2. Rows are exchanged once. A graph for each power of two, and none
    again, shows that nothing is read on the host: that would break it.
    """
    # a GPU's products: oneDNN's have no form that torch.compile knows
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    torch._dynamo.reset()
    counters.clear()
    one, other = Decoder(model, CPU, 3), Decoder(model, COMPILING, 3)
    rows = prompts()[:3]
    expected, found = one.start(rows, 29), other.start(rows, 29)
    for number in range(29):
        for decoder in (one, other) if number == 10 else ():
            decoder.reorder([2, 0, 0])
        tokens = expected.argmax(1).tolist()
        expected, found = one.step(tokens), other.step(tokens)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    assert len(captured) == 2
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_nan_of_an_earlier_text_ends_with_it(model: GPT2) -> None:
    """A text with float16 that overflows leaves NaN, and 0 times NaN is NaN."""
    decoder, slots = Decoder(model, ACCELERATOR, 1), Slots(model, ACCELERATOR, 2)
    expected = Decoder(model, CPU, 1)
    first = expected.start([[5, 6, 7]], 2)[0], expected.step([8])[0]
    for blocks in (decoder._layers.blocks, slots._layers.blocks):
        for layer in blocks:
            layer.keys[:, :, :POSITIONS] = math.nan
            layer.values[:, :, :POSITIONS] = math.nan
    of_decoder = decoder.start([[5, 6, 7]], 2)[0], decoder.step([8])[0]
    of_slots = slots.admit(1, [5, 6, 7], 0, None), slots.step([1], [8], [3])[0]
    for found in (of_decoder, of_slots):
        np.testing.assert_allclose(found, first, rtol=0, atol=2e-6)


def test_a_decoder_that_is_dropped_gives_its_memory_back(model: GPT2) -> None:
    """Without the collector of garbage, which does not look at an accelerator's memory."""
    decoder = Decoder(model, ACCELERATOR, 1)
    decoder.start([[1]], 2)
    decoder.step([1])
    keys = weakref.ref(decoder._layers.blocks[0].keys)
    captured.clear()
    gc.disable()
    del decoder
    gone = keys() is None
    gc.enable()
    assert gone


def test_a_gpu_replays_what_it_has_captured() -> None:
    """The order that torch asks for (docs/source/notes/cuda.rst, CUDA Graphs): a run on a stream
    aside, the capture, then replays only. The memory of two graphs is one.
    """
    module = MagicMock()
    device = TorchDevice(kind="cuda", index=0, name="NVIDIA H100", module=module)
    memory = device.graph_memory()
    order = ["Stream().wait_stream", "stream().__enter__", "step", "stream().__exit__"]
    order += ["current_stream().wait_stream", "graph().__enter__", "step", "graph().__exit__"]
    for _ in range(2):
        module.reset_mock()
        run = device.capture(module.step, memory)
        assert run() is run() is module.step()
        steps = [name for name, _, _ in module.mock_calls if name in {*order, "CUDAGraph().replay"}]
        assert steps == [*order, *["CUDAGraph().replay"] * 2, "step"]
        assert module.graph.call_args.kwargs["pool"] is memory

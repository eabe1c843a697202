"""The engine over a model that needs no arithmetic: the next token follows from the whole context, and each call is
held against what the engine may do.
"""

import threading
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from common.errors import RunError
from common.generation.prompts import Prompt
from common.generation.sampling import Logits
from common.serving.engine import MIN_SHARED, Engine, Observer
from common.serving.protocol import Refusal
from tests.mixed_load import Greedy

VOCABULARY = 50


def next_token(ids: Sequence[int]) -> int:
    return zlib.crc32(repr(list(ids)).encode()) % VOCABULARY


class Model:
    """Slots of lists. ``calls``: what was asked for, in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: list[list[int]] = [[] for _ in range(count)]
        self.calls: list[tuple[Any, ...]] = []

    def admit(self, slot: int, ids: Sequence[int], reuse: int, observe: Observer | None) -> Logits:
        assert self.held[slot][:reuse] == list(ids[:reuse]) and 0 <= reuse < len(ids)
        self.calls.append(("admit", slot, len(ids), reuse))
        self.held[slot] = list(ids)
        if observe is not None:
            observe(reuse, np.stack([self._logits(ids[: n + 1]) for n in range(reuse, len(ids))]))
        return self._logits(ids)

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        self.calls.append(("step", tuple(slots)))
        for slot, token, place in zip(slots, tokens, places, strict=True):
            assert place <= len(self.held[slot])
            self.held[slot][place:] = [token]
        return np.stack([self._logits(self.held[slot]) for slot in slots])

    def copy(self, source: int, slot: int, length: int) -> None:
        self.calls.append(("copy", source, slot, length))
        self.held[slot] = self.held[source][:length]

    @staticmethod
    def _logits(ids: Sequence[int]) -> Logits:
        return np.eye(VOCABULARY, dtype=np.float32)[next_token(ids)]


BySteps = type("BySteps", (Model,), {"admit": None})


class Job(Greedy):
    error: Exception | None = None

    def __init__(self, ids: list[int], new: int, window: int | None = None) -> None:
        super().__init__(Prompt(text="", ids=ids, new_tokens=new), window)

    def fail(self, error: Exception) -> None:
        self.error = error

    def expected(self) -> list[int]:
        """Texts that a loop without an engine generates."""
        alone = Greedy(self.prompt, self.window)
        while len(alone.tokens) < self.prompt.new_tokens:
            alone.tokens.append(next_token(alone.context()))
        return alone.tokens


def finish(engine: Engine | Model, *requests: list[Job]) -> Engine:
    """Do all of the requests, in an engine of its own for a model."""
    engine = engine if isinstance(engine, Engine) else Engine(engine, queue_limit=40)
    for jobs in requests:
        engine.submit(jobs)
    while engine.turn():
        pass
    return engine


@pytest.mark.parametrize("model", [Model, BySteps])
@pytest.mark.parametrize("window", [None, 12])
def test_each_sequence_is_what_it_is_in_a_batch_of_one(model: type[Model], window: int | None) -> None:
    """Forty jobs of prompts that share beginnings, in three slots; some outgrow the window."""
    random = np.random.default_rng(0)
    common = random.integers(0, VOCABULARY, 40).tolist()
    jobs = [
        Job([*common[: random.integers(0, 40)], number % VOCABULARY], random.integers(1, 30), window)
        for number in range(40)
    ]
    engine = finish(model(3), *(jobs[first : first + 8] for first in range(0, 40, 8)))
    assert [job.tokens for job in jobs] == [job.expected() for job in jobs]
    assert engine.running == engine.waiting == 0 and engine.counts["sequences"] == 40
    assert (engine.counts["reused_prompt_tokens"] > 100) == (window is None)


def lengths_of(model: Model) -> list[int]:
    return [call[2] for call in model.calls if call[0] == "admit"]


def test_at_most_one_pass_lies_between_two_steps_and_windows_take_turns_with_requests() -> None:
    """A sequence whose window slides needs a pass a token."""
    model = Model(4)
    finish(model, [Job([number], 30) for number in range(3)], [Job([number], 40, window=8) for number in range(3)])
    kinds = [call[0] for call in model.calls]
    assert kinds.count("admit") > 60
    first, last = kinds.index("step"), len(kinds) - kinds[::-1].index("step")
    gaps = " ".join(kinds[first:last]).split("step")
    assert max(gap.count("admit") for gap in gaps) == 1
    model = Model(2)
    finish(model, [Job([1, 2, 3], 30, window=3)], [Job([number], 1) for number in range(10)])
    assert lengths_of(model)[:21].count(1) == 10


def test_requests_take_turns_at_free_slots() -> None:
    """One of ten sequences and two of one, which came later, in one slot."""
    model = Model(1)
    finish(model, [Job([1], 2) for _ in range(10)], [Job([1, 2], 2)], [Job([1, 2, 3], 2)])
    assert lengths_of(model) == [1, 2, 3, *[1] * 9]


def test_a_prompt_is_taken_over_from_whoever_holds_it() -> None:
    """From a slot at work by a copy, from a free one in place; below MIN_SHARED not at all."""
    prompt = list(range(MIN_SHARED + 4))
    model = Model(2)
    engine = finish(model, [Job(prompt, 4), Job(prompt, 4)])
    reuse = len(prompt) - 1
    assert model.calls[0] == ("admit", 0, len(prompt), 0)
    assert ("copy", 0, 1, reuse) in model.calls
    assert ("admit", 1, len(prompt), reuse) in model.calls
    model.calls.clear()
    finish(engine, [Job([*prompt, 9], 1)], [Job([*prompt[: MIN_SHARED - 1], 40], 1)])
    assert "copy" not in [call[0] for call in model.calls]
    assert [call[3] for call in model.calls if call[0] == "admit"] == [len(prompt), 0]


@pytest.mark.parametrize("model", [Model, BySteps])
def test_an_observer_sees_the_logits_after_every_token(model: type[Model]) -> None:
    """Even of a prompt whose keys are there already."""
    prompt = list(range(30))
    engine, job = finish(model(2), [Job(prompt, 1)]), Job(prompt, 3)
    seen: dict[int, int] = {}
    job.observe = lambda first, logits: seen.update(enumerate(logits.argmax(-1).tolist(), first))
    finish(engine, [job])
    assert [seen[place] for place in range(30)] == [next_token(prompt[: place + 1]) for place in range(30)]


def test_a_cancelled_job_frees_its_slot_and_its_place() -> None:
    engine = Engine(Model(1), queue_limit=2)
    running, waiting, last = Job([1], 1000), Job([2], 1000), Job([3], 2)
    engine.submit([running])
    engine.turn()
    engine.submit([waiting, last])
    with pytest.raises(Refusal, match="2 sequences wait already"):
        engine.submit([Job([4], 1)])
    running.is_cancelled = waiting.is_cancelled = True
    finish(engine)
    assert last.tokens == last.expected() and len(running.tokens) == 2 and not waiting.tokens
    assert engine.counts["cancelled_sequences"] == 2
    assert str(running.error) == str(waiting.error) == "cancelled"


def test_a_job_that_fails_does_not_change_the_others_and_a_model_that_fails_ends_all() -> None:
    class Bad(Job):
        def advance(self, logits: Logits) -> bool:
            raise RunError("nan")

    class Broken(Model):
        def step(self, *_: Any) -> Logits:
            raise RuntimeError("out of memory")

    bad, good = Bad([1], 3), Job([2], 3)
    engine = finish(Model(2), [bad, good])
    assert str(bad.error) == "nan" and good.tokens == good.expected() and engine.failure is None
    engine = Engine(Broken(1), queue_limit=4)
    jobs = [Job([1], 3), Job([2], 3)]
    engine.submit(jobs)
    engine.run(lambda: True)
    assert str(engine.failure) == "out of memory" and engine.running == engine.waiting == 0
    assert all(job.error is engine.failure for job in jobs)
    with pytest.raises(Refusal, match="log says why"):
        engine.submit([Job([3], 1)])


def test_another_thread_submits_and_stops() -> None:
    engine = Engine(Model(2), queue_limit=4)
    job = Job([1], 20)
    wanted = job.expected()
    thread = threading.Thread(target=engine.run, args=(lambda: job.tokens != wanted,), daemon=True)
    thread.start()
    engine.submit([job])
    thread.join(10)
    assert not thread.is_alive() and job.tokens == wanted

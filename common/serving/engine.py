"""Continuous batching: sequences come and go, and each step adds a token to all active ones.

One thread owns the model: the one that calls ``Engine.run``. Any thread may submit and cancel. Between two steps there
is at most one pass over a prompt. So other requests wait for at most one new prompt at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import GPT2Error
from common.generation.sampling import Logits
from common.log import LOG
from common.serving.protocol import Refusal

MIN_SHARED = 16
"""Fewest first tokens in common for which copying their keys pays."""
_IDLE_SECONDS = 0.2

Observer = Callable[[int, Logits], None]
"""Takes a place and logits (n, vocab_size), those after the n tokens from that place."""


class Slots(Protocol):
    """A model that remembers ``count`` sequences, each of its own length."""

    @property
    def count(self) -> int: ...
    @property
    def admit(self) -> Callable[[int, Sequence[int], int, Observer | None], Logits] | None:
        """Put ids into a slot, which already holds the first ``reuse`` of them: ``admit(slot, ids, reuse, observe)``.

        Returns the logits (vocab_size,) of the next token. observe: gets the logits after each new token. None where
        ``step`` adds prompts, a token at a time.
        """

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        """Put a token into each of these slots at its place. Other slots stay as they are.

        places: each at most the number of tokens that the slot holds. Returns the logits (B,
        vocab_size) of the next tokens.
        """

    def copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` to another slot."""


class Job(Protocol):
    """One sequence to be generated. The engine's thread uses all members but ``is_cancelled``."""

    is_cancelled: bool

    @property
    def observe(self) -> Observer | None:
        """Function that gets the logits after every token of the prompt, or None."""

    def context(self) -> list[int]:
        """Return the tokens before the next one; only the last ones if a window slides."""

    def advance(self, logits: Logits) -> bool:
        """Choose the next token; return whether the sequence is finished."""

    def fail(self, error: Exception) -> None:
        """End the job before it is complete. Also called when it was cancelled."""


@dataclass(kw_only=True)
class _Slot:
    held: list[int] = field(default_factory=list)
    """Tokens whose keys and values the slot holds, of its current or last job."""
    job: Job | None = None
    used: int = 0
    """Number of the turn in which it last got a job or a pass."""


class Engine:
    """Runs jobs in the slots of a model.

    failure: reason for its end, or None while it runs. counts: its work since the start, by the
    names of ``common.serving.metrics``.
    """

    def __init__(self, slots: Slots, *, queue_limit: int) -> None:
        """queue_limit: number of jobs that may wait for a slot."""
        self.counts: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._model = slots
        self._slots = [_Slot() for _ in range(slots.count)]
        self._waiting: deque[deque[Job]] = deque()
        self._limit = queue_limit
        self._changed = threading.Condition()
        self._turn = 0
        self._slid_last = False

    # ---- any thread ----

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting))

    @property
    def running(self) -> int:
        return sum(slot.job is not None for slot in self._slots)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all or none. Raises Refusal if the queue is full or the engine has ended.

        Requests take turns at free slots, so that a request with many jobs does not block others.
        """
        with self._changed:
            if self.failure is not None:
                raise Refusal(503, "the model has stopped; the server's log says why")
            if sum(map(len, self._waiting)) + len(jobs) > self._limit:
                message = f"{self._limit} sequences wait already, which is the limit; try again later"
                raise Refusal(429, message, retry=1)
            self._waiting.append(deque(jobs))
            self._changed.notify()

    # ---- the thread that owns the model ----

    def run(self, go_on: Callable[[], bool]) -> None:
        """Work until ``go_on()`` is false or the model fails; then fail all jobs that are left."""
        try:
            while go_on():
                if not self.turn():
                    with self._changed:
                        if not self._waiting and go_on():
                            self._changed.wait(_IDLE_SECONDS)
            self.failure = Refusal(503, "the server stops")
        except Exception as error:
            LOG.exception("the engine has failed")
            self.failure = error
        self._take_out(lambda _: True, self.failure)

    def turn(self) -> bool:
        """Do at most one pass and one step; return whether there was anything to do."""
        self._turn += 1
        self.counts["cancelled_sequences"] += self._take_out(lambda job: job.is_cancelled, Refusal(503, "cancelled"))
        passed = self._pass()
        at_work = [number for number, slot in enumerate(self._slots) if self._can_step(slot)]
        if at_work:
            self._step(at_work)
        return passed or bool(at_work)

    def _take_out(self, is_out: Callable[[Job], bool], error: Exception) -> int:
        """Fail the jobs, waiting or at work, for which ``is_out`` is true; return their number."""
        with self._changed:
            out = [job for jobs in self._waiting for job in jobs if is_out(job)]
            if gone := {id(job) for job in out}:
                kept = (deque(job for job in jobs if id(job) not in gone) for jobs in self._waiting)
                self._waiting = deque(jobs for jobs in kept if jobs)
        for slot in self._slots:
            if slot.job is not None and is_out(slot.job):
                out.append(slot.job)
                slot.job = None
        for job in out:
            job.fail(error)
        return len(out)

    def _pass(self) -> bool:
        """Give a free slot to the next job, or compute a sequence whose window slides again.

        They take turns if both wait. Return whether there was one.
        """
        sliding = [
            number for number, slot in enumerate(self._slots) if slot.job is not None and not self._can_step(slot)
        ]
        if not sliding or self._slid_last:
            self._slid_last = False
            if self._admit_next():
                return True
        if not sliding:
            return False
        self._slid_last = True
        number = min(sliding, key=lambda each: self._slots[each].used)
        self._slots[number].held = []
        self._take_in(number, reuse=0)
        return True

    def _admit_next(self) -> bool:
        free = [number for number, slot in enumerate(self._slots) if slot.job is None]
        with self._changed:
            if not (free and self._waiting):
                return False
            jobs = self._waiting.popleft()
            job = jobs.popleft()
            if jobs:
                self._waiting.append(jobs)
        context = job.context()
        shared = [_shared(slot.held, context) for slot in self._slots]
        source = max(range(len(shared)), key=lambda each: (shared[each], each in free))
        reuse = shared[source]
        if reuse < MIN_SHARED or job.observe is not None:
            reuse = 0
        number = min(free, key=lambda each: self._slots[each].used)
        if reuse and source in free:
            number = source
        slot = self._slots[number]
        slot.job = job
        if reuse and source != number:
            self._model.copy(source, number, reuse)
        slot.held = context[:reuse]
        self.counts.update(sequences=1, prompt_tokens=len(context), reused_prompt_tokens=reuse)
        self._take_in(number, reuse)
        return True

    def _take_in(self, number: int, reuse: int) -> None:
        slot = self._slots[number]
        assert slot.job is not None
        slot.used = self._turn
        if self._model.admit is not None:
            context = slot.job.context()
            logits = self._model.admit(number, context, reuse, slot.job.observe)
            slot.held = context
            self._advance(slot, logits)

    def _can_step(self, slot: _Slot) -> bool:
        """Return whether one step can add the next token of the slot's job to the held tokens.

        They are the first of its context until a window slides, from when on it does not grow.
        """
        return slot.job is not None and len(slot.job.context()) > len(slot.held)

    def _step(self, numbers: list[int]) -> None:
        at_work = [self._slots[number] for number in numbers]
        contexts = [slot.job.context() for slot in at_work if slot.job is not None]
        places = [len(slot.held) for slot in at_work]
        tokens = [context[place] for context, place in zip(contexts, places, strict=True)]
        logits = self._model.step(numbers, tokens, places)
        self.counts["steps"] += 1
        self.counts["step_rows"] += len(numbers)
        for slot, context, token, row in zip(at_work, contexts, tokens, logits, strict=True):
            assert slot.job is not None
            slot.held.append(token)
            if self._model.admit is None and slot.job.observe is not None:
                slot.job.observe(len(slot.held) - 1, row[None])
            if len(slot.held) == len(context):
                self._advance(slot, row)

    def _advance(self, slot: _Slot, logits: Logits) -> None:
        assert slot.job is not None
        try:
            is_finished = slot.job.advance(logits)
        except GPT2Error as error:  # only this sequence fails, for example by NaN
            slot.job.fail(error)
            is_finished = True
        if is_finished:
            slot.job = None


def _shared(held: Sequence[int], context: Sequence[int]) -> int:
    """Return how many first tokens are equal, without the last of ``context``.

    The last one is left out since its logits are needed.
    """
    most = min(len(held), len(context) - 1)
    return next((place for place in range(most) if held[place] != context[place]), most)

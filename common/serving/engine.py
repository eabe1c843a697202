"""Continuous batching: sequences come and go, and each step adds a token to all that are at work.

One thread owns the model: the one that calls ``Engine.run``. Any thread may submit and cancel.
Between two steps there is at most one pass over a prompt, so that a new request holds the others
up by one prompt at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import GPT2Error
from common.generation.sampling import Logits
from common.log import LOG

LEAST_SHARED = 16
"""Tokens that two sequences begin with in common before it pays to take over their keys."""
_IDLE_SECONDS = 0.2

Observer = Callable[[int, Logits], None]
"""Takes a place, and the logits (n, vocab_size) that follow the tokens from that place on."""


class Slots(Protocol):
    """A model that remembers ``count`` sequences, each with columns of its own."""

    @property
    def count(self) -> int: ...
    @property
    def takes_prompts(self) -> bool:
        """Whether there is ``admit``; otherwise prompts go in by ``step``, a token at a time."""

    def admit(self, slot: int, ids: Sequence[int], reuse: int, observe: Observer | None) -> Logits:
        """Let a slot hold ``ids``, of which it holds the first ``reuse`` already; logits
        (vocab_size,) of what follows. observe: gets the logits after each of the new ones.
        """

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        """Put a token into each of these slots at its place, which is at most the number of tokens
        that it holds; logits (B, vocab_size) of what follows each. Other slots stay as they are.
        """

    def copy(self, source: int, slot: int, length: int) -> None:
        """Let a slot hold the first ``length`` tokens that another one holds."""


class Job(Protocol):
    """One sequence to be generated. All but ``is_cancelled`` is called by the engine's thread."""

    is_cancelled: bool

    @property
    def observe(self) -> Observer | None:
        """Set where the logits after every token of the prompt are wanted."""

    def context(self) -> list[int]:
        """The tokens after which the next one is chosen: the last ones, where a window slides."""

    def advance(self, logits: Logits) -> bool:
        """Choose the next token; return whether the sequence is finished."""

    def fail(self, error: Exception) -> None:
        """End without what is missing. Also called of a job that was cancelled."""


class QueueFullError(GPT2Error):
    """More sequences wait than may."""


class StoppedError(GPT2Error):
    """The engine takes no more jobs: it has failed, or is about to end."""


class CancelledError(GPT2Error):
    """Nobody waits for the job any more."""


@dataclass(kw_only=True)
class Counts:
    """What the engine has done since it began."""

    steps: int = 0
    rows: int = 0
    """Tokens put in by steps, over all slots."""
    prompts: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Tokens of prompts whose keys were there already."""
    cancelled: int = 0


@dataclass(kw_only=True)
class _Slot:
    held: list[int] = field(default_factory=list)
    """Tokens whose keys and values are there, of the job at work or of the last one."""
    job: Job | None = None
    used: int = 0
    """Number of the turn in which it was last given a job or a pass."""


class Engine:
    """``failure``: why it has ended, if it has. ``counts``: of all its work."""

    def __init__(self, slots: Slots, *, queue_limit: int) -> None:
        """queue_limit: how many jobs may wait for a slot."""
        self.counts = Counts()
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
        """Queue the jobs of one request, all or none. Requests take turns at free slots, so that
        one of many jobs does not keep the others out. Raises QueueFullError or StoppedError.
        """
        with self._changed:
            if self.failure is not None:
                raise StoppedError("the model has stopped; the server's log says why")
            if sum(map(len, self._waiting)) + len(jobs) > self._limit:
                raise QueueFullError(f"{self._limit} sequences wait already, which is the limit")
            self._waiting.append(deque(jobs))
            self._changed.notify()

    # ---- the thread that owns the model ----

    def run(self, go_on: Callable[[], bool]) -> None:
        """Work while ``go_on()``; then, or after a failure of the model, fail all jobs."""
        try:
            while go_on():
                if not self.turn():
                    with self._changed:
                        if not self._waiting and go_on():
                            self._changed.wait(_IDLE_SECONDS)
            self._end(StoppedError("the server stops"))
        except Exception as error:
            LOG.exception("the engine has failed")
            self._end(error)

    def turn(self) -> bool:
        """At most one pass and one step; return whether there was anything to do."""
        self._turn += 1
        self._drop_cancelled()
        passed = self._pass()
        at_work = [number for number, slot in enumerate(self._slots) if self._can_step(slot)]
        if at_work:
            self._step(at_work)
        return passed or bool(at_work)

    def _end(self, error: Exception) -> None:
        with self._changed:
            self.failure = error
            left = [job for jobs in self._waiting for job in jobs]
            self._waiting.clear()
        for slot in self._slots:
            if slot.job is not None:
                left.append(slot.job)
                slot.job = None
        for job in left:
            job.fail(error)

    def _drop_cancelled(self) -> None:
        dropped: list[Job] = []
        with self._changed:
            if any(job.is_cancelled for jobs in self._waiting for job in jobs):
                dropped = [job for jobs in self._waiting for job in jobs if job.is_cancelled]
                kept = (
                    deque(job for job in jobs if not job.is_cancelled) for jobs in self._waiting
                )
                self._waiting = deque(jobs for jobs in kept if jobs)
        for slot in self._slots:
            if slot.job is not None and slot.job.is_cancelled:
                dropped.append(slot.job)
                slot.job = None
        self.counts.cancelled += len(dropped)
        for job in dropped:
            job.fail(CancelledError("cancelled"))

    def _pass(self) -> bool:
        """Give a free slot to the next job, or a sequence whose window slides its tokens anew: in
        turns where both wait.
        """
        sliding = [
            number
            for number, slot in enumerate(self._slots)
            if slot.job is not None and not self._can_step(slot)
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
        job = self._next_job() if free else None
        if job is None:
            return False
        context = job.context()
        shared = [_shared(slot.held, context) for slot in self._slots]
        source = max(range(len(shared)), key=lambda each: (shared[each], each in free))
        reuse = shared[source]
        if reuse < LEAST_SHARED or job.observe is not None:
            reuse = 0
        number = min(free, key=lambda each: self._slots[each].used)
        if reuse and source in free:
            number = source
        slot = self._slots[number]
        slot.job = job
        if reuse and source != number:
            self._model.copy(source, number, reuse)
        slot.held = context[:reuse]
        self.counts.prompts += 1
        self.counts.prompt_tokens += len(context)
        self.counts.reused_tokens += reuse
        self._take_in(number, reuse)
        return True

    def _next_job(self) -> Job | None:
        with self._changed:
            if not self._waiting:
                return None
            jobs = self._waiting.popleft()
            job = jobs.popleft()
            if jobs:
                self._waiting.append(jobs)
            return job

    def _take_in(self, number: int, reuse: int) -> None:
        slot = self._slots[number]
        assert slot.job is not None
        slot.used = self._turn
        if self._model.takes_prompts:
            context = slot.job.context()
            logits = self._model.admit(number, context, reuse, slot.job.observe)
            slot.held = context
            self._advance(slot, logits)

    def _can_step(self, slot: _Slot) -> bool:
        """Whether a step can add what the slot's job needs next to what is held."""
        if slot.job is None:
            return False
        context, length = slot.job.context(), len(slot.held)
        one = len(context) == length + 1 or not self._model.takes_prompts
        return one and context[:length] == slot.held

    def _step(self, numbers: list[int]) -> None:
        at_work = [self._slots[number] for number in numbers]
        contexts = [slot.job.context() for slot in at_work if slot.job is not None]
        places = [len(slot.held) for slot in at_work]
        tokens = [context[place] for context, place in zip(contexts, places, strict=True)]
        logits = self._model.step(numbers, tokens, places)
        self.counts.steps += 1
        self.counts.rows += len(numbers)
        for slot, context, token, row in zip(at_work, contexts, tokens, logits, strict=True):
            assert slot.job is not None
            slot.held.append(token)
            if not self._model.takes_prompts and slot.job.observe is not None:
                slot.job.observe(len(slot.held) - 1, row[None])
            if len(slot.held) == len(context):
                self._advance(slot, row)

    def _advance(self, slot: _Slot, logits: Logits) -> None:
        assert slot.job is not None
        try:
            is_finished = slot.job.advance(logits)
        except GPT2Error as error:  # of this sequence alone, such as logits that are not finite
            slot.job.fail(error)
            is_finished = True
        if is_finished:
            slot.job = None


def _shared(held: Sequence[int], context: Sequence[int]) -> int:
    """How many first tokens are equal, without the last of ``context``, whose logits are needed."""
    most = min(len(held), len(context) - 1)
    return next((place for place in range(most) if held[place] != context[place]), most)

"""Turn the body of a request into jobs of the engine, and what they say into an answer."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.config.schema import PredictConfig
from common.errors import ConfigError, GPT2Error
from common.generation.generate import Continuation, grow, new_sequences
from common.generation.logit_rules import LogitRules, sequence_biases
from common.generation.prompts import Prompt, sliding_window
from common.generation.sampling import Logits, ScoredToken, score_token, token_text
from common.parallel.run import Run
from common.serving.engine import Engine, Observer
from common.serving.metrics import Metrics
from common.serving.protocol import CompletionRequest, Refusal, parse_request
from common.tokenizer import Tokenizer
from common.tokenizer.text_tokenizer import encode_prompt, whole_text
from common.weights.names import count_parameters

_DEFAULT_TOKENS = 16
_MIN_TOP_P = 1e-9
"""``top_p`` of 0, which leaves the most probable token; 0 is off in the section predict."""


class CompletionService:
    """Makes completions from requests. ``name``: name of the model for clients.

    ``facts``: about the model, as far as possible by llama.cpp's names in /v1/models.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: Run, backend: str | None = None) -> None:
        """backend: the library that computes, where it is not that of the config."""
        self.name = config.serve.name or Path(config.output_dir).resolve().name
        model = config.model
        self.facts = {
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_params": count_parameters(model),
            "n_ctx_train": model.max_positions,
            "n_vocab": tokenizer.vocab_size,
            "backend": backend or config.backend,
        }
        self.metrics = Metrics(engine, config.serve.slots)
        self.engine, self.tokenizer, self.window = engine, tokenizer, sliding_window(config)
        self._config = config

    def open(self, body: bytes, loop: asyncio.AbstractEventLoop) -> Completion:
        """Make the jobs of a request without queueing them. Raises Refusal.

        loop: event loop in which the answer is awaited.
        """
        request = parse_request(body)
        if request.model not in (None, self.name):
            raise Refusal(404, f"there is no model {request.model[:100]!r}, only {self.name}", param="model")
        prompts = [self._prompt(given, request) for given in request.prompt]
        count = len(prompts) * request.n
        if count > self._config.serve.max_waiting:
            raise Refusal(
                400,
                f"{len(prompts)} prompts with n={request.n} are {count} sequences; this server"
                f" takes {self._config.serve.max_waiting} in one request",
                param="n" if request.n > 1 else "prompt",
            )
        settings = PredictConfig(
            strategy="sampling",
            top_k=max(0, request.top_k),
            top_p=request.top_p or _MIN_TOP_P,
            stop=[*request.stop, *filter(None, [request.suffix])],
            temperature=request.temperature,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            logprobs=request.logprobs,
        )
        try:
            biases = sequence_biases(settings, self.tokenizer)
        except ConfigError as error:
            message = str(error).removeprefix("predict.")
            raise Refusal(400, message, param="logit_bias") from None
        rules = LogitRules(settings, ends=self.tokenizer.ends, biases=biases)
        seed = secrets.randbits(63) if request.seed == -1 else request.seed % 2**64
        sequences = new_sequences(prompts, request.n, seed, settings.stop, self.tokenizer.stream)
        return Completion(self, request, prompts, loop, rules, sequences)

    def _prompt(self, given: str | list[int], request: CompletionRequest) -> Prompt:
        """Encode a prompt. Raises Refusal if it is empty, too long, or has unknown ids."""
        if isinstance(given, str):
            ids, text = encode_prompt(self.tokenizer, given).tolist(), given
        else:
            wrong = [token for token in given if not 0 <= token < self.tokenizer.vocab_size]
            if wrong:
                raise Refusal(
                    400,
                    f"prompt: the id {wrong[0]} is outside the vocabulary of {self.tokenizer.vocab_size} tokens",
                    param="prompt",
                )
            ids, text = given, whole_text(self.tokenizer, given)
        if not ids:
            raise Refusal(400, "prompt: has no token; give some text", param="prompt")
        return Prompt(text=text, ids=ids, new_tokens=self._new_tokens(len(ids), request))

    def _new_tokens(self, length: int, request: CompletionRequest) -> int:
        """Return how many tokens to add to a prompt of ``length`` tokens. Raises Refusal."""
        serve, positions = self._config.serve, self._config.model.max_positions
        longest = serve.max_prompt_tokens or (2**62 if self.window else positions)
        if length > longest:
            raise Refusal(400, f"prompt: has {length} tokens; this server takes at most {longest}", param="prompt")
        wanted = request.max_tokens
        if wanted is not None and wanted > (serve.max_new_tokens or 2**62):
            raise Refusal(
                400, f"max_tokens: {wanted} is above this server's limit of {serve.max_new_tokens}", param="max_tokens"
            )
        # The last token after a scored prompt is chosen but needs no position.
        is_scored = request.echo and request.logprobs is not None
        room = positions - length + is_scored if self.window is None else 2**62
        if wanted is None:
            wanted = min(_DEFAULT_TOKENS, serve.max_new_tokens or room, max(room, 1))
        if wanted > room:
            raise Refusal(
                400,
                f"max_tokens: a prompt of {length} tokens and {wanted} to add go beyond the"
                f" model's {positions} positions; shorten the prompt or ask for fewer",
                param="max_tokens",
            )
        return wanted


class Completion:
    """One request being answered. ``jobs``: a job for each continuation."""

    def __init__(
        self,
        service: CompletionService,
        request: CompletionRequest,
        prompts: list[Prompt],
        loop: asyncio.AbstractEventLoop,
        rules: LogitRules,
        sequences: list[Continuation],
    ) -> None:
        self.service, self.request, self.rules = service, request, rules
        self.prompt_texts = [prompt.text for prompt in prompts]
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.jobs = [CompletionJob(sequence, self) for sequence in sequences]
        self._loop = loop
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    @property
    def usage(self) -> dict[str, int]:
        completion_tokens = sum(len(job.sequence.tokens) for job in self.jobs)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }

    def receive(self, piece: Piece | Exception) -> None:
        """Take a piece, or the reason why there is none, from the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def cancel(self) -> None:
        """Cancel jobs that are not yet done."""
        for job in self.jobs:
            job.is_cancelled = True

    async def answer(self) -> bytes:
        """Return the whole object. Raises Refusal where a job has failed."""
        found = {piece.job.number: piece.job.part(piece) async for piece in self._arriving()}
        return _json(self._head | {"choices": [found[number] for number in sorted(found)], "usage": self.usage})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the objects of a stream as server-sent events; an error is the last one."""
        options = self.request.stream_options
        with_usage = options is not None and options.include_usage
        head: dict[str, Any] = self._head | ({"usage": None} if with_usage else {})
        try:
            async for piece in self._arriving():
                yield event(head | {"choices": [piece.job.part(piece)]})
        except Refusal as refusal:
            yield event(refusal.body)
            return
        if with_usage:
            yield event(head | {"choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    async def _arriving(self) -> AsyncGenerator[Piece, None]:
        left = len(self.jobs)
        while left:
            piece = await self._pieces.get()
            if isinstance(piece, GPT2Error):
                raise Refusal(piece.status if isinstance(piece, Refusal) else 500, str(piece))
            if isinstance(piece, Exception):  # errors of a framework stay in the log
                raise Refusal(500, "the model has failed; the server's log says why")
            left -= piece.finish_reason is not None
            yield piece


class Piece(NamedTuple):
    """The new part of a sequence: all of it, but in a stream."""

    job: CompletionJob
    text: str
    scored: Sequence[ScoredToken]
    """Log-probabilities, if asked for. Those of the prompt come with the first piece."""
    finish_reason: str | None
    """Reason in OpenAI's words: stop or length."""


class CompletionJob:
    """One continuation of a completion. With one seed it draws what ``generate`` draws.

    Implements ``common.serving.engine.Job`` for the engine's thread, which gives pieces to the completion. The last one
    has a reason or an error. ``part`` is for the thread of the answer.
    """

    def __init__(self, sequence: Continuation, completion: Completion) -> None:
        self.is_cancelled = False
        self.sequence, self._completion = sequence, completion
        request, self._tokenizer = completion.request, completion.service.tokenizer
        self.number = sequence.index * request.n + sequence.number
        self._prompt_scores: dict[int, ScoredToken] = {}
        self._shown = self._scored = self._pieces = self._turns = self._offset = 0
        self._since = time.monotonic()
        self._stream = self._tokenizer.stream(() if request.echo else sequence.prompt.ids)

    @property
    def observe(self) -> Observer | None:
        request = self._completion.request
        return self._score_prompt if request.echo and request.logprobs is not None and not self._turns else None

    def context(self) -> list[int]:
        return self.sequence.context(self._completion.service.window)

    def advance(self, logits: Logits) -> bool:
        sequence, logits = self.sequence, logits[: self._tokenizer.vocab_size]
        rules, before = self._completion.rules, len(sequence.tokens)
        if sequence.prompt.new_tokens == 0:
            sequence.finish_reason = "length"
        else:
            grow(sequence, logits, rules)
        sequence.read()
        if sequence.end is not None and rules.settings.logprobs is not None:
            sequence.scored.append(score_token(logits, sequence.end, rules.settings.logprobs))
        metrics, now = self._completion.service.metrics, time.monotonic()
        metrics.generated_tokens.inc(len(sequence.tokens) - before)
        (metrics.token_seconds if self._turns else metrics.first_token_seconds).observe(now - self._since)
        self._turns, self._since = self._turns + 1, now
        is_finished = sequence.finish_reason is not None
        # to wake the loop for each token of a whole answer would slow the engine down
        if is_finished or self._completion.request.stream:
            self._say(sequence)
        return is_finished

    def fail(self, error: Exception) -> None:
        self._completion.receive(error)

    def _say(self, sequence: Continuation) -> None:
        """Give the part since the last piece to the completion, unless nothing of it can be shown."""
        text, scored, reason = sequence.text[self._shown :], sequence.scored[self._scored :], sequence.finish_reason
        if not self._pieces:
            text = sequence.prompt.text * self._completion.request.echo + text
            scored = [*(score for _, score in sorted(self._prompt_scores.items())), *scored]
        elif not (text or scored or reason):
            return
        self._pieces, self._shown, self._scored = self._pieces + 1, len(sequence.text), len(sequence.scored)
        piece = Piece(
            job=self,
            text=text,
            scored=scored,
            finish_reason="length" if reason == "length" else "stop" if reason else None,
        )
        self._completion.receive(piece)

    def _score_prompt(self, first: int, logits: Logits) -> None:
        """Score prompt tokens. logits: those after its tokens from place ``first`` onwards."""
        ids, count = self.sequence.prompt.ids, self._completion.request.logprobs or 0
        self._prompt_scores[0] = ScoredToken(id=ids[0], logprob=math.nan, top=[])
        for place, row in enumerate(logits, first + 1):
            if place < len(ids):
                row = row[: self._tokenizer.vocab_size]
                self._prompt_scores[place] = score_token(row, ids[place], count)

    def part(self, piece: Piece) -> dict[str, Any]:
        """Return the object of OpenAI's for the next piece."""
        return {
            "index": self.number,
            "text": piece.text,
            "logprobs": None if self._completion.request.logprobs is None else self._logprobs(piece.scored),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return four lists with an entry for each token.

        The first token of a text has no probability. The chosen token is always among the top ones.
        text_offset: place in the text of the first character that the token is a part of.
        """
        words = [token_text(self._tokenizer, each.id) for each in scored]
        offsets = []
        for each in scored:
            offsets.append(self._offset)
            self._offset += len(self._stream([each.id]))
        top: list[dict[str, float] | None] = []
        for word, each in zip(words, scored, strict=True):
            found: dict[str, float] = {}
            for token, value in each.top:  # the first of tokens with equal text
                found.setdefault(token_text(self._tokenizer, token), value)
            found.setdefault(word, each.logprob)
            top.append(None if math.isnan(each.logprob) else found)
        values = [None if math.isnan(each.logprob) else each.logprob for each in scored]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def event(tree: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _json(tree) + b"\n\n"


def _json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()

"""Turn the body of a request into jobs, and their pieces into an answer."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.config.schema import PredictConfig
from common.errors import ConfigError, GPT2Error
from common.generation.generate import Continuation, GrowingText
from common.generation.logit_rules import LogitRules, sequence_biases
from common.generation.prompts import Prompt, sliding_window
from common.generation.sampling import ScoredToken, token_text
from common.parallel.run import Run
from common.serving.completion_task import CompletionJob, Piece
from common.serving.engine import Engine, QueueFullError, StoppedError
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
        self.engine, self.tokenizer = engine, tokenizer
        self._config, self._window = config, sliding_window(config)

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
        settings = _settings(request)
        try:
            biases = sequence_biases(settings, self.tokenizer)
        except ConfigError as error:
            message = str(error).removeprefix("predict.")
            raise Refusal(400, message, param="logit_bias") from None
        ends, unknown = self.tokenizer.ends, self.tokenizer.unknown_id
        rules = LogitRules(settings, ends=ends, unknown=unknown, biases=biases)
        completion = Completion(self, request, prompts, loop)
        seed = secrets.randbits(63) if request.seed == -1 else request.seed % 2**64
        completion.jobs = [
            CompletionJob(
                Continuation(
                    prompt=prompt,
                    index=index,
                    number=number,
                    generator=np.random.default_rng((seed, index, number)),
                    growing=GrowingText(self.tokenizer.stream(prompt.ids), settings.stop),
                ),
                choice=index * request.n + number,
                settings=settings,
                rules=rules,
                tokenizer=self.tokenizer,
                window=self._window,
                scores_prompt=request.echo and request.logprobs is not None,
                emit=completion.receive,
            )
            for index, prompt in enumerate(prompts)
            for number in range(request.n)
        ]
        return completion

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
        longest = serve.max_prompt_tokens or (2**62 if self._window else positions)
        if length > longest:
            raise Refusal(400, f"prompt: has {length} tokens; this server takes at most {longest}", param="prompt")
        wanted = request.max_tokens
        if wanted is not None and wanted > (serve.max_new_tokens or 2**62):
            raise Refusal(
                400, f"max_tokens: {wanted} is above this server's limit of {serve.max_new_tokens}", param="max_tokens"
            )
        # The last token after a scored prompt is chosen but needs no position.
        room = positions - length + (request.echo and request.logprobs is not None)
        if self._window is not None:
            room = 2**62
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
    ) -> None:
        self.request = request
        self.prompt_texts = [prompt.text for prompt in prompts]
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.jobs: list[CompletionJob] = []
        self._service, self._loop = service, loop
        self._pieces: asyncio.Queue[list[Piece]] = asyncio.Queue()
        self._held: list[Piece] = []
        self.choices = [
            Choice(
                number,
                service.tokenizer,
                prompts[number // request.n],
                echoes=request.echo,
                has_logprobs=request.logprobs is not None,
            )
            for number in range(len(prompts) * request.n)
        ]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    def receive(self, piece: Piece) -> None:
        """Take a piece from the engine's thread.

        Only a stream sends each at once. To wake the loop for others would slow the engine down.
        """
        self._held.append(piece)
        if piece.error is None:
            metrics = self._service.metrics
            metrics.generated_tokens.inc(piece.tokens)
            seconds = metrics.first_token_seconds if piece.is_first else metrics.token_seconds
            seconds.observe(piece.seconds)
        if self.request.stream or piece.finish_reason or piece.error:
            held, self._held = self._held, []
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._pieces.put_nowait, held)

    def submit(self) -> None:
        """Queue the jobs. Raises Refusal."""
        try:
            self._service.engine.submit(self.jobs)
        except QueueFullError as error:
            raise Refusal(429, f"{error}; try again later", retry=1) from None
        except StoppedError as error:
            raise Refusal(503, str(error)) from None

    def cancel(self) -> None:
        """Cancel jobs that are not yet done."""
        for job in self.jobs:
            job.is_cancelled = True

    async def answer(self) -> bytes:
        """Return the whole object. Raises Refusal where a job has failed."""
        pieces: list[list[Piece]] = [[] for _ in self.jobs]
        async for piece in self._arriving():
            pieces[piece.choice].append(piece)
        choices = [choice.part(*found) for choice, found in zip(self.choices, pieces, strict=True)]
        used = usage(self.prompt_tokens, self.choices)
        return _json(self._head | {"choices": choices, "usage": used})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the objects of a stream as server-sent events; an error is the last one."""
        options = self.request.stream_options
        with_usage = options is not None and options.include_usage
        head: dict[str, Any] = self._head | ({"usage": None} if with_usage else {})
        try:
            async for piece in self._arriving():
                if piece.text or piece.scored or piece.finish_reason or piece.is_first:
                    yield event(head | {"choices": [self.choices[piece.choice].part(piece)]})
                else:
                    self.choices[piece.choice].tokens += piece.tokens
        except Refusal as refusal:
            yield event(refusal.body)
            return
        if with_usage:
            used = usage(self.prompt_tokens, self.choices)
            yield event(head | {"choices": [], "usage": used})
        yield b"data: [DONE]\n\n"

    async def _arriving(self) -> AsyncGenerator[Piece, None]:
        left = len(self.jobs)
        while left:
            for piece in await self._pieces.get():
                if piece.error is not None:
                    raise _refusal(piece.error)
                left -= piece.finish_reason is not None
                yield piece


def _refusal(error: Exception) -> Refusal:
    """Return the answer for a job that has failed. Errors of a framework stay in the log."""
    if not isinstance(error, GPT2Error):
        return Refusal(500, "the model has failed; the server's log says why")
    return Refusal(503 if isinstance(error, StoppedError) else 500, str(error))


def _settings(request: CompletionRequest) -> PredictConfig:
    return PredictConfig(
        strategy="sampling",
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p or _MIN_TOP_P,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        stop=[*request.stop, *filter(None, [request.suffix])],
        logprobs=request.logprobs,
    )


def event(tree: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _json(tree) + b"\n\n"


def _json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()


class Choice:
    """One continuation of a completion, built from pieces as they arrive."""

    def __init__(self, number: int, tokenizer: Tokenizer, prompt: Prompt, *, echoes: bool, has_logprobs: bool) -> None:
        """echoes: whether the text begins with the prompt."""
        self.tokens = 0
        self._number, self._tokenizer = number, tokenizer
        self._echo, self._has_logprobs = prompt.text * echoes, has_logprobs
        self._stream = tokenizer.stream(() if echoes else prompt.ids)
        self._offset = 0

    def part(self, *pieces: Piece) -> dict[str, Any]:
        """Return the object for the next pieces, at least one."""
        self.tokens += sum(piece.tokens for piece in pieces)
        scored = [each for piece in pieces for each in piece.scored]
        return {
            "index": self._number,
            "text": self._echo * pieces[0].is_first + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(scored) if self._has_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
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
            self._offset += len(self._stream.push([each.id]))
        top: list[dict[str, float] | None] = []
        for word, each in zip(words, scored, strict=True):
            found: dict[str, float] = {}
            for token, value in each.top:  # the first of tokens with equal text
                found.setdefault(token_text(self._tokenizer, token), value)
            found.setdefault(word, each.logprob)
            top.append(None if math.isnan(each.logprob) else found)
        values = [None if math.isnan(each.logprob) else each.logprob for each in scored]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    completion_tokens = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

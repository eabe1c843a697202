"""The body of a request for completions: OpenAI's fields, and some more named as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from common.errors import GPT2Error
from common.structured_files import MalformedError, parse_json

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class Refusal(GPT2Error):
    """The request gets a status other than 200. param: the field at fault.

    retry: seconds after which the same request may succeed.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.retry = status, param, retry

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


_NOT_HERE = {
    "messages": "there is no chat here: GPT-2 has no format of conversations; send prompt",
    "tools": "GPT-2 calls no tools; leave the field out",
}
"""OpenAI's fields that need another model, with the message for each."""

_WHOLE = "expected text, a list of texts, a list of token ids, or a list of such lists"


Prompts = list[str | list[int]]


def _prompts(value: Any) -> Prompts:
    """Return every form of the field as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(_WHOLE)
    if all(type(each) is int for each in value):
        return [value]
    for each in value:
        is_ids = isinstance(each, list) and each and all(type(token) is int for token in each)
        if not (isinstance(each, str) or is_ids):
            raise ValueError(_WHOLE)
    return value


def _stops(value: Any) -> Any:
    """Return texts as a list, without the empty ones of clients that fill in every field."""
    texts = [value] if isinstance(value, str) else value
    return [each for each in texts if each != ""] if isinstance(texts, list) else texts


class _Level(BaseModel):
    """Fields of an object. One that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: each for key, each in value.items() if each is not None}


class StreamOptions(_Level):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored: there is nothing that pads events."""


class CompletionRequest(_Level):
    """A request for completions."""

    model: str | None = None
    prompt: Annotated[Prompts, BeforeValidator(_prompts)] = ["<|endoftext|>"]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = 0
    """0 is off, and so is -1, as in vLLM."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    n: Annotated[int, Field(ge=1, le=100_000)] = 1
    best_of: Annotated[int, Field(ge=0, le=100_000)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]], BeforeValidator(_stops), Field(max_length=16)
    ] = Field(default_factory=list)
    suffix: Annotated[str, Field(max_length=100_000)] = ""
    """Text after the completion, which ends where it reaches this text."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = -1
    """-1 is any seed, as in vLLM (SamplingParams) and llama.cpp; OpenAI allows all others."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=1024)] = Field(
        default_factory=dict
    )
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    user: Annotated[str, Field(max_length=1000)] | None = None


def parse_request(body: bytes) -> CompletionRequest:
    """Return the request of a body. Raises Refusal with the name of the field at fault."""
    try:
        tree = parse_json(body)
    except MalformedError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise Refusal(400, 'expected a JSON object such as {"prompt": "To be"}')
    for name, message in _NOT_HERE.items():
        if tree.get(name) is not None:
            raise Refusal(400, message, param=name)
    try:
        request = CompletionRequest.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = [str(part)[:100] for part in first["loc"]]
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if first["type"] == "extra_forbidden":
            level: type[_Level] = CompletionRequest if len(where) == 1 else StreamOptions
            message = f"no such field; there are {', '.join(level.model_fields)}"
        raise Refusal(400, f"{'.'.join(where)}: {message}", param=where[0]) from None
    if request.best_of not in (0, request.n):
        raise Refusal(
            400,
            f"best_of={request.best_of} is not n={request.n}: nothing is thrown away here; ask for"
            f" n={request.best_of} with logprobs, and choose",
            param="best_of",
        )
    if request.max_tokens == 0 and not request.echo:
        raise Refusal(400, "max_tokens=0 asks for nothing; with echo=true it scores the prompt", param="max_tokens")
    return request

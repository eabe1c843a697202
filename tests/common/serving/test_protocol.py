"""Fields of a request, and the field that an error names."""

import json
from typing import Any

import pytest

from common.serving.protocol import Refusal, parse_request


def parse(**fields: Any) -> Any:
    return parse_request(json.dumps(fields).encode())


def test_null_counts_as_left_out() -> None:
    fields = ("max_tokens", "temperature", "stop", "logit_bias", "n", "stream", "suffix", "echo")
    assert parse(**dict.fromkeys(fields)) == parse()
    assert parse().temperature == 1.0 and parse().n == 1


WRONG: dict[str, list[Any]] = {
    "model": [1, ["a"]],
    "prompt": [1, True, {}, [], [[]], ["a", 1], [1, "a"], [1.5], [[1], [True]]],
    "max_tokens": ["5", 1.5, 0, -1, True, 2**40],
    "temperature": ["1", -0.1, True, 1e300, [1]],
    "top_p": [-0.1, 1.01, "a"],
    "top_k": [-2, 0.5],
    "min_p": [-0.1, 1.5, "1"],
    "n": [0, -1, "2", 10**9],
    "best_of": [-1, 2, "1"],
    "stream": ["true", 1],
    "stream_options": [True, {"include_usage": 1}, {"other": True}, {"stream": True}],
    "stop": [1, [1], ["a"] * 17, {}, "a" * 1001],
    "seed": [1.5, 2**63, -(2**63) - 1, "1"],
    "logprobs": [-1, 21, True, "2"],
    "echo": [1, "yes"],
    "logit_bias": [[1], {"5": 101}, {"5": "1"}, {"5": None}, {str(n): 0 for n in range(1025)}],
    "presence_penalty": [2.1, "1"],
    "frequency_penalty": [-2.1, []],
    "repetition_penalty": [0, -1, "1"],
    "user": [1, "a" * 1001],
    "suffix": [1, ["a"]],
    "messages": [[{"role": "user", "content": "a"}]],
    "promt": ["a"],
}


ALLOWED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("OpenAI", {"suffix": "test."}, {"suffix": "test."}),
    ("OpenAI", {"best_of": 0, "n": 3}, {"best_of": 0, "n": 3}),
    ("OpenAI", {"best_of": 3, "n": 3}, {"best_of": 3}),
    ("OpenAI", {"seed": -9007199254740991}, {"seed": -9007199254740991}),
    ("OpenAI", {"top_p": 0}, {"top_p": 0.0}),
    ("OpenAI", {"temperature": 2, "frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ("OpenAI", {"logit_bias": {"50256": -100}}, {"logit_bias": {"50256": -100.0}}),
    ("OpenAI", {"logit_bias": {"foo": 0}}, {"logit_bias": {"foo": 0.0}}),
    ("OpenAI", {"stop": ""}, {"stop": []}),
    ("OpenAI", {"stop": ["", "a"]}, {"stop": ["a"]}),
    # as openai-python's own tests send it; vLLM refuses it
    ("OpenAI", {"stream_options": {"include_usage": True}}, {"stream": False}),
    *(
        ("OpenAI", {"stream": True, "stream_options": given}, {"stream": True})
        for given in ({}, {"include_obfuscation": True}, {"include_usage": None})
    ),
    ("vLLM", {"top_k": -1}, {"top_k": -1}),
    ("vLLM", {"min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05}),
    ("vLLM", {"echo": True, "max_tokens": 0, "logprobs": 0}, {"max_tokens": 0}),
    *(
        ("OpenAI", {"prompt": given}, {"prompt": prompts})
        for given, prompts in (("a", ["a"]), ([1, 2], [[1, 2]]), (None, ["<|endoftext|>"]))
    ),
    ("llama.cpp", {"prompt": [[1, 2], [3]], "n": 2}, {"prompt": [[1, 2], [3]]}),
    ("llama.cpp", {"prompt": ["a", [1, 2]]}, {"prompt": ["a", [1, 2]]}),
]
"""The peer that allows a request, its fields, and how they are read."""


@pytest.mark.parametrize(("peer", "fields", "read"), ALLOWED)
def test_fields_that_a_peer_allows(peer: str, fields: dict[str, Any], read: dict[str, Any]) -> None:
    found = parse(**fields)
    assert {name: getattr(found, name) for name in read} == read, peer


@pytest.mark.parametrize(
    ("peer", "fields", "message"),
    [
        ("vLLM", {"prompt_logprobs": 1}, "prompt_logprobs: no such field; there are model, prompt"),
        (
            "vLLM",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats: no such field; there are include_usage,",
        ),
        ("llama.cpp", {"logit_bias": [["a", 1]]}, "logit_bias: should be a valid dictionary"),
        ("llama.cpp", {"prompt": [1, "a"]}, "prompt: expected text, a list"),
        ("OpenAI", {"best_of": 3}, "best_of=3 is not n=1: nothing is thrown away here"),
        ("OpenAI", {"messages": []}, "there is no chat here"),
    ],
)
def test_fields_that_only_a_peer_has(peer: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse(**fields)
    assert str(caught.value).startswith(message), peer


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_named(name: str) -> None:
    """Type, range and size; Python's true is not a number."""
    for value in WRONG[name]:
        with pytest.raises(Refusal) as caught:
            parse(**{name: value})
        assert caught.value.status == 400, value
        assert caught.value.body["error"]["param"] == name, value
        assert name in str(caught.value) or name == "messages", value
        assert len(json.dumps(caught.value.body)) < 1000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "expected a JSON object"),
        (b'{"temperature": NaN}', "should be a finite number"),
        (b'{"n": 1, "n": 2}', "'n' is given twice"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"n": ' + b"9" * 5000 + b"}", "a number of more digits"),
        (b'{"prompt": "\\ud800"}', "half of a pair"),
    ],
)
def test_a_body_that_is_not_a_request(body: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        parse_request(body)
    assert caught.value.status == 400

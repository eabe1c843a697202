"""Fields of a request, and the field that an error names. The page, the address and the key of the server."""

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.config.schema import ServeConfig
from common.errors import ConfigError
from common.processes.addresses import is_loopback
from common.serving import protocol
from common.serving.protocol import Refusal, parse_request
from common.serving.server import listen, read_key
from tests.html_page import Page


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


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        # OpenAI's
        ({"suffix": "test."}, {"suffix": "test."}),
        ({"best_of": 0, "n": 3}, {"best_of": 0, "n": 3}),
        ({"best_of": 3, "n": 3}, {"best_of": 3}),
        ({"seed": -9007199254740991}, {"seed": -9007199254740991}),
        ({"top_p": 0}, {"top_p": 0.0}),
        ({"temperature": 2, "frequency_penalty": -2}, {"frequency_penalty": -2.0}),
        ({"logit_bias": {"50256": -100, "foo": 0}}, {"logit_bias": {"50256": -100.0, "foo": 0.0}}),
        ({"stop": ""}, {"stop": []}),
        ({"stop": ["", "a"]}, {"stop": ["a"]}),
        # as openai-python's own tests send it; vLLM refuses it
        ({"stream_options": {"include_usage": True}}, {"stream": False}),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, {"stream": True}),
        ({"stream": True, "stream_options": {"include_usage": None}}, {"stream": True}),
        ({"prompt": "a"}, {"prompt": ["a"]}),
        ({"prompt": [1, 2]}, {"prompt": [[1, 2]]}),
        ({"prompt": None}, {"prompt": ["<|endoftext|>"]}),
        # vLLM's
        ({"top_k": -1}, {"top_k": -1}),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05}),
        ({"echo": True, "max_tokens": 0, "logprobs": 0}, {"max_tokens": 0}),
        # llama.cpp's
        ({"prompt": [[1, 2], [3]], "n": 2}, {"prompt": [[1, 2], [3]]}),
        ({"prompt": ["a", [1, 2]]}, {"prompt": ["a", [1, 2]]}),
    ],
)
def test_fields_that_a_peer_allows(fields: dict[str, Any], read: dict[str, Any]) -> None:
    found = parse(**fields)
    assert {name: getattr(found, name) for name in read} == read


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs: no such field; there are model, prompt"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats: no such field; the",
        ),
        ({"logit_bias": [["a", 1]]}, "logit_bias: should be a valid dictionary"),
        ({"prompt": [1, "a"]}, "prompt: expected text, a list"),
        ({"best_of": 3}, "best_of=3 is not n=1: nothing is thrown away here"),
        ({"messages": []}, "there is no chat here"),
    ],
)
def test_fields_that_only_a_peer_has(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse(**fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_named(name: str) -> None:
    """Type, range and size; Python's true is not a number."""
    for value in WRONG[name]:
        with pytest.raises(Refusal) as caught:
            parse(**{name: value})
        assert (caught.value.status, caught.value.body["error"]["param"]) == (400, name), value
        assert name in str(caught.value) or name == "messages", value
        assert len(json.dumps(caught.value.body)) < 1000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "expected a JSON object"),
        (b'{"temperature": NaN}', "should be a finite number"),
        (b'{"n": 1, "n": 2}', "'n' is given twice"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"n": ' + b"9" * 5000 + b"}", "a number of more digits"),
        (b'{"prompt": "\\ud800"}', "half of a pair"),
    ],
)
def test_a_body_that_is_not_a_request(body: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        parse_request(body)
    assert caught.value.status == 400


# ---- the page without a browser: one file, nothing from elsewhere; the address and the key of the server ----


TEXT = Path(protocol.__file__).with_name("page.html").read_text(encoding="utf-8")
SCRIPT = TEXT.split("<script>")[1].split("</script>")[0]
PAGE = Page(TEXT)


def test_nothing_comes_from_elsewhere() -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bimport\b|innerHTML|eval\(", TEXT)
    assert PAGE.values("src", "href", "action", "srcset") == ["data:,"]
    assert re.findall(r'fetch\("([^"]+)"', SCRIPT) == ["v1/completions", "v1/models"]


def test_every_word_is_there_in_both_languages() -> None:
    languages = re.findall(r"^  (en|zh): \{\n(.*?)^  \},", SCRIPT, flags=re.S | re.M)
    words = {name: set(re.findall(r'(\w+): "', re.sub(r'(?<=: )"[^"]*"', '"', body))) for name, body in languages}
    assert words["en"] == words["zh"] and len(words["en"]) > 25
    used = set(PAGE.values("data-text", "data-label"))
    used |= set(re.findall(r'word\("(\w+)"\)', SCRIPT))
    used |= set(re.findall(r'kind(?::| =) "(\w+)"', SCRIPT)) - {"wrong"}
    assert len(used) > 20 and used <= words["en"], used - words["en"]


def test_elements_that_the_script_names_exist_and_the_facts_that_it_shows_are_sent() -> None:
    ids = PAGE.values("id")
    assert len(ids) == len(set(ids)) and set(re.findall(r'\$\("(\w+)"\)', SCRIPT)) <= set(ids)
    numbers = re.findall(r'"(\w+)"', SCRIPT.split("const NUMBERS = [")[1].split("]")[0])
    assert set(numbers) <= set(ids) & set(protocol.CompletionRequest.model_fields)
    shown = set(re.findall(r"meta\.(\w+)", SCRIPT))
    sent = Path(protocol.__file__).with_name("completions.py").read_text(encoding="utf-8")
    assert len(shown) == 6 and all(f'"{name}": ' in sent for name in shown)


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(["node", "--check", tmp_path / "page.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_address_that_is_taken_or_not_here() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"serve.port={port}: cannot listen there"):
            listen(ServeConfig(port=port))
    with pytest.raises(ConfigError, match=r"serve\.host=192\.0\.2\.1"):  # kept for documentation
        listen(ServeConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match=r"serve\.host=a\.\.b"):
        listen(ServeConfig(host="a..b", port=0))
    with listen(ServeConfig(port=0)) as listener:
        assert (listener.getsockname()[0], listener.proto) == ("127.0.0.1", socket.IPPROTO_TCP)


def test_addresses_that_only_this_machine_reaches() -> None:
    own = ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost.")
    others = ("0.0.0.0", "::", "10.0.0.1", "example", "localhost..")
    assert [host for host in (*own, *others) if is_loopback(host)] == [*own]


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" secret\n")
    settings = ServeConfig(api_key_file=str(file))
    assert read_key(settings, "other") == "secret"
    assert read_key(ServeConfig(), "other") == "other" and read_key(ServeConfig(), None) is None
    for content in ("", "two words", "two\nlines", "\u5bc6\u94a5"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"api_key_file=.*visible ASCII") as caught:
            read_key(settings, None)
        assert not content or content not in str(caught.value)
    with pytest.raises(ConfigError, match="GPT2_API_KEY: expected"):
        read_key(ServeConfig(), "")

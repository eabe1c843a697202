"""The server over a small model: what it answers against ``generate`` and torch, and what it refuses."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("prometheus_client", reason="not installed: pip install '.[serve]'")

from common.config.schema import PredictConfig
from common.generation.output import continuations
from common.generation.prompts import Prompt
from common.serving.app import App
from common.serving.completions import CompletionService
from common.serving.engine import Engine
from common.serving.server import http_server, listen
from common.tokenizer import Tokenizer, load_tokenizer
from tests.run_scripts import wait_until
from tests.tiny import tiny_config
from tests.twins import random_model
from torch_gpt2.device import select_device
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder, Slots

POSITIONS = 64
MODEL = {"model__seq_length": POSITIONS, "model__vocab_size": 50257}


class Server:
    """An engine and its HTTP in threads of this process."""

    def __init__(self, folder: Path, model: GPT2, tokenizer: Tokenizer, **tree: Any) -> None:
        key = tree.pop("key", None)
        given = {"port": 0, "slots": 4, "name": "small", **tree.pop("serve", {})}
        self.config = tiny_config(folder, **MODEL, serve=given, **tree)
        self.model, self.tokenizer, serve = model, tokenizer, self.config.serve
        slots = Slots(model, select_device("cpu"), serve.slots)
        self.engine = Engine(slots, queue_limit=serve.max_waiting)
        listener = listen(serve)
        self.port: int = listener.getsockname()[1]
        listener.listen()
        self.server = http_server(App(CompletionService(self.engine, tokenizer, self.config), serve, key), serve)
        self.http = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.stopping = threading.Event()
        self.work = threading.Thread(target=self.engine.run, args=(lambda: not self.stopping.is_set(),), daemon=True)

    def __enter__(self) -> "Server":
        self.http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.server.should_exit = True
        self.http.join(10)
        assert not self.http.is_alive()

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Content-Type": "application/json"} | given)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        content = response.read()
        connection.close()
        return response.status, found, content

    def post(self, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        return self.call("POST", "/v1/completions", json.dumps(fields).encode())

    def complete(self, **fields: Any) -> Any:
        status, _, body = self.post(**fields)
        assert status == 200, body
        return json.loads(body)

    def refused(self, **fields: Any) -> tuple[int, Any]:
        """Status and error."""
        status, _, body = self.post(**fields)
        return status, json.loads(body)["error"]

    def events(self, **fields: Any) -> list[Any]:
        status, headers, body = self.post(**fields, stream=True)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), body
        events = body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(each.removeprefix("data: ")) for each in events[:-2]]

    def expected(self, prompt: str, new: int, n: int, seed: int, **settings: Any) -> list[Any]:
        """Text and reason of ``continuations``, one sequence at a time."""
        settings |= {"num_sequences": n, "seed": seed, "window": self.config.predict.window}
        run = self.config.model_copy(update={"predict": PredictConfig(**settings)})
        ids = self.tokenizer.encode(prompt, allow_special=True).tolist()
        prompts = [Prompt(text=prompt, ids=ids, new_tokens=new)]
        decoder = Decoder(self.model, select_device("cpu"), 1)
        return [
            (each.read(), "length" if each.finish_reason == "length" else "stop")
            for each in continuations(decoder, prompts, run, self.tokenizer)
        ]


@pytest.fixture(scope="module")
def tokenizer(gpt2_vocab_files: tuple[Path, Path]) -> Tokenizer:
    return load_tokenizer(None, *gpt2_vocab_files, "auto")


@pytest.fixture(scope="module")
def model() -> GPT2:
    return random_model(seq_length=POSITIONS, vocab_size=50257).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: GPT2, tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("serve"), model, tokenizer) as made:
        made.work.start()
        yield made


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
PARAMETERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"temperature": 0, "repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
    ({"temperature": 0, "logit_bias": {"262": 100}}, {"logit_bias": {"262": 100.0}}),
    ({"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5}, PENALTIES),
    ({"n": 2, "temperature": 0.3, "top_k": 8, "best_of": 2}, {"strategy": "sampling", "temperature": 0.3, "top_k": 8}),
    ({"n": 2, "top_p": 0.4, "min_p": 0.1}, {"strategy": "sampling", "top_p": 0.4, "min_p": 0.1}),
    (
        {"n": 8, "top_k": 8, "stop": ["e", ""], "suffix": "st"},
        {"strategy": "sampling", "top_k": 8, "stop": ["e", "st"]},
    ),
    ({"top_p": 0}, {}),
    (
        {"n": 3, "temperature": 0.05, "top_k": -1, "best_of": 0, "stop": ""},
        {"strategy": "sampling", "temperature": 0.05},
    ),
]
"""Fields and settings. Draws are from few tokens: of 50,000 near equal ones a CPU's rounding may choose the next."""


def test_each_parameter_is_generates(server: Server) -> None:
    """Whole and as a stream, all at once in four slots, with lengths and seeds of their own."""
    long = "It was the best of times, it was the worst of times, it was the age of wisdom"
    prompts = ("To be, or not", long)
    calls = []
    for number, (fields, settings) in enumerate(PARAMETERS):
        own = {"prompt": prompts[number % 2], "max_tokens": 20 - number % 4, "seed": number}
        calls.append((own | {"model": "small"} | fields, settings))
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda call: server.complete(**call[0]), calls)
        streams = pool.map(lambda call: server.events(**call[0]), calls)
        found = list(zip(calls, answers, streams, strict=True))
    for (given, settings), answer, events in found:
        n, prompt, new = given.get("n", 1), given["prompt"], given["max_tokens"]
        expected = server.expected(prompt, new, n, given["seed"], **settings)
        choices = answer["choices"]
        assert [(each["text"], each["finish_reason"]) for each in choices] == expected
        assert [each["index"] for each in choices] == list(range(n))
        assert answer["usage"]["prompt_tokens"] == len(server.tokenizer.encode(prompt))
        assert answer["object"] == "text_completion"
        texts, reasons = [""] * n, set()
        for [piece] in (event["choices"] for event in events):
            texts[piece["index"]] += piece["text"]
            reasons.add(piece["finish_reason"])
        assert texts == [text for text, _ in expected] and reasons - {None}
        if "stop" in settings:
            assert "stop" in reasons
            assert not any("e" in text or "st" in text for text in texts)
    assert server.engine.counts["reused_prompt_tokens"] > 100
    assert server.engine.counts["step_rows"] > 1.5 * server.engine.counts["steps"]


def test_every_form_of_prompt_and_the_usage(server: Server) -> None:
    texts = ["To be", "The dog"]
    ids = [server.tokenizer.encode(text).tolist() for text in texts]
    answers = [server.complete(prompt=given, max_tokens=5, temperature=0) for given in (texts, ids, texts[0], ids[0])]
    found = [[each["text"] for each in answer["choices"]] for answer in answers]
    assert found[0] == found[1] and found[2] == found[3] == found[0][:1]
    used = {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
    assert answers[0]["usage"] == used
    options = {"include_usage": True}
    events = server.events(prompt=texts, max_tokens=5, temperature=0, stream_options=options)
    assert events[-1]["usage"] == answers[0]["usage"] and events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_scores_the_prompt_as_torch_does(server: Server, max_tokens: int) -> None:
    """An entry for each token of the prompt, which fills the positions, and for each generated one. float32: 1e-4."""
    random = np.random.default_rng(max_tokens)
    ids = random.integers(0, 50257, POSITIONS + 1 - max(max_tokens, 1)).tolist()
    fields = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "logprobs": 3}
    first, answer = (server.complete(**fields, echo=True) for _ in range(2))
    assert first["choices"] == answer["choices"], "its keys are there already"
    entries = answer["choices"][0]["logprobs"]
    with torch.no_grad():
        logits = server.model.logits(server.model(torch.tensor([ids])))[0].log_softmax(-1)
    assert all(len(entries[name]) == len(ids) + max_tokens for name in entries)
    assert entries["token_logprobs"][0] is None and entries["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        own = float(logits[place - 1, ids[place]])
        assert entries["token_logprobs"][place] == pytest.approx(own, abs=1e-4)
        best = sorted(entries["top_logprobs"][place].values(), reverse=True)
        top = logits[place - 1].topk(3).values.tolist()
        assert best[:3] == pytest.approx(top, abs=1e-4) and len(best) <= 4
    if max_tokens:
        best = float(logits[-1].max())
        assert entries["token_logprobs"][len(ids)] == pytest.approx(best, abs=1e-4)
    assert answer["choices"][0]["text"].startswith(server.tokenizer.decode(ids)[:-1])
    assert entries["text_offset"] == sorted(entries["text_offset"])


def test_a_prompt_of_ids_may_end_within_a_character(server: Server) -> None:
    """The first new token completes it; the place of each token is that in the text."""
    ids = server.tokenizer.encode("Hi 😀").tolist()
    assert server.tokenizer.decode(ids[:2]) == "Hi \ufffd"
    for echo, text, places in ((True, "Hi 😀", [0, 2, 3]), (False, "😀", [0])):
        fields = {"prompt": ids[:2], "max_tokens": 1, "echo": echo, "logprobs": 0}
        answer = server.complete(**fields, temperature=0, logit_bias={str(ids[2]): 100})
        choice = answer["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, places)
    words = server.tokenizer.encode("a 😀😀 b c").tolist()
    scored = server.complete(prompt=words, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    found = zip(scored["logprobs"]["tokens"], scored["logprobs"]["text_offset"], strict=True)
    assert all(scored["text"][at:].startswith(token) for token, at in found if token[:5] != "bytes")


def test_the_end_of_text_has_an_entry(server: Server) -> None:
    """lm-evaluation-harness cuts the last entry off, which must not be one of the prompt."""
    end = server.tokenizer.eod_id
    fields = {"prompt": "To be", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    answer = server.complete(**fields, echo=True, logit_bias={str(end): 100})
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == "To be"
    assert choice["logprobs"]["tokens"] == ["To", " be", "<|endoftext|>"]
    assert answer["usage"]["completion_tokens"] == 0


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server: Server, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(sent)
    return client


def test_a_client_that_leaves_ends_its_work(server: Server) -> None:
    """Tokens of a stream and of a whole answer."""
    for stream in (True, False):
        before = server.engine.counts["cancelled_sequences"]
        body = json.dumps({"prompt": "a", "max_tokens": 60, "n": 30, "stream": stream}).encode()
        with connect(server, HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)):
            wait_until(lambda: server.engine.running > 0, "work")
        wait_until(lambda: server.engine.running + server.engine.waiting == 0, "free slots")
        # counted after they have left their slots
        wait_until(lambda before=before: server.engine.counts["cancelled_sequences"] > before, "a count")  # type: ignore[misc]
    assert server.complete(prompt="a", max_tokens=2)["choices"][0]["finish_reason"]


REFUSED: list[tuple[int, str, dict[str, Any]]] = [
    (400, "n", {"n": 1000}),
    (400, "prompt", {"prompt": ["a"] * 65}),
    (400, "prompt", {"prompt": ""}),
    (400, "prompt", {"prompt": [50257]}),
    (400, "prompt", {"prompt": [-1]}),
    (400, "prompt", {"prompt": "a " * 100}),
    (400, "max_tokens", {"max_tokens": 64}),
    (400, "logit_bias", {"logit_bias": {"50257": 1}}),
    (404, "model", {"model": "gpt-4"}),
]


@pytest.mark.parametrize(("status", "param", "fields"), REFUSED)
def test_refusals_name_the_field(server: Server, status: int, param: str, fields: dict[str, Any]) -> None:
    found, error = server.refused(**{"prompt": "a", **fields})
    assert (found, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error" and param in error["message"]


def test_requests_refused_before_the_body_is_read(server: Server) -> None:
    assert server.call("GET", "/nowhere")[0] == 404
    assert server.call("GET", "/v1/completions")[0] == 405
    status, _, body = server.call("POST", "/v1/chat/completions", b"{}")
    assert status == 404 and b"no chat here" in body
    plain = server.call("POST", "/v1/completions", b'{"prompt": "a"}', Content_Type="text/plain")
    assert plain[0] == 415
    assert server.call("GET", "/v1/models", Host="evil.example:80")[0] == 403
    for host in ("[::1]:8000", "LOCALHOST:8000", "localhost.:8000", "Localhost"):
        assert server.call("GET", "/v1/models", Host=host)[0] == 200
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    for rest in (b"Content-Length: 100000000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 17):
        with connect(server, HEAD + rest) as client:
            assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_models_health_metrics_and_page(server: Server) -> None:
    models = json.loads(server.call("GET", "/v1/models")[2])
    assert [each["id"] for each in models["data"]] == ["small"]
    h, layers, vocabulary = 32, 2, 50257
    assert json.loads(server.call("GET", "/v1/models/small")[2])["meta"] == {
        "n_layer": layers, "n_embd": h, "n_ctx_train": POSITIONS, "n_vocab": vocabulary,
        "n_params": (vocabulary + POSITIONS + 2) * h + layers * (12 * h**2 + 13 * h),
        "backend": "torch",
    }  # fmt: skip
    assert json.loads(server.call("GET", "/health")[2]) == {"status": "ok"}
    found = []
    for new in (1, 4):
        server.complete(prompt="To be", max_tokens=new, temperature=0)
        lines = server.call("GET", "/metrics")[2].decode().splitlines()
        found.append(dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#")))
    for name, more in (("generated", 4), ("prompt", 2)):
        before, after = (float(each[f"gpt2_{name}_tokens_total"]) for each in found)
        assert after - before == more
    assert all(float(found[1][f"gpt2_{name}_seconds_count"]) > 0 for name in ("first_token", "token", "request"))
    status, headers, _ = server.call("GET", "/")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert server.call("HEAD", "/")[2] == b""


@pytest.fixture
def make(tmp_path: Path, model: GPT2, tokenizer: Tokenizer) -> Callable[..., Server]:
    """Make servers whose engine does not run yet."""
    return partial(Server, tmp_path, model, tokenizer)


def test_a_full_queue_and_an_engine_that_fails(make: Callable[..., Server]) -> None:
    serve = {"slots": 1, "max_waiting": 2}
    with make(serve=serve) as server, ThreadPoolExecutor(2) as pool:
        fields = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        waiting = [pool.submit(server.complete, **fields) for _ in range(2)]
        wait_until(lambda: server.engine.waiting == 2, "both wait")
        status, headers, body = server.post(**fields)
        assert (status, headers["retry-after"]) == (429, "1") and b"rate_limit_error" in body
        server.work.start()
        assert all(len(each.result(20)["choices"]) == 1 for each in waiting)

        with patch.object(Slots, "admit", side_effect=RuntimeError("out of memory")):
            status, error = server.refused(**fields)
        assert status == 500 and error["type"] == "server_error"
        assert "memory" not in error["message"]
        assert server.post(**fields)[0] == 503
        assert server.call("GET", "/health")[0] == 503


def test_a_key_guards_all_but_health(make: Callable[..., Server]) -> None:
    with make(key="secret-1") as server:
        for path in ("/", "/v1/models", "/metrics", "/nowhere"):
            status, headers, _ = server.call("GET", path)
            assert status == 401 and headers["www-authenticate"].startswith("Basic")
            for wrong in ("Bearer secret-2", "Bearer", "secret-1", "Basic !", "Basic eA=="):
                assert server.call("GET", path, Authorization=wrong)[0] == 401
        assert server.call("GET", "/health")[0] == 200
        assert server.call("GET", "/v1/models", Authorization="Bearer secret-1")[0] == 200
        browser = "Basic YW55OnNlY3JldC0x"  # any:secret-1
        assert server.call("GET", "/", Authorization=browser)[0] == 200


def test_slow_clients_are_given_up(make: Callable[..., Server]) -> None:
    """A head and a body that do not come, and an answer that takes too long."""
    with make(serve={"read_timeout": 0.3, "request_timeout": 0.6}) as server:
        with connect(server, b"POST /v1/comp") as client:
            assert client.recv(100) == b""
        with connect(server, HEAD + b"Content-Length: 20\r\n\r\n{") as client:
            assert client.recv(100).startswith(b"HTTP/1.1 408")
        for stream, code in ((False, 504), (True, 200)):
            status, _, body = server.post(prompt="a", stream=stream)
            assert status == code and b"0.6 seconds" in body
        server.work.start()  # it finds the job cancelled
        wait_until(lambda: server.engine.counts["cancelled_sequences"] == 2, "both are given up")


def test_a_text_outgrows_the_model_where_that_is_chosen(make: Callable[..., Server]) -> None:
    with make(predict={"window": 20}) as server:
        server.work.start()
        found = server.complete(prompt="To be, or not", max_tokens=100, temperature=0)
        assert found["choices"][0]["text"] == server.expected("To be, or not", 100, 1, 0)[0][0]
        assert found["usage"]["completion_tokens"] == 100


def test_the_official_client(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install '.[dev]'")
    url = f"http://127.0.0.1:{server.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert [each.id for each in client.models.list().data] == ["small"]
    fields = {"model": "small", "prompt": "To be", "max_tokens": 8, "seed": 3, "n": 2}
    texts = ["", ""]
    for event in client.completions.create(**fields, extra_body={"top_k": 9}, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    expected = server.expected("To be", 8, 2, 3, strategy="sampling", top_k=9)
    assert texts == [text for text, _ in expected]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="a", temperature=-1)
    assert caught.value.body["param"] == "temperature"

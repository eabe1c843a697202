"""--run_mode serve as a user starts it: the line that says where, signals, and many clients."""

import collections
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from common.inference.load import load_model
from run_gpt2 import main
from tests.run_scripts import start_program, wait_until
from tests.tiny import tiny_run, train_here

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")
CLIENTS = 200
SECONDS = float(os.environ.get("GPT2_LOAD_SECONDS", "60"))
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WRONG: list[dict[str, Any]] = [{"prompt": 5}, {"n": 0}, {"promt": "a"}, {"max_tokens": 10**6}, {"prompt": [[]]}]
HOSTILE = {
    HEAD[:-2]: (b"",),  # a head that does not end
    HEAD + b"Content-Length: 50\r\n\r\n{": (b"HTTP/1.1 408",),
    HEAD + b"Content-Length: 50000\r\n\r\n" + b"[" * 50_000: (b"HTTP/1.1 400",),
    HEAD + b"Content-Length: 1\r\n\r\n\xff": (b"HTTP/1.1 400",),
    b"GET / HTTP/1.1\r\nA: " + b"a" * 200_000: (b"", b"HTTP/1.1 400", b"HTTP/1.1 431"),
    HEAD + b"Content-Length: 100000000\r\n\r\n" + b"a" * 10_000: (b"HTTP/1.1 413",),
}
"""What clients send, and the beginnings of answers to it."""
WORDS = ["To be", "or not to be", "that is the question", "O Romeo", "the king", "and yet"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, gpt2_vocab_files: tuple[Path, Path]) -> Path:
    """A config and its run of one step."""
    folder = tmp_path_factory.mktemp("serve")
    files = dict(zip(("vocab_file", "merge_file"), map(str, gpt2_vocab_files), strict=True))
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 32}
    tree = tiny_run(
        folder / "tiny", corpus_prefix, train={"max_steps": 1, "micro_batch_size": 2},
        model=sizes | {"vocab_size": 50257}, data__tokenizer=files, serve__port=0,
        predict__window=16,
    )  # fmt: skip
    train_here(tree)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    while Served.started:
        child = Served.started.pop()
        child.kill()
        child.wait()


class Served:
    """The process, and requests to it."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, config: Path, *words: str, **variables: str) -> None:
        self.child = start_program("--config", str(config), "--run_mode", "serve", *words, **variables)
        self.started.append(self.child)
        assert self.child.stdout is not None
        line = ""
        while "is served at" not in line:
            line = self.child.stdout.readline()
            assert line, self.child.communicate()[1]
        found = re.search(r"tiny is served at http://127\.0\.0\.1:(\d+)/v1", line)
        assert found is not None, line
        self.port = int(found[1])

    def request(self, fields: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        headers["Authorization"] = "Bearer secret-of-mine"
        connection.request("POST", "/v1/completions", json.dumps(fields), headers)
        return connection

    def send(self, content: bytes) -> bytes:
        """Return the first bytes of the answer: none where the server closed, or reset, at once."""
        address = ("127.0.0.1", self.port)
        with suppress(ConnectionError), socket.create_connection(address, timeout=60) as client:
            client.sendall(content)
            return client.recv(100)
        return b""

    def post(self, fields: dict[str, Any]) -> http.client.HTTPResponse:
        return self.request(fields).getresponse()

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """Return one that has begun."""
        fields = {"prompt": "To be", "logit_bias": {"50256": -100}, "max_tokens": max_tokens}
        response = self.post(fields | {"stream": True})
        assert response.status == 200 and response.readline().startswith(b"data: ")
        return response

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        self.child.send_signal(number)
        out, error = self.child.communicate(timeout=60)
        return self.child.returncode, out, error


def events(response: http.client.HTTPResponse) -> list[Any]:
    lines = [line[6:].strip() for line in response.read().split(b"\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_requests_at_work_have_a_time_to_end(config: Path) -> None:
    """Ctrl-C during two streams. The one that is not done by then tells its client; the key is not shown."""
    served = Served(config, "serve.drain_timeout=3", GPT2_API_KEY="secret-of-mine")
    short, long = served.stream(30), served.stream(1_000_000)
    code, out, error = served.end(signal.SIGINT)
    found = events(short)
    assert found[-1] == b"[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
    found = events(long)
    assert found[-1]["error"]["type"] == "server_error" and b"[DONE]" not in found
    assert code == 130 and "were given up" in error and "Traceback" not in error
    assert re.search(r"POST /v1/completions 200 [\d.]+ s prompt_tokens=2 tokens=30", out)
    assert "To be" not in out and "secret-of-mine" not in out + error


@pytest.mark.long
def test_an_export_says_what_its_checkpoint_says(config: Path) -> None:
    """An ONNX folder is served without torch in the process."""
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
    folder, words = config.parent / "tiny", ["--config", str(config), "--run_mode", "export"]
    words += ["export.format=onnx", "predict.window=null", "export.check=false"]
    assert main(words) == 0
    keys = ("predict.window=null", "serve.log_prompts=true")
    served = Served(config, f"checkpoint.load={folder / 'onnx'}", *keys)
    fields = {"prompt": "To be", "max_tokens": 20, "temperature": 0, "model": "tiny"}
    answer = json.loads(served.post(fields).read())["choices"][0]["text"]
    assert "libtorch" not in Path(f"/proc/{served.child.pid}/maps").read_text()
    code, out, error = served.end(signal.SIGTERM)
    assert code == 143 and "every request is answered" in error and 'prompts=["To be"]' in out
    [expected] = load_model(folder).generate(["To be"], max_new_tokens=20)
    assert answer == expected.text != ""


@pytest.mark.campaign
def test_a_crowd_of_clients(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer is whole, equal requests get equal texts whatever their neighbours, memory stays
    flat, and in the end nothing is left over. GPT2_LOAD_SECONDS=300 makes five minutes of it.
    """
    served = Served(config, "predict.window=null", "serve.read_timeout=3")
    process = psutil.Process(served.child.pid)
    threading.Thread(target=served.child.stdout.read, daemon=True).start()  # type: ignore[union-attr]
    deadline = time.monotonic() + SECONDS
    texts: dict[str, set[str]] = collections.defaultdict(set)

    def be_client(number: int) -> collections.Counter[str]:
        """Ask, stream, leave before the answer, be wrong or hostile until the time is over. Return how often."""
        dice, seen = random.Random(number), collections.Counter[str]()
        while time.monotonic() < deadline:
            tokens, prompt = (dice.randint(1, 12), " ".join(dice.choices(WORDS, k=dice.randint(1, 3))))
            fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logit_bias": {"50256": -100}}
            if dice.random() < 0.2:
                served.request(fields | {"n": 8}).close()
                seen["left"] += 1
                continue
            if dice.random() < 0.2:
                response = served.post(dice.choice(WRONG))
                assert response.status == 400 and b"Traceback" not in response.read()
                seen["wrong"] += 1
                continue
            if dice.random() < 0.1:
                content, answers = dice.choice([*HOSTILE.items()])
                found = served.send(content)
                assert found[:12] in answers, (content[-100:], found)
                seen["hostile"] += 1
                continue
            streamed = dice.random() < 0.5
            response = served.post(fields | {"stream": streamed})
            seen[f"stream={streamed}: {response.status}"] += 1
            if response.status != 200:
                assert response.status == 429 and response.headers["retry-after"] == "1"
                continue
            if streamed:
                *pieces, done = events(response)
                assert done == b"[DONE]"
            else:
                pieces = [json.loads(response.read())]
                assert pieces[0]["usage"]["completion_tokens"] == tokens
            texts[json.dumps(fields)].add("".join(piece["choices"][0]["text"] for piece in pieces))
        return seen

    memory = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(be_client, number) for number in range(CLIENTS)]
        while time.monotonic() < deadline:
            time.sleep(SECONDS / 20)
            memory.append(process.memory_info().rss / 2**20)
            assert '"ok"' in served.get("/health")
        seen = sum((client.result(60) for client in clients), collections.Counter[str]())
    idle = {"gpt2_running_sequences 0.0", "gpt2_waiting_sequences 0.0"}
    wait_until(lambda: idle <= {*served.get("/metrics").splitlines()}, "nothing is left over")
    served.child.send_signal(signal.SIGTERM)
    assert served.child.wait(40) == 143
    assert served.child.stderr is not None and "Traceback" not in served.child.stderr.read()
    with capsys.disabled():
        print(f"\n{CLIENTS} clients, {SECONDS:g} s: {dict(sorted(seen.items()))}")
        print(f"memory MiB {[round(each) for each in memory]}")
    assert all(len(found) == 1 for found in texts.values())
    assert seen["stream=False: 200"] > 50 and seen["left"] > 50
    assert seen["wrong"] > 50 and seen["hostile"] > 20
    assert max(memory[-5:]) < 1.03 * max(memory[4:10]) + 5

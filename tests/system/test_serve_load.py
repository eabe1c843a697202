"""Two hundred clients of all kinds for a minute; with GPT2_LOAD_SECONDS=300 for five."""

import collections
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.test_serve import Served, config

__all__ = ["config"]

CLIENTS = 200
SECONDS = float(os.environ.get("GPT2_LOAD_SECONDS", "60"))
WORDS = ["To be", "or not to be", "that is the question", "O Romeo", "the king", "and yet"]


class Crowd:
    """Clients in threads. ``seen``: how often each thing happened."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seen: collections.Counter[str] = collections.Counter()
        self.texts: dict[str, set[str]] = collections.defaultdict(set)
        self.waits: list[float] = []
        self.wrong: list[str] = []
        self.deadline = time.monotonic() + SECONDS
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        dice = random.Random(number)
        kinds = (self.whole, self.stream, self.leave, self.bad, self.slow, self.flood)
        while time.monotonic() < self.deadline:
            kind = dice.choices(kinds, weights=(30, 30, 15, 15, 5, 5))[0]
            try:
                found = kind(dice)
            except (ConnectionError, TimeoutError) as error:
                found = f"{kind.__name__}: {type(error).__name__}"
            with self._lock:
                self.seen[found] += 1

    def post(self, fields: Any, timeout: float = 60) -> socket.socket:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        client = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        return client

    def fields(self, dice: random.Random) -> dict[str, Any]:
        prompt = " ".join(dice.choices(WORDS, k=dice.randint(1, 3)))
        return {
            "prompt": prompt,
            "max_tokens": dice.randint(1, 12),
            "temperature": 0,
            "logit_bias": {"50256": -100},
        }

    def ask(self, fields: Any) -> tuple[int, str, str]:
        with self.post(fields) as client:
            head, _, body = client.makefile("rb").read().decode().partition("\r\n\r\n")
        return int(head.split()[1]), head.lower(), body

    def keep(self, fields: dict[str, Any], texts: list[str]) -> None:
        with self._lock:
            self.texts[json.dumps(fields, sort_keys=True)].add(json.dumps(texts))

    def whole(self, dice: random.Random) -> str:
        fields, began = self.fields(dice), time.monotonic()
        if dice.random() < 0.3:
            fields |= {"n": dice.randint(1, 4), "temperature": 1.0, "seed": dice.randint(0, 9)}
        status, head, body = self.ask(fields)
        if status == 200:
            self.waits.append(time.monotonic() - began)
            tree = json.loads(body)
            count = fields.get("n", 1)
            self.check(tree["usage"]["completion_tokens"] == count * fields["max_tokens"], body)
            self.check(all(each["finish_reason"] == "length" for each in tree["choices"]), body)
            self.keep(fields, [each["text"] for each in tree["choices"]])
        else:
            self.check(status == 429 and "retry-after: 1" in head, head)
        return f"whole: {status}"

    def stream(self, dice: random.Random) -> str:
        fields = self.fields(dice)
        status, head, body = self.ask(fields | {"stream": True})
        if status == 200:
            lines = [line for line in body.split("\n") if line.startswith("data: ")]
            self.check(lines[-1] == "data: [DONE]", body[-300:])
            pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
            self.keep(fields, ["".join(pieces)])
        else:
            self.check(status == 429, head)
        return f"stream: {status}"

    def leave(self, dice: random.Random) -> str:
        fields = self.fields(dice) | {"stream": dice.random() < 0.5, "n": dice.randint(1, 8)}
        with self.post(fields) as client:
            if dice.random() < 0.5:
                client.recv(dice.randint(1, 200))
        return "left"

    def bad(self, dice: random.Random) -> str:
        wrong: list[Any] = [
            {"prompt": 5}, {"temperature": -1}, {"n": 0}, {"promt": "a"}, {"max_tokens": 10**6},
            [], b"{", b"\xff", b"[" * 50_000, {"prompt": [[]]}, {"logit_bias": {"x": 1000}},
        ]  # fmt: skip
        status, head, body = self.ask(dice.choice(wrong))
        self.check(status == 400 and "Traceback" not in body, head)
        return "bad: 400"

    def slow(self, dice: random.Random) -> str:
        """A byte now and then, of a head or of a body."""
        text = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        if dice.random() < 0.5:
            text += b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall(text[:-1])
            answer = b""
            for _ in range(20):
                time.sleep(0.5)
                client.sendall(text[-1:] if _ == 0 else b" ")
                client.settimeout(0.01)
                try:
                    answer = client.recv(4096)
                    break
                except TimeoutError:
                    continue
        return f"slow: {answer[9:12].decode() or 'closed'}"

    def flood(self, dice: random.Random) -> str:
        """A head of 200 kB, or the beginning of a body of 100 MB."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            if dice.random() < 0.5:
                client.sendall(b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 200_000)
            else:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
                    b" application/json\r\nContent-Length: 100000000\r\n\r\n" + b"a" * 10_000
                )
            answer = client.recv(4096)
        return f"flood: {answer[9:12].decode() or 'closed'}"

    def check(self, is_right: bool, found: str) -> None:
        if not is_right:
            self.wrong.append(found[:500])


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.campaign
def test_a_crowd_of_clients(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each accepted request is whole, equal requests get equal texts whatever their neighbours,
    memory stays flat, and in the end nothing is left over.
    """
    served = Served(config, "predict.window=null", "serve.read_timeout=3")
    process = psutil.Process(served.child.pid)
    log = threading.Thread(target=served.child.stdout.read, daemon=True)  # type: ignore[union-attr]
    log.start()
    crowd = Crowd(served.port)
    threads = [
        threading.Thread(target=crowd.client, args=(number,), daemon=True)
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    memory, files, alive = [], [], 0
    while time.monotonic() < crowd.deadline:
        time.sleep(SECONDS / 20)
        memory.append(process.memory_info().rss / 2**20)
        files.append(process.num_fds())
        alive += '"ok"' in get(served.port, "/health")
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    lines = get(served.port, "/metrics").splitlines()
    figures = dict(line.split() for line in lines if line.startswith("gpt2_") and "{" not in line)
    served.child.send_signal(signal.SIGTERM)
    assert served.child.wait(40) == 143
    assert served.child.stderr is not None
    assert "Traceback" not in served.child.stderr.read()
    waits = sorted(crowd.waits)
    with capsys.disabled():
        print(f"\n{CLIENTS} clients, {SECONDS:g} s: {dict(sorted(crowd.seen.items()))}")
        print(f"memory MiB {[round(each) for each in memory]}, open files at most {max(files)}")
        print(
            f"seconds of whole answers: median {waits[len(waits) // 2]:.2f}, {waits[-1]:.2f} most"
        )
        print({name: value for name, value in figures.items() if "seconds" not in name})
    assert crowd.wrong == []
    assert all(len(texts) == 1 for texts in crowd.texts.values())
    assert alive == len(memory) and crowd.seen["whole: 200"] > 50 and crowd.seen["left"] > 50
    assert max(memory[-5:]) < 1.03 * max(memory[4:10]) + 5
    assert figures["gpt2_running_sequences"] == figures["gpt2_waiting_sequences"] == "0.0"

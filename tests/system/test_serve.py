"""--run_mode serve as a user starts it: the line that says where, and signals."""

import http.client
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from run_gpt2 import main
from tests.run_scripts import start_program
from tests.tiny import tiny_run, train_here

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory,
    corpus_prefix: Path,
    gpt2_vocab_files: tuple[Path, Path],
) -> Path:
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


class Served:
    """The process, and a stream of it that has begun."""

    def __init__(self, config: Path, *words: str, **variables: str) -> None:
        self.child = start_program(
            "--config", str(config), "--run_mode", "serve", *words, **variables
        )
        assert self.child.stdout is not None
        line = ""
        while "is served at" not in line:
            line = self.child.stdout.readline()
            assert line, self.child.communicate()[1]
        found = re.search(r"tiny is served at http://127\.0\.0\.1:(\d+)/v1", line)
        assert found is not None, line
        self.port = int(found[1])

    def post(self, **fields: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret-of-mine"}
        body = json.dumps({"prompt": "To be", "logit_bias": {"50256": -100}} | fields)
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200
        return response

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        response = self.post(max_tokens=max_tokens, stream=True)
        assert response.readline().startswith(b"data: ")
        return response

    def end(self) -> tuple[int, str, str]:
        out, error = self.child.communicate(timeout=60)
        return self.child.returncode, out, error


def events(response: http.client.HTTPResponse) -> list[Any]:
    lines = [line[6:].strip() for line in response.read().split(b"\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_requests_at_work_end_before_the_server_does(config: Path) -> None:
    """SIGTERM while a stream has hundreds of tokens left; the key is asked for and not shown."""
    served = Served(config, GPT2_API_KEY="secret-of-mine")
    response = served.stream(200)
    served.child.send_signal(signal.SIGTERM)
    found = events(response)
    code, out, error = served.end()
    assert found[-1] == b"[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
    assert code == 143 and "every request is answered" in error
    assert re.search(r"POST /v1/completions 200 [\d.]+ s prompt_tokens=2 tokens=200", out)
    assert "To be" not in out and "secret-of-mine" not in out + error and "Traceback" not in error


def test_a_drain_has_a_limit(config: Path) -> None:
    """Ctrl-C; what is not done is told to the client."""
    served = Served(
        config, "serve.drain_timeout=0.3", "serve.log_prompts=true", GPT2_API_KEY="secret-of-mine"
    )
    response = served.stream(1_000_000)
    began = time.monotonic()
    served.child.send_signal(signal.SIGINT)
    found = events(response)
    code, out, error = served.end()
    assert time.monotonic() - began < 10
    assert found[-1]["error"]["type"] == "server_error" and b"[DONE]" not in found
    assert code == 130 and "were given up" in error and 'prompts=["To be"]' in out


@pytest.mark.long
def test_an_export_says_what_its_checkpoint_says(config: Path) -> None:
    """An ONNX folder is served without torch in the process."""
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
    folder, words = config.parent / "tiny", ["--config", str(config), "--run_mode", "export"]
    words += ["export.format=onnx", "predict.window=null", "export.check=false"]
    assert main(words) == 0
    found = []
    for path in (folder, folder / "onnx"):
        served = Served(config, f"checkpoint.load={path}", "predict.window=null")
        answer = json.loads(served.post(max_tokens=20, temperature=0, model="tiny").read())
        found.append(answer["choices"][0]["text"])
        maps = Path(f"/proc/{served.child.pid}/maps").read_text()
        assert ("libtorch" in maps) == (path == folder)
        served.child.send_signal(signal.SIGTERM)
        assert served.end()[0] == 143
    assert found[0] == found[1] != ""

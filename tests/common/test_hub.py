"""Models by name, through huggingface_hub itself, from a hub on loopback.

The hub has the addresses and headers that huggingface_hub uses. A missing or private repository is 401 without a token
and 404 with one, a wrong token 401. A gated one refuses only its files. Source: hf_raise_for_status and hf_hub_download
of huggingface_hub 2.4.0.
"""

import hashlib
import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

pytest.importorskip("huggingface_hub", reason="pip install '.[hub]'")

from huggingface_hub import constants, file_download

from common.checkpoint.manifest import read_manifest
from common.errors import UserError
from common.hub import COMMITS, SMALL, located
from common.log import LOG
from common.run_config import load_config
from common.tokenizer.folder import BESIDE, VOCABULARIES
from common.training.opened_checkpoint import fingerprint
from gpt2_toolkit import load_model
from run_gpt2 import main as run_gpt2
from tools.convert_weight import main as convert
from tools.inference import main as inference
from tools.preprocess_data import main as preprocess

GOOD_TOKEN = "hf_good"


@dataclass
class Repository:
    """files: of the newest commit. access: public, private or gated."""

    files: dict[str, bytes]
    access: str = "public"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit(self.files)

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Add a commit, which ``main`` and ``names`` then mean, and return it."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = files
        self.revisions |= dict.fromkeys(("main", *names, sha), sha)
        return sha


class Hub(ThreadingHTTPServer):
    """asked: method and path of each request. fetched: names of the files whose content was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.fetched: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        path = unquote(self.path.partition("?")[0])
        if found := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/(.+)", path):
            if sha := self._commit(found[1], found[3]):
                self._describe(found[1], found[2], sha)
        elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            if sha := self._commit(found[1], found[2]):
                self._resolve(found[1], sha, found[3])
        else:
            self._answer(404)

    do_HEAD = do_GET

    def _describe(self, name: str, what: str, sha: str) -> None:
        files = self.server.repositories[name].commits[sha]
        body: object = {"id": name, "sha": sha, "siblings": [{"rfilename": file} for file in files]}
        if what == "tree":
            body = [
                {"type": "file", "path": file, "size": len(content), "oid": _tag(content)[:40]}
                for file, content in files.items()
            ]
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, sha: str, file: str) -> None:
        content = self.server.repositories[name].commits[sha].get(file)
        headers = {"X-Repo-Commit": sha}
        if self.server.repositories[name].access == "gated":
            error = {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}
            self._answer(403, headers=error)
        elif content is None:
            self._answer(404, headers=headers | {"X-Error-Code": "EntryNotFound"})
        else:
            if self.command == "GET":
                self.server.fetched.append(file)
            self._answer(200, content, headers | {"ETag": f'"{_tag(content)}"'})

    def _commit(self, name: str, revision: str) -> str | None:
        """Return the commit, or answer why there is none."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        repository = self.server.repositories.get(name)
        if token not in ("", GOOD_TOKEN):
            message = "Invalid credentials in Authorization header"
            self._answer(401, headers={"X-Error-Message": message})
        elif repository is None or (repository.access == "private" and not token):
            self._answer(404 if token else 401, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in repository.revisions:
            self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return repository.revisions[revision]
        return None

    def _answer(self, status: int, body: bytes = b"", headers: Any = ()) -> None:
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


OF_TOKENIZER = {name: name.encode() for name in ("vocab.json", "merges.txt", "tokenizer.json")}
READ = OF_TOKENIZER | {name: name.encode() for name in ("config.json", "generation_config.json", "chat_template.jinja")}
LARGE = np.random.default_rng(0).bytes(5000)
NOT_READ = dict.fromkeys(
    (
        "README.md", "tf_model.h5", "flax_model.msgpack", "rust_model.rs", "64.tflite",
        "onnx/config.json", "onnx/model.onnx", "model.fp16.safetensors", "training_args.bin",
        "optimizer.pt", ".gitattributes",
    ),
    b"unwanted",
)  # fmt: skip
SAFETENSORS, PICKLE = {"model.safetensors": LARGE}, {"pytorch_model.bin": LARGE}


def shards(stem: str, ending: str) -> dict[str, bytes]:
    """Files of weights in two parts, with their index."""
    names = (f"{ending}.index.json", f"-00001-of-00002{ending}", f"-00002-of-00002{ending}")
    return {f"{stem}{name}": LARGE[number:] for number, name in enumerate(names)}


SHARDS, SHARDED_PICKLE = shards("model", ".safetensors"), shards("pytorch_model", ".bin")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository, an empty cache, and a folder to work in."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv(COMMITS, "")
    # a command of an earlier test writes its log to a stream that is closed
    monkeypatch.setattr(LOG, "handlers", [])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with Hub() as hub:
        set_address(monkeypatch, hub.url)
        hub.repositories["me/small"] = Repository({**READ, **SAFETENSORS, **NOT_READ})
        yield hub
        hub.shutdown()


def set_address(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (SAFETENSORS | PICKLE, SAFETENSORS), (SHARDS | PICKLE, SHARDS), (PICKLE, PICKLE),
        (SHARDED_PICKLE, SHARDED_PICKLE),
    ],
)  # fmt: skip
def test_only_files_that_are_read(hub: Hub, there, wanted, capsys) -> None:
    hub.repositories["me/small"] = repository = Repository({**READ, **NOT_READ, **there})
    folder = located(Path("hf://me/small"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == READ | wanted
    assert folder.name == repository.revisions["main"]
    assert sorted(hub.fetched) == sorted({**READ, **wanted}), "each once, and nothing else"
    assert capsys.readouterr().err == "", "bars are for terminals"


def test_the_names_of_tokenizer_files_are_among_them(hub: Hub) -> None:
    names = (*VOCABULARIES, *BESIDE)
    assert [name for name in names if not any(fnmatch(name, like) for like in SMALL)] == []
    located(Path("hf://me/small"), weights=False)
    assert located(Path("me/small"), weights=False) == Path("me/small")
    gone = Path("/x/models--me--none/snapshots/" + 40 * "0")
    assert located(gone, weights=False) == gone, "training does not need it"
    assert sorted(hub.fetched) == sorted(READ)


def test_revisions_and_ranks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    old = hub.repositories["me/small"].commit({**READ, **SAFETENSORS}, "v1", "refs/pr/2")
    assert located(Path("me/small")).name == old
    new = hub.repositories["me/small"].commit({**READ, **PICKLE})
    hub.asked.clear()
    assert located(Path("me/small")).name == old, "a process and its children keep to one commit"
    assert hub.asked == [], "ranks ask nothing again"
    monkeypatch.setenv(COMMITS, "")  # another process
    assert located(Path("me/small")).name == new
    for revision in ("v1", "refs/pr/2", old):
        folder = located(Path(f"hf://me/small@{revision}"))
        assert folder.name == old and (folder / "model.safetensors").is_file()
    before = fingerprint(folder)
    (folder / "README.md").write_text("of another program, on one of the hosts")
    assert fingerprint(folder) == before
    for path in (folder / "model.safetensors", folder):
        path.unlink() if path.is_symlink() else path.rename(path.with_name("elsewhere"))
    assert (located(folder) / "model.safetensors").is_file(), "a run's folder is fetched again"


def test_files_are_fetched_in_the_main_thread(hub: Hub, monkeypatch) -> None:
    """Ctrl-C stops it there; other threads would be waited for."""
    get, threads = file_download.http_get, set()

    def in_thread(*words: Any, **options: Any) -> None:
        threads.add(threading.current_thread())
        get(*words, **options)

    monkeypatch.setattr(file_download, "http_get", in_thread)
    assert (located(Path("hf://me/small")) / "model.safetensors").read_bytes() == LARGE
    assert threads == {threading.main_thread()}


def test_processes_of_a_host_fetch_once(hub: Hub) -> None:
    threads = [threading.Thread(target=located, args=(Path("hf://me/small"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(hub.fetched) == sorted({**READ, **SAFETENSORS})


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = located(Path("hf://me/small"))
    monkeypatch.setenv(COMMITS, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert located(Path("me/small")) == folder
    monkeypatch.setenv(COMMITS, "")
    (folder / "model.safetensors").unlink()
    message = r"^hf://me/small: HF_HUB_OFFLINE is set, and .*cache does not"
    with pytest.raises(UserError, match=message):
        located(Path("hf://me/small"))
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("hf://me/none", None, "^hf://me/none: {url}/me/none does not exist, or is private; check"
         " the name, or give a token"),
        ("hf://me/none", GOOD_TOKEN, "or is private; check the name, that the token may read it"),
        ("me/none", None, r"^me/none: there is no such file or folder \(looked in .*work\); as"
         " hf://me/none: .* does not exist, or is private"),
        ("hf://me/small@v9", None, "^hf://me/small@v9: no revision v9 there; give one of {url}"),
        ("hf://me/private", None, "me/private does not exist, or is private"),
        ("hf://me/private", "hf_bad", r"refuses the token \(401\)"),
        ("hf://me/gated", GOOD_TOKEN, "only some accounts may read it; ask at {url}/me/gated"),
        ("hf://me/empty", None, "no weights there that are read by name"),
        ("hf://me/small/file.bin", None, "expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION"),
        ("hf://me/../small", None, "expected hf://OWNER/NAME"),
    ],
)  # fmt: skip
def test_one_message_for_each_fault(hub, monkeypatch, name, token, message) -> None:
    for access in ("private", "gated"):
        hub.repositories[f"me/{access}"] = Repository({**READ, **SAFETENSORS}, access)
    hub.repositories["me/empty"] = Repository({**READ, **NOT_READ})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=message.replace("{url}", hub.url)) as caught:
        located(Path(name))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    assert (located(Path("hf://me/private")) / "model.safetensors").is_file()


def test_no_network_and_no_package(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            located(Path(name))

    folder = located(Path("hf://me/small"))
    set_address(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv(COMMITS, "")
    assert located(Path("hf://me/small")) == folder, "the cache is enough"
    refused("hf://me/other", r"127.0.0.1:9 does not answer \(ConnectError: .*; check the network")
    with monkeypatch.context() as older:
        older.delattr("huggingface_hub.errors.DryRunError")
        refused("hf://me/other", r"huggingface_hub is too old \(.*pip install .*hub\]")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("me/small", r"^me/small: there is no .*; as hf://me/small: the package")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("hf://gpt2", True), ("openai-community/gpt2", True), ("me/gpt2-v1.5", True),
        ("gpt2", False), ("there/gpt2", False), ("output/quickstart", False),
        ("me/model.safetensors", False), ("/me/small", False), ("me/small/weights", False),
        ("../me/small", False), ("~/small", False), ("x" * 300 + "/y", False),
    ],
)  # fmt: skip
def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_one: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.hub._fetch", lambda *words: (_ for _ in ()).throw(OSError("asked")))
    Path("there").mkdir()
    with pytest.raises(UserError, match="asked") if is_one else nullcontext():
        assert located(Path(text)) == Path(text)


def test_commands_take_names_as_they_take_folders(hub: Hub, tmp_path, capsys) -> None:
    """The first command that needs weights fetches them; a run records the commit."""
    pytest.importorskip("transformers")
    from tests.reference import MERGES, save_model, write_vocabulary

    folder = save_model(tmp_path / "hf", write_vocabulary(tmp_path / "v", MERGES), size=262)
    hub.repositories["me/small"] = Repository({path.name: path.read_bytes() for path in folder.iterdir()})
    commit = hub.repositories["me/small"].revisions["main"]
    Path("text.txt").write_text("hello, the hell there\n" * 60)
    Path("run.yaml").write_text(
        "{device: cpu, optimizer: {learning_rate: 0.001}, data: {train: own_text_document},"
        " train: {max_steps: 1, micro_batch_size: 2}, logging: {tensorboard: false, plot: false}}"
    )
    words = ["--input", "text.txt", "--output-prefix", "own", "--vocab-file", "hf://me/small"]
    assert preprocess(words) == 0 and "model.safetensors" not in hub.fetched
    command = ["--config", "run.yaml", "--run_mode"]
    changes = ["checkpoint.init_from=hf://me/small", "output_dir=tuned", "model.seq_length=16"]
    assert run_gpt2([*command, "finetune", *changes]) == 0
    recorded = load_config(Path("tuned/config.yaml"))
    assert recorded.data.tokenizer is not None
    assert Path(recorded.checkpoint.init_from or "").name == commit
    assert recorded.checkpoint.init_from == recorded.data.tokenizer.folder
    model = load_model("hf://me/small", tokenizer="hf://me/small", device="cpu")
    for source, output in (("me/small", "named"), (str(folder), "given")):
        capsys.readouterr()
        assert convert(["--to", "torch_gpt2", "--input", source, "--output", output]) == 0
        assert f"parameters of {source} (hf)" in capsys.readouterr().out
    assert read_manifest(Path("named"))["files"] == read_manifest(Path("given"))["files"]
    words = ["predict.prompt=hello", "predict.max_new_tokens=8", "output_dir=new"]
    words += ["checkpoint.load=me/small", "data.tokenizer=hf://me/small", "model=from_checkpoint"]
    assert run_gpt2([*command, "predict", *words]) == 0
    assert str(model.generate("hello", max_new_tokens=8)[0]) in capsys.readouterr().out
    assert inference(["--model_dir", "me/none", "--prompt", "hello"]) == 2
    assert re.match(r"error: me/none: there is no .* private; .*\n$", capsys.readouterr().err)
    assert max(Counter(hub.fetched).values()) == 1
    shutil.rmtree(constants.HF_HUB_CACHE)  # as on another machine
    load_model("tuned", device="cpu")
    assert hub.fetched.count("vocab.json") == 2 and hub.fetched.count("model.safetensors") == 1

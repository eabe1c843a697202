"""A Hugging Face hub on loopback, with the addresses and headers that huggingface_hub uses.

A missing or private repository is
401 without a token and 404 with one, a wrong token 401. A gated one refuses only its files.
Source: hf_raise_for_status and hf_hub_download of huggingface_hub 2.4.0.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

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
    """asked: method and path of each request. fetched: names of the files whose content was asked
    for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.fetched: list[str] = []


@contextmanager
def hub_running() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


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

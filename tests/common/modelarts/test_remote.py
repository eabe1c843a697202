"""Copies from and to stores: once per host, whole or absent, tried again, and what the two libraries of OBS are asked for."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError, DataError, StorageError
from common.modelarts import remote

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket"
    (folder / "data" / "inner").mkdir(parents=True)
    (folder / "data" / "a.bin").write_bytes(b"abc")
    (folder / "data" / "inner" / "b.txt").write_text("inner")
    (folder / "prompts.txt").write_text("Hello\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_and_a_file_are_pulled(bucket: Path, tmp_path: Path) -> None:
    here = remote.pull_once(f"file://{bucket}/data", tmp_path / "cache" / "data", {})
    assert here == tmp_path / "cache" / "data" and files(here) == {"a.bin": b"abc", "inner/b.txt": b"inner"}
    (bucket / "data" / "a.bin").unlink()
    assert files(remote.pull_once(f"file://{bucket}/data", here, {}))["a.bin"] == b"abc", "what is there is not copied again"
    assert remote.pull_once(f"file://{bucket}/prompts.txt", tmp_path / "cache" / "prompts.txt", {}).read_text() == "Hello\n"


def test_a_push_adds_and_deletes_nothing(bucket: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "checkpoints").mkdir(parents=True)
    (output / "checkpoints" / "latest").write_text("step_1")
    (output / ".lock").touch()
    remote.push(output, f"file://{bucket}/results", {})
    (output / "checkpoints" / "latest").write_text("step_2")
    (bucket / "results" / "older").touch()
    remote.push(output, f"file://{bucket}/results", {})
    assert files(bucket / "results") == {"checkpoints/latest": b"step_2", "older": b""}
    remote.push(tmp_path / "never_made", f"file://{bucket}/results", {})


def test_of_the_processes_of_a_host_one_copies(bucket: Path, tmp_path: Path) -> None:
    """The store counts its calls in a file, and takes long enough for the others to come."""
    program = """
import sys, time
from pathlib import Path
from common.modelarts import remote
class Slow(remote.FolderStore):
    def pull(self, url, folder):
        with open(sys.argv[2], "a") as log:
            log.write("pull\\n")
        time.sleep(0.5)
        super().pull(url, folder)
remote.find_store = lambda url, environ: Slow()
print(sorted(path.name for path in remote.pull_once(sys.argv[1], Path(sys.argv[3]), {}).iterdir()))
"""
    words = [sys.executable, "-c", program, f"file://{bucket}/data", str(tmp_path / "calls"), str(tmp_path / "cache" / "data")]
    children = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=60)[0] for child in children] == ["['a.bin', 'inner']\n"] * 3
    assert (tmp_path / "calls").read_text() == "pull\n"


class Failing(remote.FolderStore):
    """Fails ``times`` times, having written half."""

    def __init__(self, times: int) -> None:
        self.times = times

    def pull(self, url: str, folder: Path) -> None:
        if self.times > 0:
            (folder / "half").touch()
        self._fail()
        super().pull(url, folder)

    def push(self, folder: Path, url: str) -> None:
        self._fail()
        super().push(folder, url)

    def _fail(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise ConnectionError("the line is dead")


def test_a_copy_is_tried_again_with_growing_pauses(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    store = Failing(2)
    monkeypatch.setattr(remote, "find_store", lambda url, environ: store)
    here = remote.pull_once(f"file://{bucket}/data", tmp_path / "cache" / "data", {})
    assert files(here) == {"a.bin": b"abc", "inner/b.txt": b"inner"}, "nothing is left of the halves"
    assert pauses == [5.0, 10.0]


def test_a_failed_copy_is_one_error_and_never_looks_whole(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    store = Failing(10)
    monkeypatch.setattr(remote, "find_store", lambda url, environ: store)
    target = tmp_path / "cache" / "data"
    with pytest.raises(StorageError, match=r"could not be copied to .*\(the line is dead\); tried 3 times"):
        remote.pull_once(f"file://{bucket}/data", target, {})
    assert not target.exists()
    with pytest.raises(StorageError, match=r"results: .* could not be copied there, and is still here \(the line is dead\)"):
        remote.push(bucket / "data", f"file://{bucket}/results", {})


def test_those_who_waited_for_a_failed_copy_fail_with_it(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "cache" / "data"
    target.parent.mkdir()
    (target.parent / ".data.failed").write_text("the other's reason")
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this process began to wait before that file was written
    with pytest.raises(StorageError, match="the other's reason"):
        remote.pull_once(f"file://{bucket}/data", target, {})


def test_waiting_has_a_limit(bucket: Path, tmp_path: Path) -> None:
    import fcntl

    target = tmp_path / "cache" / "data"
    target.parent.mkdir()
    with (target.parent / ".data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process of this host copies it for more than 0 s"):
            remote.pull_once(f"file://{bucket}/data", target, {}, limit=0)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("file:///nowhere/data", DataError, "there is nothing; check the address"),
        ("obs://bucket/data", ConfigError, "neither ModelArts' moxing nor the OBS SDK can be imported; pip install esdk-obs-python"),
        ("http://host/data", ConfigError, "expected a URL that starts with obs://, s3://, file://"),
    ],
)
def test_what_cannot_be_reached(url: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_import", lambda name: None)
    with pytest.raises(error) as caught:
        remote.pull_once(url, tmp_path / "data", {})
    assert message in str(caught.value)


# ---- the libraries: doubles with the calls of moxing 2 (ModelArts guide, "MoXing Framework API") and of esdk-obs-python 3.26 ----


class Moxing:
    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def exists(self, url: str) -> bool:
        return True

    def is_directory(self, url: str) -> bool:
        return not url.endswith(".txt")

    def copy_parallel(self, source: str, target: str) -> None:
        self.calls.append(("copy_parallel", source, target))
        if Path(target).is_dir():
            (Path(target) / "copied").touch()

    def copy(self, source: str, target: str) -> None:
        self.calls.append(("copy", source, target))
        Path(target).touch()


def test_moxing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moxing = Moxing()
    monkeypatch.setattr(remote, "_import", {"moxing": SimpleNamespace(file=moxing)}.get)
    here = remote.pull_once("obs://bucket/data/", tmp_path / "data", {})
    assert [path.name for path in here.iterdir()] == ["copied"]
    assert remote.pull_once("s3://bucket/prompts.txt", tmp_path / "prompts.txt", {}) == tmp_path / "prompts.txt" / "prompts.txt"
    remote.push(here, "obs://bucket/results", {})
    assert [call[:2] for call in moxing.calls] == [
        ("copy_parallel", "obs://bucket/data/"),
        ("copy", "s3://bucket/prompts.txt"),
        ("copy_parallel", str(here)),
    ]


class Client:
    """One bucket of an OBS client; two objects a page."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.broken = False

    def listObjects(self, bucketName: str, prefix: Any = None, marker: Any = None, max_keys: Any = None) -> Any:
        if self.broken:
            return SimpleNamespace(status=403, errorCode="AccessDenied", errorMessage="Access Denied", body=None)
        keys = [key for key in sorted(self.objects) if key.startswith(prefix or "") and key > (marker or "")]
        contents = [SimpleNamespace(key=key, size=len(self.objects[key])) for key in keys[:2]]
        body = SimpleNamespace(contents=contents, is_truncated=len(keys) > 2, next_marker=keys[1] if len(keys) > 2 else None)
        return SimpleNamespace(status=200, body=body)

    def getObject(self, bucketName: str, objectKey: str, downloadPath: str) -> Any:
        Path(downloadPath).write_bytes(self.objects[objectKey])
        return SimpleNamespace(status=200)

    def putFile(self, bucketName: str, objectKey: str, file_path: str) -> Any:
        self.objects[objectKey] = Path(file_path).read_bytes()
        return SimpleNamespace(status=200)


KEYS = {"OBS_ACCESS_KEY_ID": "id", "S3_SECRET_ACCESS_KEY": "secret", "OBS_ENDPOINT": "https://obs.example.com", "S3_SECURITY_TOKEN": "t"}


def test_the_obs_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"data/": b"", "data/a.bin": b"abc", "data/inner/b.txt": b"inner", "data/inner/empty": b"", "data2/c": b"other", "p.txt": b"Hi"}
    client, given = Client(dict(data)), {}

    def make(**options: str) -> Client:
        given.update(options)
        return client

    elsewhere = SimpleNamespace(file=None)  # PyPI's moxing
    monkeypatch.setattr(remote, "_import", {"moxing": elsewhere, "obs": SimpleNamespace(ObsClient=make)}.get)
    here = remote.pull_once("obs://bucket/data", tmp_path / "data", KEYS)
    assert files(here) == {"a.bin": b"abc", "inner/b.txt": b"inner", "inner/empty": b""}
    assert given == {"access_key_id": "id", "secret_access_key": "secret", "server": "https://obs.example.com", "security_token": "t"}
    assert remote.pull_once("obs://bucket/p.txt", tmp_path / "p.txt", KEYS).read_bytes() == b"Hi"
    remote.push(here, "obs://bucket/results/", KEYS)
    assert {key: value for key, value in client.objects.items() if key not in data} == {
        "results/a.bin": b"abc",
        "results/inner/b.txt": b"inner",
        "results/inner/empty": b"",
    }
    client.broken = True
    with pytest.raises(StorageError, match="OBS answered 403 AccessDenied Access Denied"):
        remote.exists("obs://bucket/data", KEYS, pause=0)
    with pytest.raises(ConfigError, match="the OBS SDK needs OBS_SECRET_ACCESS_KEY, OBS_ENDPOINT in the environment; set them"):
        remote.exists("obs://bucket/data", {"OBS_ACCESS_KEY_ID": "id"})


def test_markers_name_what_was_copied(bucket: Path, tmp_path: Path) -> None:
    remote.pull_once(f"file://{bucket}/data", tmp_path / "cache" / "data", {})
    assert json.loads((tmp_path / "cache" / ".data.complete").read_text())["url"] == f"file://{bucket}/data"

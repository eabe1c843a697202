"""Copies from and to stores: once per host, whole or absent, and what moxing is asked for."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.checkpoint.folders import whole_checkpoints
from common.errors import ConfigError, DataError, StorageError
from common.modelarts import stores
from common.modelarts.stores import StoredFile, join

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stores, "_PAUSES", (0.0, 0.0))
    folder = tmp_path / "bucket"
    (folder / "data" / "inner").mkdir(parents=True)
    (folder / "data" / "a.bin").write_bytes(b"abc")
    (folder / "data" / "inner" / "b.txt").write_text("inner")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


CHANGES: dict[str, Callable[[Path], object]] = {
    "size": lambda folder: (folder / "a.bin").write_bytes(b"abcd"),
    "time": lambda folder: os.utime(folder / "a.bin", (1, 1)),
    "another file": lambda folder: (folder / "z").touch(),
    "one less": lambda folder: (folder / "a.bin").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_made_again_when_its_source_has_changed(change, bucket, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "gpt2")
    url, target = f"file://{bucket}/data", tmp_path / "cache" / "data"
    stores.pull_once(url, target)
    (target / "mine").touch()
    stores.pull_once(url, target)
    assert (target / "mine").is_file() and f"{url} has not changed" in caplog.text
    CHANGES[change](bucket / "data")
    assert files(stores.pull_once(url, target)) == files(bucket / "data")
    assert f"{url} has changed" in caplog.text


UPLOAD_ORDER = [
    "checkpoints/step_00000001/model.safetensors",
    "checkpoints/step_00000002/model.safetensors",
    "checkpoints/step_00000002/optimizer.safetensors",
    "metrics.jsonl",
    "checkpoints/step_00000001/manifest.json",
    "checkpoints/step_00000002/manifest.json",
    "checkpoints/latest",
]


def run_folder(folder: Path) -> Path:
    for name in (*sorted(UPLOAD_ORDER), ".lock", "checkpoints/.step_00000003.tmp/manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("step_00000002\n" if name.endswith("latest") else name)
    return folder


def test_an_upload_that_is_cut_off_never_looks_whole(tmp_path, monkeypatch) -> None:
    class CutOff(stores.Folders):
        @staticmethod
        def copy(source: str, target: str) -> None:
            if len(files(there)) == allowed:
                raise ConnectionError("cut off")
            stores.Folders.copy(source, target)

    monkeypatch.setattr(stores, "find_store", lambda url: CutOff)
    monkeypatch.setattr(stores, "_PAUSES", (0.0, 0.0))
    here = run_folder(tmp_path / "out")
    for allowed in range(len(UPLOAD_ORDER)):
        there = tmp_path / f"bucket_{allowed}"
        with pytest.raises(StorageError, match="cut off"):
            stores.push(here, f"file://{there}")
        assert list(files(there)) == sorted(UPLOAD_ORDER[:allowed])
        for checkpoint in whole_checkpoints(there / "checkpoints"):
            assert files(checkpoint) == files(here / "checkpoints" / checkpoint.name)
        assert not (there / "checkpoints" / "latest").exists()


def test_a_push_tries_three_times_and_deletes_nothing(bucket, tmp_path, monkeypatch) -> None:
    run, there, copy = tmp_path / "run", bucket / "results", stores.Folders.copy
    (run / "checkpoints").mkdir(parents=True)
    (run / ".lock").touch()
    there.mkdir()
    (there / "older").touch()
    tries: list[str] = []

    def fails_first(source: str, target: str) -> None:
        tries.append(target)
        if len(tries) < 3:
            raise OSError("the mount was away")
        copy(source, target)

    monkeypatch.setattr(stores.Folders, "copy", fails_first)
    for step in ("step_1", "step_2"):
        (run / "checkpoints" / "latest").write_text(step)
        stores.push(run, f"file://{there}")
    assert files(there) == {"checkpoints/latest": b"step_2", "older": b""} and len(tries) == 4
    stores.push(tmp_path / "never_made", f"file://{there}")


def test_one_process_of_a_host_copies(bucket: Path, tmp_path: Path) -> None:
    """The store counts its calls in a file, and takes long enough for the others to come."""
    program = """
import sys, time
from pathlib import Path
from common.modelarts import stores
class Slow(stores.Folders):
    def copy_parallel(source, target):
        with open(sys.argv[2], "a") as log:
            log.write("pull\\n")
        time.sleep(0.5)
        stores.Folders.copy_parallel(source, target)
stores.find_store = lambda url: Slow
print(sorted(path.name for path in stores.pull_once(sys.argv[1], Path(sys.argv[3])).iterdir()))
"""
    words = [f"file://{bucket}/data", str(tmp_path / "calls"), str(tmp_path / "cache" / "data")]
    command = [sys.executable, "-c", program, *words]
    children = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=60)[0] for child in children] == ["['a.bin', 'inner']\n"] * 3
    assert (tmp_path / "calls").read_text() == "pull\n"


def test_a_failed_copy_is_one_error_and_never_looks_whole(bucket, tmp_path, monkeypatch) -> None:
    class Failing(stores.Folders):
        """Fails, having written half."""

        @staticmethod
        def copy_parallel(source: str, target: str) -> None:
            (Path(target) / "half").touch()
            raise ConnectionError("the line is dead")

        copy = copy_parallel

    target = tmp_path / "cache" / "data"
    with monkeypatch.context() as broken:
        broken.setattr(stores, "find_store", lambda url: Failing)
        with pytest.raises(StorageError, match=r"could not be copied to .*\(the line is dead\)"):
            stores.pull_once(f"file://{bucket}/data", target)
        assert not target.exists()
        message = r"results: .* could not be copied there, and is still here \("
        with pytest.raises(StorageError, match=message):
            stores.push(bucket / "data", f"file://{bucket}/results")
    here = stores.pull_once(f"file://{bucket}/data", target)
    assert files(here) == {"a.bin": b"abc", "inner/b.txt": b"inner"}, "nothing is left of the half"


def test_unreachable_addresses_are_named(bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "moxing", None)
    (tmp_path / ".held.lock").mkdir()
    for url, target, error, message in (
        ("file:///nowhere/data", "data", DataError, "no files there; check the address"),
        ("obs://bucket/data", "data", ConfigError, "cannot be imported; use one of ModelArts' images"),
        ("http://host/data", "data", ConfigError, "a URL that starts with obs://, s3://, file://"),
        (f"file://{bucket}/data", "held", StorageError, "cannot be written: Is a directory; choose a writable"),
    ):
        with pytest.raises(error, match=message):
            stores.pull_once(url, tmp_path / target)


# ---- a double with the calls of moxing 2 (ModelArts guide, "MoXing Framework API") ----


class Moxing:
    """A bucket as moxing.file shows it."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.copied: list[str] = []

    def exists(self, url: str) -> bool:
        return url in self.objects or self.is_directory(url)

    def is_directory(self, url: str) -> bool:
        return any(key.startswith(url.rstrip("/") + "/") for key in self.objects)

    def list_directory(self, url: str, recursive: bool) -> list[str]:
        assert recursive
        top = url.rstrip("/") + "/"
        names = [key.removeprefix(top) for key in self.objects if key.startswith(top)]
        return [*names, *{name.partition("/")[0] for name in names if "/" in name}]  # folders too

    def stat(self, url: str) -> Any:
        length = len(self.objects.get(url, b""))
        return SimpleNamespace(length=length, mtime_nsec=7, is_directory=url not in self.objects)

    def copy_parallel(self, source: str, target: str) -> None:
        for name in self.list_directory(source, recursive=True):
            if join(source, name) in self.objects and name:
                (Path(target) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(target) / name).write_bytes(self.objects[join(source, name)])

    def copy(self, source: str, target: str) -> None:
        self.copied.append(target)
        if target.startswith("obs://"):
            self.objects[target] = Path(source).read_bytes()
        else:
            Path(target).write_bytes(self.objects[source])


def test_moxing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moxing = Moxing(
        {
            "obs://b/data/a.bin": b"abc",
            "obs://b/data/inner/b": b"inner",
            "s3://b/prompts.txt": b"Hi",
            "obs://b/empty/": b"",
        }
    )
    monkeypatch.setitem(sys.modules, "moxing", SimpleNamespace(file=None))  # PyPI's moxing
    with pytest.raises(ConfigError, match="ModelArts' moxing cannot be imported"):
        stores.files("obs://b/data")
    monkeypatch.setitem(sys.modules, "moxing", SimpleNamespace(file=moxing))
    here = stores.pull_once("obs://b/data/", tmp_path / "data")
    assert files(here) == {"a.bin": b"abc", "inner/b": b"inner"}
    assert stores.files("obs://b/data") == [StoredFile("a.bin", 3, "7"), StoredFile("inner/b", 5, "7")]
    assert stores.files("obs://b/empty") == [], "the marker of a folder is no file"
    prompts = stores.pull_once("s3://b/prompts.txt", tmp_path / "prompts.txt")
    assert prompts == tmp_path / "prompts.txt" / "prompts.txt"
    moxing.copied.clear()
    stores.push(run_folder(tmp_path / "out"), "obs://b/out/")
    assert [url.removeprefix("obs://b/out/") for url in moxing.copied] == UPLOAD_ORDER

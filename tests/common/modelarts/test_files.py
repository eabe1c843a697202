"""Input that lies elsewhere, wherever the config names it, and the output that is copied back
whatever happens. Copies from and to stores, and what moxing is asked for.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from common.checkpoint.folders import find_checkpoint, whole_checkpoints
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import CheckpointError, ConfigError, DataError, StorageError
from common.interrupts import StopSignal
from common.modelarts import files, stores
from common.modelarts.stores import join
from common.run_config import load_config
from tests.tiny import tiny_run

ROOT = Path(__file__).resolve().parents[3]


def config_of(**keys: Any) -> RunConfig:
    return build_config(tiny_run(data__split="100,0,0", **keys))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TMPDIR": str(tmp_path / "tmp")}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stores, "_PAUSES", (0.0, 0.0))
    folder = tmp_path / "bucket"
    for name in ("c/c.idx", "c/c.bin", "d/d.idx", "d/d.bin", "prompts.txt", "data/a.bin", "data/inner/b.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(Path(name).stem)
    return folder


def weights_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}" / "model.safetensors"


def make_run(folder: Path, *steps: int, latest: int | None = None, mark: str = "") -> Path:
    """Names in a folder that find_checkpoint looks at."""
    for step in steps:
        weights = weights_of(folder, step)
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_text(f"weights {step}{mark}")
        weights.with_name("manifest.json").write_text(json.dumps({"step": step, "mark": mark}))
    (folder / "checkpoints" / "latest").write_text(f"step_{latest or steps[-1]:08d}\n")
    (folder / "metrics.jsonl").write_text(f"{steps[-1]}{mark}")
    return folder


# ---- input ----


def test_urls_of_a_yaml_and_of_a_blend_are_pulled(bucket, tmp_path, environ) -> None:
    """The words that come back, behind those of the user, make a config in which everything is here."""
    url, file = f"file://{bucket}", tmp_path / "run.yaml"
    data = {"train": f"{url}/c", "tokenizer": f"{url}/d"}
    predict = {"prompt": "obs://is text", "prompt_file": f"{url}/prompts.txt"}
    file.write_text(yaml.safe_dump(tiny_run(tmp_path / "out", data=data, predict=predict)))
    words = [f"data.validation=[0.7,{url}/c,0.3,{url}/d]"]
    config = load_config(file, words)
    config = load_config(file, [*words, *files.bring_input(config, environ)])
    (train,), (first, c, second, d) = config.data.train or [], config.data.validation or []
    assert (first, second) == (0.7, 0.3) and train == c
    assert [Path(str(c), "c.bin").read_text(), Path(str(d), "d.bin").read_text()] == ["c", "d"]
    assert config.data.tokenizer and Path(config.data.tokenizer.folder or "", "d.idx").is_file()
    assert Path(config.predict.prompt_file or "").read_text() == "prompts"
    assert config.predict.prompt == ["obs://is text"]
    assert files.bring_input(config, environ) == [], "nothing is left to do"


def test_a_url_that_would_be_written_to_is_refused(environ) -> None:
    for key, url in (("predict.output_file", "obs://b/o"), ("context.save_graphs_path", "s3://b/o")):
        with pytest.raises(ConfigError, match=f"^{key}={url}: a URL cannot be written to; give a folder or file of"):
            files.bring_input(config_of(**{key.replace(".", "__"): url}), environ)


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("resume", "run"),
        ("init_from", "run/checkpoints"),
        ("load", "run/checkpoints/latest"),
        ("resume", "run/checkpoints/step_00000002"),
    ],
)
def test_a_checkpoint_by_its_url(key, form, bucket, environ) -> None:
    """latest is not the highest number: the run was sent back."""
    make_run(bucket / "run", 1, 2, 3, latest=2)
    config = config_of(checkpoint={key: f"file://{bucket}/{form}"})
    (word,) = files.bring_input(config, environ)
    folder = Path(word.removeprefix(f"checkpoint.{key}="))
    assert find_checkpoint(folder) == folder
    assert (folder / "model.safetensors").read_text() == "weights 2"
    names = [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
    assert names == ["step_00000002"], "no other is copied"


def test_a_url_without_a_whole_checkpoint(bucket: Path, environ: dict[str, str]) -> None:
    weights_of(make_run(bucket / "run", 1), 1).with_name("manifest.json").unlink()
    for form in ("run", "run/checkpoints/step_00000001", "run/checkpoints/latest", "nowhere"):
        config = config_of(checkpoint={"init_from": f"file://{bucket}/{form}"})
        message = f"^checkpoint.init_from=file://{bucket}/{form}: no complete checkpoint there"
        with pytest.raises(CheckpointError, match=message):
            files.bring_input(config, environ)


@pytest.mark.parametrize("named", ["step_00000003", "nonsense"])
def test_a_latest_that_names_no_whole_checkpoint_is_said(named: str, bucket: Path, caplog) -> None:
    run = make_run(bucket / "run", 1, 2, 3)
    weights_of(run, 3).with_name("manifest.json").unlink()
    (run / "checkpoints" / "latest").write_text(f"{named}\n")
    found = files.find_checkpoint_url(f"file://{run}")
    assert found == f"file://{run}/checkpoints/step_00000002"
    said = f"file://{run}/checkpoints/latest names {named!r}, which is not a complete checkpoint there; using"
    assert caplog.messages == [f"{said} step_00000002 instead"]


# ---- the output of an earlier start ----


def test_place_of_copies(environ: dict[str, str]) -> None:
    jobs = [{**environ, "MA_VJ_NAME": name} for name in ("job-1", "job-2", "")]
    assert len({files.local_folder("obs://b/data", job) for job in jobs}) == 3


def test_output_of_an_earlier_start_is_copied(bucket, tmp_path, environ) -> None:
    def bring(*overrides: str) -> list[str]:
        return files.bring_files(config_of(), overrides, f"file://{bucket}/out", (0,), environ)

    (word,) = bring()
    folder = Path(word.removeprefix("output_dir="))
    assert tmp_path / "tmp" in folder.parents and not folder.exists()
    (bucket / "out").mkdir()
    assert bring() == [word] and not folder.exists(), "an empty folder is a first start"
    make_run(bucket / "out", 1)
    assert bring() == [word] and (folder / "metrics.jsonl").read_text() == "1"
    make_run(folder, 1, 2)
    bring()
    assert (folder / "metrics.jsonl").read_text() == "2", "what is here is newer"
    mine = f"output_dir={tmp_path}/mine"
    assert bring(mine) == [mine] and weights_of(tmp_path / "mine", 1).exists()


def test_a_host_without_rank_0_takes_its_newest_checkpoint(bucket: Path, tmp_path: Path) -> None:
    out, here = bucket / "out", tmp_path / "here"

    def bring(*ranks: int) -> None:
        files.bring_output(f"file://{out}", here, ranks)

    make_run(out, 1, 2)
    bring(2, 3)
    # step 2 again, after the run was sent back, and step 3
    make_run(out, 2, 3, mark=" again")
    bring()
    assert not weights_of(here, 3).exists(), "its first rank does it"
    bring(2, 3)
    assert weights_of(here, 3).read_text() == "weights 3 again"
    make_run(out, 2, mark=" again")
    bring(2, 3)
    assert weights_of(here, 2).read_text() == "weights 2 again"
    weights_of(out, 2).unlink()
    bring(2, 3)
    assert weights_of(here, 2).exists(), "the same manifest: nothing to copy"


def test_a_host_that_has_rank_0_now_takes_a_newer_run(bucket: Path, tmp_path: Path) -> None:
    url, here, empty = f"file://{bucket}/out", tmp_path / "here", tmp_path / "empty"
    make_run(here, 1)
    (here / "own").touch()
    empty.mkdir()
    make_run(bucket / "out", 1, 2)
    for folder in (here, empty):
        files.bring_output(url, folder, (0, 1))
        assert find_checkpoint(folder) == weights_of(folder, 2).parent
        assert (folder / "metrics.jsonl").read_text() == "2"
    assert (here / "own").exists()


# ---- the output ----


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "result").write_text("result")
    return folder


def test_output_is_copied_when_the_platform_stops_the_job(output: Path, tmp_path: Path) -> None:
    """The training loop's own handler, which saves, comes first."""
    before, url = signal.getsignal(signal.SIGTERM), f"file://{tmp_path}/bucket"
    with pytest.raises(SystemExit) as caught, files.output_copied(url, output, (0,)):
        ours = signal.getsignal(signal.SIGTERM)
        with StopSignal() as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is ours
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert caught.value.code == 143, "not StopRequested, on which all ranks agree"
    assert (tmp_path / "bucket" / "result").is_file() and signal.getsignal(signal.SIGTERM) is before


def test_output_is_copied_after_a_failure_too_and_a_failed_copy_hides_none(
    output: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def push(folder: Path, url: str, **_: object) -> None:
        raise StorageError("the bucket is full")

    url = f"file://{tmp_path}/bucket"
    with pytest.raises(KeyboardInterrupt), files.output_copied(url, output, (0,)):
        raise KeyboardInterrupt
    assert (tmp_path / "bucket" / "result").read_text() == "result"
    monkeypatch.setattr(stores, "push", push)
    with pytest.raises(StorageError, match="the bucket is full"), files.output_copied(url, output, (0,)):
        pass
    with pytest.raises(RuntimeError, match="the run's own"), files.output_copied(url, output, (0,)):
        raise RuntimeError("the run's own")
    assert capsys.readouterr().err == "error: the bucket is full\n"


def test_a_host_without_rank_0_copies_the_files_of_its_ranks(output: Path, tmp_path: Path) -> None:
    """Its run folder began as a copy of the bucket, which by now is older than what rank 0 has put there."""
    names = [f"mf_parallel{rank}/mindformer.log" for rank in (0, 1, 2, 12)]
    names += [f"profile/steps_1_2_rank_{rank}.json.gz" for rank in (0, 2)]
    make_run(output, 1)
    for name in names:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("older")
    bucket = make_run(tmp_path / "bucket", 2)
    before = [path for path in bucket.rglob("*") if path.is_file()]
    for ranks in ((2, 3), ()):
        with files.output_copied(f"file://{bucket}", output, ranks):
            pass
    own = [bucket / "mf_parallel2/mindformer.log", bucket / "profile/steps_1_2_rank_2.json.gz"]
    assert {path for path in bucket.rglob("*") if path.is_file()} == {*before, *own}
    assert (bucket / "metrics.jsonl").read_text() == "2"


# ---- stores: once per host, whole or absent ----


def contents(folder: Path) -> dict[str, bytes]:
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
    assert contents(stores.pull_once(url, target)) == contents(bucket / "data")
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
            if len(contents(there)) == allowed:
                raise ConnectionError("cut off")
            stores.Folders.copy(source, target)

    monkeypatch.setattr(stores, "find_store", lambda url: CutOff)
    monkeypatch.setattr(stores, "_PAUSES", (0.0, 0.0))
    here = run_folder(tmp_path / "out")
    for allowed in range(len(UPLOAD_ORDER)):
        there = tmp_path / f"bucket_{allowed}"
        with pytest.raises(StorageError, match="cut off"):
            stores.push(here, f"file://{there}")
        assert list(contents(there)) == sorted(UPLOAD_ORDER[:allowed])
        for checkpoint in whole_checkpoints(there / "checkpoints"):
            assert contents(checkpoint) == contents(here / "checkpoints" / checkpoint.name)
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
    assert contents(there) == {"checkpoints/latest": b"step_2", "older": b""} and len(tries) == 4
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
    assert contents(here) == {"a.bin": b"a", "inner/b.txt": b"b"}, "nothing is left of the half"


def test_unreachable_addresses_are_named(bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "moxing", None)
    (tmp_path / ".held.lock").mkdir()
    for url, target, error, message in (
        ("file:///nowhere/data", "data", DataError, "no files there; check the address"),
        ("obs://bucket/data", "data", ConfigError, "cannot be imported; use one of ModelArts' images"),
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
    assert contents(here) == {"a.bin": b"abc", "inner/b": b"inner"}
    assert stores.files("obs://b/data") == [("a.bin", 3, "7"), ("inner/b", 5, "7")]
    assert stores.files("obs://b/empty") == [], "the marker of a folder is no file"
    prompts = stores.pull_once("s3://b/prompts.txt", tmp_path / "prompts.txt")
    assert prompts == tmp_path / "prompts.txt" / "prompts.txt"
    moxing.copied.clear()
    stores.push(run_folder(tmp_path / "out"), "obs://b/out/")
    assert [url.removeprefix("obs://b/out/") for url in moxing.copied] == UPLOAD_ORDER

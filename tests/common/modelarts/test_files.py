"""Input that lies elsewhere, wherever the config names it, and the output that is copied back
whatever happens.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.checkpoint.folders import find_checkpoint
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import CheckpointError, ConfigError, StorageError
from common.interrupts import StopSignal
from common.modelarts import files, stores
from common.run_config import load_config
from tests.tiny import tiny_run


def config_of(**keys: Any) -> RunConfig:
    return build_config(tiny_run(data__split="100,0,0", **keys))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TMPDIR": str(tmp_path / "tmp")}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    for corpus in ("c", "d"):
        (tmp_path / "bucket" / corpus).mkdir(parents=True)
        for extension in (".idx", ".bin"):
            (tmp_path / "bucket" / corpus / f"{corpus}{extension}").write_text(corpus)
    (tmp_path / "bucket" / "prompts.txt").write_text("Hello")
    return tmp_path / "bucket"


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
    """The words that come back, behind those of the user, make a config in which everything is
    here.
    """
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
    assert Path(config.predict.prompt_file or "").read_text() == "Hello"
    assert config.predict.prompt == ["obs://is text"]
    assert files.bring_input(config, environ) == [], "nothing is left to do"


@pytest.mark.parametrize(
    ("key", "url"), [("predict.output_file", "obs://b/o"), ("context.save_graphs_path", "s3://b/o")]
)
def test_a_url_that_would_be_written_to_is_refused(key, url, environ) -> None:
    message = f"^{key}={url}: a URL cannot be written to; give a folder or file of this host"
    with pytest.raises(ConfigError, match=message):
        files.bring_input(config_of(**{key.replace(".", "__"): url}), environ)


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("resume", "run"),
        ("init_from", "run/"),
        ("load", "run/checkpoints"),
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
    weights = weights_of(bucket / "run", 1)
    weights.parent.mkdir(parents=True)
    weights.touch()
    for form in ("run", "run/checkpoints/step_00000001", "run/checkpoints/latest", "nowhere"):
        config = config_of(checkpoint={"init_from": f"file://{bucket}/{form}"})
        message = f"^checkpoint.init_from=file://{bucket}/{form}: no complete checkpoint there"
        with pytest.raises(CheckpointError, match=message):
            files.bring_input(config, environ)


@pytest.mark.parametrize("named", ["step_00000003", "step_00000009", "nonsense"])
def test_a_latest_that_names_no_whole_checkpoint_is_said(named: str, bucket: Path, caplog) -> None:
    run = make_run(bucket / "run", 1, 2, 3)
    weights_of(run, 3).with_name("manifest.json").unlink()
    (run / "checkpoints" / "latest").write_text(f"{named}\n")
    found = files.find_checkpoint_url(f"file://{run}")
    assert found == f"file://{run}/checkpoints/step_00000002"
    assert caplog.messages == [
        f"file://{run}/checkpoints/latest names {named!r}, which is not a complete checkpoint"
        f" there; using step_00000002 instead"
    ]


def test_copies_of_two_jobs_are_apart(environ: dict[str, str]) -> None:
    jobs = [{**environ, "MA_VJ_NAME": name} for name in ("job-1", "job-2", "")]
    assert len({files.local_folder("obs://b/data", job) for job in jobs}) == 3


# ---- the output of an earlier start ----


def test_place_of_the_output() -> None:
    assert files.output_url(config_of(), None) is None
    there = config_of(output_dir="obs://b/o")
    assert [files.output_url(there, url) for url in (None, "obs://b/p")] == [
        "obs://b/o", "obs://b/p"
    ]  # fmt: skip


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


@pytest.mark.parametrize("error", [RuntimeError("the run's own"), SystemExit(3), KeyboardInterrupt()])
def test_output_is_copied_after_a_failure_too(error: BaseException, output: Path, tmp_path) -> None:
    url = f"file://{tmp_path}/bucket"
    with pytest.raises(type(error)), files.output_copied(url, output, (0,)):
        raise error
    assert (tmp_path / "bucket" / "result").read_text() == "result"


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


def test_a_failed_copy_is_an_error_but_hides_none(output: Path, monkeypatch, capsys) -> None:
    def push(folder: Path, url: str, **_: object) -> None:
        raise StorageError("the bucket is full")

    monkeypatch.setattr(stores, "push", push)
    copied = files.output_copied("file:///x", output, (0,))
    with pytest.raises(StorageError, match="the bucket is full"), copied:
        pass
    copied = files.output_copied("file:///x", output, (0,))
    with pytest.raises(RuntimeError, match="the run's own"), copied:
        raise RuntimeError("the run's own")
    assert capsys.readouterr().err == "error: the bucket is full\n"


def test_a_host_without_rank_0_copies_the_files_of_its_ranks(output: Path, tmp_path: Path) -> None:
    """Its run folder began as a copy of the bucket, which by now is older than what rank 0 has put
    there.
    """
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

"""Input that lies elsewhere, wherever the config names it, and the output that is copied back
whatever happens.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.folders import find_checkpoint
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import CheckpointError, ConfigError, StorageError
from common.modelarts import files, stores
from common.run_config import load_config
from common.training.stop import StopSignal

MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 32, "vocab_size": 101}


def config_of(**keys: Any) -> RunConfig:
    return build_config(
        {"output_dir": "elsewhere", "model": MODEL, "optimizer": {"learning_rate": 0.1}, **keys}
    )


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


def make_run(folder: Path, *steps: int, latest: int | None = None, mark: str = "") -> Path:
    """Names in a folder that find_checkpoint looks at."""
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "model.safetensors").write_text(f"weights {step}{mark}")
        (checkpoint / "manifest.json").write_text(json.dumps({"step": step, "mark": mark}))
    (folder / "checkpoints" / "latest").write_text(f"step_{latest or steps[-1]:08d}\n")
    (folder / "metrics.jsonl").write_text(f"{steps[-1]}{mark}")
    return folder


# ---- input ----


def test_urls_of_a_yaml_and_of_a_blend_are_pulled(
    bucket: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The words that come back, behind those of the user, make a config in which everything is
    here.
    """
    url = f"file://{bucket}"
    (tmp_path / "run.yaml").write_text(
        f"output_dir: {tmp_path}/out\nmodel: {json.dumps(MODEL)}\noptimizer: {{learning_rate:"
        f" 0.1}}\ndata: {{train: {url}/c, tokenizer: {url}/d}}\npredict: {{prompt: 'obs://is text',"
        f" prompt_file: {url}/prompts.txt}}\n"
    )
    words = [f"data.validation=[0.7,{url}/c,0.3,{url}/d]"]
    config = load_config(tmp_path / "run.yaml", words)
    config = load_config(tmp_path / "run.yaml", [*words, *files.bring_input(config, environ)])
    (train,), (first, c, second, d) = config.data.train or [], config.data.validation or []
    assert (first, second) == (0.7, 0.3) and train == c
    found = [Path(str(folder), f"{name}.bin").read_text() for folder, name in ((c, "c"), (d, "d"))]
    assert found == ["c", "d"]
    assert (
        config.data.tokenizer is not None
        and (Path(config.data.tokenizer.folder or "") / "d.idx").is_file()
    )
    assert Path(
        config.predict.prompt_file or ""
    ).read_text() == "Hello" and config.predict.prompt == ["obs://is text"]
    assert files.bring_input(config, environ) == [], "nothing is left to do"


@pytest.mark.parametrize(
    "keys",
    [
        {"predict": {"output_file": "obs://b/o"}},
        {"context": {"save_graphs_path": "s3://b/o"}},
    ],
)
def test_a_url_that_would_be_written_to_is_refused(
    keys: dict[str, dict[str, str]], environ: dict[str, str]
) -> None:
    ((section, values),) = keys.items()
    ((key, url),) = values.items()
    with pytest.raises(
        ConfigError,
        match=f"^{section}.{key}={url}: a URL cannot be written to; give a folder or file of this"
        " host",
    ):
        files.bring_input(config_of(**keys), environ)


@pytest.mark.parametrize(
    "form",
    ["run", "run/", "run/checkpoints", "run/checkpoints/latest", "run/checkpoints/step_00000002"],
)
@pytest.mark.parametrize("key", ["resume", "init_from", "load"])
def test_a_checkpoint_by_its_url(
    key: str, form: str, bucket: Path, environ: dict[str, str]
) -> None:
    """latest is not the highest number: the run was sent back."""
    make_run(bucket / "run", 1, 2, 3, latest=2)
    (word,) = files.bring_input(config_of(checkpoint={key: f"file://{bucket}/{form}"}), environ)
    name, _, folder = word.partition("=")
    assert name == f"checkpoint.{key}" and find_checkpoint(Path(folder)) == Path(folder)
    assert (Path(folder) / "model.safetensors").read_text() == "weights 2"
    assert [
        path.name for path in Path(folder).parent.iterdir() if not path.name.startswith(".")
    ] == ["step_00000002"], "no other is copied"


def test_a_url_without_a_whole_checkpoint(bucket: Path, environ: dict[str, str]) -> None:
    (bucket / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (bucket / "run" / "checkpoints" / "step_00000001" / "model.safetensors").touch()
    expected = (
        "no complete checkpoint there; expected the URL of a run folder, of its checkpoints"
        " folder or of a step_... folder"
    )
    for form in ("run", "run/checkpoints/step_00000001", "run/checkpoints/latest", "nowhere"):
        with pytest.raises(CheckpointError) as caught:
            files.bring_input(
                config_of(checkpoint={"init_from": f"file://{bucket}/{form}"}), environ
            )
        assert str(caught.value) == f"checkpoint.init_from=file://{bucket}/{form}: {expected}"


@pytest.mark.parametrize("named", ["step_00000003", "step_00000009", "nonsense"])
def test_a_latest_that_names_no_whole_checkpoint_is_said(
    named: str, bucket: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(bucket / "run", 1, 2)
    (run / "checkpoints" / "step_00000003").mkdir()
    (run / "checkpoints" / "step_00000003" / "model.safetensors").touch()
    (run / "checkpoints" / "latest").write_text(f"{named}\n")
    found = files.find_checkpoint_url(f"file://{run}")
    assert found == f"file://{run}/checkpoints/step_00000002"
    assert caplog.messages == [
        f"file://{run}/checkpoints/latest names {named!r}, which is not a complete checkpoint"
        f" there; using step_00000002 instead"
    ]


def test_copies_of_two_jobs_are_apart(environ: dict[str, str]) -> None:
    folders = {
        files.local_folder("obs://b/data", {**environ, "MA_VJ_NAME": name})
        for name in ("job-1", "job-2", "")
    }
    assert len(folders) == 3


# ---- the output of an earlier start ----


def test_place_of_the_output(environ: dict[str, str]) -> None:
    assert files.output_url(config_of(), None) is None
    assert files.output_url(config_of(output_dir="obs://b/o"), None) == "obs://b/o"
    assert files.output_url(config_of(output_dir="obs://b/o"), "obs://b/p") == "obs://b/p"


def test_output_of_an_earlier_start_is_copied(
    bucket: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    url = f"file://{bucket}/out"
    (word,) = files.bring_files(config_of(), [], url, (0,), environ)
    folder = Path(word.removeprefix("output_dir="))
    assert tmp_path / "tmp" in folder.parents and not folder.exists()
    (bucket / "out").mkdir()
    assert (
        files.bring_files(config_of(), [], url, (0,), environ) == [word] and not folder.exists()
    ), "an empty folder is a first start"
    make_run(bucket / "out", 1)
    assert files.bring_files(config_of(), [], url, (0,), environ) == [word]
    assert (folder / "metrics.jsonl").read_text() == "1"
    make_run(folder, 1, 2)
    files.bring_files(config_of(), [], url, (0,), environ)
    assert (folder / "metrics.jsonl").read_text() == "2", "what is here is newer"
    assert files.bring_files(config_of(), [f"output_dir={tmp_path}/mine"], url, (0,), environ) == [
        f"output_dir={tmp_path}/mine"
    ]
    assert (tmp_path / "mine" / "checkpoints" / "step_00000001").is_dir()


def test_a_host_without_rank_0_takes_its_newest_checkpoint(
    bucket: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    url, here = f"file://{bucket}/out", tmp_path / "here"
    make_run(bucket / "out", 1, 2)
    files.bring_output(url, here, (2, 3))
    # step 2 again, after the run was sent back, and step 3
    make_run(bucket / "out", 2, 3, mark=" again")
    files.bring_output(url, here, ())
    assert not (here / "checkpoints" / "step_00000003").exists(), "its first rank does it"
    files.bring_output(url, here, (2, 3))
    assert (
        here / "checkpoints" / "step_00000003" / "model.safetensors"
    ).read_text() == "weights 3 again"
    make_run(bucket / "out", 2, mark=" again")
    files.bring_output(url, here, (2, 3))
    assert (
        here / "checkpoints" / "step_00000002" / "model.safetensors"
    ).read_text() == "weights 2 again"
    (bucket / "out" / "checkpoints" / "step_00000002" / "model.safetensors").unlink()
    files.bring_output(url, here, (2, 3))
    assert (here / "checkpoints" / "step_00000002" / "model.safetensors").exists(), (
        "the same manifest: nothing to copy"
    )


def test_a_host_that_has_rank_0_now_takes_a_newer_run(
    bucket: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    url, here = f"file://{bucket}/out", tmp_path / "here"
    make_run(here, 1)
    (here / "own").touch()
    make_run(bucket / "out", 1, 2)
    files.bring_output(url, here, (0, 1))
    assert find_checkpoint(here) == here / "checkpoints" / "step_00000002"
    assert (here / "metrics.jsonl").read_text() == "2" and (here / "own").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    files.bring_output(url, empty, (0,))
    assert find_checkpoint(empty) == empty / "checkpoints" / "step_00000002"


# ---- the output ----


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "result").write_text("result")
    return folder


@pytest.mark.parametrize(
    "error", [RuntimeError("the run's own"), SystemExit(3), KeyboardInterrupt()]
)
def test_output_is_copied_after_a_failure_too(
    error: BaseException, output: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(type(error)),
        files.output_copied(f"file://{tmp_path}/bucket", output, (0,)),
    ):
        raise error
    assert (tmp_path / "bucket" / "result").read_text() == "result"


def test_output_is_copied_when_the_platform_stops_the_job(output: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit) as caught,
        files.output_copied(f"file://{tmp_path}/bucket", output, (0,)),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert caught.value.code == 143, "not StopRequested, on which all ranks agree"
    assert (tmp_path / "bucket" / "result").is_file() and signal.getsignal(signal.SIGTERM) is before


def test_a_failed_copy_is_an_error_but_hides_none(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def push(folder: Path, url: str, **_: object) -> None:
        raise StorageError("the bucket is full")

    monkeypatch.setattr(stores, "push", push)
    with (
        pytest.raises(StorageError, match="the bucket is full"),
        files.output_copied("file:///x", output, (0,)),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="the run's own"),
        files.output_copied("file:///x", output, (0,)),
    ):
        raise RuntimeError("the run's own")
    assert capsys.readouterr().err == "error: the bucket is full\n"


def test_the_loops_own_signal_handler_wins(output: Path, tmp_path: Path) -> None:
    with files.output_copied(f"file://{tmp_path}/bucket", output, (0,)):
        before = signal.getsignal(signal.SIGTERM)
        with StopSignal() as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_host_without_rank_0_copies_the_files_of_its_ranks(output: Path, tmp_path: Path) -> None:
    """Its run folder began as a copy of the bucket, which by now is older than what rank 0 has put
    there.
    """
    names = [f"mf_parallel{rank}/mindformer.log" for rank in (0, 1, 2, 12)] + [
        f"profile/steps_1_2_rank_{rank}.json.gz" for rank in (0, 2)
    ]
    make_run(output, 1)
    for name in names:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("older")
    make_run(tmp_path / "bucket", 2)
    with files.output_copied(f"file://{tmp_path}/bucket", output, (2, 3)):
        pass
    found = sorted(
        str(path.relative_to(tmp_path / "bucket"))
        for path in (tmp_path / "bucket").rglob("*")
        if path.is_file()
    )
    run = [
        "checkpoints/latest",
        "checkpoints/step_00000002/manifest.json",
        "checkpoints/step_00000002/model.safetensors",
    ]
    assert found == [
        *run,
        "metrics.jsonl",
        "mf_parallel2/mindformer.log",
        "profile/steps_1_2_rank_2.json.gz",
    ]
    assert (tmp_path / "bucket" / "metrics.jsonl").read_text() == "2"
    with files.output_copied(f"file://{tmp_path}/bucket", output, ()):
        pass
    assert (tmp_path / "bucket" / "metrics.jsonl").read_text() == "2"

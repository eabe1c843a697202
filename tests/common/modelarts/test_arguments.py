"""ModelArts' and MindFormers' words in ours, the data in a folder, the output that is copied whatever happens, ranks of a host."""

import os
import signal
from pathlib import Path

import pytest

from common.cluster.environment import ALONE, Process
from common.config.schema import RunConfig, Section
from common.errors import ConfigError, DataError, StopRequested, StorageError
from common.modelarts import arguments as modelarts, job as modelarts_job, remote
from common.modelarts.arguments import TOP_LEVEL, mindformers_words, translate

INSIDE = {"MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--config", "a.yaml", "--run_mode=train", "x.y=1"], ["--config=a.yaml", "--run_mode=train", "x.y=1"]),
        (["--run_mode", "eval", "--all_ranks"], ["--run_mode", "eval", "--all_ranks"]),
        (["--train.max_steps=10", "--model.dropout", "0.1"], ["train.max_steps=10", "model.dropout=0.1"]),
        (["--backend=torch", "--seed", "7", "--precision=bf16"], ["backend=torch", "seed=7", "precision=bf16"]),
        (["--predict.prompt=Once: a=b --c\nd"], ["predict.prompt=Once: a=b --c\nd"]),
        (["--dataset=/data"], ["data.train=/data"]),
        (["--dataset_dir", "/data"], ["data.train=/data"]),
        (["--train_dataset_dir=/data", "--eval_dataset_dir=/more"], ["data.train=/data", "data.validation=/more"]),
        (["--data_url=obs://b/data"], ["data.train=obs://b/data"]),
        (["--train_url=/mnt/out"], ["output_dir=/mnt/out"]),
        (["--mode=0", "--device_id=3", "--device_target=CPU"], ["context.mode=0", "context.device_id=3", "context.device_target=CPU"]),
        (["--epochs=2"], ["train.max_steps=null", "train.max_tokens=null", "train.max_epochs=2"]),
        (["--batch_size=2"], ["train.micro_batch_size=2"]),
        (["--run_mode=train", "--load_checkpoint=/c"], ["--run_mode=train", "checkpoint.resume=/c"]),
        (["--run_mode=finetune", "--load_checkpoint=/c"], ["--run_mode=finetune", "checkpoint.init_from=/c"]),
        (["--run_mode", "predict", "--load_checkpoint=/c"], ["--run_mode", "predict", "checkpoint.load=/c"]),
        (["--predict_data=Hello world"], ["predict.prompt=Hello world"]),
        (["--predict_data", __file__], [f"predict.prompt_file={__file__}"]),
        (["--profile=True", "--sink_mode=False"], ["profile.start=1", "profile.stop=10", "train.sink_size=1"]),
        (["--profile=False", "--sink_mode=True", "--use_parallel=True", "--enable_modelarts=1"], []),
        (
            ["--options", "logging.plot=True", "checkpoint.asynchronous=False", "--seed=1"],
            ["logging.plot=True", "checkpoint.asynchronous=False", "seed=1"],
        ),
        (["--nonsense=1"], ["--nonsense=1"]),  # the parser refuses it
    ],
)
def test_words(words: list[str], expected: list[str]) -> None:
    assert translate(words, {}).words == tuple(expected)


def test_where_the_output_goes() -> None:
    both = translate(["--output_dir=/local", "--train_url=obs://b/out"], {})
    assert both.words == ("output_dir=/local",) and both.output_url == "obs://b/out"
    for word in ("--output_dir=obs://b/out", "--obs_path=obs://b/out", "--remote_save_url=obs://b/out", "output_dir=obs://b/out"):
        assert translate([word], {}).output_url == "obs://b/out"
    with pytest.raises(ConfigError, match="already to be copied to obs://a; give one of them"):
        translate(["--obs_path=obs://a", "--train_url=obs://b"], {})


def test_unknown_words_are_the_platforms_inside_modelarts_alone() -> None:
    words = ["--init_method", "tcp://job-0:6666", "--flag", "seed=1", "--num_gpus=8", "--dataset_id=wiki"]
    job = translate(words, INSIDE)
    assert job.words == ("seed=1",)
    assert [remark.partition(" is ")[0] for remark in job.remarks] == [
        "--init_method tcp://job-0:6666",
        "--flag",
        "--num_gpus=8",
        "--dataset_id=wiki",
    ]
    assert translate(words[:2], {}).words == tuple(words[:2])


def test_use_parallel() -> None:
    assert translate(["--use_parallel=False"], {}).one_process and not translate(["--use_parallel=True"], {}).one_process


def test_a_config_is_found_from_the_code_folder_inside_modelarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = "configs/gpt2/run_gpt2.yaml"
    assert translate([f"--config={preset}"], INSIDE).words == (f"--config={modelarts.ROOT / preset}",)
    assert translate([f"--config={preset}"], {}).words == (f"--config={preset}",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed"], "--seed: expected a value behind it"),
        (["--dataset", "--seed=1"], "--dataset: expected a value behind it"),
        (["--use_parallel=maybe"], "--use_parallel=maybe: expected True or False"),
        (["--options", "a"], "--options a: expected section.key=value"),
        (["--train_url="], "train_url: expected a folder or a URL, found nothing"),
    ],
)
def test_words_that_cannot_be_meant(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(words, INSIDE)
    assert message in str(caught.value)


def test_every_key_outside_of_sections_has_its_flag() -> None:
    keys = {
        name
        for name, field in RunConfig.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    }
    assert {*TOP_LEVEL, "output_dir"} == keys | {"precision"}  # which has a shorthand besides being a section


def test_mindformers_train_begins_anew() -> None:
    assert mindformers_words(["--config=a"]) == ["--run_mode=train", "checkpoint.init_from=null", "--config=a"]
    assert mindformers_words(["--run_mode=finetune"]) == ["--run_mode=finetune"]


def test_the_data_of_a_folder(tmp_path: Path) -> None:
    assert modelarts_job.corpus_in(tmp_path) == str(tmp_path)  # of MindRecord files, whose reader walks it
    (tmp_path / "inner").mkdir()
    for name in ("a.idx", "a.bin", "no_bin.idx"):
        (tmp_path / "inner" / name).touch()
    assert modelarts_job.corpus_in(tmp_path) == str(tmp_path / "inner" / "a")
    (tmp_path / "b.idx").touch()
    (tmp_path / "b.bin").touch()
    with pytest.raises(DataError, match=r"holds 2 corpora \(b, inner/a\); give one as data.train=FOLDER/NAME"):
        modelarts_job.corpus_in(tmp_path)


def test_input_is_copied_and_output_of_an_earlier_start_too(tmp_path: Path) -> None:
    bucket, environ = tmp_path / "bucket", {"TMPDIR": str(tmp_path / "tmp")}
    (bucket / "data").mkdir(parents=True)
    (bucket / "data" / "c.idx").touch()
    (bucket / "data" / "c.bin").touch()
    url = f"file://{bucket}/out"
    data, output = modelarts_job.bring_input([f"data.train=file://{bucket}/data"], url, environ)
    prefix, folder = Path(data.removeprefix("data.train=")), Path(output.removeprefix("output_dir="))
    assert prefix.name == "c" and prefix.with_suffix(".bin").is_file() and tmp_path / "tmp" in prefix.parents
    assert not folder.exists()
    (bucket / "out").mkdir()
    (bucket / "out" / "metrics.jsonl").write_text("earlier")
    assert modelarts_job.bring_input([], url, environ) == [output]
    assert (folder / "metrics.jsonl").read_text() == "earlier"
    (folder / "metrics.jsonl").write_text("later")
    modelarts_job.bring_input([], url, environ)
    assert (folder / "metrics.jsonl").read_text() == "later", "what is here is newer"


# ---- the output ----


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "result").write_text("result")
    return folder


@pytest.mark.parametrize("error", [RuntimeError("the run's own"), SystemExit(3), KeyboardInterrupt()])
def test_output_is_copied_after_a_failure_too(error: BaseException, output: Path, tmp_path: Path) -> None:
    with pytest.raises(type(error)), modelarts_job.output_copied(f"file://{tmp_path}/bucket", output, ALONE, {}):
        raise error
    assert (tmp_path / "bucket" / "result").read_text() == "result"


def test_output_is_copied_when_the_platform_stops_the_job(output: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopRequested) as caught, modelarts_job.output_copied(f"file://{tmp_path}/bucket", output, ALONE, {}):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert caught.value.exit_code == 143
    assert (tmp_path / "bucket" / "result").is_file() and signal.getsignal(signal.SIGTERM) is before


def test_a_failed_copy_is_an_error_but_hides_none(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def push(folder: Path, url: str, environ: object) -> None:
        raise StorageError("the bucket is full")

    monkeypatch.setattr(remote, "push", push)
    with pytest.raises(StorageError, match="the bucket is full"), modelarts_job.output_copied("file:///x", output, ALONE, {}):
        pass
    with pytest.raises(RuntimeError, match="the run's own"), modelarts_job.output_copied("file:///x", output, ALONE, {}):
        raise RuntimeError("the run's own")
    assert capsys.readouterr().err == "error: the bucket is full\n"


def test_of_a_host_the_first_rank_copies(output: Path, tmp_path: Path) -> None:
    second = Process(rank=5, world_size=8, local_rank=1, local_world_size=4)
    with modelarts_job.output_copied(f"file://{tmp_path}/bucket", output, second, {}):
        pass
    assert not (tmp_path / "bucket").exists()


# ---- who starts the ranks ----


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"MA_NUM_GPUS": "8"}, False),  # not inside ModelArts
        ({**INSIDE, "MA_NUM_GPUS": "8"}, True),
        ({**INSIDE, "MA_NUM_GPUS": "1"}, False),
        ({**INSIDE, "MA_NUM_GPUS": "8", "RANK_ID": "0", "RANK_SIZE": "8"}, False),  # one process per card
        ({**INSIDE, "MA_NUM_GPUS": "8", "RANK": "0", "WORLD_SIZE": "8"}, False),
        ({**INSIDE, "MA_NUM_GPUS": "1", "MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "a,b"}, True),
    ],
)
def test_ranks_are_started_where_the_platform_started_none(environ: dict[str, str], expected: bool) -> None:
    assert modelarts_job.must_start_ranks(environ) is expected


def test_places_by_the_names_of_the_hosts() -> None:
    environ = {**INSIDE, "MA_NUM_GPUS": "4", "MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "job-0.job,job-1.job", "VC_TASK_INDEX": "1"}
    table, places = modelarts_job.find_places(environ)
    assert table is None and places.master == "job-0.job" and places.own_host == "job-1.job"
    assert [(place.rank, place.device_id, place.local_rank) for place in places.own] == [(4, 0, 0), (5, 1, 1), (6, 2, 2), (7, 3, 3)]
    assert modelarts_job.world_size_of_job(environ) == 8
    with pytest.raises(ConfigError, match=r"MA_NUM_HOSTS=3, but VC_WORKER_HOSTS=job-0.job,job-1.job names 2"):
        modelarts_job.find_places({**environ, "MA_NUM_HOSTS": "3"})
    with pytest.raises(ConfigError, match="VC_TASK_INDEX=2, but VC_WORKER_HOSTS names 2"):
        modelarts_job.find_places({**environ, "VC_TASK_INDEX": "2"})


def test_places_by_the_platforms_table(samples: Path, tmp_path: Path) -> None:
    table = samples / "v0_modelarts_k8s_jobstart_2x8_unordered.json"
    environ = {**INSIDE, "RANK_TABLE_FILE": str(table), "VC_TASK_INDEX": "1", "TMPDIR": str(tmp_path)}
    written, places = modelarts_job.find_places(environ)
    assert (places.own_host, places.master) == ("10.19.1.79", "10.19.1.142")
    assert [place.rank for place in places.own] == list(range(8, 16))
    assert written is not None and '"version": "1.0"' in written.read_text()
    assert modelarts_job.find_places({**environ, "MA_CURRENT_IP": "10.19.1.142"})[1].own_host == "10.19.1.142"
    with pytest.raises(ConfigError, match=r"nor VC_TASK_INDEX=2 says which server of .*: it holds 10.19.1.142, 10.19.1.79"):
        modelarts_job.find_places({**environ, "VC_TASK_INDEX": "2"})


def test_variables_that_a_process_per_card_lacks(samples: Path, tmp_path: Path) -> None:
    table = samples / "v0_modelarts_cce_1x1.json"
    environ = {**INSIDE, "RANK_TABLE_FILE": str(table), "RANK_ID": "0", "HCCL_CONNECT_TIMEOUT": "600", "TMPDIR": str(tmp_path)}
    found = modelarts_job.platform_variables(Process(device_id=0, launcher="rank table"), environ)
    written = Path(found.pop("RANK_TABLE_FILE"))
    assert found == {"RANK_SIZE": "1", "DEVICE_ID": "0", "HCCL_CONNECT_TIMEOUT": "600", "GLOO_SOCKET_IFNAME": "lo"}
    assert '"rank_id": "0"' in written.read_text()

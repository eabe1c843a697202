"""Ranks of a ModelArts job, who starts them, whose files a process copies. Its and MindFormers' words in ours."""

import re
from pathlib import Path

import pytest
import yaml

from common.cluster.environment import ALONE, Process, find_process
from common.config.schema import RunConfig, Section
from common.errors import ConfigError
from common.modelarts import arguments as modelarts, job as modelarts_job
from common.modelarts.arguments import TOP_LEVEL, mindformers_argv, translate
from common.systems.config import ConfigFile

INSIDE = {"MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir"}
TWO_HOSTS = {**INSIDE, "MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "job-0.job,job-1.job"}
EIGHT, FOUR, ONE = ({**INSIDE, "MA_NUM_GPUS": count} for count in "841")
TWO_EACH = {**TWO_HOSTS, "MA_NUM_GPUS": "2"}
CARD = {**TWO_HOSTS, "RANK_SIZE": "4"}
"""One process per card, of which RANK_ID is given."""
TABLE = "v0_modelarts_k8s_jobstart_2x8_unordered.json"


@pytest.mark.parametrize(
    ("environ", "starts", "one_process", "copied"),
    [
        ({"MA_NUM_GPUS": "8"}, False, False, (0,)),  # not inside ModelArts
        (ONE, False, False, (0,)),
        (FOUR, True, False, (0, 1, 2, 3)),
        (FOUR, True, True, (0,)),
        ({**TWO_EACH, "VC_TASK_INDEX": "1"}, True, False, (2, 3)),
        ({**TWO_EACH, "VC_TASK_INDEX": "1"}, True, True, ()),
        ({**TWO_HOSTS, "MA_NUM_GPUS": "1"}, True, False, (0,)),
        ({**CARD, "RANK_ID": "0"}, False, False, (0, 1)),
        ({**CARD, "RANK_ID": "1"}, False, False, ()),
        ({**CARD, "RANK_ID": "2"}, False, False, (2, 3)),
        ({**EIGHT, "RANK_ID": "0", "RANK_SIZE": "8"}, False, False, tuple(range(8))),
        ({**EIGHT, "RANK": "0", "WORLD_SIZE": "8"}, False, False, (0,)),
    ],
)
def test_who_starts_the_ranks_and_whose_files_a_process_copies(
    environ: dict[str, str], starts: bool, one_process: bool, copied: tuple[int, ...]
) -> None:
    assert modelarts_job.must_start_ranks(environ) is starts
    process = ALONE if starts else find_process(environ)
    assert modelarts_job.ranks_to_copy(process, environ, one_process=one_process) == copied


def test_files_that_a_process_copies_by_the_platforms_table(samples: Path) -> None:
    environ = {**INSIDE, "RANK_TABLE_FILE": str(samples / TABLE)}
    for rank, expected in ((0, tuple(range(8))), (7, ()), (8, tuple(range(8, 16)))):
        own = {**environ, "RANK_ID": str(rank)}
        assert modelarts_job.ranks_to_copy(find_process(own), own, one_process=False) == expected


def test_places_by_the_names_of_the_hosts() -> None:
    environ = {**TWO_EACH, "VC_TASK_INDEX": "1"}
    table, places = modelarts_job.find_places(environ)
    assert (table, places.master, places.own_host) == (None, "job-0.job", "job-1.job")
    own = [(place.rank, place.device_id, place.local_rank) for place in places.own]
    assert (places.world_size, own) == (4, [(2, 0, 0), (3, 1, 1)])
    for wrong, message in (
        ({"MA_NUM_HOSTS": "3"}, "MA_NUM_HOSTS=3, but VC_WORKER_HOSTS=job-0.job,job-1.job names 2"),
        ({"VC_TASK_INDEX": "2"}, "VC_TASK_INDEX=2, but VC_WORKER_HOSTS names 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            modelarts_job.find_places(environ | wrong)


def test_places_by_the_platforms_table(samples: Path, tmp_path: Path) -> None:
    environ = {**INSIDE, "RANK_TABLE_FILE": str(samples / TABLE), "TMPDIR": str(tmp_path), "VC_TASK_INDEX": "1"}
    written, places = modelarts_job.find_places(environ)
    assert (places.own_host, places.master) == ("10.19.1.79", "10.19.1.142")
    assert [place.rank for place in places.own] == list(range(8, 16))
    assert written is not None and '"version": "1.0"' in written.read_text()
    assert modelarts_job.find_places({**environ, "MA_CURRENT_IP": "10.19.1.142"})[1].own_host == "10.19.1.142"
    with pytest.raises(ConfigError, match=r"nor VC_TASK_INDEX=2 says which server.*it holds 10.19.1.142, 10.19.1.79"):
        modelarts_job.find_places({**environ, "VC_TASK_INDEX": "2"})


def test_variables_that_a_process_per_card_lacks(samples: Path, tmp_path: Path) -> None:
    table = samples / "v0_modelarts_cce_1x1.json"
    given = {"RANK_TABLE_FILE": str(table), "RANK_ID": "0", "TMPDIR": str(tmp_path), "HCCL_CONNECT_TIMEOUT": "600"}
    found = modelarts_job.platform_variables(Process(device_id=0, launcher="rank table"), INSIDE | given)
    assert '"rank_id": "0"' in Path(found.pop("RANK_TABLE_FILE")).read_text()
    assert found == {"RANK_SIZE": "1", "DEVICE_ID": "0", "HCCL_CONNECT_TIMEOUT": "600", "GLOO_SOCKET_IFNAME": "lo"}


WORDS = """
--config a.yaml --run_mode=train x.y=1 -> --config=a.yaml --run_mode=train x.y=1
--run_mode eval --all_ranks -> --run_mode eval --all_ranks
--train.max_steps=10 --model.dropout 0.1 -> train.max_steps=10 model.dropout=0.1
--backend=torch --seed 7 --precision=bf16 -> backend=torch seed=7 precision=bf16
--dataset_dir /data -> data.train=/data
--train_dataset_dir=/data --eval_dataset_dir=/more -> data.train=/data data.validation=/more
--data_url=obs://b/data -> data.train=obs://b/data
--train_url=/mnt/out -> output_dir=/mnt/out
--mode=0 --device_id=3 --device_target=CPU -> context.mode=0 context.device_id=3 context.device_target=CPU
--epochs=2 -> train.max_steps=null train.max_tokens=null train.max_epochs=2
--batch_size=2 -> train.micro_batch_size=2
--num_samples 8 -> train.num_samples=8
--run_mode=eval --num_samples=8 --dataset_dir=/data -> --run_mode=eval validation.max_samples=8 data.validation=/data
--run_mode=train --load_checkpoint=/c -> --run_mode=train checkpoint.resume=/c
--run_mode train --run_mode=finetune --load_checkpoint=/c -> --run_mode train --run_mode=finetune checkpoint.init_from=/c
--run_mode predict --load_checkpoint=/c -> --run_mode predict checkpoint.load=/c
--profile=True --sink_mode=False -> profile.start=1 profile.stop=10 train.sink_size=1
--profile=False --sink_mode=True --use_parallel=True -> profile.start=null profile.stop=null profile.memory=false
--enable_modelarts=1 ->
--options logging.plot=True checkpoint.asynchronous=False --seed=1 -> logging.plot=True checkpoint.asynchronous=False seed=1
--nonsense=1 -> --nonsense=1
"""  # noqa: E501
"""What a user types, and the words of run_gpt2.py. The parser refuses the last one."""


@pytest.mark.parametrize("line", WORDS.strip().splitlines())
def test_words(line: str) -> None:
    typed, _, expected = line.partition("->")
    assert translate(typed.split(), {}).argv == expected.split()


def test_words_of_text() -> None:
    for typed, expected in (
        (["--predict.prompt=Once: a=b --c\nd"], "predict.prompt=Once: a=b --c\nd"),
        (["--predict_data=Hello world"], "predict.prompt=Hello world"),
        (["--predict_data", __file__], f"predict.prompt_file={__file__}"),
    ):
        assert translate(typed, {}).argv == [expected]


def test_place_of_the_output_and_number_of_processes(tmp_path, monkeypatch) -> None:
    both = translate(["--output_dir=/local", "--train_url=obs://b/out"], {})
    assert both.argv == ["output_dir=/local"] and both.output_url == "obs://b/out"
    for word in ("--output_dir", "--obs_path", "--remote_save_url", "output_dir"):
        assert translate([f"{word}=obs://b/out"], {}).output_url == "obs://b/out"
    assert [translate([f"--use_parallel={word}"], {}).one_process for word in ("False", "True")] == [True, False]
    original = (modelarts.ROOT / "tests/common/systems/originals/mindformers_r1.yaml").read_text()
    (tmp_path / "a.yaml").write_text(original.replace("Please input obs url on AICC platform.", "obs://b/out"))
    file = ConfigFile.read(tmp_path / "a.yaml")
    monkeypatch.setattr(modelarts_job, "bring_files", lambda config, words, url, *rest: pytest.fail(url))
    with pytest.raises(pytest.fail.Exception, match="obs://b/out"):
        modelarts_job.run_job(file, file.open([]), "train", [], translate([], {}), ALONE, {})


def test_unknown_words_are_the_platforms_only_inside_modelarts() -> None:
    words = ["--init_method", "tcp://job-0:6666", "--flag", "seed=1", "--dataset_id=wiki"]
    job = translate(words, INSIDE)
    named = [remark.partition(" is ")[0] for remark in job.remarks]
    assert (job.argv, named) == (["seed=1"], ["--init_method tcp://job-0:6666", "--flag", "--dataset_id=wiki"])
    assert translate(words[:2], {}).argv == words[:2]


def test_a_config_is_found_from_the_code_folder_inside_modelarts(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = "configs/gpt2/run_gpt2.yaml"
    assert translate([f"--config={preset}"], INSIDE).argv == [f"--config={modelarts.ROOT / preset}"]
    assert translate([f"--config={preset}"], {}).argv == [f"--config={preset}"]


@pytest.mark.parametrize(("words", "message"), yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text()))
def test_words_that_cannot_be_meant(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate(words.split(), INSIDE)


def test_every_key_outside_of_sections_has_its_flag() -> None:
    kinds = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    keys = {name for name, kind in kinds.items() if not (isinstance(kind, type) and issubclass(kind, Section))}
    # the first has a shorthand besides being a section, the second is one that may be left out
    assert {*TOP_LEVEL, "output_dir", "quantization"} == keys | {"precision"}


@pytest.mark.parametrize(
    ("text", "words", "chosen"),
    [
        ("seed: 1", "--device_target Ascend", True),
        ("seed: 1", "--options context.device_target=Ascend", True),
        ("context: {device_target: Ascend}", "", True),
        ("context: {device_target: Ascend}", "--device_target=CPU", False),
        ("backend: torch", "--device_target Ascend", False),
        ("backend: mindspore", "--device_target Ascend", False),
        ("base: other.yaml", "--device_target Ascend", False),
        ("seed: 1", "--device_target Ascend --backend torch", False),
        ("seed: 1", "--device_target Ascend backend=torch", False),
        ("no: such: yaml", "--device_target Ascend", True),
    ],
)
def test_mindformers_ascend_is_mindspores(tmp_path, caplog, text, words, chosen) -> None:
    preset = modelarts.ROOT / "configs/gpt2/run_gpt2_tiny.yaml"
    (tmp_path / "other.yaml").write_text(f"base: {preset}\nbackend: torch\n")
    (tmp_path / "a.yaml").write_text(text if text.startswith("base") else f"base: {preset}\n{text}")
    given = ["--run_mode=eval", f"--config={tmp_path / 'a.yaml'}", *words.split()]
    with caplog.at_level("WARNING"):
        assert mindformers_argv(given)[0] == [*(["backend=mindspore"] if chosen else []), *given]
    said = "says backend: torch, which is used; for MindSpore give backend=mindspore" in caplog.text
    assert said is (text in ("backend: torch", "base: other.yaml"))


def test_mindformers_train_starts_over(tmp_path: Path) -> None:
    """The choice of a backend comes before the overrides, and opens no checkpoint."""
    assert mindformers_argv(["--config=a"])[0] == ["--run_mode=train", "checkpoint.init_from=null", "--config=a"]
    path = tmp_path / "run.yaml"
    path.write_text("run_mode: finetune\nmodel: {model_config: {type: GPT2Config}}\n")
    assert mindformers_argv([f"--config={path}"])[0] == ["--run_mode=finetune", f"--config={path}"]
    path.write_text("checkpoint: {init_from: hf://owner/name}\noutput_dir: out\n")
    assert "backend=mindspore" in mindformers_argv(["--config", str(path), "--device_target=Ascend"])[0]

"""ModelArts' and MindFormers' words in ours."""

from pathlib import Path

import pytest

from common.config.schema import RunConfig, Section
from common.errors import ConfigError
from common.modelarts import arguments as modelarts
from common.modelarts.arguments import TOP_LEVEL, mindformers_argv, translate

INSIDE = {"MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir"}


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
--run_mode=eval --num_samples=8 -> --run_mode=eval evaluation.max_samples=8
--run_mode=train --load_checkpoint=/c -> --run_mode=train checkpoint.resume=/c
--run_mode=finetune --load_checkpoint=/c -> --run_mode=finetune checkpoint.init_from=/c
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


def test_place_of_the_output_and_number_of_processes() -> None:
    both = translate(["--output_dir=/local", "--train_url=obs://b/out"], {})
    assert both.argv == ["output_dir=/local"] and both.output_url == "obs://b/out"
    for word in ("--output_dir", "--obs_path", "--remote_save_url", "output_dir"):
        assert translate([f"{word}=obs://b/out"], {}).output_url == "obs://b/out"
    alone = [translate([f"--use_parallel={word}"], {}).one_process for word in ("False", "True")]
    assert alone == [True, False]


def test_unknown_words_are_the_platforms_only_inside_modelarts() -> None:
    words = ["--init_method", "tcp://job-0:6666", "--flag", "seed=1", "--dataset_id=wiki"]
    job = translate(words, INSIDE)
    assert job.argv == ["seed=1"]
    named = [remark.partition(" is ")[0] for remark in job.remarks]
    assert named == ["--init_method tcp://job-0:6666", "--flag", "--dataset_id=wiki"]
    assert translate(words[:2], {}).argv == words[:2]


def test_a_config_is_found_from_the_code_folder_inside_modelarts(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = "configs/gpt2/run_gpt2.yaml"
    assert translate([f"--config={preset}"], INSIDE).argv == [f"--config={modelarts.ROOT / preset}"]
    assert translate([f"--config={preset}"], {}).argv == [f"--config={preset}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed", "--seed: expected a value after it"),
        ("--dataset --seed=1", "--dataset: expected a value after it"),
        ("--use_parallel=maybe", "--use_parallel=maybe: expected True or False"),
        ("--options a", "--options a: expected section.key=value"),
        ("--config=obs://b/run.yaml", "put it into the code folder and give its path there"),
        ("--train_url=", "train_url: expected a folder or a URL, found an empty value"),
        ("--obs_path=obs://a --train_url=obs://b", "to be copied to obs://a; give one of them"),
    ],
)
def test_words_that_cannot_be_meant(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(words.split(), INSIDE)
    assert message in str(caught.value)


def test_every_key_outside_of_sections_has_its_flag() -> None:
    keys = {
        name
        for name, field in RunConfig.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    }
    # the first has a shorthand besides being a section, the second is one that may be left out
    assert {*TOP_LEVEL, "output_dir", "quantization"} == keys | {"precision"}


def test_mindformers_train_starts_over() -> None:
    found = mindformers_argv(["--config=a"])[0]
    assert found == ["--run_mode=train", "checkpoint.init_from=null", "--config=a"]
    assert mindformers_argv(["--run_mode=finetune"])[0] == ["--run_mode=finetune"]


@pytest.mark.parametrize(
    ("text", "words", "chosen"),
    [
        ("seed: 1", "--device_target Ascend", True),
        ("seed: 1", "--device_target=Ascend", True),
        ("seed: 1", "--options context.device_target=Ascend", True),
        ("context: {device_target: Ascend}", "", True),
        ("context: {device_target: Ascend}", "--device_target=CPU", False),
        ("seed: 1", "", False),
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
    base = "" if text.startswith("base") else f"base: {preset}\n"
    (tmp_path / "a.yaml").write_text(f"{base}{text}\n")
    given = ["--run_mode=eval", f"--config={tmp_path / 'a.yaml'}", *words.split()]
    with caplog.at_level("WARNING"):
        assert mindformers_argv(given)[0] == [*(["backend=mindspore"] if chosen else []), *given]
    said = "says backend: torch, which is used; for MindSpore give backend=mindspore" in caplog.text
    assert said is (text in ("backend: torch", "base: other.yaml"))


def test_the_choice_of_a_backend_opens_no_checkpoint(tmp_path: Path) -> None:
    """It comes before the overrides, and training begins with new weights."""
    path = tmp_path / "run.yaml"
    path.write_text("checkpoint: {init_from: hf://owner/name}\noutput_dir: out\n")
    words = ["--config", str(path), "--device_target=Ascend"]
    assert mindformers_argv(words)[0][-4:] == ["backend=mindspore", *words]

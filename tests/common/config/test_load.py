"""Files, bases, overrides, and what is said when they are wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.config.load import dump_config, flatten
from common.errors import ConfigError
from common.resolve.derive import resolve_config
from common.run_config import load_config

MINIMAL = """output_dir: out
model: {num_layers: 2, hidden_size: 8, num_heads: 2, seq_length: 16, vocab_size: 100}
optimizer: {learning_rate: 6e-4}
train: {max_steps: 3, micro_batch_size: 2}
logging: {interval: 1}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_main_file_wins_over_bases_and_words_over_files(tmp_path: Path) -> None:
    """And of two files with one base the second, with what it says and with what the base says."""
    parts = {
        "base": MINIMAL.replace("micro_batch_size: 2", "micro_batch_size: 2, accumulation_steps: 4") + "seed: 1\n",
        "a": "base: base.yaml\ntrain: {micro_batch_size: 5, max_steps: 7}\n",
        "b": "base: base.yaml\nseed: 2\ntrain: {max_steps: 9}\n",
    }
    (tmp_path / "parts").mkdir()
    for name, text in parts.items():
        (tmp_path / "parts" / f"{name}.yaml").write_text(text)
    main = tmp_path / "main.yaml"
    main.write_text("base: [parts/a.yaml, parts/b.yaml]\noutput_dir: mine\n")
    config = load_config(main)
    assert (config.seed, config.output_dir, config.model.hidden_size) == (2, "mine", 8)
    train = config.train
    assert (train.max_steps, train.micro_batch_size, train.accumulation_steps) == (9, 2, 4)
    assert load_config(main, ["train.max_steps=8"]).train.max_steps == 8


def test_all_faults_are_told_at_once(config_file: Path) -> None:
    said = error_of(config_file, "seed=-1", "train.max_step=2", "model.dropout=1.5")
    assert len(said.splitlines()) == 3


def test_files_that_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, said in (
        ("output_dir: out\n", "model: required"),
        ("a: [1,\nb: }", f"{path}:2:"),
        ("- a\n", "expected keys and values"),
        ("base: other.yaml\n", "include each other"),
    ):
        path.write_text(text)
        (tmp_path / "other.yaml").write_text("base: run.yaml\n")
        assert said in error_of(path)
    for number in range(300):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    assert "nested deeper than 64 levels" in error_of(tmp_path / "0.yaml")
    assert f"did you mean {path}?" in error_of(tmp_path / "ran.yaml")
    assert "cannot be read" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        *((text, [text]) for text in ("1984", "1e3", "null", "", "Once: upon [a", '"quoted"')),
        *((text, [text]) for text in ("{a: b}", "[CLS][MASK]", "[MASK]", "[[Paris]]", "[1] a")),
        *((text, [text]) for text in ("[Laughs, then cries]", "[12 men]", '["a", b]', "[")),
        ('["[CLS]", \'b\', "it\'s"]', ["[CLS]", "b", "it's"]),
        ("[464, 3290]", [[464, 3290]]),
        ('[[464, 3290], "a"]', [[464, 3290], "a"]),
        ("[]", []),
    ],
)
def test_prompts_arrive_as_typed(config_file: Path, text: str, kept: list[str]) -> None:
    """Only a list of texts in quotation marks and ids is a list."""
    assert load_config(config_file, [f"predict.prompt={text}"]).predict.prompt == kept


@pytest.mark.parametrize(
    ("key", "text", "kept"),
    [
        ("output_dir", "20240101", "20240101"),
        ("predict.output_file", "007", "007"),
        ("predict.output_file", "null", None),
        ("predict.stop", "1984", ["1984"]),
        ("predict.stop", "null", ["null"]),
        ("data.train", "2024", ["2024"]),
        ("data.train", "[A, B]", ["A", "B"]),
        ("data.train", "", None),
        ("data.split", "[98,1,1]", "98,1,1"),
        ("checkpoint.resume", "true", "latest"),
        ("checkpoint.resume", "false", "never"),
        ("parallel.strategy", "SPS", "parameter_server"),
    ],
)
def test_text_is_the_same_in_a_file_and_on_the_command_line(config_file: Path, key: str, text: str, kept: Any) -> None:
    *sections, name = key.split(".")
    own = f"{': {'.join(sections)}: {{{name}: {text}}}" if sections else f"{name}: {text}"
    other = config_file.parent / "own.yaml"
    other.write_text(f"base: {config_file.name}\n{own}{'}' * (len(sections) - 1)}\n")
    for config in (load_config(config_file, [f"{key}={text}"]), load_config(other)):
        assert dict(flatten(config.model_dump()))[key] == kept


@pytest.mark.parametrize("text", ["08", "1e5", "no", "0x1F", "~", "1_000", "a: b", "#x", "é"])
def test_what_is_dumped_reads_back_equal(config_file: Path, text: str) -> None:
    config = load_config(config_file, ["data.train=[0.3,a,0.7,b]", "precision=bf16"])
    predict = config.predict.model_copy(update={"prompt": [text]})
    config = config.model_copy(update={"output_dir": text, "predict": predict})
    config_file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(config_file) == config


def test_one_key_of_a_shorthand_refines_it(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "precision: bf16\ndata: {tokenizer: vocab}\n")
    words = ["precision.softmax=bfloat16", "data.tokenizer.backend=tiktoken"]
    config = load_config(config_file, words)
    precision, tokenizer = config.precision, config.data.tokenizer
    found = (precision.compute, precision.softmax, precision.layer_norm)
    assert found == ("bfloat16", "bfloat16", "float32")
    assert tokenizer is not None
    assert (tokenizer.folder, tokenizer.backend) == ("vocab", "tiktoken")
    main = config_file.with_name("main.yaml")
    main.write_text("base: run.yaml\nprecision: {layer_norm: bfloat16}\n")
    assert load_config(main).precision.compute == "bfloat16"


def test_a_length_of_the_command_line_replaces_that_of_the_file(config_file: Path) -> None:
    config = load_config(config_file, ["train.max_epochs=2"])
    assert (config.train.max_epochs, config.train.max_steps) == (2.0, None)
    both = load_config(config_file, ["train.max_epochs=2", "train.max_steps=7"]).train
    assert (both.max_epochs, both.max_steps) == (2.0, 7), "two of one place still contradict"
    assert load_config(config_file, ["train.max_epochs=null"]).train.max_steps is not None


@pytest.mark.parametrize(
    ("word", "same"),
    [
        ("precision=O1", "precision=fp16"),
        ("precision=O2", "precision={parameters: float16, compute: float16}"),
        ("precision=pure_fp16", "precision={parameters: fp16, compute: float16, softmax: fp16, layer_norm: float16}"),
        ("parallel.micro_batch_num=4", "train.accumulation_steps=4"),
        ("parallel.enable_parallel_optimizer=true", "parallel.zero_stage=1"),
        ("parallel.enable_parallel_optimizer=true parallel.zero_stage=3", "parallel.zero_stage=3"),
        ("parallel.enable_parallel_optimizer=false", ""),
        (
            "parallel.zero_stage=1 parallel.parallel_optimizer_config.gradient_accumulation_shard=true",
            "parallel.zero_stage=2",
        ),
        ("context.device_target=CPU device=auto", "device=cpu"),
        ("parallel.gradients_mean=false parallel.parallel_mode=1", "parallel.parallel_mode=1"),
    ],
)
def test_words_of_other_systems(config_file: Path, word: str, same: str) -> None:
    found, expected = (load_config(config_file, re.findall(r"\S+=(?:\{.*\}|\S+)", each)) for each in (word, same))
    assert found == expected


def test_samples_of_an_epoch_are_a_length(config_file: Path) -> None:
    """In batches of 2, of data with 1,000 windows."""
    for length, words, steps in (
        ("num_samples: 30", [], 15),
        ("num_samples: 30, max_epochs: 3", [], 45),
        ("max_steps: 9", ["train.max_epochs=2", "train.num_samples=5"], 5),
        ("num_samples: 30", ["train.max_epochs=0.5"], 7),
        ("num_samples: 30, max_epochs: 3", ["train.max_steps=7"], 7),
    ):
        config_file.write_text(MINIMAL.replace("max_steps: 3", length))
        run = resolve_config(load_config(config_file, words), samples_per_epoch=1000)
        assert run.train.max_steps == steps


def test_both_places_of_an_alias_are_named(config_file: Path) -> None:
    (config_file.parent / "base.yaml").write_text("parallel:\n  micro_batch_num: 4\n")
    config_file.write_text(MINIMAL.replace("max_steps: 3", "accumulation_steps: 2") + "base: base.yaml\n")
    message = r"{}and .*base\.yaml:2: train\.accumulation_steps={} and"
    with pytest.raises(ConfigError, match=message.format(r"run\.yaml:4 ", 2)):
        load_config(config_file)
    with pytest.raises(ConfigError, match=message.format("^command line ", 3)):
        load_config(config_file, ["train.accumulation_steps=3"])
    agreed = load_config(config_file, ["train.accumulation_steps=4"])
    assert agreed.train.accumulation_steps == 4


def test_presets_find_data_of_the_projects_folder(config_file, tmp_path, monkeypatch) -> None:
    """From any working directory, where the same name comes first; what is typed stays as typed."""
    project, here = tmp_path / "project", tmp_path / "here"
    (project / "data" / "vocab").mkdir(parents=True)
    (project / "data" / "mine_document.idx").write_bytes(b"")
    here.mkdir()
    monkeypatch.setattr("common.config.load.ROOT", project)
    monkeypatch.chdir(here)
    text = config_file.read_text()
    assert "\ndata:" not in text
    data = "data: {train: [1, data/mine_document, 2, data/absent], tokenizer: data/vocab}\n"
    config_file.write_text(text + data)
    found = load_config(config_file).data
    assert found.train == [1, str(project / "data" / "mine_document"), 2, "data/absent"]
    assert found.tokenizer is not None and found.tokenizer.folder == str(project / "data" / "vocab")
    typed = load_config(config_file, ["data.train=data/mine_document"]).data.train
    assert typed == ["data/mine_document"]
    (here / "data").mkdir()
    (here / "data" / "mine_document_ids.npy").write_bytes(b"")
    assert load_config(config_file).data.train[1] == "data/mine_document"

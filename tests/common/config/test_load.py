"""Files, bases, overrides, and what is said when they are wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from common.config.load import dump_config, flatten, parse_scalar
from common.errors import ConfigError
from common.run_config import load_config

MINIMAL = """
output_dir: out
model: {num_layers: 2, hidden_size: 8, num_heads: 2, seq_length: 16, vocab_size: 100}
train: {max_steps: 3, micro_batch_size: 2}
optimizer: {learning_rate: 6e-4}
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


def test_numbers_without_a_dot_are_numbers(config_file: Path) -> None:
    assert load_config(config_file).optimizer.learning_rate == 6e-4


@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(10**12), 10**12)
    | st.booleans()
    | st.none()
)
def test_scalars_read_back_as_json_writes_them(value: object) -> None:
    import json

    assert parse_scalar(json.dumps(value), "here") == value


def test_yes_and_no_are_text() -> None:
    assert parse_scalar("no", "here") == "no"
    assert parse_scalar("on", "here") == "on"


def test_dump_reads_back_equal(config_file: Path) -> None:
    config = load_config(
        config_file, ["data.train=[0.3,a,0.7,b]", "precision=bf16", "predict.prompt=a: b"]
    )
    config_file.write_text(dump_config(config))
    assert load_config(config_file) == config


def test_main_file_wins_over_bases_and_words_over_files(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.yaml").write_text(MINIMAL + "seed: 1\n")
    (tmp_path / "parts" / "b.yaml").write_text(
        "base: a.yaml\nseed: 2\ntrain: {micro_batch_size: 5}\n"
    )
    main = tmp_path / "main.yaml"
    main.write_text("base: [parts/a.yaml, parts/b.yaml]\noutput_dir: mine\n")
    config = load_config(main, ["train.max_steps=9"])
    assert (
        config.seed,
        config.output_dir,
        config.train.micro_batch_size,
        config.train.max_steps,
    ) == (2, "mine", 5, 9)
    assert config.model.hidden_size == 8


@pytest.mark.parametrize(
    ("base", "main", "words", "inherited"),
    [
        ("decay_steps: 9", "", ["train.max_steps=3"], True),
        ("decay_steps: 9", "train: {max_steps: 4}\n", [], True),
        ("decay_samples: 9", "", ["train.max_tokens=30"], True),
        ("decay_steps: 9", "train: {max_steps: 3}\noptimizer: {decay_steps: 8}\n", [], False),
        ("decay_steps: 9", "", ["optimizer.decay_steps=3", "train.max_steps=4"], False),
        ("decay_steps: 9", "", ["optimizer.decay_steps=null", "train.max_steps=4"], False),
        ("warmup_steps: 9", "", ["train.max_steps=3"], False),
    ],
)
def test_an_end_of_the_schedule_is_inherited(
    tmp_path: Path, base: str, main: str, words: list[str], inherited: bool
) -> None:
    own = MINIMAL.replace("6e-4", f"6e-4, {base}")
    assert own != MINIMAL
    (tmp_path / "base.yaml").write_text(own)
    (tmp_path / "main.yaml").write_text(f"base: base.yaml\n{main}")
    place = load_config(tmp_path / "main.yaml", words).optimizer.inherited_end
    assert (place or "").startswith(str(tmp_path / "base.yaml:")) is inherited


def test_all_faults_are_told_at_once(config_file: Path) -> None:
    assert (
        len(error_of(config_file, "seed=-1", "train.max_step=2", "model.dropout=1.5").splitlines())
        == 3
    )


def test_missing_key_file_and_broken_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("output_dir: out\n")
    assert "model: required" in error_of(path)
    path.write_text("a: [1,\nb: }")
    assert f"{path}:2:" in error_of(path)
    path.write_text("- a\n")
    assert "expected keys and values" in error_of(path)
    assert f"did you mean {path}?" in error_of(tmp_path / "ran.yaml")


def test_bases_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "include each other" in error_of(tmp_path / "a.yaml")


def test_python_objects_are_never_built(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "output_dir: !!python/object/apply:os.system ['touch " + str(tmp_path / "owned") + "']\n"
    )
    assert "not valid YAML" in error_of(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        *((text, [text]) for text in ("42", "1984", "007", "1e3", "true", "yes", "null", "~", "")),
        *((text, [text]) for text in ("Once: upon [a", '"quoted"', "#1", "{a: b}", "- a", "!b")),
        *((text, [text]) for text in ("[CLS][MASK]", "[MASK]", "[CLS]宝玉", "[[Paris]]", "[1] a")),
        *((text, [text]) for text in ("[Laughs, then cries]", "[12 men]", '["a", b]', "[")),
        ("[\"a\", 'b']", ["a", "b"]),
        ('["[CLS]", "it\'s"]', ["[CLS]", "it's"]),
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
        ("predict.bad_words", "true", ["true"]),
        ("serve.name", "1.50", "1.50"),
        ("data.train", "2024", ["2024"]),
        ("data.train", "[A, B]", ["A", "B"]),
        ("data.train", "", None),
        ("data.tokenizer.folder", "2024", "2024"),
        ("predict.logprobs", "2", 2),
    ],
)
def test_text_is_the_same_in_a_file_and_on_the_command_line(
    config_file: Path, key: str, text: str, kept: Any
) -> None:
    *sections, name = key.split(".")
    own = f"{': {'.join(sections)}: {{{name}: {text}}}" if sections else f"{name}: {text}"
    found = [load_config(config_file, [f"{key}={text}"])]
    (config_file.parent / "own.yaml").write_text(
        f"base: {config_file.name}\n{own}{'}' * (len(sections) - 1)}\n"
    )
    found.append(load_config(config_file.parent / "own.yaml"))
    for config in found:
        assert dict(flatten(config.model_dump()))[key] == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [("true", "latest"), ("false", "never"), ("auto", "auto"), ("output/x", "output/x")],
)
def test_resume_words(config_file: Path, text: str, kept: str) -> None:
    assert load_config(config_file, [f"checkpoint.resume={text}"]).checkpoint.resume == kept


@pytest.mark.parametrize(
    "text", ["08", "1e5", ".5e3", "no", "null-ish", "0x1F", "~", "true", "1_000", "a: b", "#x", "é"]
)
def test_text_survives_being_dumped(config_file: Path, text: str) -> None:
    config = load_config(config_file)
    config = config.model_copy(
        update={"output_dir": text, "predict": config.predict.model_copy(update={"prompt": [text]})}
    )
    config_file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(config_file) == config


def test_one_key_of_a_shorthand_refines_it(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "precision: bf16\ndata: {tokenizer: vocab}\n")
    config = load_config(
        config_file, ["precision.softmax=bfloat16", "data.tokenizer.backend=tiktoken"]
    )
    assert (config.precision.compute, config.precision.softmax, config.precision.layer_norm) == (
        "bfloat16",
        "bfloat16",
        "float32",
    )
    assert config.data.tokenizer is not None
    assert (config.data.tokenizer.folder, config.data.tokenizer.backend) == ("vocab", "tiktoken")
    main = config_file.with_name("main.yaml")
    main.write_text("base: run.yaml\nprecision: {layer_norm: bfloat16}\n")
    assert load_config(main).precision.compute == "bfloat16"


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    assert "cannot be read" in error_of(tmp_path)


def test_split_as_list_or_text(config_file: Path) -> None:
    assert load_config(config_file, ["data.split=[98,1,1]"]).data.split == "98,1,1"
    assert load_config(config_file, ["data.split=98,1,1"]).data.split == "98,1,1"
    assert load_config(config_file, ["data.split=98/1/1"]).data.split == "98,1,1"


def test_seed_precisions_are_mappings(config_file: Path) -> None:
    config_file.write_text(
        MINIMAL
        + yaml.safe_dump(
            {"precision": {"parameters": "fp16", "compute": "fp16", "softmax": "fp16"}}
        )
    )
    precision = load_config(config_file).precision
    assert (precision.parameters, precision.compute, precision.softmax, precision.layer_norm) == (
        "float16",
        "float16",
        "float16",
        "float32",
    )


def test_a_length_of_the_command_line_replaces_that_of_the_file(config_file: Path) -> None:
    config = load_config(config_file, ["train.max_epochs=2"])
    assert (config.train.max_epochs, config.train.max_steps) == (2.0, None)
    both = load_config(config_file, ["train.max_epochs=2", "train.max_steps=7"]).train
    assert (both.max_epochs, both.max_steps) == (2.0, 7), "two of one place still contradict"
    assert load_config(config_file, ["train.max_epochs=null"]).train.max_steps is not None


@pytest.mark.parametrize(
    ("word", "same"),
    [
        ("O0", "float32"),
        ("O1", "fp16"),
        ("O2", "{parameters: float16, compute: float16}"),
        (
            "pure_fp16",
            "{parameters: float16, compute: float16, softmax: float16, layer_norm: float16}",
        ),
    ],
)
def test_apexs_words_for_precision(config_file: Path, word: str, same: str) -> None:
    found, expected = (
        load_config(config_file, [f"precision={text}"]).precision for text in (word, same)
    )
    assert found == expected


def test_the_studys_words_for_strategies(config_file: Path) -> None:
    for word, same in (("SPS", "parameter_server"), ("DPS", "ddp")):
        config = load_config(config_file, [f"parallel.strategy={word}"])
        assert config.parallel.strategy == same


def test_presets_find_data_of_the_projects_folder(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_config_that_links_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.symlink_to("run.yaml")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        load_config(path)


def test_bases_that_name_the_next_twice_are_read_once_each(tmp_path: Path) -> None:
    """With a read for each mention, the 30 files would be read 2^30 times."""
    for number in range(30):
        text = f"base: [{number + 1}.yaml, {number + 1}.yaml]\nseed: {number}\n"
        (tmp_path / f"{number}.yaml").write_text(text)
    (tmp_path / "30.yaml").write_text(MINIMAL)
    assert load_config(tmp_path / "0.yaml").seed == 0


def test_bases_in_a_long_chain(tmp_path: Path) -> None:
    for number in range(80):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    with pytest.raises(ConfigError, match="more than 64 levels"):
        load_config(tmp_path / "0.yaml")


def test_a_base_of_two_files_is_not_changed_by_the_first(tmp_path: Path) -> None:
    """The second of two files with one base wins with what it says itself, and with what the base
    says.
    """
    (tmp_path / "base.yaml").write_text(
        MINIMAL.replace("micro_batch_size: 2", "micro_batch_size: 2, accumulation_steps: 4")
    )
    (tmp_path / "a.yaml").write_text(
        "base: base.yaml\ntrain: {micro_batch_size: 5, max_steps: 7}\n"
    )
    (tmp_path / "b.yaml").write_text("base: base.yaml\ntrain: {max_steps: 9}\n")
    (tmp_path / "main.yaml").write_text("base: [a.yaml, b.yaml]\n")
    train = load_config(tmp_path / "main.yaml").train
    assert (train.max_steps, train.micro_batch_size, train.accumulation_steps) == (9, 2, 4)

"""Names of other systems: the table leads to keys that exist, and nothing is guessed across
sections.
"""

import re
from pathlib import Path

import pytest

from common.command_line import RUN_MODES, parse_arguments
from common.config.aliases import ALIASES
from common.config.explain import explain_key
from common.config.hints import (
    TABLES,
    _names_of_others,
    hint,
    schema_keys,
    unknown_arguments,
)
from common.config.schema import RunConfig
from common.dialects.others import ABSENT, HERE as OTHERS
from common.errors import ConfigError
from common.run_config import load_config

HERE = _names_of_others()[0]
WORDS_BETWEEN = {"and", "or", "times"}


@pytest.mark.parametrize("name", sorted(HERE))
def test_every_foreign_name_leads_to_what_is_there(name: str) -> None:
    target = re.sub(r"\(.*?\)", "", HERE[name])
    if target.startswith("--run_mode "):
        assert target.removeprefix("--run_mode ") in RUN_MODES
        return
    words = [word for word in re.split(r"[ ,]+", target) if word and word not in WORDS_BETWEEN]
    keys = [word.partition("=")[0] for word in words]
    assert keys and all(key in (*schema_keys(), *ALIASES, "base") for key in keys), target
    assert name not in schema_keys(), "a key of ours needs no translation"


def test_each_name_has_one_meaning() -> None:
    """The list of systems without a table repeats no name of a table."""
    theirs = {key.removesuffix(".*").rpartition(".")[2] for table in TABLES for key in table}
    assert not theirs & {*OTHERS, *ABSENT} and not {*OTHERS} & {*ABSENT}
    assert all(name.rpartition(".")[0] in {"", *schema_keys()} for name in OTHERS)


def test_values_in_the_table_are_taken(tmp_path: Path) -> None:
    """Flags that are written key=value."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "output_dir: out\nmodel: {num_layers: 1, hidden_size: 8, num_heads: 1, seq_length: 8,"
        " vocab_size: 9}\noptimizer: {learning_rate: 1.0}\n"
    )
    words = {target for target in HERE.values() if re.fullmatch(r"[\w.]+=\w+", target)}
    assert words >= {"precision=fp16", "predict.strategy=sampling", "parallel.zero_stage=3"}
    load_config(path, sorted(words))


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("pipeline_model_parallel_size", "parallel.pipeline_stage"),
        ("gradient_accumulation_steps", "train.accumulation_steps"),
        ("eval_interval", "validation.interval"),
        ("train.save_interval", "checkpoint.interval"),
        ("checkpoint.save_steps", "checkpoint.interval"),
        ("predict.do_sample", "predict.strategy=sampling"),
        ("predict.length", "predict.max_new_tokens"),
        ("data.data_path", "data.train"),
        ("resume_training", "checkpoint.resume"),
        ("fp16", "precision=fp16"),
        ("base_config", "base"),
        ("local_batch_size", "train.micro_batch_size times train.accumulation_steps"),
        ("data.vocab_file", "data.tokenizer.vocab_file"),
        ("loss_scale.loss_scale_window", "loss_scale.window"),
        ("Generation", "predict"),
        ("data.eos_id", "data.eod_id"),
        ("eod_reset", "data.reset_position_ids and data.reset_attention_mask"),
        # a typing error, in its section first
        ("train.max_step", "train.max_steps"),
        ("data.shufle", "data.shuffle"),
        ("learning_rate", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_the_hint_is_the_right_key(typed: str, right: str) -> None:
    assert hint(typed) == f"; did you mean {right}?"


@pytest.mark.parametrize(
    ("words", "may_say_more"),
    [
        ("run_mode trainer only_save_strategy wandb_log moe_config Quantization run_modes", True),
        ("frobnicate train.frobnicate Globe data.dat interval_of_hashes x", False),
    ],
)
def test_an_unrelated_word_gets_no_guess(words: str, may_say_more: bool) -> None:
    for typed in words.split():
        assert "did you mean" not in hint(typed) and (may_say_more or hint(typed) == "")


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["--lr", "1e-3"], "--lr: did you mean optimizer.learning_rate=1e-3?"),
        (["--max-steps", "5"], "--max-steps: did you mean train.max_steps=5?"),
        (["--max_steps=5"], "--max_steps=5: did you mean train.max_steps=5?"),
        (
            ["--do_sample", "--run_mode=plan"],
            "--do_sample: did you mean predict.strategy=sampling?",
        ),
        (["--fp16"], "--fp16: did you mean precision=fp16?"),
        (["--prefix", "x"], "--prefix: did you mean predict.prompt or checkpoint.ckpt_prefix?"),
    ],
)
def test_the_command_line_suggests_the_word(
    words: list[str], suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--config", "x.yaml", "--run_mode", "plan", *words])
    assert stop.value.code == 2
    assert suggested in capsys.readouterr().err.splitlines()


def test_a_key_is_explained() -> None:
    text = explain_key("optimizer.learning_rate")
    assert text.splitlines()[0] == "optimizer.learning_rate"
    assert explain_key("learning_rate") == text and explain_key("lr").endswith("\n" + text)
    assert "lr corresponds to optimizer.learning_rate" in explain_key("lr")
    for key, *words in (
        ("optimizer.learning_rate", "above 0", "Peak learning rate.", "the key is required"),
        ("optimizer.schedule", "cosine, linear, polynomial, constant"),
        ("parallel.zero_stage", "at least 0, at most 3"),
        ("predict.logit_bias", "mapping to number"),
        ("predict.bad_words", "text or list of (text or list of whole number)"),
        ("predict.prompt", "default  []"),
    ):
        assert [word for word in words if word not in explain_key(key)] == []


@pytest.mark.parametrize("key", [*schema_keys(), "base", *OTHERS])
def test_everything_can_be_explained(key: str) -> None:
    text = explain_key(key)
    assert key in text and text.endswith("\n") and max(map(len, text.splitlines())) <= 120


def test_the_sections_are_listed() -> None:
    text = explain_key(None)
    shown = set(re.findall(r"^  (\w+) +\S", text, re.M))
    alone = re.search("keys of the whole run: (.*)", text)
    assert shown | set(alone[1].split(", ")) == set(RunConfig.model_fields)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.max_step", r"did you mean train.max_steps\?"),
        ("moe_config", "mixture of experts is not in this version"),
    ],
)
def test_an_unknown_key_cannot_be_explained(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"--explain {key}: unknown key; {hint}"):
        explain_key(key)


def test_explain_needs_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--explain", "checkpoint"])
    assert stop.value.code == 0
    assert "checkpoint (a section)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_arguments(["--explain"])
    assert capsys.readouterr().out == explain_key(None)


def test_an_unknown_option_does_not_accuse_the_keys_behind_it() -> None:
    """argparse returns them as unknown too, since the option may have had several values."""
    words = ["--max_lr", "8", "train.max_steps=2", "data.tokenizer=vocab"]
    first, *rest = unknown_arguments(words, ["--config", "a.yaml", *words]).splitlines()
    assert first.startswith("unrecognized arguments: --max_lr 8; keys of the configuration")
    assert rest == ["--max_lr: did you mean optimizer.learning_rate=8?"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--accelerator", "8xH100"], ("H100", 8)),
        (["--accelerator", "2 x Ascend 910A", "--devices", "2"], ("Ascend 910A", 2)),
        (["--accelerator", "H100", "--devices", "4"], ("H100", 4)),
        (["--accelerator", "H100"], ("H100", None)),
        (
            ["--accelerator", "8xH100", "--devices", "4"],
            "--devices and --accelerator differ: 4 and 8",
        ),
        (["--devices", "4"], "add --accelerator NAME, such as H100"),
    ],
)
def test_the_number_of_accelerators(
    words: list[str], expected: tuple[str, int] | str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", "a.yaml", "--run_mode", "plan", *words]
    if isinstance(expected, str):
        with pytest.raises(SystemExit):
            parse_arguments(command)
        assert expected in capsys.readouterr().err
    else:
        found = parse_arguments(command)
        assert (found.accelerator, found.devices) == expected

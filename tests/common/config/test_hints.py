"""Names of other systems: the table leads to keys that exist, and nothing is guessed across sections."""

import re

import pytest

from common.command_line import RUN_MODES, parse_arguments
from common.config.aliases import ALIASES
from common.config.explain import explain_key
from common.config.hints import TABLES, _names_of_others, hint, schema_keys, unknown_arguments
from common.config.load import build_config
from common.config.schema import RunConfig
from common.dialects.others import ABSENT, HERE as OTHERS
from common.errors import ConfigError
from tests.common.resolve.test_refusals import with_words
from tests.tiny import tiny_run

HERE = _names_of_others()[0]
WORDS_BETWEEN = {"and", "or", "times"}


def test_every_foreign_name_leads_to_what_is_there() -> None:
    known = {*schema_keys(), *ALIASES, "base"}
    for name, target in HERE.items():
        assert name not in schema_keys(), "a key of ours needs no translation"
        if target.startswith("--run_mode "):
            assert target.removeprefix("--run_mode ") in RUN_MODES
            continue
        words = re.split(r"[ ,]+", re.sub(r"\(.*?\)", "", target).strip())
        keys = {word.partition("=")[0] for word in words} - WORDS_BETWEEN
        assert keys and keys <= known, f"{name}: {target}"


def test_each_name_has_one_meaning() -> None:
    """The list of systems without a table repeats no name of a table."""
    theirs = {key.removesuffix(".*").rpartition(".")[2] for table in TABLES for key in table}
    assert not theirs & {*OTHERS, *ABSENT} and not {*OTHERS} & {*ABSENT}
    assert all(name.rpartition(".")[0] in {"", *schema_keys()} for name in OTHERS)


def test_values_in_the_table_are_taken() -> None:
    """Flags that are written key=value."""
    words = {target for target in HERE.values() if re.fullmatch(r"[\w.]+=\w+", target)}
    assert words >= {"precision=fp16", "predict.strategy=sampling", "parallel.zero_stage=3"}
    build_config(with_words(tiny_run(), sorted(words)))


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("pipeline_model_parallel_size", "parallel.pipeline_stage"),
        ("train.save_interval", "checkpoint.interval"),
        ("predict.do_sample", "predict.strategy=sampling"),
        ("fp16", "precision=fp16"),
        ("base_config", "base"),
        ("local_batch_size", "train.micro_batch_size times train.accumulation_steps"),
        ("data.vocab_file", "data.tokenizer.vocab_file"),
        ("loss_scale.loss_scale_window", "loss_scale.window"),
        ("eod_reset", "data.reset_position_ids and data.reset_attention_mask"),
        # a typing error, in its section first
        ("train.max_step", "train.max_steps"),
        ("data.shufle", "data.shuffle"),
        ("train.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_the_hint_is_the_right_key(typed: str, right: str) -> None:
    assert hint(typed) == f"; did you mean {right}?"


def test_an_unrelated_word_gets_no_guess() -> None:
    for typed in ("run_mode", "trainer", "only_save_strategy", "moe_config", "Quantization"):
        assert "did you mean" not in hint(typed)
    for typed in ("frobnicate", "train.frobnicate", "Globe", "data.dat", "interval_of_hashes"):
        assert hint(typed) == ""


def test_the_command_line_suggests_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    for words, suggested in (
        (["--lr", "1e-3"], "--lr: did you mean optimizer.learning_rate=1e-3?"),
        (["--max_steps=5"], "--max_steps=5: did you mean train.max_steps=5?"),
        (["--fp16"], "--fp16: did you mean precision=fp16?"),
        (["--prefix", "x"], "--prefix: did you mean predict.prompt or checkpoint.ckpt_prefix?"),
    ):
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
        ("parallel.zero_stage", "at least 0, at most 3"),
        ("predict.logit_bias", "mapping to number"),
        ("predict.bad_words", "text or list of (text or list of whole number)"),
        ("predict.prompt", "default  []"),
        ("micro_batch_num", "micro_batch_num: Another name for train.accumulation_steps.\n"),
    ):
        assert [word for word in words if word not in explain_key(key)] == []


def test_everything_can_be_explained() -> None:
    for key in (*schema_keys(), "base", *OTHERS):
        text = explain_key(key)
        assert key in text and text.endswith("\n") and max(map(len, text.splitlines())) <= 120


def test_the_sections_are_listed() -> None:
    text = explain_key(None)
    shown = set(re.findall(r"^  (\w+) +\S", text, re.M))
    alone = re.search("keys of the whole run: (.*)", text)
    assert shown | set(alone[1].split(", ")) == set(RunConfig.model_fields)


def test_an_unknown_key_cannot_be_explained() -> None:
    said = r"--explain train.max_step: unknown key; did you mean train.max_steps\?"
    with pytest.raises(ConfigError, match=said):
        explain_key("train.max_step")


def test_explain_needs_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["checkpoint"], "checkpoint (a section)"), ([], explain_key(None))):
        with pytest.raises(SystemExit, match="0"):
            parse_arguments(["--explain", *words])
        assert said in capsys.readouterr().out


def test_an_unknown_option_does_not_accuse_the_keys_behind_it() -> None:
    """argparse returns them as unknown too, since the option may have had several values."""
    words = ["--max_lr", "8", "train.max_steps=2", "data.tokenizer=vocab", "--auto_trans_ckpt=1"]
    first, *rest = unknown_arguments(words, ["--config", "a.yaml", *words]).splitlines()
    assert first.startswith("unrecognized arguments: --max_lr 8 --auto_trans_ckpt=1; keys of the configuration")
    assert [line[:29] for line in rest] == ["--max_lr: did you mean optimi", "--auto_trans_ckpt=1: checkpoi"]

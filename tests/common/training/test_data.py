"""The data of a run, opened from its config: what training says of vocabularies before its first step."""

import itertools
import json
import logging
import os
import re
import resource
import shutil
import threading
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.checkpoint.snapshot import TrainState
from common.config.load import build_config
from common.config.resolved import as_run
from common.dataset.indexed import IndexedWriter
from common.dataset.metadata import METADATA_EXTENSION, Metadata, write_metadata
from common.dataset.token_files import with_extension
from common.errors import ConfigError, DataError, TokenizerError
from common.evaluation.task import run_task
from common.parallel.run import Run
from common.resolve.derive import length_in_steps, resolve_config
from common.tokenizer import load_tokenizer
from common.training import data as module
from common.training.data import TrainingData, open_corpus, open_data, open_tokenizer
from common.training.session import announce
from common.training.start import Start
from tests.reference import MERGES, write_vocabulary
from tests.tiny import tiny_run

SIZE = 101


def say(prefix: Path, eod: int | None) -> None:
    """Write the pair's record: a tokenizer of SIZE tokens, and the end of its documents."""
    record = Metadata(
        tokenizer="Characters", vocab_size=SIZE, tokenizer_sha256="a" * 64, eod_id=eod,
        documents=1, sequences=1, tokens=1, empty_documents=0, sources=(),
    )  # fmt: skip
    write_metadata(with_extension(prefix, METADATA_EXTENSION), record)


@pytest.fixture
def pair(corpus_prefix: Path, tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus"
    for ending in (".bin", ".idx"):
        shutil.copy(with_extension(corpus_prefix, ending), with_extension(prefix, ending))
    say(prefix, None)
    return prefix


def make_config(prefix: Path, tokenizer: Path | None, vocab_size: int = SIZE, **changes: Any) -> Run:
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": 16, "vocab_size": vocab_size}
    usual: dict[str, Any] = {"model": model, "train": {"max_steps": 1, "micro_batch_size": 1}, "validation": {}}
    if tokenizer is not None:
        usual["data__tokenizer"] = str(tokenizer)
    return resolve_config(build_config(tiny_run("unused", prefix, **(usual | changes))))


def open_all(config: Run, *, training: bool = True, **place: Any) -> tuple[TrainingData, Run]:
    corpus = open_corpus(config, training=training)
    length = {}
    if corpus.samples is not None:
        length = length_in_steps(config, config.batch_sizes, corpus.samples.samples_per_epoch)
    run = as_run(Run, config, model=corpus.vocabulary, data={"eod_id": corpus.eod_id}, **length)
    return open_data(run, corpus, **place), run


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The tokenizer that every folder holds."""
    tokenizer = SimpleNamespace(kind="Characters", sha256="a" * 64, vocab_size=SIZE)
    monkeypatch.setattr(module, "load_tokenizer", lambda *words: tokenizer)
    return tokenizer


def remarks(prefix: Path, tokenizer: Path | None, **changes: Any) -> tuple[str, ...]:
    return open_all(make_config(prefix, tokenizer, **changes))[0].remarks


MADE = r"made with Characters of 101 .*\(sha256 a{12}\), and data\.tokenizer is Characters of 102 .*\(sha256 b{12}\)"
TOO_SMALL = r"has 101 tokens but model\.vocab_size=100; set model\.vocab_size=101"


@pytest.mark.parametrize(
    ("data", "tokenizer", "vocab_size", "said"),
    [
        ("", "", 50257, None),
        ("a", "", 101, None),
        ("a", "a", 128, None),
        ("", "a", 129, "model.vocab_size=129, but the tokenizer has 101 tokens: no token uses 28 rows"),
        # 8 x 1001 of 8 x 1001 + 16 x 8 + 12 x 64 + 13 x 8 + 16 parameters are the table's
        ("a", "", 1001, "no token uses 900 rows of the embedding, 80% of all param.*model.vocab_size=101$"),
        ("a", "b", 102, MADE),
        ("a", "", 100, f"the tokenizer of the data {TOO_SMALL}"),
        ("", "a", 100, rf"data\.tokenizer {TOO_SMALL}"),
        ("a", "b", 101, f"{MADE}.* set data.tokenizer to the folder"),
    ],
)
def test_what_is_said_of_vocabularies(pair, corpus_prefix, tmp_path, given, data, tokenizer, vocab_size, said) -> None:
    """data, tokenizer: the letter of the digest. Of a vocabulary beyond the model an error, of others one remark."""
    if tokenizer == "b":
        given.sha256, given.vocab_size = "b" * 64, SIZE + 1
    config = make_config(pair if data else corpus_prefix, tmp_path if tokenizer else None, vocab_size)
    if vocab_size < (102 if tokenizer == "b" else 101):
        with pytest.raises(ConfigError, match=said):
            open_all(config)
        return
    found, _ = open_all(config)
    assert len(found.remarks) == (said is not None) and all(re.search(said, remark) for remark in found.remarks)
    assert (found.tokenizer_record or {"sha256": ""})["sha256"] == 64 * (data or tokenizer)


def test_a_blend_of_data_that_two_tokenizers_made_is_refused(pair, tmp_path) -> None:
    other = tmp_path / "other"
    for ending in (".bin", ".idx", METADATA_EXTENSION):
        shutil.copy(with_extension(pair, ending), with_extension(other, ending))
    record = with_extension(other, METADATA_EXTENSION)
    record.write_text(record.read_text().replace("a" * 64, "b" * 64))
    with pytest.raises(DataError, match=f"{pair} and {other} were made with different tokenizers; preprocess them"):
        open_all(make_config(Path(), None, data__train=[1, str(pair), 1, str(other)]))


def test_predict_says_so_too(tmp_path, given, caplog) -> None:
    open_tokenizer(make_config(tmp_path, tmp_path, vocab_size=1001))
    assert "no token uses 900 rows" in caplog.text


def test_a_tokenizer_that_is_not_there_or_broken(pair, tmp_path) -> None:
    (remark,) = remarks(pair, tmp_path / "none")
    assert f"{tmp_path / 'none'} is not there, and training does not need it, but predict does" in remark
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("broken")
    assert "tokenizer.json: not JSON" in remarks(pair, tmp_path / "broken")[0]
    with_extension(pair, METADATA_EXTENSION).unlink()
    with pytest.raises(TokenizerError):  # now only it tells the vocabulary
        open_all(make_config(pair, tmp_path / "broken"))
    (remark,) = remarks(pair, tmp_path / "none")
    assert "the data does not record its vocabulary" in remark


def test_a_library_that_is_built_for_another_system_does_not_stop_training(pair, tmp_path, break_package) -> None:
    break_package("sentencepiece")
    (tmp_path / "tokenizer.model").touch()
    (remark,) = remarks(pair, tmp_path / "tokenizer.model")
    assert "which predict needs, but not training: the package sentencepiece" in remark and "GLIBC_2.38" in remark


POSITIONS = {"data__reset_position_ids": True}


def test_the_end_of_document_is_the_data_s_else_the_tokenizer_s(pair, corpus_prefix, tmp_path, given) -> None:
    def eod_of(prefix: Path, tokenizer: Path | None = None, **changes: Any) -> int | None:
        return open_all(make_config(prefix, tokenizer, **changes))[1].data.eod_id

    given.eod_id = 9
    say(pair, 5)
    assert eod_of(pair) is None, "no key needs it"
    assert eod_of(pair, **POSITIONS) == eod_of(pair, tmp_path, **POSITIONS) == 5
    assert eod_of(pair, data__eod_id=6, **POSITIONS) == 6
    assert eod_of(corpus_prefix, tmp_path, **POSITIONS) == 9
    blend = [0.5, str(corpus_prefix), 0.5, str(pair)]
    assert eod_of(pair, data__train=blend, **POSITIONS) == 5


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A vocabulary of 262 byte-level tokens; ``told`` beside it has characters of 2 and 3 bytes, which windows cut."""
    write_vocabulary(tmp_path / "vocabulary", MERGES)
    tokenizer = load_tokenizer("GPT2BPETokenizer", tmp_path / "vocabulary")
    with IndexedWriter(tmp_path / "told", np.uint16) as writer:
        for number in range(40):
            ids = tokenizer.encode(f"{number} hello théâtre 春风 the hell")
            writer.append(np.append(ids, tokenizer.eod_id), np.array([len(ids) + 1]))
    return tmp_path


@pytest.mark.parametrize("masks", [False, True, "targets"])
def test_bytes_of_a_validation_are_those_of_the_text_that_its_windows_predict(told, masks) -> None:
    """In OpenAI's encoder.json each character of a token stands for one byte."""
    vocabulary, end = told / "vocabulary", 261
    spelling = list(json.loads((vocabulary / "encoder.json").read_text()))
    changes: dict[str, Any] = {"data__eod_mask_loss": masks, "data__split": "50,50,0"}
    changes["train"] = {"max_steps": 1, "micro_batch_size": 1, "global_batch_size": 2}
    config = make_config(told / "told", vocabulary, 262, **changes)
    data, _ = open_all(config)
    [windows] = data.validation.values()
    expected = 0
    for before, token in (pair for batch in windows() for row in batch.tolist() for pair in itertools.pairwise(row)):
        if token != end and not (masks is True and before == end):
            expected += len(spelling[token])
    sizes = data.validation_bytes()
    assert expected > 500 and list(sizes.values()) == [expected]
    of_two = [open_all(config, rank=rank, ranks=2)[0] for rank in range(2)]
    assert [each.validation_bytes() for each in of_two] == [sizes, {}], "one rank of two reports"


def test_no_bytes_where_they_are_not_known(told, pair) -> None:
    """Without a tokenizer, for an id that it lacks, with one of words, and with another one than the data's."""
    write_vocabulary(told / "fewer", MERGES[:1])
    (told / "words").mkdir()
    (told / "words" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"]))
    for data, name in (("told", ""), ("told", "none"), ("told", "fewer"), ("told", "words"), ("corpus", "vocabulary")):
        tokenizer = told / name if name else None
        found, _ = open_all(make_config(told / data, tokenizer, 262, data__split="50,50,0"))
        assert found.validation and found.validation_bytes() == {}, name


def test_data_without_an_end_of_document_are_refused(pair, corpus_prefix) -> None:
    keys = POSITIONS | {"data__eod_mask_loss": True}
    for prefix, eod, training, message in (
        (pair, None, True, "corpus do not end.*--no-append-eod"),
        (corpus_prefix, None, True, "not known.*set data.tokenizer or data.eod_id"),
        (pair, 101, True, "data.eod_id=101 is not a token.*has 101"),
        (pair, 101, False, "data.eod_id=101 is not a token"),
    ):
        with pytest.raises(ConfigError, match=f"data.reset_position_ids and data.eod_mask_loss: .*{message}"):
            open_all(make_config(prefix, None, data__eod_id=eod, **keys), training=training)


def test_a_warning_if_no_window_holds_the_end_of_document(pair: Path) -> None:
    say(pair, 3)  # occurs among the random tokens
    assert remarks(pair, None, **POSITIONS) == ()
    wide: dict[str, Any] = {"vocab_size": 110, "data__eod_id": 109}
    (remark,) = remarks(pair, None, **POSITIONS, **wide)
    assert f"data.eod_id=109, but the documents of {pair} end with 3; leave the key" in remark
    with_extension(pair, METADATA_EXTENSION).unlink()
    (remark,) = remarks(pair, None, **POSITIONS, **wide)
    assert "the first 64 windows do not hold the token 109 that ends documents" in remark


def test_batches_are_the_samplers_from_any_place(corpus_prefix: Path) -> None:
    data, _ = open_all(make_config(corpus_prefix, None, data__prefetch=2))
    expected = list(islice(data.batches(TrainState()), 50))
    tenth, threads = expected[9], threading.active_count()
    state = TrainState(consumed_samples=tenth.consumed_samples, sample_hash=tenth.sample_hash)
    with data.training_batches(state) as batches:
        for batch, found in zip(expected[10:], islice(batches, 40), strict=True):
            np.testing.assert_array_equal(found.tokens, batch.tokens)
            assert (found.consumed_samples, found.sample_hash) == (batch.consumed_samples, batch.sample_hash)
    assert threading.active_count() == threads
    # a fault of the data arrives as it is: the corpus holds tokens up to 100
    data, _ = open_all(make_config(corpus_prefix, None, vocab_size=50))
    with data.training_batches(TrainState()) as batches, pytest.raises(DataError, match="vocab_size is 50"):
        list(islice(batches, 50))


@pytest.mark.parametrize(
    ("split", "interval", "reason", "can_evaluate"),
    [
        ("90,10,0", "never", "validation.interval is never", True),  # only training reads the key
        ("1,0,0", 1000, "data.split is 1,0,0", False),
        ("100000,1,0", 2, "holds 0 of ", False),
    ],
)
def test_a_run_without_validation_starts_and_says_why(corpus_prefix, split, interval, reason, can_evaluate) -> None:
    config = make_config(corpus_prefix, None, 1000, data__split=split, validation__interval=interval)
    data, _ = open_all(config)
    assert not data.validation and reason in str(data.no_validation)
    evaluated, _ = open_all(config, training=False)
    assert bool(evaluated.validation) is can_evaluate
    if not can_evaluate:
        with pytest.raises(DataError, match=r"nothing to evaluate on.*give data\.validation"):
            run_task(evaluated, config, pytest.fail, pytest.fail)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str | float]:
    """data.train of a blend of 10,000 and 40 documents of 300 tokens, half each."""
    folder = tmp_path_factory.mktemp("sets")
    for name, documents in (("big", 10_000), ("small", 40)):
        with IndexedWriter(folder / name, np.uint16) as writer:
            tokens = np.arange(documents * 300) % 60_000
            writer.append(tokens, np.full(documents, 300))
    return [0.5, str(folder / "big"), 0.5, str(folder / "small")]


def blend_config(sets: list[str | float], **changes: Any) -> Run:
    keys = {"model__seq_length": 128, "data__split": "949,50,1", "data__train": sets}
    return make_config(Path(), None, 65_000, **{**keys, **changes})


@pytest.mark.parametrize(
    ("whole", "limit", "windows"),
    [
        (False, 0, {"big": 1171, "small": 4}),
        (True, 0, {"big": 23437, "small": 93}),
        (False, 100, {"big": 99, "small": 1}),
    ],
)
def test_a_validation_reads_every_window_of_every_part_once(sets, whole, limit, windows) -> None:
    """Ranks and micro batch do not change which windows these are."""
    changes = {"data__validation": sets if whole else None, "validation__max_samples": limit}
    found = []
    for ranks, micro in ((1, 8), (3, 16)):
        config = blend_config(sets, **changes, validation__micro_batch_size=micro)
        runs = [open_all(config, training=False, rank=rank, ranks=ranks)[0] for rank in range(ranks)]
        passes = [run.validation for run in runs]
        assert all(list(each) == list(windows) for each in passes)
        rows = {name: np.concatenate([batch[:, 0] for each in passes for batch in each[name]()]) for name in windows}
        assert {name: len(row) for name, row in rows.items()} == windows
        found.append({name: sorted(row.tolist()) for name, row in rows.items()})
    first = 0 if whole else 9490 * 300
    starts = [(first + 128 * window) % 60_000 for window in range(windows["big"])]
    assert found[0] == found[1] and found[0]["big"] == sorted(starts)


def test_an_epoch_of_a_blend_has_the_windows_of_all_parts(sets, caplog) -> None:
    """22,242 + 89, half of them from each."""
    config = blend_config(sets, train={"max_epochs": 1, "micro_batch_size": 1})
    data, config = open_all(config)
    assert data.samples_per_epoch == config.train.max_steps == 22242 + 89
    caplog.set_level(logging.INFO)
    announce(config, data, "cpu", Start(), TrainState())
    assert "length: 22331 steps = 1.00 epochs of 22,331 samples" in caplog.messages
    assert "blend: big 0.5 -> 0.502 epochs, small 0.5 -> 125 epochs" in caplog.messages


def test_a_part_without_a_validation_document_leaves_the_others(sets: list[str | float]) -> None:
    data, _ = open_all(blend_config(sets, data__split="9990,9,1"))
    assert list(data.validation) == ["big"] and data.no_validation is None
    (remark,) = data.remarks
    assert remark.startswith("no validation of small: ") and "holds 0 of 40 documents" in remark
    neither, _ = open_all(blend_config(sets, data__split="1000000,1,1"))
    assert not neither.validation and "holds 0 of 10000" in str(neither.no_validation)


def test_a_blend_has_more_parts_than_a_process_has_files_by_default(tmp_path: Path) -> None:
    entries: list[str | float] = []
    for number in range(30):
        with IndexedWriter(tmp_path / f"part{number}", np.uint16) as writer:
            writer.append(np.arange(300), np.full(1, 300))
        entries += [1, str(tmp_path / f"part{number}")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        changes = {"data__split": "1,0,0", "train": {"max_epochs": 1, "micro_batch_size": 1}}
        data, _ = open_all(blend_config(entries, **changes))
        assert data.samples_per_epoch == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""The data of a run, opened from its config: what training says of vocabularies before its first step."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.load import build_config
from common.config.schema import RunConfig
from common.dataset.metadata import METADATA_EXTENSION, Metadata, write_metadata
from common.dataset.token_files import with_extension
from common.errors import TokenizerError
from common.log import LOG, start_log
from common.resolve.derive import resolve_config
from common.training import data as module
from common.training.data import open_data, open_tokenizer

SIZE = 101


@pytest.fixture
def pair(corpus_prefix: Path, tmp_path: Path) -> Path:
    """A pair that says it was made with a tokenizer of SIZE tokens."""
    prefix = tmp_path / "corpus"
    for ending in (".bin", ".idx"):
        shutil.copy(with_extension(corpus_prefix, ending), with_extension(prefix, ending))
    write_metadata(
        with_extension(prefix, METADATA_EXTENSION),
        Metadata(
            tokenizer="Characters", vocab_size=SIZE, tokenizer_sha256="a" * 64, eod_id=None, documents=1, sequences=1, tokens=1,
            empty_documents=0, sources=(),
        ),
    )  # fmt: skip
    return prefix


def make_config(prefix: Path, tokenizer: Path | None, vocab_size: int = SIZE) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": "unused",
        "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": 16, "vocab_size": vocab_size},
        "train": {"max_steps": 1, "micro_batch_size": 1},
        "optimizer": {"learning_rate": 0.1},
        "data": {"train": str(prefix), "split": "90,10,0"} | ({} if tokenizer is None else {"tokenizer": str(tokenizer)}),
    }
    return resolve_config(build_config(tree))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The tokenizer that every folder holds."""
    tokenizer = SimpleNamespace(kind="Characters", sha256="a" * 64, vocab_size=SIZE)
    monkeypatch.setattr(module, "load_tokenizer", lambda *words: tokenizer)
    return tokenizer


def test_what_fits_is_not_remarked(pair: Path, tmp_path: Path, given: SimpleNamespace) -> None:
    assert open_data(make_config(pair, tmp_path))[0].remarks == () == open_data(make_config(pair, None))[0].remarks


def test_another_tokenizer_than_that_of_the_data(pair: Path, tmp_path: Path, given: SimpleNamespace) -> None:
    given.sha256 = "b" * 64
    data, _ = open_data(make_config(pair, tmp_path))
    assert len(data.remarks) == 1 and "the data were made with Characters of 101 tokens (sha256 aaaaaaaaaaaa)" in data.remarks[0]
    assert data.tokenizer_record is not None and data.tokenizer_record["sha256"] == "a" * 64


def test_more_rows_than_tokens(pair: Path, tmp_path: Path, given: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    (remark,) = open_data(make_config(pair, tmp_path, vocab_size=1001))[0].remarks
    # 8 x 1001 of 8 x 1001 + 16 x 8 + 12 x 64 + 13 x 8 + 16 parameters are the table's
    assert "no token reaches 900 rows of the embedding, 80% of all parameters" in remark
    start_log()
    open_tokenizer(make_config(pair, tmp_path, vocab_size=1001))
    LOG.handlers.clear()
    assert "no token reaches 900 rows" in capsys.readouterr().out, "predict says so too"


def test_a_tokenizer_that_is_not_there_or_broken(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (remark,) = open_data(make_config(pair, tmp_path / "none"))[0].remarks
    assert f"{tmp_path / 'none'} is not there" in remark and "training does without it, predict does not" in remark

    def broken(*words: Any) -> None:
        raise TokenizerError("merges.txt: broken")

    monkeypatch.setattr(module, "load_tokenizer", broken)
    (remark,) = open_data(make_config(pair, tmp_path))[0].remarks
    assert "merges.txt: broken" in remark
    with_extension(pair, METADATA_EXTENSION).unlink()
    with pytest.raises(TokenizerError):  # now it alone tells the vocabulary
        open_data(make_config(pair, tmp_path))
    (remark,) = open_data(make_config(pair, tmp_path / "none"))[0].remarks
    assert "the data do not say their vocabulary" in remark

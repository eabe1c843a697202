"""Input files that the system does not let us read: each reader has one error, of exit code 2, that
names the file and a remedy.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.cluster.rank_table_files import read_table
from common.conversion.convert import convert
from common.dataset.corpus import open_corpus
from common.dataset.indexed import IndexedDataset
from common.dataset.metadata import read_metadata
from common.dataset.mindrecord_file import MindRecordFile
from common.errors import UserError
from common.generation.prompts import read_prompts
from common.run_config import load_config
from common.systems.hugging_face.weights import read_config as read_hugging_face
from common.systems.run_state import read_model_yaml
from common.tensor_files.containers import open_tensors
from common.tokenizer.bpe_files import read_vocabulary


def open_weights(path: Path) -> None:
    with open_tensors(path):
        pass


READERS: dict[str, Callable[[Path], Any]] = {
    "run.yaml": load_config,
    "table.json": read_table,
    "config.json": read_hugging_face,
    "model.yaml": read_model_yaml,
    "corpus.jsonl": open_corpus,
    "tokens.bin": IndexedDataset,
    "tokens.idx": IndexedDataset,
    "tokens.meta.json": read_metadata,
    "rows.mindrecord": MindRecordFile,
    "prompts.txt": read_prompts,
    "vocab.json": lambda path: read_vocabulary(path, path),
    "model.safetensors": open_weights,
    "model.safetensors.index.json": open_weights,
    "gpt2.ckpt": open_weights,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*READERS, "rows.mindrecord.db"):
        (tmp_path / name).write_bytes(b"x" * 64)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "allow this user to read it"), (errno.EIO, "check the path and the disk")],
)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, remedy: str
) -> None:
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError) as caught:
        READERS[name](folder / name)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert name in message and remedy in message and os.strerror(number) in message


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_at_once(folder: Path, name: str) -> None:
    """To open one would wait for a writer for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match="a pipe"):
        READERS[name](folder / name)


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("stat", lambda folder: IndexedDataset(folder / "tokens")),
        ("stat", lambda folder: MindRecordFile(folder / "rows.mindrecord")),
        ("stat", lambda folder: open_corpus(folder / "corpus.txt")),
        ("is_file", lambda folder: convert(folder, folder / "out", target_format="hf")),
    ],
)
def test_a_folder_that_cannot_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, read: Callable[[Path], Any]
) -> None:
    def refuse(path: Path, **_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "weights").mkdir()
    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(UserError, match="Permission denied; allow this user to read it"):
        read(tmp_path / "weights")


# ---- values of wrong types ----


PAGE = {"page_id": 0, "page_type": "BLOB_DATA", "page_size": 17, "end_row_id": 1}
FIELD = {"schema": {"input_ids": {"type": "int32", "shape": [-1]}}, "blob_fields": ["input_ids"]}


def header_of(**changes: Any) -> bytes:
    """The header of a MindRecord file of one row, as JSON with Infinity where a float is
    infinite.
    """
    header = {
        "version": "3.0", "header_size": 1024, "page_size": 1024, "schema": [FIELD],
        "page": [PAGE], "shard_addresses": ["a"],
    }  # fmt: skip
    text = json.dumps(header | changes).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"page_size": float("inf")}, "a header that is not a MindRecord's"),
        ({"page": [5]}, "a header that is not a MindRecord's"),
        ({"version": [[]]}, "has format version"),
    ],
)
def test_headers_of_mindrecord(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(header_of(**changes).ljust(2048, b"\0"))
    (tmp_path / "a.db").touch()
    with pytest.raises(UserError, match=problem):
        MindRecordFile(path)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("vocab_size", None, "'None' where a whole number is expected"),
        ("tokens", -1, "'-1' where a whole number is expected"),
        ("sources", [1], "does not describe token files"),
        ("tokenizer", 5, "does not describe token files"),
        ("tokenizer_sha256", [], "does not describe token files"),
        ("eod_id", [], "'..' where a whole number is expected"),
        ("options", "ab", "options: expected keys and values, found text"),
        ("more", 1, "unexpected keyword argument 'more'"),
    ],
)
def test_metadata_of_wrong_types(tmp_path: Path, key: str, value: Any, problem: str) -> None:
    path = tmp_path / "a.meta.json"
    good = {
        "format": "gpt2-toolkit dataset", "version": 1, "tokenizer": "a", "vocab_size": 3,
        "tokenizer_sha256": "s", "eod_id": None,
        "documents": 1, "sequences": 1, "tokens": 3, "empty_documents": 0,
        "sources": [{"name": "a", "bytes": 1, "format": "t"}],
    }  # fmt: skip
    path.write_text(json.dumps(good))
    assert read_metadata(path) is not None
    path.write_text(json.dumps(good | {key: value}))
    with pytest.raises(UserError, match=problem):
        read_metadata(path)

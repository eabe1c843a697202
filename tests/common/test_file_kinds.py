"""Input files of another kind, and those that the system does not let us read: each reader has one
error, of exit code 2, that names the file, what it is and a remedy.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.cluster.rank_table_files import read_table
from common.conversion.convert import convert
from common.dataset.corpus import CorpusFormat, open_corpus
from common.dataset.documents import read_texts
from common.dataset.fleetx import FleetXDataset
from common.dataset.indexed import IndexedDataset
from common.dataset.metadata import read_metadata
from common.dataset.mindrecord_file import MindRecordFile
from common.errors import UserError
from common.generation.prompts import read_prompts
from common.run_config import load_config
from common.systems.hugging_face.weights import read_config
from common.systems.run_state import read_model_yaml
from common.tensor_files.containers import open_tensors
from common.tokenizer import load_tokenizer
from common.tokenizer.bpe_files import read_vocabulary
from tools import make_vocab, preprocess_data, train_tokenizer

TEXT = b'{"text": "hello world one"}\n{"text": "hello two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:56f7\nsize 67974813\n"
ENGLISH, CHINESE = "one\n\ntwo and three\n", "她说：你好，世界。\n\n第二段一个。\n" * 3


def packed(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("c.jsonl", TEXT)
        return buffer.getvalue()
    formats = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
    with tarfile.open(fileobj=buffer, mode="w", format=formats[kind]) as tar:
        tar.add(__file__)
    return buffer.getvalue()


ARCHIVES: dict[str, tuple[bytes, str]] = {
    "a.zst": (b"\x28\xb5\x2f\xfd\x24\x00" + TEXT, "is compressed by zstd; unpack it (unzstd)"),
    "a.xz": (lzma.compress(TEXT), "is compressed by xz; unpack it (unxz)"),
    "a.bz2": (bz2.compress(TEXT), "is compressed by bzip2; unpack it (bunzip2)"),
    "a.zip": (packed("zip"), "is a zip archive; unpack it (unzip)"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(40), "is a 7z archive; unpack it (7z x)"),
    "a.rar": (b"Rar!\x1a\x07\x01\x00" + bytes(40), "is a rar archive"),
    "a.tar": (packed("pax"), "is a tar archive; unpack it (tar -xf)"),
    "gnu.tar": (packed("gnu"), "is a tar archive; unpack it (tar -xf)"),
    "a.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "is a PDF; extract its text (pdftotext)"),
}
CORPORA: dict[str, tuple[bytes, str]] = {
    **ARCHIVES,
    "a.tar.gz": (gzip.compress(packed("pax")), "is a tar archive; unpack it (tar -xf)"),
    "twice.gz": (gzip.compress(gzip.compress(TEXT)), "is compressed by gzip; unpack it (gunzip)"),
    "train.json": (POINTER, "is a Git LFS pointer; run git lfs pull"),
    "train.txt.gz": (gzip.compress(POINTER), "is a Git LFS pointer; run git lfs pull"),
    "hole.txt": (
        b"one\n" + bytes(4096) + b"two\n",
        "holds NUL bytes (0x00), 4096 of 4104; the file is binary, or was not written whole",
    ),
    "nul.jsonl": (TEXT.replace(b"two", b"t\0o"), "holds NUL bytes (0x00), 1 of 50; the file"),
    "le.txt": (ENGLISH.encode("utf-16-le"), "looks like UTF-16 without its mark: add --encoding"
               " utf-16-le"),
    "be.txt": (ENGLISH.encode("utf-16-be"), "add --encoding utf-16-be, or convert it: iconv -f"
               " UTF-16-BE -t UTF-8"),
    "zh.txt": (CHINESE.encode("utf-16-le"), "add --encoding utf-16-le"),
    "mark.txt": (ENGLISH.encode("utf-16"), "is UTF-16 (its byte order mark"),
    "wide.txt": (ENGLISH.encode("utf-32"), "is UTF-32 (its byte order mark is at byte 0), expected"
                 " UTF-8; add --encoding utf-32"),
    "text.json": (b"No JSON at all\n", "is neither a JSON array nor JSON Lines, though its name"
                  " says '.json'; if it is plain text, name it .txt"),
    "text.jsonl.gz": (gzip.compress(b"1\n2\n"), "though its name says '.jsonl'"),
}  # fmt: skip
"""Content of each file, and the words of its message."""


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_of_another_kind(tmp_path, capsys, name: str) -> None:
    """Each tool ends with 2, one line, and nothing written."""
    path = tmp_path / name
    content, message = CORPORA[name]
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_corpus(path)
    assert message in str(caught.value) and str(caught.value).startswith(f"{path}: ")
    tools: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (preprocess_data.main, ["--input", name, "--output-prefix", "out/a", "--vocab-file", "v"]),
        (make_vocab.main, ["--raw_data_path", name, "--vocab_file", "out/v.txt"]),
        (train_tokenizer.main, ["--input", name, "--output-folder", "out", "--vocab-size", "300"]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for main, words in tools:
            assert main(words) == 2
            assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {name}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.zst", "a.zip", "a.tar.gz", "train.json", "hole.txt"])
def test_no_option_turns_it_into_a_corpus(tmp_path: Path, name: str) -> None:
    path, plain = tmp_path / name, tmp_path / "a.json"
    path.write_bytes(CORPORA[name][0])
    for encoding in ("utf-8", "iso8859-1"):
        with pytest.raises(UserError, match=r"; (unpack|run git|the file is binary)"):
            open_corpus(path, CorpusFormat.TEXT, encoding)
    plain.write_bytes(b"No JSON at all\n")  # but text is taken for what it is said to be
    assert open_corpus(plain, CorpusFormat.TEXT).format is CorpusFormat.TEXT


def test_utf16_is_read_as_the_message_says(tmp_path: Path) -> None:
    for text in (ENGLISH, CHINESE):
        for order in ("utf-16-le", "utf-16-be"):
            (tmp_path / "a.txt").write_bytes(text.encode(order))
            with pytest.raises(UserError, match=f"add --encoding {order}"):
                open_corpus(tmp_path / "a.txt")
            found = list(read_texts([tmp_path / "a.txt"], encoding=order))
            assert found == [part.strip("\n") for part in text.split("\n\n")]


def weights(path: Path) -> None:
    with open_tensors(path):
        pass


def bpe(path: Path) -> None:
    (path.parent / "merges.txt").touch()
    load_tokenizer(None, path.parent / "vocab.json", path.parent / "merges.txt")


def vocabulary(path: Path) -> None:
    load_tokenizer(None, path, None)


Reader = Callable[[Path], Any]
READERS: dict[str, Reader] = {
    "vocab.json": bpe,
    "vocab.txt": vocabulary,
    "tokenizer.json": vocabulary,
    "spiece.model": vocabulary,
    "config.json": read_config,
    "prompts.jsonl": read_prompts,
    "model.safetensors": weights,
    "pytorch_model.bin": weights,
    "model.pt": weights,
    "gpt2.ckpt": weights,
    "model.pdparams": weights,
    "model.safetensors.index.json": weights,
}
TOKEN_FILES: dict[str, Reader] = {
    "tokens.bin": IndexedDataset,
    "tokens.idx": IndexedDataset,
    "tokens_ids.npy": lambda path: FleetXDataset(path.with_name("tokens")),
    "rows.mindrecord": MindRecordFile,
}
OPENED: dict[str, Reader] = {
    "run.yaml": load_config,
    "table.json": read_table,
    "model.yaml": read_model_yaml,
    "corpus.jsonl": open_corpus,
    "tokens.meta.json": read_metadata,
    "prompts.txt": read_prompts,
    "vocab.json": lambda path: read_vocabulary(path, path),
    "config.json": read_config,
    "tokens.bin": IndexedDataset,
    "tokens.idx": IndexedDataset,
    "rows.mindrecord": MindRecordFile,
    "gpt2.ckpt": weights,
    "model.safetensors": weights,
    "model.safetensors.index.json": weights,
}
"""Files that the system refuses to open, and what reads them."""


def read_file(path: Path) -> str:
    """Return the one message of the file's reader."""
    with pytest.raises(UserError) as caught:
        (READERS | TOKEN_FILES)[path.name](path)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", [*READERS, *TOKEN_FILES])
def test_a_pointer_of_git_lfs_says_what_it_is(tmp_path: Path, name: str) -> None:
    for other in (*TOKEN_FILES, "tokens_idx.npz", "rows.mindrecord.db"):
        (tmp_path / other).write_bytes(b"x" * 64)
    (tmp_path / name).write_bytes(POINTER)
    expected = f"{tmp_path / name}: is a Git LFS pointer; run git lfs pull"
    assert expected in read_file(tmp_path / name)


@pytest.mark.parametrize("kind", ["a.zst", "a.tar", "a.pdf"])
@pytest.mark.parametrize("name", READERS)
def test_an_archive_says_what_it_is(tmp_path: Path, name: str, kind: str) -> None:
    content, message = ARCHIVES[kind]
    (tmp_path / name).write_bytes(content)
    assert message in read_file(tmp_path / name)


def test_safetensors_whose_length_looks_like_gzip(tmp_path: Path) -> None:
    """The first bytes are the length of the header: 0x8b1f is one."""
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x8B1F)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x1f\x8b".ljust(8, b"\0") + header + b"\7")
    with open_tensors(path) as found:
        assert found["a"].read().tolist() == [7]


# ---- what the system does not let us read ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*OPENED, "rows.mindrecord.db"):
        (tmp_path / name).write_bytes(b"x" * 64)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "allow this user to read it"), (errno.EIO, "check the path and the disk")]
)
@pytest.mark.parametrize("name", OPENED)
def test_a_file_that_cannot_be_opened(folder, monkeypatch, name, number, remedy) -> None:
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError) as caught:
        OPENED[name](folder / name)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert name in message and remedy in message and os.strerror(number) in message


@pytest.mark.parametrize("name", OPENED)
def test_a_pipe_is_refused_at_once(folder: Path, name: str) -> None:
    """To open one would wait for a writer for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match="a pipe"):
        OPENED[name](folder / name)


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("stat", lambda folder: IndexedDataset(folder / "tokens")),
        ("stat", lambda folder: MindRecordFile(folder / "rows.mindrecord")),
        ("stat", lambda folder: open_corpus(folder / "corpus.txt")),
        ("is_file", lambda folder: convert(folder, folder / "out", target_format="hf")),
    ],
)
def test_a_folder_that_cannot_be_entered(tmp_path, monkeypatch, method, read) -> None:
    def refuse(path: Path, **_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "weights").mkdir()
    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(UserError, match="Permission denied; allow this user to read it"):
        read(tmp_path / "weights")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("vocab_size", None, "'None' where a whole number is expected"),
        ("tokens", -1, "'-1' where a whole number is expected"),
        ("tokenizer", 5, "that is no text; the file does not describe token files"),
        ("options", "ab", "options: expected keys and values, found text"),
        ("more", 1, "unknown keys more"),
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

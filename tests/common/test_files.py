"""Folders that are whole or absent, also where several processes write."""

import fcntl
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.files import atomic_write, refuse_to_overwrite, temporary_folder, whole_folder


def fill(folder: Path) -> None:
    with whole_folder(folder, what="it", remedy="mend") as temporary:
        (temporary / "new").touch()


def test_the_last_of_two_writers_counts(tmp_path: Path) -> None:
    """Each fills a folder of its own, so no half of one mixes with the other's."""
    out = tmp_path / "out"
    with whole_folder(out, what="it", remedy="mend") as ours:
        (ours / "a").touch()
        writer = multiprocessing.get_context("fork").Process(target=fill, args=(out,))
        writer.start()
        writer.join()
        assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in out.iterdir()] == ["a"] and [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("name", ["out", "out[1]"])
def test_remains_of_a_killed_writer_are_removed(tmp_path: Path, name: str) -> None:
    for leftover in (f".{name}.0000abcd.tmp", f".{name}.replaced.tmp"):
        (tmp_path / leftover / "part").mkdir(parents=True)
    fill(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]


def test_leftovers_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    def write(content: bytes = b"whole", wait: Callable[[], object] = lambda: None) -> list[str]:
        with atomic_write(tmp_path / "x.bin") as file, temporary_folder(tmp_path / "x.pairs") as folder:
            file.write(content)
            (folder / "part").touch()
            wait()
        return sorted(path.name for path in tmp_path.iterdir())

    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    writer = fork.Process(target=write, args=(b"half", lambda: (begun.set(), time.sleep(60))))
    writer.start()
    try:
        assert begun.wait(60)
        assert [path[:7] for path in write()] == [".x.bin.", ".x.pair", "x.bin"], "it still writes"
    finally:
        writer.kill()
        writer.join()
    others = [".x.bin.more.0000abcd.tmp", ".x.bin.tmp", ".x.pairs.old.0000abcd.tmp"]
    for name in others:
        (tmp_path / name).touch()
    assert write() == [*others, "x.bin"]
    assert (tmp_path / "x.bin").read_bytes() == b"whole"


def test_a_file_that_another_writer_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    lock = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        next(tmp_path.iterdir()).unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with atomic_write(tmp_path / "x", "w") as file:
        file.write("whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_a_folder_may_be_renamed_once_its_last_file_is_seen(tmp_path, monkeypatch) -> None:
    """Publish as rank 0 does when all ranks' parts of a checkpoint are there."""
    replace = os.replace

    def seen(source: Path, target: Path) -> None:
        replace(source, target)
        (tmp_path / "parts").rename(tmp_path / "whole")

    monkeypatch.setattr(os, "replace", seen)
    with atomic_write(tmp_path / "parts" / "rank_00001.json", "w") as file:
        file.write("{}")
    assert (tmp_path / "whole" / "rank_00001.json").read_text() == "{}"


@pytest.mark.parametrize("way", ["name", "relative name", "symlink", "hard link", "folder"])
def test_an_input_is_not_an_output(tmp_path: Path, way: str) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.touch()
    if way == "symlink":
        output.symlink_to(source)
    elif way == "hard link":
        output.hardlink_to(source)
    elif way == "folder":
        output.symlink_to(tmp_path)
        output /= "source"
    else:
        output = source if way == "name" else Path(os.path.relpath(source))
    message = "is both an input and an output, and would be lost; mend"
    with pytest.raises(ConfigError, match=message):
        refuse_to_overwrite([None, tmp_path / "absent", source], [tmp_path / "new", output], "mend")
    refuse_to_overwrite([source], [tmp_path / "new"], "mend")


def test_a_file_or_a_link_is_replaced_without_remains(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        fill(tmp_path / name)
        assert (tmp_path / name / "new").is_file() and not (tmp_path / name).is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file", "link"]
    assert (tmp_path / "elsewhere" / "kept").is_file()

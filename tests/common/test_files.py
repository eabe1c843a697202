"""Folders that are whole or absent, also where several processes write."""

from pathlib import Path

import pytest

from common.errors import StorageError
from common.files import clean_up, whole_folder


def fill(folder: Path) -> None:
    with whole_folder(folder, what="it", remedy="mend") as temporary:
        (temporary / "new").touch()


def test_what_another_writes_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole_folder(out, what="it", remedy="mend") as ours:
        (ours / "a").touch()
        with pytest.raises(StorageError, match="out: it could not be written: another process is writing there; mend"):
            fill(out)
        assert (ours / "a").is_file()
    with whole_folder(tmp_path / "out.v2", what="it", remedy="mend") as ours:
        (ours / "a").touch()
        fill(out)
        clean_up(tmp_path, "out")
    assert (tmp_path / "out.v2" / "a").is_file() and (out / "new").is_file() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["out", "out[1]"])
def test_what_a_killed_writer_left_is_gone(tmp_path: Path, name: str) -> None:
    for leftover in (f".{name}.tmp", f".{name}.replaced.tmp"):
        (tmp_path / leftover / "part").mkdir(parents=True)
    fill(tmp_path / name)
    assert [path.name for path in (tmp_path / name).iterdir()] == ["new"] and len(list(tmp_path.iterdir())) == 1

"""MindRecord without MindSpore: files that its FileWriter wrote, rows against those that its
MindDataset reads.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset import GPTDataset, open_samples
from common.dataset.mindrecord import MindRecordSamples, is_mindrecord, metadata_paths
from common.dataset.mindrecord_file import MindRecordFile
from common.errors import ConfigError, DataError, StorageError

os.environ.setdefault("GLOG_v", "3")
mindrecord = pytest.importorskip(
    "mindspore.mindrecord", reason="MindSpore is not installed: pip install '.[mindspore]'"
)

INT32 = {"input_ids": {"type": "int32", "shape": [-1]}}
MASKED = {
    "input_ids": {"type": "int32", "shape": [-1]},
    "attention_mask": {"type": "int32", "shape": [-1]},
}
MIXED: dict[str, Any] = {
    "input_ids": {"type": "int64", "shape": [-1]},
    "label": {"type": "int32"},
    "a_score": {"type": "float32", "shape": [-1]},
    "name": {"type": "string"},
    "blob": {"type": "bytes"},
    "z_mask": {"type": "int64", "shape": [2, 2]},
}
WHOLE: dict[str, Any] = {"split": "train", "split_weights": (1, 0, 0), "seed": 7}


def tokens_of(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Numbers of 1, 2 and 4 bytes, with the ends of each range."""
    generator = np.random.default_rng(seed)
    edges = [0, 127, 128, 255, 32767, 32768, 50256, 2**31 - 1]
    return np.where(
        generator.random((rows, width)) < 0.3,
        generator.choice(edges, (rows, width)),
        generator.integers(0, 50257, (rows, width)),
    )


def write(
    path: Path,
    rows: Sequence[np.ndarray] | np.ndarray,
    schema: dict[str, Any] = INT32,
    *,
    shards: int = 1,
    page: int = 32,
    masks: np.ndarray | None = None,
) -> Path:
    """With FileWriter; page: KiB. Other columns than input_ids get values of varying length."""
    writer = mindrecord.FileWriter(str(path), shards, True)
    writer.set_page_size(page << 10)
    writer.set_header_size(64 << 10)
    writer.add_schema(schema, "test")
    extra = {
        "label": lambda n: n,
        "name": lambda n: f"row {n}",
        "blob": lambda n: b"x" * (n % 5),
        "a_score": lambda n: np.ones(n % 3 + 1, np.float32),
        "z_mask": lambda n: np.ones((2, 2), np.int64),
        "attention_mask": lambda n: np.ones(n % 4 + 1, np.int32) if masks is None else masks[n],
    }
    dtype = schema["input_ids"]["type"] if "input_ids" in schema else None
    for start in range(0, len(rows), 100):
        block = []
        for number in range(start, min(start + 100, len(rows))):
            row = {name: make(number) for name, make in extra.items() if name in schema}
            if dtype:
                row["input_ids"] = (
                    np.asarray(rows[number], dtype=dtype)
                    if "shape" in schema["input_ids"]
                    else int(rows[number][0])
                )
            block.append(row)
        writer.write_raw_data(block)
    writer.commit()
    return path


def mindspore_reads(source: Path | list[Path]) -> np.ndarray:
    import mindspore.dataset

    files = [str(path) for path in source] if isinstance(source, list) else str(source)
    data = mindspore.dataset.MindDataset(
        files, columns_list=["input_ids"], shuffle=False, num_parallel_workers=1
    )
    return np.stack(
        [row["input_ids"] for row in data.create_dict_iterator(num_epochs=1, output_numpy=True)]
    )


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_padded_rows_are_refused_unless_their_padding_is_left_out(
    kind: str, tmp_path: Path
) -> None:
    """A thousand rows are looked at when the file is opened, the others when they are read."""
    rows, masks = tokens_of(3000, 9), np.ones((3000, 9), dtype=kind)
    schema = MASKED | {"attention_mask": {"type": kind, "shape": [-1]}}
    masks[1, 6:] = 0  # which is not among those that are looked at
    path = write(tmp_path / "late.mindrecord", rows, schema, masks=masks)
    file = MindRecordFile(path)
    assert (file.read(np.array([0, 2])) == rows[[0, 2]]).all()
    with pytest.raises(DataError, match=r"row 1 is padded: its attention_mask has a 0.*=targets"):
        file.read(np.array([0, 1]))
    assert (MindRecordFile(path, padded=True).read(np.array([1])) == rows[1]).all()
    masks[-1, 8] = 0
    path = write(tmp_path / "early.mindrecord", rows, schema, masks=masks)
    with pytest.raises(DataError, match="row 2999 is padded"):
        open_samples([str(path)], seq_length=8, **WHOLE)
    assert open_samples([str(path)], seq_length=8, padded=True, **WHOLE).samples_per_epoch == 3000


def all_rows(samples: Any) -> np.ndarray:
    return samples.read(np.arange(samples.samples_per_epoch))


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("data.mindrecord", INT32),
        ("wiki-train", {"input_ids": {"type": "int32", "shape": [9]}}),
        ("data.mindrecord", MASKED),
        ("wiki-train", MIXED),
    ],
)
def test_rows_are_those_that_mindspore_reads(
    tmp_path: Path, schema: dict[str, Any], name: str
) -> None:
    rows = tokens_of(2000, 9)  # several pages of 32 KiB, of both kinds
    path = write(tmp_path / name, rows, schema)
    assert is_mindrecord(path) and is_mindrecord(tmp_path)
    for source in (path, tmp_path):
        samples = MindRecordSamples(source, seq_length=8, shuffle=False, **WHOLE)
        assert (all_rows(samples) == rows).all()
    assert (mindspore_reads(path) == rows).all()
    mixed = np.random.default_rng(1).integers(0, 6000, 300)
    assert (samples.read(mixed) == rows[mixed % 2000]).all()
    assert samples.read(mixed).dtype == np.int32
    assert samples.source(0) == path


@pytest.mark.parametrize("shards", [2, 11])
def test_shards_are_read_in_order_from_any_of_them(tmp_path: Path, shards: int) -> None:
    write(tmp_path / "data.mindrecord", tokens_of(205, 9), shards=shards)
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".db")
    assert len(files) == shards
    expected = mindspore_reads(files)
    for source in (tmp_path, tmp_path / "data.mindrecord", files[-1]):
        assert (
            all_rows(MindRecordSamples(source, seq_length=8, shuffle=False, **WHOLE)) == expected
        ).all()
    (tmp_path / files[-1].name).unlink()
    for source in (tmp_path, files[0], tmp_path / "data.mindrecord"):
        with pytest.raises(
            DataError,
            match=rf"{files[-1].name}: not found, but .* one of {shards} shards; copy all",
        ):
            MindRecordSamples(source, seq_length=8, **WHOLE)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 1500),
    width=st.integers(2, 300),
    shards=st.integers(1, 4),
    wide=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_number_of_rows_and_pages(
    tmp_path: Path, rows: int, width: int, shards: int, wide: bool, seed: int
) -> None:
    tokens = tokens_of(rows, width, seed)
    folder = tmp_path / "property"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write(folder / "data.mindrecord", tokens, MIXED if wide else INT32, shards=shards)
    found = all_rows(MindRecordSamples(folder, seq_length=width - 1, shuffle=False, **WHOLE))
    if shards == 1:
        assert (found == tokens).all()
    else:  # FileWriter deals them to the shards by chance
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, tokens.tolist()))


def test_epochs_are_different_permutations_and_resume_anywhere(tmp_path: Path) -> None:
    rows = np.arange(300)[:, None] + np.arange(5)
    path = write(tmp_path / "data.mindrecord", rows)
    samples, again = (MindRecordSamples(path, seq_length=4, **WHOLE) for _ in range(2))
    orders = [samples.read(np.arange(300) + 300 * epoch)[:, 0].tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(300)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4 and orders[0] != list(range(300))
    ids = np.array([901, 3, 300, 299, 650])
    assert again.read(ids)[:, 0].tolist() == [orders[n // 300][n % 300] for n in ids]
    assert again.identities(ids).tolist() == [
        [0, n // 300 * 300 + orders[n // 300][n % 300]] for n in ids
    ]
    assert samples.fingerprint == again.fingerprint
    # a change of these numbers breaks the resumption of every run: raise ORDER_VERSION and say so
    assert orders[0][:8] == [153, 59, 203, 207, 246, 217, 3, 144]
    other = MindRecordSamples(path, seq_length=4, split="train", split_weights=(1, 0, 0), seed=8)
    assert (
        other.read(np.arange(300))[:, 0].tolist() != orders[0]
        and other.fingerprint != samples.fingerprint
    )


def test_splits_are_disjoint_and_cover_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "data.mindrecord", np.arange(100)[:, None] + np.zeros(3, int))
    parts = [
        all_rows(
            MindRecordSamples(path, split=split, split_weights=(80, 15, 5), seq_length=2, seed=1)
        )[:, 0].tolist()
        for split in ("train", "valid", "test")
    ]
    assert [len(part) for part in parts] == [80, 15, 5]
    assert [sorted(part) for part in parts] == [
        list(range(80)),
        list(range(80, 95)),
        list(range(95, 100)),
    ]
    with pytest.raises(
        DataError, match=r"split 'test' \(weights 949,50,1\) holds none of 100 rows.*larger weight"
    ):
        MindRecordSamples(path, split="test", seq_length=2, seed=1)


@pytest.mark.parametrize(("seq_length", "shards"), [(4, 1), (10, 12)])
def test_written_rows_are_the_windows_of_the_pair(
    tmp_path: Path, write_pair: Any, seq_length: int, shards: int
) -> None:
    from mindformers_gpt2.mindrecord import write_mindrecord

    prefix = write_pair([40, 1, 88, 301, 20], dtype="int32")
    target = tmp_path / "out" / "data.mindrecord"
    pair = GPTDataset(prefix, seq_length=seq_length, shuffle=False, **WHOLE)
    for _ in range(2):  # the second replaces the first
        written = write_mindrecord(prefix, target, seq_length, shards)
    ids = np.arange(2 * pair.samples_per_epoch)
    assert (
        written.rows == pair.samples_per_epoch
        and written.left_over == 450 - written.rows * seq_length - 1 < seq_length
    )
    for source in (target.parent, target, written.files[-1]):
        samples = open_samples([str(source)], seq_length=seq_length, shuffle=False, **WHOLE)
        assert isinstance(samples, MindRecordSamples)
        assert (samples.read(ids) == pair.read(ids)).all()
    assert (mindspore_reads(written.files[0]) == all_rows(pair)).all(), (
        "one shard leads MindSpore to the others"
    )
    assert (mindspore_reads(list(written.files)) == all_rows(pair)).all()
    sizes = [len(MindRecordFile(path)) for path in written.files]
    modes = {path.stat().st_mode & 0o777 for path in target.parent.iterdir()}
    assert modes == {prefix.with_name("data.idx").stat().st_mode & 0o777}
    assert len(sizes) == shards and max(sizes) - min(sizes) <= 1
    write_mindrecord(prefix, target, seq_length, 2)
    assert len(list(target.parent.iterdir())) == 4, (
        "nothing is left of the older set, nor a temporary name"
    )


def test_a_failed_write_leaves_nothing(tmp_path: Path, write_pair: Any) -> None:
    from mindformers_gpt2.mindrecord import write_mindrecord

    prefix, target = write_pair([10, 11]), tmp_path / "out" / "data.mindrecord"
    for seq_length, shards, error, message in (
        (50, 1, DataError, "with 21 tokens, expected at least seq_length"),
        (10, 3, DataError, "gives 2 rows of 11 tokens, too few for 3 files"),
        (4, 1001, ConfigError, "--num-splits=1001: expected 1 to 1000"),
    ):
        with pytest.raises(error, match=message):
            write_mindrecord(prefix, target, seq_length, shards)
    with pytest.raises(ConfigError, match="names hold none of"):
        write_mindrecord(prefix, tmp_path / "out" / "a&b.mindrecord", 4)
    assert not target.parent.exists()


def test_a_crash_between_the_renames_leaves_no_set(
    tmp_path: Path, write_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindformers_gpt2.mindrecord import write_mindrecord

    rename = os.replace

    def fail(source: Path, target: Path) -> None:
        if target.suffix == ".db":
            raise OSError(5, "Input/output error")
        rename(source, target)

    prefix, target = write_pair([40, 50]), tmp_path / "out" / "data.mindrecord"
    write_mindrecord(prefix, target, 4, 2)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError, match="could not be written: Input/output error"):
        write_mindrecord(prefix, target, 4, 3)
    with pytest.raises(DataError, match=r"mindrecord0\.db: not found, although .* is there"):
        MindRecordSamples(target, seq_length=4, **WHOLE)


def test_a_blend_of_a_pair_and_a_mindrecord(tmp_path: Path, write_pair: Any) -> None:
    path = write(tmp_path / "data.mindrecord", np.full((50, 5), 60_000))
    blend = open_samples(["3", str(write_pair([11] * 40)), "1", str(path)], seq_length=4, **WHOLE)
    rows = blend.read(np.arange(100))
    from_record = (rows == 60_000).all(axis=1)
    assert from_record.sum() == 25
    assert {blend.source(n).name for n in range(8)} == {"data", "data.mindrecord"}


def test_a_stride_cannot_cut_rows_again(tmp_path: Path) -> None:
    path = write(tmp_path / "data.mindrecord", tokens_of(20, 9))
    with pytest.raises(DataError, match=r"windows already, which data\.stride=4 cannot cut again"):
        open_samples([str(path)], seq_length=8, stride=4, **WHOLE)
    assert open_samples([str(path)], seq_length=8, stride=8, **WHOLE).samples_per_epoch == 20


def test_place_of_the_metadata(tmp_path: Path) -> None:
    write(tmp_path / "data.mindrecord", tokens_of(20, 9), shards=2)
    assert tmp_path / "data.mindrecord.meta.json" in metadata_paths(tmp_path / "data.mindrecord1")
    assert metadata_paths(tmp_path / "pair.idx") == [tmp_path / "pair.meta.json"]


def _edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + len(text) :])


def _other_rows(path: Path) -> None:
    other = path.parent / "other"
    other.mkdir()
    write(other / path.name, tokens_of(30, 9))
    os.replace(other / f"{path.name}.db", f"{path}.db")


def _renamed(path: Path) -> None:
    write(path.with_name("other.mindrecord"), tokens_of(20, 9))
    shutil.move(path.with_name("other.mindrecord.db"), f"{path}.db")
    path.with_name("other.mindrecord").unlink()


def _moved_rows(path: Path) -> None:
    with closing(sqlite3.connect(f"{path}.db")) as connection, connection:
        connection.execute("UPDATE INDEXES SET PAGE_ID_BLOB = 99 WHERE ROW_ID = 3")


def _endless_index(path: Path) -> None:
    with closing(sqlite3.connect(f"{path}.db")) as connection, connection:
        connection.execute("DROP TABLE INDEXES")
        connection.execute(
            "CREATE VIEW INDEXES AS WITH RECURSIVE n(ROW_ID) AS (SELECT 0 UNION ALL SELECT ROW_ID +"
            " 1 FROM n) SELECT ROW_ID, 0 AS PAGE_ID_BLOB, 0 AS PAGE_OFFSET_BLOB, 0 AS"
            " PAGE_OFFSET_BLOB_END FROM n"
        )


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek((64 << 10) + at)
        file.write(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (
        lambda path: Path(f"{path}.db").unlink(),
        r"data.mindrecord.db: not found, although data.mindrecord is there; .*copy both",
    ),
    "no file": (
        lambda path: path.unlink(),
        r"data.mindrecord: not found; a MindRecord is that file and data.mindrecord.db",
    ),
    "cut in the pages": (
        lambda path: os.truncate(path, path.stat().st_size - 300),
        r"cut short: \d+ bytes found, its pages end at \d+",
    ),
    "text": (
        lambda path: path.write_text("Once upon a time there was a file"),
        "is not a MindRecord file",
    ),
    "header of something else": (
        lambda path: _edit_header(path, lambda header: header.pop("schema")),
        "a header that is not a MindRecord's",
    ),
    "version": (
        lambda path: _edit_header(path, lambda header: header.update(version="2.0")),
        "format version 2.0, expected 3.0",
    ),
    "index is text": (
        lambda path: Path(f"{path}.db").write_text("no database " * 50),
        "is not the index of a MindRecord",
    ),
    "a page beyond 64 bits": (
        lambda path: _edit_header(path, lambda header: header.update(page_size=2**70, page=[])),
        "a header that is not a MindRecord's .OverflowError",
    ),
    "a shard without a name": (
        lambda path: _edit_header(
            path, lambda header: header.update(shard_addresses=[path.name, ""])
        ),
        "a header that is not a MindRecord's .ValueError",
    ),
    "index is a view without end": (
        _endless_index,
        "is not the index of a MindRecord .it has views",
    ),
    "index of other rows": (
        _other_rows,
        "data.mindrecord.db: does not name the 20 rows of data.mindrecord; .*copy both",
    ),
    "width beyond the memory": (
        lambda path: _overwrite(path, 8, b"\xff\xff\xff\xff"),
        "row 0 is damaged",
    ),
    "index of another file": (_renamed, "is the index of other.mindrecord, not of data.mindrecord"),
    "index out of bounds": (_moved_rows, "does not name the 20 rows of"),
    "length of a row": (lambda path: _overwrite(path, 0, b"\x07"), "row 0 is damaged"),
    "bytes of a row": (
        lambda path: _overwrite(path, 12, b"\x55"),
        "row 0 is damaged",
    ),
    "floats": (
        lambda path: write(
            path, tokens_of(20, 9), {"input_ids": {"type": "float32", "shape": [-1]}}
        ),
        r"no array 'input_ids' of int32 or int64, only input_ids of float32",
    ),
    "single numbers": (
        lambda path: write(
            path,
            tokens_of(20, 9) % 1000,
            {"input_ids": {"type": "int32"}, "z_mask": MIXED["z_mask"]},
        ),
        "no array 'input_ids' of int32 or int64, only input_ids of int32, z_mask of int64",
    ),
    "another width": (
        lambda path: write(path, tokens_of(20, 5)),
        "hold 5 tokens, expected seq_length [+] 1 = 9; set model.seq_length=4",
    ),
    "no rows": (lambda path: write(path, []), "holds none of 0 rows"),
    "beyond int32": (
        lambda path: write(path, tokens_of(20, 9) + (1 << 40), {"input_ids": MIXED["input_ids"]}),
        "row 0 holds a number beyond 32 bits",
    ),
    "ragged": (
        lambda path: write(path, [*tokens_of(19, 9), np.arange(7)]),
        "row 19 has 7 tokens, the first row 9; all need as many",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_fault_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "data.mindrecord", tokens_of(20, 9) % 100)
    damage, message = DAMAGES[name]
    damage(path)
    with pytest.raises(DataError, match=message):
        open_samples([str(path)], seq_length=8, **WHOLE)


def test_a_ragged_row_in_the_middle_is_said_when_it_is_read(tmp_path: Path) -> None:
    rows = list(tokens_of(20, 9))
    rows[7] = np.arange(12)
    samples = MindRecordSamples(
        write(tmp_path / "data.mindrecord", rows), seq_length=8, shuffle=False, **WHOLE
    )
    with pytest.raises(DataError, match="row 7 has 12 tokens, the first row 9"):
        all_rows(samples)


def test_a_folder_without_files_and_an_absent_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no MindRecord file \(\*\.mindrecord, with"):
        MindRecordSamples(tmp_path, seq_length=8, **WHOLE)
    with pytest.raises(DataError, match=r"absent.mindrecord: not found; .*--format mindrecord"):
        open_samples([str(tmp_path / "absent.mindrecord")], seq_length=8, **WHOLE)


def test_a_folder_passes_over_what_a_killed_writer_left(tmp_path: Path) -> None:
    write(tmp_path / "data.mindrecord", tokens_of(20, 9))
    (tmp_path / ".data.mindrecord.77.tmp").mkdir()
    write(tmp_path / ".data.mindrecord.77.tmp" / "data.mindrecord", tokens_of(20, 9))
    assert MindRecordSamples(tmp_path, seq_length=8, **WHOLE).samples_per_epoch == 20

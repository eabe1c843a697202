"""MindRecord without MindSpore: files that its FileWriter wrote, rows against those that its MindDataset reads."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.dataset.blend import open_samples
from common.dataset.mindrecord import MindRecordSamples, find_mindrecord, metadata_paths
from common.dataset.mindrecord_file import MindRecordFile
from common.dataset.samples import GPTDataset
from common.errors import ConfigError, DataError
from tests.common.dataset.conftest import WHOLE

os.environ.setdefault("GLOG_v", "3")
mindrecord = pytest.importorskip(
    "mindspore.mindrecord", reason="MindSpore is not installed: pip install '.[mindspore]'"
)


def ids(type: str = "int32", *shape: int) -> dict[str, Any]:
    """The column that training reads; without a shape a single number."""
    return {"input_ids": {"type": type} | ({"shape": [*shape]} if shape else {})}


INT32 = ids("int32", -1)
MASKED = INT32 | {"attention_mask": {"type": "int32", "shape": [-1]}}
MIXED = ids("int64", -1) | {
    "label": {"type": "int32"},
    "a_score": {"type": "float32", "shape": [-1]},
    "name": {"type": "string"},
    "blob": {"type": "bytes"},
    "z_mask": {"type": "int64", "shape": [2, 2]},
}


def tokens_of(rows: int, width: int) -> np.ndarray:
    """Numbers of 1, 2 and 4 bytes, with the ends of each range."""
    generator = np.random.default_rng(0)
    edges = generator.choice([0, 127, 128, 255, 32767, 32768, 50256, 2**31 - 1], (rows, width))
    return np.where(generator.random((rows, width)) < 0.3, edges, generator.integers(0, 50257, (rows, width)))


def write(path: Path, rows: Any, schema: dict[str, Any] = INT32, *, shards: int = 1, masks: Any = None) -> Path:
    """With FileWriter, in pages of 32 KiB. Other columns get values of varying length."""
    writer = mindrecord.FileWriter(str(path), shards, True)
    writer.set_page_size(32 << 10)
    writer.set_header_size(64 << 10)
    writer.add_schema(schema, "test")
    own = schema["input_ids"]
    columns = {
        "input_ids": lambda n: np.asarray(rows[n], own["type"]) if "shape" in own else int(rows[n][0]),
        "label": lambda n: n,
        "name": lambda n: f"row {n}",
        "blob": lambda n: b"x" * (n % 5),
        "a_score": lambda n: np.ones(n % 3 + 1, np.float32),
        "z_mask": lambda n: np.ones((2, 2), np.int64),
        "attention_mask": lambda n: np.ones(n % 4 + 1, np.int32) if masks is None else masks[n],
    }
    for start in range(0, len(rows), 100):
        numbers = range(start, min(start + 100, len(rows)))
        writer.write_raw_data([{name: columns[name](n) for name in schema} for n in numbers])
    writer.commit()
    return path


def mindspore_reads(source: Path | list[Path]) -> np.ndarray:
    import mindspore.dataset

    files = [str(path) for path in source] if isinstance(source, list) else str(source)
    data = mindspore.dataset.MindDataset(files, columns_list=["input_ids"], shuffle=False, num_parallel_workers=1)
    return np.stack([row["input_ids"] for row in data.create_dict_iterator(num_epochs=1, output_numpy=True)])


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_padded_rows_are_refused_unless_their_padding_is_left_out(kind, tmp_path) -> None:
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
    ("name", "schema", "width"),
    [
        ("data.mindrecord", INT32, 9),
        ("wiki-train", ids("int32", 8), 8),
        ("data.mindrecord", MASKED, 299),
        ("wiki-train", MIXED, 3),
        ("data.mindrecord", MIXED, 4098),
    ],
)
def test_rows_are_those_that_mindspore_reads(tmp_path, schema, name, width) -> None:
    rows = tokens_of(2000 if width < 4000 else 40, width)  # several pages, of both kinds
    path = write(tmp_path / name, rows, schema)
    left_by_killed_writer = tmp_path / ".data.mindrecord.0000abcd.tmp"
    left_by_killed_writer.mkdir()
    write(left_by_killed_writer / "data.mindrecord", rows)
    assert find_mindrecord(path) == find_mindrecord(tmp_path) == [path]
    for source in (path, tmp_path):
        samples = MindRecordSamples(source, seq_length=width - 1, shuffle=False, **WHOLE)
        assert (all_rows(samples) == rows).all()
    assert (mindspore_reads(path) == rows).all()
    mixed = np.random.default_rng(1).integers(0, 3 * len(rows), 300)
    assert (samples.read(mixed) == rows[mixed % len(rows)]).all()
    assert samples.read(mixed).dtype == np.int32
    assert samples.source(0) == path


def test_shards_are_read_in_order_from_any_of_them(tmp_path: Path) -> None:
    write(tmp_path / "data.mindrecord", tokens_of(205, 9), shards=11)
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".db")
    expected = mindspore_reads(files)
    sources = (tmp_path, tmp_path / "data.mindrecord", files[3])
    for source in sources:
        samples = MindRecordSamples(source, seq_length=8, shuffle=False, **WHOLE)
        assert (all_rows(samples) == expected).all()
        assert tmp_path / "data.mindrecord.meta.json" in metadata_paths(files[3])
    files[-1].unlink()
    for source in sources:
        with pytest.raises(DataError, match=r"10: not found, but .* one of 11 shards; copy all"):
            MindRecordSamples(source, seq_length=8, **WHOLE)


def test_epochs_are_different_permutations_and_resume_anywhere(tmp_path) -> None:
    path = write(tmp_path / "data.mindrecord", np.arange(300)[:, None] + np.arange(5))
    samples, again, other = (MindRecordSamples(path, seq_length=4, **{**WHOLE, "seed": seed}) for seed in (7, 7, 8))
    orders = [samples.read(np.arange(300) + 300 * epoch)[:, 0].tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(300)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    some = np.array([901, 3, 300, 299, 650])
    assert again.read(some)[:, 0].tolist() == [orders[n // 300][n % 300] for n in some]
    assert again.identities(some).tolist() == [[0, n // 300 * 300 + orders[n // 300][n % 300]] for n in some]
    # a change of these numbers breaks the resumption of every run: raise ORDER_VERSION and say so
    assert orders[0][:8] == [153, 59, 203, 207, 246, 217, 3, 144]
    assert other.fingerprint != samples.fingerprint == again.fingerprint
    weights = {"split_weights": (80, 15, 5), "seq_length": 4, "seed": 1}
    for split, first, last in (("train", 0, 240), ("valid", 240, 285), ("test", 285, 300)):
        found = all_rows(MindRecordSamples(path, split=split, **weights))[:, 0].tolist()
        assert sorted(found) == list(range(first, last))
    with pytest.raises(DataError, match=r"weights 9490,50,1\) holds none of 300 rows.*larger weigh"):
        MindRecordSamples(path, split="test", seq_length=4, seed=1, split_weights=(9490, 50, 1))


@pytest.mark.parametrize(("seq_length", "shards"), [(4, 1), (10, 12)])
def test_written_rows_are_the_windows_of_the_pair(tmp_path, write_pair, seq_length, shards) -> None:
    from mindformers_gpt2.mindrecord import write_mindrecord

    prefix = write_pair([40, 1, 88, 301, 20], dtype="int32")
    target = tmp_path / "out" / "data.mindrecord"
    pair = GPTDataset(prefix, seq_length=seq_length, shuffle=False, **WHOLE)
    for _ in range(2):  # the second replaces the first
        written = write_mindrecord(prefix, target, seq_length, shards)
    rows = pair.samples_per_epoch
    some, left_over = np.arange(2 * rows), 450 - rows * seq_length - 1
    files = sorted(path for path in target.parent.iterdir() if path.suffix != ".db")
    names = f"{files[0]} ... {files[-1].name}" if shards > 1 else str(target)
    assert written == f"{names}: {rows} rows of {seq_length + 1} tokens, {left_over} tokens left over at the end"
    assert left_over < seq_length
    for source in (target.parent, target, files[-1]):
        samples = open_samples([str(source)], seq_length=seq_length, shuffle=False, **WHOLE)
        assert isinstance(samples, MindRecordSamples)
        assert (samples.read(some) == pair.read(some)).all()
    for given in (files[0], files):  # one shard leads to the others
        assert (mindspore_reads(given) == all_rows(pair)).all()
    sizes = [len(MindRecordFile(path)) for path in files]
    assert len(sizes) == shards and max(sizes) - min(sizes) <= 1
    assert len({path.stat().st_mode for path in (*target.parent.iterdir(), prefix.with_name("data.idx"))}) == 1
    write_mindrecord(prefix, target, seq_length, 2)
    assert len(list(target.parent.iterdir())) == 4, "nothing is left of the older set"


def test_what_cannot_be_written_leaves_nothing(tmp_path, write_pair) -> None:
    from mindformers_gpt2.mindrecord import write_mindrecord

    for name, seq_length, shards, message in (
        ("data.mindrecord", 50, 1, "with 21 tokens, expected at least seq_length"),
        ("data.mindrecord", 10, 3, "gives 2 rows of 11 tokens, too few for 3 files"),
        ("data.mindrecord", 4, 1001, "--num-splits=1001: expected 1 to 1000"),
        ("a&b.mindrecord", 4, 1, "names hold none of"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            write_mindrecord(write_pair([10, 11]), tmp_path / "out" / name, seq_length, shards)
        assert not (tmp_path / "out").exists()


def test_a_blend_of_a_pair_and_a_mindrecord_and_no_stride(tmp_path, write_pair) -> None:
    path = write(tmp_path / "data.mindrecord", np.full((50, 5), 60_000))
    blend = open_samples(["3", str(write_pair([11] * 40)), "1", str(path)], seq_length=4, **WHOLE)
    from_record = (blend.read(np.arange(100)) == 60_000).all(axis=1)
    assert from_record.sum() == 25
    assert {blend.source(n).name for n in range(8)} == {"data", "data.mindrecord"}
    with pytest.raises(DataError, match=r"windows already, which data\.stride=2 cannot cut again"):
        open_samples([str(path)], seq_length=4, stride=2, **WHOLE)
    assert open_samples([str(path)], seq_length=4, stride=4, **WHOLE).samples_per_epoch == 50


def _swap(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def _edit_index(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        with closing(sqlite3.connect(f"{path}.db")) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return edit


def _rewrite(rows: Any, schema: dict[str, Any] = INT32) -> Callable[[Path], None]:
    return lambda path: write(path, rows, schema)


def _ragged(row: int) -> list[np.ndarray]:
    return [*tokens_of(row, 9), np.arange(7), *tokens_of(19 - row, 9)]


SIZE, COUNT = b"\x10" + bytes(7), b"\0\0\0\x09"
"""How each row of 9 small numbers begins: its bytes, its numbers."""
VIEW = (
    "CREATE VIEW INDEXES AS WITH RECURSIVE n(ROW_ID) AS (SELECT 0 UNION ALL SELECT ROW_ID + 1 FROM n)"
    " SELECT ROW_ID, 0 AS PAGE_ID_BLOB, 0 AS PAGE_OFFSET_BLOB, 0 AS PAGE_OFFSET_BLOB_END FROM n"
)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: Path(f"{path}.db").unlink(), "data.mindrecord.db: not found, although .* is there; .*copy both"),
        (Path.unlink, "not found; a MindRecord is that file and data.mindrecord.db"),
        (
            lambda path: os.truncate(path, path.stat().st_size - 300),
            r"cut short: \d+ bytes found, its pages end at \d+",
        ),
        (lambda path: path.write_text("Once upon a time there"), "is not a MindRecord file, or an encrypted one"),
        (_swap(b'"schema":[', b'"scheme":['), "its header is not a MindRecord's .KeyError"),
        (_swap(b'"3.0"', b'"2.0"'), "format version 2.0, expected 3.0"),
        (_edit_index("DROP TABLE INDEXES", VIEW), ".it has views"),
        (
            _edit_index("DELETE FROM INDEXES WHERE ROW_ID = 3"),
            "does not name the 20 rows of data.mindrecord; .*copy both",
        ),
        (_edit_index("UPDATE INDEXES SET PAGE_ID_BLOB = 99 WHERE ROW_ID = 3"), "does not name the 20 rows of"),
        (_edit_index("UPDATE SHARD_NAME SET NAME = 'other'"), "is the index of other, not of data.mindrecord"),
        (_swap(SIZE + COUNT, b"\x07" + bytes(7) + COUNT), "row 0 is damaged"),
        (_swap(SIZE + COUNT, SIZE + b"\xff" * 4), "row 0 is damaged"),
        (_swap(SIZE + COUNT + b"\0", SIZE + COUNT + b"\x55"), "row 0 is damaged"),
        (_rewrite(tokens_of(20, 9), ids("float32", -1)), "only input_ids of float32"),
        (
            _rewrite(tokens_of(20, 9) % 1000, ids() | {"z_mask": MIXED["z_mask"]}),
            "only input_ids of int32, z_mask of int64",
        ),
        (_rewrite(tokens_of(20, 5)), "hold 5 tokens, expected seq_length [+] 1 = 9; set model.seq_length=4"),
        (_rewrite([]), "holds none of 0 rows"),
        (_rewrite(tokens_of(20, 9) + (1 << 40), ids("int64", -1)), "row 0 holds a number beyond 32 bits"),
        (_rewrite(_ragged(19)), "row 19 has 7 tokens, the first row 9; all"),  # which is looked at first
        (_rewrite(_ragged(7)), "row 7 has 7 tokens, the first row 9"),
    ],
)
def test_each_fault_is_named(tmp_path, damage, message) -> None:
    path = write(tmp_path / "data.mindrecord", tokens_of(20, 9) % 100)
    damage(path)
    with pytest.raises(DataError, match=message):
        all_rows(open_samples([str(path)], seq_length=8, **WHOLE))


def test_a_folder_without_files_and_an_absent_path(tmp_path) -> None:
    assert find_mindrecord(tmp_path) is None
    with pytest.raises(DataError, match=r"absent.mindrecord: not found; .*--format mindrecord"):
        open_samples([str(tmp_path / "absent.mindrecord")], seq_length=8, **WHOLE)

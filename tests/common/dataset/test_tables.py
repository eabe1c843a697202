"""Parquet, Arrow and folders of ``datasets`` against the same texts as JSON Lines.

``data/`` was written by ``save_to_disk`` of datasets 5.2 from the texts in ``SAVED``: ``saved`` in
two files, ``splits`` as the rows 0 to 3 (train) and 4, 0 (test).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.dataset.corpus import CorpusFormat
from common.dataset.documents import read_texts
from common.dataset.merge import merge_datasets
from common.dataset.metadata import Shard
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.tables import read_table
from common.errors import ConfigError, DataError
from tests.common.dataset.conftest import files_of, write_table

DATA = Path(__file__).parent / "data"
SAVED = ["Hello world", "你好，世界。\n\nwith a blank line", "", "Ünïcode \u2028 and 🙂", "the last row"]


@pytest.fixture
def pa() -> Any:
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")


@pytest.fixture
def run(options_for: Callable[..., PreprocessOptions]) -> Callable[..., Path]:
    return lambda *inputs, **options: preprocess(options_for(*inputs, **options)).prefixes[0]


def texts(count: int = 700) -> list[str]:
    words = random.Random(0)
    found = ["".join(words.choices("abcdefgh 中文é\n", k=words.randrange(900))) for _ in range(count)]
    return [text * (number % 7 > 0) for number, text in enumerate(found)]


def as_json_lines(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    return path


KINDS = ["parquet", "parquet-dict", "stream", "zstd", "file", "large", "view", "dictionary"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_the_bytes_of_json_lines(pa, tmp_path, run, kind) -> None:
    rows: Any = texts() * 2 if kind.endswith("dict") else texts()
    expected = files_of(run(as_json_lines(tmp_path / "a.jsonl", rows), json_keys=("body",)))
    types = {"large": pa.large_string(), "view": pa.string_view()}
    if kind in types:
        rows = pa.array(rows, types[kind])
    if kind == "dictionary":
        rows = pa.array(rows).dictionary_encode()
    table = write_table(pa, tmp_path / "a.table", rows, kind)
    for block_bytes in (100, 5000, 1 << 20):
        assert files_of(run(table, json_keys=("body",), block_bytes=block_bytes)) == expected
    assert list(read_texts([table], encoding="utf-8", keys=("body",))) == [
        text for text in (rows if isinstance(rows, list) else rows.to_pylist()) if text.strip()
    ]


@pytest.mark.parametrize("count", [3, 8, 40])
def test_merged_shards_of_many_files_have_the_bytes_of_one_process(pa, tmp_path, run, count) -> None:
    rows = texts()
    (tmp_path / "more").mkdir()
    inputs = (
        write_table(pa, tmp_path / "z.parquet", rows[:300], group=1000),
        as_json_lines(tmp_path / "b.jsonl", rows[300:350]),
        write_table(pa, tmp_path / "empty.parquet", []),
        write_table(pa, tmp_path / "c.arrow", rows[350:500], "stream"),
        tmp_path / "more",
    )
    write_table(pa, tmp_path / "more" / "2.parquet", rows[600:])
    write_table(pa, tmp_path / "more" / "1.parquet", rows[500:600])
    expected = files_of(run(as_json_lines(tmp_path / "all.jsonl", rows), json_keys=("body",)))
    whole = run(*inputs, json_keys=("body",))
    assert files_of(whole) == expected

    def part(number: int) -> Path:
        shard, prefix = Shard(number=number, count=count), tmp_path / "parts"
        return run(*inputs, shard=shard, json_keys=("body",), output_prefix=prefix)

    parts = [part(number) for number in range(count, 0, -1)]
    merge_datasets(parts, tmp_path / "merged")
    assert files_of(tmp_path / "merged") == expected
    assert files_of(tmp_path / "merged", ".meta.json") == files_of(whole, ".meta.json")
    if count == 3:  # a part of an earlier release, which divided tables by rows
        record = Path(f"{parts[0]}.meta.json")
        there = record.read_text()
        record.write_text(there.replace("3/3 by blocks", "3/3"))
        with pytest.raises(DataError, match="is shard 3/3, but others are of another division"):
            merge_datasets(parts, tmp_path / "merged")
        part(3)
        assert record.read_text() == there
    if count == 8:  # rows of one group go to several parts
        sizes = [Path(f"{part}.bin").stat().st_size for part in parts]
        assert max(sizes) < 0.25 * sum(sizes)


def test_a_folder_that_datasets_saved(pa: Any, tmp_path: Path, run: Callable[..., Path]) -> None:
    def expected(rows: list[str]) -> list[bytes]:
        path = as_json_lines(tmp_path / "a.jsonl", rows)
        return files_of(run(path, json_keys=("body",)))

    assert files_of(run(DATA / "saved")) == expected(SAVED)
    assert files_of(run(DATA / "splits", dataset_split="train")) == expected(SAVED[:4])
    assert files_of(run(DATA / "splits", dataset_split="test")) == expected([SAVED[4], SAVED[0]])
    both = run(DATA / "splits", DATA / "saved", dataset_split="test")
    assert files_of(both) == expected([SAVED[4], SAVED[0], *SAVED])


def test_memory_does_not_grow_with_a_row_group(pa: Any, tmp_path: Path) -> None:
    """48 MiB of text in one row group of many pages, and in one record batch."""
    from pyarrow import parquet

    line = "".join(random.Random(1).choices("abcdefgh ", k=1 << 16))
    table = pa.table({"text": [line[n:] + line[:n] for n in range(768)]})
    files = tmp_path / "a.parquet", tmp_path / "b.arrow"
    options = {"use_dictionary": False, "write_batch_size": 4, "compression": "none"}
    parquet.write_table(table, files[0], **options)
    with pa.OSFile(str(files[1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    sizes = {"block_bytes": 1 << 20, "document_bytes": 1 << 20}
    for path in files:
        before, held, rows = pa.total_allocated_bytes(), [], 0
        for found, _ in read_table(path, path.stat().st_size, ("text",), **sizes):
            held.append(pa.total_allocated_bytes() - before)
            rows += len(found)
        assert rows == 768 and max(held) < 6 << 20


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tables, by the names of BROKEN."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")
    folder = tmp_path_factory.mktemp("broken")
    whole = write_table(pa, folder / "good.parquet", SAVED).read_bytes()
    stream = write_table(pa, folder / "stream.arrow", SAVED, "stream").read_bytes()
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]))
    for name, data in {
        "cut.parquet": whole[:-20],
        "cut.arrow": stream[:-300],
        "unfinished.arrow": stream[:-8],
        "head.arrow": stream[:40],
        "page.parquet": whole[:4] + b"\xff" * 300 + whole[304:],
        "a.gz": gzip.compress(whole),
    }.items():
        (folder / name).write_bytes(data)
    for name, rows in {
        "null.parquet": [*SAVED * 60, None],
        "null.arrow": ["a", None],
        "long.parquet": ["x", "word " * 300_000],
        "bytes.parquet": pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"a\xff")),
        "list.parquet": pa.array([["a"]]),
    }.items():
        write_table(pa, folder / name, rows, "stream" if name.endswith("arrow") else "parquet")
    return folder


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cut.parquet", {}, "cannot be read as parquet ("),
        ("cut.arrow", {}, "it may be cut short or broken: copy or write it again"),
        ("unfinished.arrow", {}, "the mark at the end of the stream is missing"),
        ("head.arrow", {}, "cannot be read as Arrow ("),
        ("page.parquet", {}, "cannot be read as parquet ("),
        ("null.parquet", {}, "row 300 (from 0): the value in column 'body' is null, expected"),
        ("null.arrow", {}, "row 1 (from 0): the value in column 'body' is null"),
        ("long.parquet", {"document_bytes": 1 << 20}, "row 1 (from 0): the text in column 'body'"),
        ("bytes.parquet", {}, "row 1 (from 0): the text in column 'body' is not UTF-8"),
        ("list.parquet", {}, "the column 'body' holds list<element: string>, expected strings"),
        (
            "good.parquet",
            {"json_keys": ("text",)},
            "the column 'text' is missing, the columns present are 'number', 'body'; name another",
        ),
        ("stream.arrow", {"json_keys": ("number",)}, "the column 'number' holds int64, expected"),
        ("good.parquet", {"encoding": "gbk"}, "text is always UTF-8; leave --encoding gbk out"),
        ("a.gz", {}, "is gzipped parquet, which is compressed inside"),
    ],
)
def test_a_table_that_cannot_be_read(broken, tmp_path, run, name, options, message) -> None:
    """An error of a later file comes before the work."""
    first = as_json_lines(tmp_path / "a.jsonl", ["x"])
    for inputs in ([broken / name], [first, broken / name]):
        with pytest.raises(DataError) as caught:
            run(*inputs, **{"json_keys": ("body",), **options})
        assert str(caught.value).startswith(str(broken / name))
        assert message in str(caught.value)
    with pytest.raises(DataError, match="does not begin as parquet does"):
        run(first, input_format=CorpusFormat.PARQUET)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("folder", "split", "state", "message"),
    [
        ("splits", None, None, "holds the splits 'train', 'test'; choose one: --dataset-split"),
        ("splits", "dev", None, "not 'dev'; choose one"),
        ("saved", "train", None, "no --input is a folder of splits"),
        ("folder", None, None, "without *.parquet files and without state.json"),
        (
            "folder",
            None,
            {"_indices_data_files": [{"filename": "indices.arrow"}]},
            "load the dataset there and save it again",
        ),
        ("folder", None, {"_data_files": [{"filename": "../a.arrow"}]}, "_data_files: expected th"),
        ("folder", None, {"_data_files": "many"}, "_data_files: expected the names"),
        ("folder", None, {"_data_files": [{"filename": "a.arrow"}]}, "a.arrow: is not there, thou"),
    ],
)
def test_folders_that_cannot_be_read(pa, tmp_path, run, folder, split, state, message) -> None:
    path = DATA / folder
    if folder == "folder":
        path = tmp_path / folder
        path.mkdir()
    if state is not None:
        (path / "state.json").write_text(json.dumps(state))
    with pytest.raises((ConfigError, DataError)) as caught:
        run(path, dataset_split=split)
    assert message in str(caught.value)


def test_without_pyarrow_the_extra_is_named(tmp_path, run, monkeypatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pyarrow, which reads .*a\.parquet, is not installed"):
        run(tmp_path / "a.parquet")

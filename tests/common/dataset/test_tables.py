"""Parquet, Arrow and folders of ``datasets`` against the same texts as JSON Lines.

``data/`` was written by ``save_to_disk`` of datasets 5.2 from the texts in ``SAVED``: ``saved`` in
two files, ``splits`` as the rows 0 to 3 (train) and 4, 0 (test).
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.dataset.documents import read_texts
from common.dataset.merge import merge_datasets
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.shards import Shard
from common.dataset.workers import TokenizerChoice
from common.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(__file__).parent / "data"
SAVED = [
    "Hello world",
    "你好，世界。\n\nwith a blank line",
    "",
    "Ünïcode \u2028 and 🙂",
    "the last row",
]


@pytest.fixture
def pa() -> Any:
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")


@pytest.fixture
def run(tmp_path: Path, byte_tokenizer: TokenizerChoice) -> Callable[..., Path]:
    def run(*inputs: Path, **options: object) -> Path:
        made = PreprocessOptions(
            inputs=inputs, output_prefix=tmp_path / "out", tokenizer=byte_tokenizer
        )
        return preprocess(replace(made, **options)).prefixes[0]  # type: ignore[arg-type]

    return run


def texts(count: int = 700) -> list[str]:
    words = random.Random(0)
    found = [
        "".join(words.choices("abcdefgh 中文é\n", k=words.randrange(900))) for _ in range(count)
    ]
    return [text * (number % 7 > 0) for number, text in enumerate(found)]


def files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{extension}").read_bytes() for extension in (".bin", ".idx")]


def as_json_lines(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    return path


def write(pa: Any, path: Path, rows: Any, kind: str = "parquet", group: int = 130) -> Path:
    """Write a table of the columns number and body, in groups of ``group`` rows."""
    from pyarrow import parquet

    column = rows if isinstance(rows, pa.Array | pa.ChunkedArray) else pa.array(rows, pa.string())
    table = pa.table({"number": list(range(len(column))), "body": column})
    if kind.startswith("parquet"):
        options = {"compression": "zstd", "data_page_size": 4096, "use_dictionary": "dict" in kind}
        parquet.write_table(table, path, row_group_size=group, **options)
        return path
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "zstd" else None)
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=group)
    return path


KINDS = ["parquet", "parquet-dict", "stream", "zstd", "file", "large", "view", "dictionary"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_the_bytes_of_json_lines(
    pa: Any, tmp_path: Path, run: Callable[..., Path], kind: str
) -> None:
    rows: Any = texts() * 2 if kind.endswith("dict") else texts()
    expected = files(run(as_json_lines(tmp_path / "a.jsonl", rows), json_keys=("body",)))
    types = {"large": pa.large_string(), "view": pa.string_view()}
    if kind in types:
        rows = pa.array(rows, types[kind])
    if kind == "dictionary":
        rows = pa.array(rows).dictionary_encode()
    table = write(pa, tmp_path / "a.table", rows, kind)
    for block_bytes in (100, 5000, 1 << 20):
        assert files(run(table, json_keys=("body",), block_bytes=block_bytes)) == expected
    assert list(read_texts([table], encoding="utf-8", keys=("body",))) == [
        text for text in (rows if isinstance(rows, list) else rows.to_pylist()) if text.strip()
    ]


@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_merged_shards_of_many_files_have_the_bytes_of_one_process(
    pa: Any, tmp_path: Path, run: Callable[..., Path], count: int
) -> None:
    rows = texts()
    (tmp_path / "more").mkdir()
    inputs = (
        write(pa, tmp_path / "z.parquet", rows[:300], group=1000),
        as_json_lines(tmp_path / "b.jsonl", rows[300:350]),
        write(pa, tmp_path / "empty.parquet", []),
        write(pa, tmp_path / "c.arrow", rows[350:500], "stream"),
        tmp_path / "more",
    )
    write(pa, tmp_path / "more" / "2.parquet", rows[600:])
    write(pa, tmp_path / "more" / "1.parquet", rows[500:600])
    expected = files(run(as_json_lines(tmp_path / "all.jsonl", rows), json_keys=("body",)))
    options = {"json_keys": ("body",), "output_prefix": tmp_path / "parts"}
    whole = run(*inputs, json_keys=("body",))
    assert files(whole) == expected
    parts = [
        run(*inputs, shard=Shard(number=number, count=count), **options)
        for number in range(count, 0, -1)
    ]
    merge_datasets(parts, tmp_path / "merged")
    assert files(tmp_path / "merged") == expected
    assert Path(f"{tmp_path / 'merged'}.meta.json").read_bytes() == (
        Path(f"{whole}.meta.json").read_bytes()
    )
    if count == 3:  # a part of an earlier release, which divided tables by rows
        record = Path(f"{parts[0]}.meta.json")
        there = record.read_text()
        record.write_text(there.replace("3/3 by blocks", "3/3"))
        with pytest.raises(DataError, match="is shard 3/3, but others are of another division"):
            merge_datasets(parts, tmp_path / "merged")
        run(*inputs, shard=Shard(number=3, count=3), **options)
        assert record.read_text() == there
    if count == 8:  # rows of one group go to several parts
        sizes = [Path(f"{part}.bin").stat().st_size for part in parts]
        assert max(sizes) < 0.25 * sum(sizes)


def test_a_folder_that_datasets_saved(pa: Any, tmp_path: Path, run: Callable[..., Path]) -> None:
    def expected(rows: list[str]) -> list[bytes]:
        path = as_json_lines(tmp_path / "a.jsonl", rows)
        return files(run(path, json_keys=("body",)))

    assert files(run(DATA / "saved")) == expected(SAVED)
    assert files(run(DATA / "splits", dataset_split="train")) == expected(SAVED[:4])
    assert files(run(DATA / "splits", dataset_split="test")) == expected([SAVED[4], SAVED[0]])
    both = run(DATA / "splits", DATA / "saved", dataset_split="test")
    assert files(both) == expected([SAVED[4], SAVED[0], *SAVED])


def test_datasets_writes_the_layout_of_the_fixture(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.load_from_disk(str(DATA / "saved"))
    assert rows["text"][:] == SAVED
    rows.save_to_disk(tmp_path / "again", num_shards=2)
    names = [path.name for path in sorted((DATA / "saved").iterdir())]
    assert [path.name for path in sorted((tmp_path / "again").iterdir())] == names
    for name in names:
        found, frozen = (
            re.sub(rb'"_fingerprint": "\w+"', b"", (folder / name).read_bytes())
            for folder in (tmp_path / "again", DATA / "saved")
        )
        assert found == frozen


def test_memory_does_not_grow_with_a_row_group(pa: Any, tmp_path: Path) -> None:
    """48 MiB of text in one row group of many pages, and in one record batch."""
    from pyarrow import parquet

    line = "".join(random.Random(1).choices("abcdefgh ", k=1 << 16))
    table = pa.table({"text": [line[n:] + line[:n] for n in range(768)]})
    options = {"use_dictionary": False, "write_batch_size": 4, "compression": "none"}
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    code = """
import sys, pathlib, pyarrow
from common.dataset.tables import read_table
for name in sys.argv[1:]:
    path = pathlib.Path(name)
    blocks = read_table(
        path, path.stat().st_size, ("text",), block_bytes=1 << 20, document_bytes=1 << 20
    )
    print(sum(len(texts) for texts, _ in blocks), pyarrow.default_memory_pool().max_memory())
"""
    names = [str(tmp_path / name) for name in ("a.parquet", "b.arrow")]
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [rows for rows, _ in found] == [768, 768], done.stderr
    assert max(peak for _, peak in found) < 6 << 20


def broken(pa: Any, folder: Path) -> dict[str, tuple[Any, str]]:
    """Return inputs and options, and what is said of them."""
    long = ["x", "word " * 300_000]
    write(pa, folder / "good.parquet", SAVED)
    write(pa, folder / "stream.arrow", SAVED, "stream")
    whole, stream = (folder / "good.parquet").read_bytes(), (folder / "stream.arrow").read_bytes()
    for name, data in {
        "cut.parquet": whole[:-20],
        "cut.arrow": stream[:-300],
        "unfinished.arrow": stream[:-8],
        "head.arrow": stream[:40],
        "page.parquet": whole[:4] + b"\xff" * 300 + whole[304:],
    }.items():
        (folder / name).write_bytes(data)
    write(pa, folder / "null.parquet", [*SAVED * 60, None])
    write(pa, folder / "null.arrow", ["a", None], "stream")
    write(pa, folder / "long.parquet", long)
    wrong = pa.StringArray.from_buffers(
        2, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"a\xff")
    )
    write(pa, folder / "bytes.parquet", wrong)
    write(pa, folder / "list.parquet", pa.array([["a"]]))
    return {
        "cut.parquet": ({}, "cannot be read as parquet ("),
        "cut.arrow": ({}, "it may be cut short or broken: copy or write it again"),
        "unfinished.arrow": ({}, "the mark at the end of the stream is missing"),
        "head.arrow": ({}, "cannot be read as Arrow ("),
        "page.parquet": ({}, "cannot be read as parquet ("),
        "null.parquet": ({}, "row 300 (from 0): the value in column 'body' is null, expected"),
        "null.arrow": ({}, "row 1 (from 0): the value in column 'body' is null"),
        "long.parquet": ({"document_bytes": 1 << 20}, "row 1 (from 0): the text in column 'body'"),
        "bytes.parquet": ({}, "row 1 (from 0): the text in column 'body' is not UTF-8"),
        "list.parquet": ({}, "the column 'body' holds list<element: string>, expected strings"),
        "good.parquet": (
            {"json_keys": ("text",)},
            "the column 'text' is missing, the columns present are 'number', 'body'; name another",
        ),
        "stream.arrow": ({"json_keys": ("number",)}, "the column 'number' holds int64, expected"),
    }


BROKEN = (
    *("cut.parquet", "cut.arrow", "unfinished.arrow", "head.arrow", "page.parquet"),
    *("null.parquet", "null.arrow", "long.parquet", "bytes.parquet", "list.parquet"),
    *("good.parquet", "stream.arrow"),
)


@pytest.mark.parametrize("name", BROKEN)
def test_one_clear_error(pa: Any, tmp_path: Path, run: Callable[..., Path], name: str) -> None:
    options, message = broken(pa, tmp_path)[name]
    with pytest.raises(DataError) as caught:
        run(tmp_path / name, **{"json_keys": ("body",), **options})
    assert str(caught.value).startswith(str(tmp_path / name))
    assert message in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_an_error_of_a_later_file_comes_before_the_work(
    pa: Any, tmp_path: Path, run: Callable[..., Path]
) -> None:
    first = as_json_lines(tmp_path / "a.jsonl", ["not under the key text"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"b\.parquet: cannot be read as parquet"):
        run(first, tmp_path / "b.parquet")


def test_folders_that_cannot_be_read(
    pa: Any, tmp_path: Path, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*inputs: Path, **options: object) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            run(*inputs, **options)
        return str(caught.value)

    assert "holds the splits 'train', 'test'; choose one: --dataset-split" in said(DATA / "splits")
    assert "not 'dev'; choose one" in said(DATA / "splits", dataset_split="dev")
    assert "no --input is a folder of splits" in said(DATA / "saved", dataset_split="train")
    (tmp_path / "folder").mkdir()
    assert "without *.parquet files and without state.json" in said(tmp_path / "folder")
    state = tmp_path / "folder" / "state.json"
    state.write_text(json.dumps({"_indices_data_files": [{"filename": "indices.arrow"}]}))
    assert "load the dataset there and save it again" in said(tmp_path / "folder")
    for entries, message in (
        ([{"filename": "../a.arrow"}], "_data_files: expected the names of files in this folder"),
        ("many", "_data_files: expected the names"),
        ([{"filename": "a.arrow"}], f"a.arrow: is not there, though {state} names it"),
    ):
        state.write_text(json.dumps({"_data_files": entries}))
        assert message in said(tmp_path / "folder")


def test_options_that_a_table_does_not_take(
    pa: Any, tmp_path: Path, run: Callable[..., Path]
) -> None:
    import gzip

    from common.dataset.corpus import CorpusFormat

    table = write(pa, tmp_path / "a.parquet", SAVED)
    with pytest.raises(DataError, match="whose text is always UTF-8; leave --encoding gb18030 out"):
        run(table, encoding="gb18030")
    (tmp_path / "a.gz").write_bytes(gzip.compress(table.read_bytes()))
    with pytest.raises(DataError, match="is gzipped parquet, which is compressed inside"):
        run(tmp_path / "a.gz")
    text = as_json_lines(tmp_path / "a.jsonl", SAVED)
    with pytest.raises(DataError, match="does not begin as parquet does"):
        run(text, input_format=CorpusFormat.PARQUET)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"pyarrow, which reads .*a\.parquet, is not installed; pip"
    ):
        run(tmp_path / "a.parquet")

"""Parquet, Arrow and folders of ``datasets`` against the same texts as JSON Lines. Parts of a corpus, and their merge.

``data/`` was written by ``save_to_disk`` of datasets 5.2 from the texts in ``SAVED``: ``saved`` in two files,
``splits`` as the rows 0 to 3 (train) and 4, 0 (test).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.dataset.documents import read_texts
from common.dataset.indexed import IndexedDataset, IndexedWriter
from common.dataset.merge import merge_datasets
from common.dataset.metadata import Shard, parse_shard
from common.dataset.options import PreprocessOptions
from common.dataset.preprocess import preprocess
from common.dataset.tables import read_table
from common.errors import ConfigError, DataError, StorageError
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
    return [*(text * (number % 7 > 0) for number, text in enumerate(found)), "  ", "\t\r\n", "\u3000"]


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


def test_folders_of_parquet_and_of_datasets(pa, tmp_path, run) -> None:
    def expected(rows: list[str]) -> list[bytes]:
        return files_of(run(as_json_lines(tmp_path / "a.jsonl", rows), json_keys=("body",)))

    (tmp_path / "more").mkdir()
    for name, rows in (("2", SAVED[2:]), ("1", SAVED[:2]), ("3", [])):
        write_table(pa, tmp_path / "more" / f"{name}.parquet", rows)
    assert files_of(run(tmp_path / "more", json_keys=("body",))) == expected(SAVED)
    assert files_of(run(DATA / "saved")) == expected(SAVED)
    assert files_of(run(DATA / "splits", dataset_split="train")) == expected(SAVED[:4])
    both = run(DATA / "splits", DATA / "saved", dataset_split="test")
    assert files_of(both) == expected([SAVED[4], SAVED[0], *SAVED])


def test_memory_does_not_grow_with_a_row_group(pa, tmp_path) -> None:
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
def broken(tmp_path_factory) -> Path:
    """A folder of tables, by the names of the test below."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")
    folder = tmp_path_factory.mktemp("broken")
    whole = write_table(pa, folder / "good.parquet", SAVED).read_bytes()
    stream = write_table(pa, folder / "good.arrow", SAVED, "stream").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[:-20])
    (folder / "page.parquet").write_bytes(whole[:4] + b"\xff" * 300 + whole[304:])
    (folder / "cut.arrow").write_bytes(stream[:-8])
    (folder / "name.arrow").write_bytes(stream.replace(b"number", b"n\xffmber", 1))
    (folder / "a.gz").write_bytes(gzip.compress(whole))
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]))
    write_table(pa, folder / "null.parquet", [*SAVED * 60, None])
    write_table(pa, folder / "long.parquet", ["x", "word " * 300_000])
    write_table(pa, folder / "bytes.parquet", pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"a\xff")))
    return folder


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cut.parquet", {}, "cannot be read as parquet ("),
        ("page.parquet", {}, "it may be cut short or broken: copy or write it again"),
        ("cut.arrow", {}, "the mark at the end of the stream is missing"),
        ("name.arrow", {}, "cannot be read as Arrow ("),
        ("null.parquet", {}, "row 300 (from 0): the value in column 'body' is null, expected"),
        ("long.parquet", {"document_bytes": 1 << 20}, "row 1 (from 0): the text in column 'body'"),
        ("bytes.parquet", {}, "row 1 (from 0): the text in column 'body' is not UTF-8"),
        ("good.parquet", {"json_keys": ("text",)}, "'text' is missing, the columns present are 'number', 'body'; name"),
        ("good.arrow", {"json_keys": ("number",)}, "the column 'number' holds int64, expected"),
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
        run(first, input_format="parquet")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("folder", "split", "message"),
    [
        ("splits", None, "holds the splits 'train', 'test'; choose one: --dataset-split"),
        ("splits", "dev", "not 'dev'; choose one"),
        ("saved", "train", "no --input is a folder of splits"),
        (None, None, "without *.parquet files and without state.json"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, None, "load the dataset there and save it again"),
        ({"_data_files": "many"}, None, "_data_files: expected the names"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, None, "_data_files: expected the names"),
        ({"_data_files": [{"filename": "a.arrow"}]}, None, "this folder, found 'a.arrow'; copy"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path, run, folder, split, message) -> None:
    """folder: its name in DATA, or the content of state.json."""
    if isinstance(folder, dict):
        (tmp_path / "state.json").write_text(json.dumps(folder))
    with pytest.raises((ConfigError, DataError)) as caught:
        run(DATA / folder if isinstance(folder, str) else tmp_path, dataset_split=split)
    assert message in str(caught.value)


def test_without_pyarrow_the_extra_is_named(tmp_path, run, monkeypatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pyarrow, which reads .*a\.parquet, is not installed"):
        run(tmp_path / "a.parquet")


# ---- parts of a corpus and their merge: the bytes that one process writes ----


@pytest.fixture
def options(tmp_path: Path, byte_tokenizer: dict[str, Any]) -> PreprocessOptions:
    """Text, JSON Lines, an array, a gzipped text, parquet, Arrow and a folder, of about 400 kB."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")
    words = random.Random(0)
    texts = ["".join(words.choices("abcdefgh ", k=words.randrange(1, 900))) for _ in range(1000)]
    (tmp_path / "a.txt").write_text("\ufeff" + "\n\n".join(texts[:150]))
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps({"text": text * (n % 5 > 0)}) for n, text in enumerate(texts[150:300]))
    )
    (tmp_path / "c.json").write_text(json.dumps(texts[300:450]))
    with gzip.open(tmp_path / "d.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\r\n\r\n".join(texts[450:600]))
    write_table(pa, tmp_path / "e.parquet", texts[600:900], group=1000, column="text")
    write_table(pa, tmp_path / "f.arrow", texts[900:950], "stream", column="text")
    (tmp_path / "more").mkdir()
    write_table(pa, tmp_path / "more" / "1.parquet", texts[950:], column="text")
    inputs = (*sorted(tmp_path.glob("?.*")), tmp_path / "more")
    return PreprocessOptions(inputs=inputs, output_prefix=tmp_path / "whole", **byte_tokenizer)


def shards(options: PreprocessOptions, count: int) -> list[Path]:
    """Write all parts, the last one first; return their prefixes in that order."""
    return [
        preprocess(replace(options, shard=Shard(number=number, count=count))).prefixes[0]
        for number in range(count, 0, -1)
    ]


def files(prefix: Path) -> list[bytes]:
    return files_of(prefix, ".bin", ".idx", ".meta.json")


@pytest.mark.parametrize("count", [1, 8, 100])
def test_merged_shards_have_the_bytes_of_one_process(tmp_path, options, count) -> None:
    whole = preprocess(options).prefixes[0]
    parts = shards(options, count)
    merge_datasets(parts, tmp_path / "merged")
    assert files(tmp_path / "merged") == files(whole)
    if count == 8:  # parts are about equal; rows of one group go to several
        sizes = [Path(f"{part}.bin").stat().st_size for part in parts]
        assert max(sizes) < 0.25 * sum(sizes)


def test_a_finished_shard_is_kept_and_one_of_other_inputs_is_not(tmp_path, options) -> None:
    second = replace(options, shard=Shard(number=2, count=3))
    first, again = preprocess(second), preprocess(second)
    assert not first.kept and again.kept
    assert again.tokens == first.tokens > 0
    with (tmp_path / "a.txt").open("a") as file:
        file.write("\n\nmore")
    assert not preprocess(second).kept


def test_a_shard_of_empty_documents_keeps_them(tmp_path, options) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in ["one"] + 9000 * [""] + ["two"]))
    options = replace(options, inputs=(path,))
    whole = preprocess(options).prefixes[0]
    merge_datasets(shards(options, 8), tmp_path / "merged")
    assert files(tmp_path / "merged") == files(whole)
    assert IndexedDataset(whole).document_count == 9002


def test_shards_that_do_not_make_a_whole_are_refused(tmp_path, options) -> None:
    def refused(message: str, *parts: Path, output: str = "merged") -> None:
        with pytest.raises((ConfigError, DataError, StorageError), match=message):
            merge_datasets(parts, tmp_path / output)

    parts = shards(options, 3)
    refused("shards 2 of 3 are missing; preprocess them with --shard", parts[0], parts[2])
    refused("named twice", *parts, parts[0])
    refused("choose another --output-prefix", *parts, output=parts[0].name)
    (tmp_path / "empty").mkdir()
    refused(r"empty: holds no \.idx", tmp_path / "empty")
    refused("could not be written", *parts, output="a.txt/merged")
    other = preprocess(replace(options, shard=Shard(number=1, count=2))).prefixes[0]
    refused("of another division", *parts, other)
    records = [Path(f"{part}.meta.json") for part in parts]
    for record in records:
        record.write_text(record.read_text().replace("/3", "/3 by blocks"))
    refused("is shard ./3 by blocks, but others, or those of this release", *parts)
    for record in records:
        record.write_text(record.read_text().replace("/3 by blocks", "/3"))
    preprocess(replace(options, append_eod=False, shard=Shard(number=2, count=3)))
    refused(r"eod_id is (None|256), but (None|256)", *parts)


def test_other_pairs_follow_one_another(tmp_path: Path) -> None:
    """Sentences and documents included, with the bytes of Megatron's own builder."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    random_numbers = np.random.default_rng(0)
    folder = tmp_path / "pairs"
    for name, documents in (("a", [2, 0, 1]), ("b", [1]), ("c", [3, 1])):
        sizes = random_numbers.integers(0, 9, sum(documents))
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.append(random_numbers.integers(0, 60000, sizes.sum()), sizes, np.array(documents))
    merge_datasets([folder], tmp_path / "merged")
    builder: Any = indexed.IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=np.uint16)
    for name in "abc":
        builder.add_index(str(folder / name))
    builder.finalize(str(tmp_path / "megatron.idx"))
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "megatron")
    assert IndexedDataset(tmp_path / "merged").document_count == 6
    with IndexedWriter(folder / "d", np.int32) as writer:
        writer.append(np.arange(3), np.array([3]))
    with pytest.raises(DataError, match="has tokens of int32, but uint16"):
        merge_datasets([folder], tmp_path / "merged")


def test_shards_are_named_by_number() -> None:
    assert parse_shard("2/8") == Shard(number=2, count=8)
    for text in ("0/3", "4/3", "half", "1/100000"):
        with pytest.raises(ConfigError, match=rf"--shard {text}: expected I/N, .*a number from 1 to N"):
            parse_shard(text)

"""The .bin/.idx pair: against megatron-core, in closed form, and broken in every field."""

from __future__ import annotations

import json
import struct
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset import IndexedDataset, IndexedWriter, token_dtype
from common.dataset.fleetx import FleetXDataset, FleetXWriter
from common.dataset.indexed import HEADER, MAGIC
from common.dataset.preprocess import PreprocessResult, preprocess
from common.errors import DataError, StorageError


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("torch", reason="megatron-core needs torch, which is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
        )


def write_theirs(megatron, prefix: Path, dtype, documents: list[list[list[int]]]) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_ours(prefix: Path, dtype, documents: list[list[list[int]]]) -> None:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            flat = np.array([token for sequence in document for token in sequence], dtype=np.int64)
            writer.append(
                flat,
                np.array([len(sequence) for sequence in document], dtype=np.int64),
                np.array([len(document)]),
            )


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), max_size=4),
    min_size=1,
    max_size=8,
).filter(any)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([300, 65499, 65500, 100_000]))
def test_bytes_equal_megatrons_and_each_reads_the_other(
    megatron, tmp_path, documents, vocab_size
) -> None:
    dtype = megatron.DType.optimal_dtype(vocab_size)
    assert token_dtype(vocab_size) == dtype
    write_theirs(megatron, tmp_path / "theirs", dtype, documents)
    write_ours(tmp_path / "ours", dtype, documents)
    for extension in ("bin", "idx"):
        assert (tmp_path / f"ours.{extension}").read_bytes() == (
            tmp_path / f"theirs.{extension}"
        ).read_bytes()
    ours = IndexedDataset(tmp_path / "theirs")
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    sequences = [sequence for document in documents for sequence in document]
    assert [part.tolist() for part in (ours[n] for n in range(len(ours)))] == sequences
    assert [theirs[n].tolist() for n in range(len(theirs))] == sequences
    assert ours.document_index[:].tolist() == theirs.document_indices.tolist()


ROWS = [
    *(" ".join(map(str, range(1, count))) for count in range(2, 40)),
    *(line + "\n" for line in Path(__file__).read_text(encoding="utf-8").split("\n")[:60]),
    *("", "\n", "  ", "\t\r\n", "\u3000", "", "last"),
]
"""Rows as those of Megatron's own test, and more of white space and of nothing."""


def megatron_bytes(megatron, tmp_path: Path, rows: list[str]) -> tuple[bytes, bytes]:
    """The pair that megatron-core's builder writes of bytes as tokens, driven as
    tools/preprocess_data.py of Megatron-LM drives it: a text without a token is a document without
    a sequence, and has no end-of-document token.
    """
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for row in rows:
        ids = [*row.encode(), 256] if row else []
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    return (tmp_path / "theirs.bin").read_bytes(), (tmp_path / "theirs.idx").read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl", "strings.json", "array.json", "a.parquet", "a.arrow"])
def test_every_row_is_a_document_as_in_megatron(
    megatron, tmp_path, options_for, name, offsets_of
) -> None:
    path = tmp_path / name
    if name.startswith("a."):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in ROWS)
    else:
        lines = "\n".join(map(json.dumps, ROWS))
    if path.suffix in (".parquet", ".arrow"):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        table = pa.table({"text": ROWS})
        if path.suffix == ".parquet":
            from pyarrow import parquet

            parquet.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
    else:
        path.write_text(json.dumps(ROWS) if name == "array.json" else lines)

    def run(format: str, block_bytes: int) -> PreprocessResult:
        options = {"format": format, "block_bytes": block_bytes}
        return preprocess(options_for(path, output_prefix=tmp_path / format, **options))

    expected = megatron_bytes(megatron, tmp_path, ROWS)
    for block_bytes in (50, 1 << 20):
        result = run("indexed", block_bytes)
        (prefix,) = result.prefixes
        found = [prefix.with_name(f"{prefix.name}{end}").read_bytes() for end in (".bin", ".idx")]
        assert tuple(found) == expected
        assert (result.progress.documents, result.progress.empty) == (len(ROWS), 2)
    of_fleetx = FleetXDataset(run("fleetx", 50).prefixes[0])
    pair = IndexedDataset(prefix)
    assert of_fleetx.tokens.tolist() == pair.tokens.tolist()
    assert offsets_of(of_fleetx) == offsets_of(pair)


@pytest.mark.parametrize("writer", ["Megatron-LM", "fairseq"])
def test_the_older_index_of_lazy_and_cached_is_read(tmp_path, writer, offsets_of) -> None:
    """DeepSpeed still has the class that wrote it. fairseq's has neither documents nor their
    number.
    """
    torch = pytest.importorskip(
        "torch", reason="the builder takes tensors, and torch is not installed"
    )
    deepspeed = pytest.importorskip(
        "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset",
        reason="DeepSpeed is not installed",
    )
    builder = deepspeed.IndexedDatasetBuilder(str(tmp_path / "old.bin"), dtype=np.int32)
    for document in ([[5, 6, 7], [8]], [], [[9, 70000]]):
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "old.idx"))
    if writer == "fairseq":
        raw = (tmp_path / "old.idx").read_bytes()
        (tmp_path / "old.idx").write_bytes(raw[:48] + raw[56 : 56 + 8 * 11])
    data = IndexedDataset(tmp_path / "old")
    assert [data[n].tolist() for n in range(len(data))] == [[5, 6, 7], [8], [9, 70000]]
    assert offsets_of(data) == ([0, 4, 4, 6] if writer == "Megatron-LM" else [0, 3, 4, 6])
    whole = (tmp_path / "old.idx").read_bytes()
    for wrong, message in (
        (whole[:-8], "ends early"),
        (whole + b"x" * 16, "is too long"),
        (whole[:44], "inside its header"),
        (whole[:24] + struct.pack("<Q", 8) + whole[32:], "says 8 bytes a token of int32"),
    ):
        (tmp_path / "old.idx").write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "old")


def test_members_in_closed_form(write_pair, offsets_of) -> None:
    data = IndexedDataset(write_pair([3, 7, 2, 1], documents=[2, 0, 2]))
    assert data.sizes[:].tolist() == [3, 7, 2, 1]
    assert data.document_index[:].tolist() == [0, 2, 2, 4]
    assert offsets_of(data) == [0, 10, 10, 13]
    assert (data.token_count, len(data), data.document_count) == (13, 4, 3)
    assert data.tokens.tolist() == list(range(13))
    assert data[1].tolist() == list(range(3, 10))
    assert data.dtype == np.uint16


@pytest.mark.parametrize("extension", ["", ".bin", ".idx"])
@pytest.mark.parametrize("name", ["data", "corpus.v1.2"])
def test_a_prefix_may_contain_dots_and_carry_an_extension(write_pair, name, extension) -> None:
    assert IndexedDataset(f"{write_pair([4], name=name)}{extension}").token_count == 4


def test_the_content_key_follows_the_content(write_pair, tmp_path) -> None:
    keys = [
        IndexedDataset(write_pair(lengths, name=f"n{n}")).content_key
        for n, lengths in enumerate([[4, 4], [4, 4], [8], [4, 5]])
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    (tmp_path / "n0.bin").write_bytes(b"\xff\xff" + (tmp_path / "n0.bin").read_bytes()[2:])
    assert IndexedDataset(tmp_path / "n0").content_key != keys[0], (
        "another vocabulary with the same lengths must be told apart"
    )


def test_missing_names_the_alternatives(write_pair, tmp_path) -> None:
    write_pair([4], name="my_text_document")
    write_pair([4], name="my_text_sentence")
    for asked in ("my_text", "my", "my_text_documents"):
        with pytest.raises(DataError, match=r"not found; did you mean .*my_text_document"):
            IndexedDataset(tmp_path / asked)
    with pytest.raises(DataError, match=r"my_text_document or .*my_text_sentence"):
        IndexedDataset(tmp_path / "my_text")
    for other in ("corpus_text_document", "my2_text_sentences_of_another"):  # not a slip of the pen
        with pytest.raises(DataError, match=r"holds my_text_document, my_text_sentence; write one"):
            IndexedDataset(tmp_path / other)
    with pytest.raises(DataError, match="does not exist"):
        IndexedDataset(tmp_path / "absent" / "my_text_document")
    (tmp_path / "my_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"although my_text_document\.idx is there"):
        IndexedDataset(tmp_path / "my_text_document")


def change(path: Path, at: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"XX", "starts with"),
        (0, b"TNTIDX\0\0", "has format version 256"),
        (9, struct.pack("<Q", 2), "format version 2, expected 1"),
        (17, b"\x07", "dtype code 7"),
        (18, struct.pack("<Q", 0), "holds no sequences"),
        (18, struct.pack("<Q", 9), "ends early"),
        (26, struct.pack("<Q", 1), "is too long"),
        (HEADER.size, struct.pack("<i", -1), "damaged: sequence 0 of -1 tokens"),
        (HEADER.size, struct.pack("<i", 4), "damaged: sequence 1 of 7 tokens is at byte 6"),
        (HEADER.size + 20, struct.pack("<q", 8), "damaged: sequence 1 of 7 tokens is at byte 8"),
        (HEADER.size + 36, struct.pack("<q", 1), "must run from 0"),
        (HEADER.size + 36 + 8, struct.pack("<q", 9), "damaged: document 2 begins before"),
    ],
)
def test_a_broken_idx_is_refused(write_pair, at, data, message) -> None:
    prefix = write_pair([3, 7, 2])
    change(prefix.with_suffix(".idx"), at, data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 5, HEADER.size - 1, HEADER.size, HEADER.size + 20])
def test_a_truncated_idx_is_refused(write_pair, size) -> None:
    prefix = write_pair([3, 7, 2])
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"data\.idx"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("change_by", "word"), [(-1, "smaller"), (-24, "smaller"), (2, "larger")])
def test_a_bin_of_another_size_is_refused(write_pair, change_by, word) -> None:
    prefix = write_pair([3, 7, 2])
    path = prefix.with_suffix(".bin")
    path.write_bytes((path.read_bytes() + b"\0\0")[: 24 + change_by])
    with pytest.raises(DataError, match=f"{word}.*{24 + change_by} bytes found, 24 expected"):
        IndexedDataset(prefix)


def test_nothing_is_left_behind_by_a_failure(tmp_path) -> None:
    def fail() -> None:
        with IndexedWriter(tmp_path / "data", "uint16") as writer:
            writer.append(np.arange(5), np.array([5]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_old_pair(write_pair) -> None:
    prefix = write_pair([3, 7])
    with (
        pytest.raises(DataError, match="token id 70000 does not fit uint16"),
        IndexedWriter(prefix, "uint16") as writer,
    ):
        writer.append(np.array([70000]), np.array([1]))
    assert IndexedDataset(prefix).sizes[:].tolist() == [3, 7]
    write_pair([1])
    assert IndexedDataset(prefix).sizes[:].tolist() == [1]


def test_a_rewrite_that_cannot_be_published_keeps_the_old_pair(write_pair, monkeypatch) -> None:
    prefix = write_pair([3, 7])
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}

    unlink = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path.suffix == ".idx":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with (
        pytest.raises(StorageError, match=r"an older file of this name is untouched"),
        IndexedWriter(prefix, "uint16") as writer,
    ):
        writer.append(np.arange(4), np.array([4]))
    after = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    assert after == before


@pytest.mark.parametrize("writer", [IndexedWriter, FleetXWriter])
def test_ten_million_documents_are_written_with_the_memory_of_a_block(tmp_path, writer) -> None:
    block = np.ones(100_000, dtype=np.uint16)
    tracemalloc.start()
    with writer(tmp_path / "data", np.dtype("u2")) as file:
        for _ in range(100):
            file.append(block, block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 45e6, "8 bytes a document would be 80 MB"
    data = (IndexedDataset if writer is IndexedWriter else FleetXDataset)(tmp_path / "data")
    assert (data.document_count, data.token_count) == (10_000_000, 10_000_000)
    assert [data.tokens_before(n) for n in (0, 1, 7_654_321, 10_000_000)] == [
        *(0, 1, 7_654_321, 10_000_000)
    ]


def test_the_format_starts_with_magic_and_version(write_pair) -> None:
    raw = write_pair([3]).with_suffix(".idx").read_bytes()
    assert raw.startswith(MAGIC + struct.pack("<QBQQ", 1, 8, 1, 2))
    assert raw[HEADER.size :] == struct.pack("<iqqq", 3, 0, 0, 1)

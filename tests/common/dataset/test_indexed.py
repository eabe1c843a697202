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
from common.dataset.fleetx import FleetXDataset, FleetXWriter, fleetx_dtype
from common.dataset.indexed import HEADER
from common.dataset.preprocess import PreprocessResult, preprocess
from common.errors import DataError
from tests.common.dataset.conftest import files_of, write_table


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("torch", reason="megatron-core needs torch, which is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


def write_theirs(megatron, prefix: Path, dtype, documents: list[list[list[int]]]) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_ours(writer, prefix: Path, dtype, documents: list[list[list[int]]]) -> None:
    with writer(prefix, dtype) as file:
        for document in documents:
            sizes = np.array([len(sequence) for sequence in document], dtype=np.int64)
            tokens = np.array([token for sequence in document for token in sequence], np.int64)
            file.append(tokens, sizes, np.array([len(document)]))


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), max_size=4), min_size=1, max_size=8
).filter(any)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([300, 65499, 65500, 100_000]))
def test_bytes_equal_megatrons_and_each_reads_the_other(megatron, tmp_path, documents, vocab_size) -> None:
    dtype = megatron.DType.optimal_dtype(vocab_size)
    assert token_dtype(vocab_size) == dtype
    write_theirs(megatron, tmp_path / "theirs", dtype, documents)
    write_ours(IndexedWriter, tmp_path / "ours", dtype, documents)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    ours = IndexedDataset(tmp_path / "theirs")
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    sequences = [sequence for document in documents for sequence in document]
    assert [part.tolist() for part in (ours[n] for n in range(len(ours)))] == sequences
    assert [theirs[n].tolist() for n in range(len(theirs))] == sequences
    assert ours.document_index[:].tolist() == theirs.document_indices.tolist()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([65534, 65535]))
def test_fleetx_files_have_the_bytes_of_numpy(tmp_path, documents, vocab_size, offsets_of) -> None:
    """numpy.save and numpy.savez wrote FleetX's own."""
    dtype = np.uint16 if vocab_size < 65535 else np.int32
    assert fleetx_dtype(vocab_size) == dtype
    sequences = [sequence for document in documents for sequence in document]
    flat = np.array([token for sequence in sequences for token in sequence], dtype)
    np.save(tmp_path / "theirs_ids.npy", flat)
    lens = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    docs = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    np.savez(tmp_path / "theirs_idx.npz", lens=lens, docs=docs)
    write_ours(FleetXWriter, tmp_path / "ours", dtype, documents)
    assert files_of(tmp_path / "ours", "_ids.npy") == files_of(tmp_path / "theirs", "_ids.npy")
    with np.load(tmp_path / "ours_idx.npz") as ours, np.load(tmp_path / "theirs_idx.npz") as theirs:
        for name in ("lens", "docs"):
            assert ours[name].dtype == theirs[name].dtype
            assert ours[name].tolist() == theirs[name].tolist()
    ends = np.cumsum([0, *(sum(map(len, document)) for document in documents)])
    assert offsets_of(FleetXDataset(tmp_path / "ours")) == ends.tolist()


ROWS = [
    *(" ".join(map(str, range(1, count))) for count in range(2, 40)),
    *(line + "\n" for line in Path(__file__).read_text(encoding="utf-8").split("\n")[:60]),
    *("", "\n", "  ", "\t\r\n", "\u3000", "", "last"),
]
"""Rows as those of Megatron's own test, and more of white space and of nothing."""


@pytest.mark.parametrize("name", ["a.jsonl", "strings.json", "array.json", "a.parquet", "a.arrow"])
def test_every_row_is_a_document_as_in_megatron(megatron, tmp_path, options_for, name, offsets_of) -> None:
    """Their builder is driven as tools/preprocess_data.py of Megatron-LM drives it: a text without
    a token is a document without a sequence, and has no end-of-document token.
    """
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for row in ROWS:
        ids = [*row.encode(), 256] if row else []
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    path = tmp_path / name
    if name.endswith(("parquet", "arrow")):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        kind = "parquet" if name.endswith("parquet") else "file"
        write_table(pa, path, ROWS, kind, column="text")
    elif name == "array.json":
        path.write_text(json.dumps(ROWS))
    else:
        rows = [{"text": row} for row in ROWS] if name == "a.jsonl" else ROWS
        path.write_text("\n".join(map(json.dumps, rows)))

    def run(format: str, block_bytes: int) -> PreprocessResult:
        options = {"format": format, "block_bytes": block_bytes}
        return preprocess(options_for(path, output_prefix=tmp_path / format, **options))

    for block_bytes in (50, 1 << 20):
        result = run("indexed", block_bytes)
        (prefix,) = result.prefixes
        assert files_of(prefix) == files_of(tmp_path / "theirs")
        assert (result.progress.documents, result.progress.empty) == (len(ROWS), 2)
    of_fleetx = FleetXDataset(run("fleetx", 50).prefixes[0])
    pair = IndexedDataset(prefix)
    assert of_fleetx.tokens.tolist() == pair.tokens.tolist()
    assert offsets_of(of_fleetx) == offsets_of(pair)
    assert (metadata := of_fleetx.metadata()) is not None and metadata.tokens == pair.token_count


@pytest.mark.parametrize("writer", ["Megatron-LM", "fairseq"])
def test_the_older_index_of_lazy_and_cached_is_read(tmp_path, writer, offsets_of) -> None:
    """DeepSpeed still has the class that wrote it. fairseq's has neither documents nor their
    number.
    """
    torch = pytest.importorskip("torch", reason="the builder takes tensors, and torch is not installed")
    deepspeed = pytest.importorskip(
        "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset", reason="DeepSpeed is not installed"
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
    for name in ("corpus.v1.2", "corpus.v1.2.bin", "corpus.v1.2.idx"):
        write_pair([4], name="corpus.v1.2")
        assert IndexedDataset(data.prefix.with_name(name)).token_count == 4


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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("my_text", r"did you mean .*my_text_document or .*my_text_sentence"),
        ("my_text_documents", r"not found; did you mean .*my_text_document"),
        ("corpus_text_document", r"holds my_text_document, my_text_sentence; write one"),
        ("absent/my_text_document", "does not exist"),
        ("my_text_alone", r"although my_text_alone\.idx is there"),
    ],
)
def test_missing_names_the_alternatives(write_pair, tmp_path, asked, message) -> None:
    for name in ("document", "sentence", "alone"):
        write_pair([4], name=f"my_text_{name}")
    (tmp_path / "my_text_alone.bin").unlink()
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / asked)


@pytest.mark.parametrize(
    ("extension", "at", "data", "message"),
    [
        (".idx", 0, b"XX", "starts with"),
        (".idx", 9, struct.pack("<Q", 2), "format version 2, expected 1"),
        (".idx", 17, b"\x07", "dtype code 7"),
        (".idx", 18, struct.pack("<Q", 0), "holds no sequences"),
        (".idx", 26, struct.pack("<Q", 1), "is too long"),
        (".idx", HEADER.size, struct.pack("<i", 4), "sequence 1 of 7 tokens is at byte 6"),
        (".idx", HEADER.size + 36, struct.pack("<q", 1), "must run from 0"),
        (".idx", HEADER.size + 44, struct.pack("<q", 9), "document 2 begins before"),
        (".idx", HEADER.size - 1, None, "inside its header"),
        (".idx", HEADER.size + 20, None, "ends early"),
        (".bin", 23, None, "smaller.*23 bytes found, 24 expected"),
        (".bin", 24, b"..", "larger.*26 bytes found, 24 expected"),
    ],
)
def test_a_damaged_pair_is_refused(write_pair, extension, at, data, message) -> None:
    """data: what stands there instead, None where the file is cut short."""
    prefix = write_pair([3, 7, 2])
    path = prefix.with_suffix(extension)
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + (data + raw[at + len(data) :] if data else b""))
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("writer", [IndexedWriter, FleetXWriter])
def test_nothing_is_left_behind_by_a_failure(tmp_path, write_pair, writer) -> None:
    def fail(name: str) -> None:
        with writer(tmp_path / name, "<u2") as file:
            file.append(np.array([70000]), np.array([1]))

    with pytest.raises(DataError, match="token id 70000 does not fit uint16"):
        fail("new")
    assert list(tmp_path.iterdir()) == []
    prefix = write_pair([3, 7])
    with pytest.raises(DataError):
        fail("data")
    assert IndexedDataset(prefix).sizes[:].tolist() == [3, 7]
    write_pair([1])
    assert IndexedDataset(prefix).sizes[:].tolist() == [1]


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
    places = (0, 1, 7_654_321, 10_000_000)
    assert tuple(data.tokens_before(place) for place in places) == places

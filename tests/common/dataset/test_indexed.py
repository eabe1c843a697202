"""The .bin/.idx pair: against megatron-core, in closed form, and broken in every field. FleetX's against numpy."""

from __future__ import annotations

import io
import json
import resource
import struct
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset.blend import open_samples, require_data
from common.dataset.fleetx import FleetXDataset, FleetXWriter, find_fleetx, fleetx_dtype
from common.dataset.indexed import HEADER, IndexedDataset, IndexedWriter, token_dtype
from common.dataset.metadata import read_metadata
from common.dataset.preprocess import Progress, preprocess
from common.dataset.samples import GPTDataset
from common.errors import DataError, StorageError
from tests.common.dataset.conftest import WHOLE, files_of, offsets_of, sequences_of


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
    sizes, dtype = [300, 65499, 65500, 100_000], megatron.DType.optimal_dtype(vocab_size)
    assert [token_dtype(size) for size in sizes] == [megatron.DType.optimal_dtype(size) for size in sizes]
    write_theirs(megatron, tmp_path / "theirs", dtype, documents)
    write_ours(IndexedWriter, tmp_path / "ours", dtype, documents)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    ours = IndexedDataset(tmp_path / "theirs")
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    sequences = [sequence for document in documents for sequence in document]
    assert [part.tolist() for part in sequences_of(ours)] == sequences
    assert [theirs[n].tolist() for n in range(len(theirs))] == sequences
    assert ours.document_index[:].tolist() == theirs.document_indices.tolist()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([65534, 65535]))
def test_fleetx_files_have_the_bytes_of_numpy(tmp_path, documents, vocab_size) -> None:
    """numpy.save and numpy.savez wrote FleetX's own."""
    dtype = np.uint16 if vocab_size < 65535 else np.int32
    assert [fleetx_dtype(size) for size in (65534, 65535)] == [np.uint16, np.int32]
    sequences = [sequence for document in documents for sequence in document]
    np.save(tmp_path / "theirs_ids.npy", np.array([token for sequence in sequences for token in sequence], dtype))
    write_ours(FleetXWriter, tmp_path / "ours", dtype, documents)
    assert files_of(tmp_path / "ours", "_ids.npy") == files_of(tmp_path / "theirs", "_ids.npy")
    with np.load(tmp_path / "ours_idx.npz") as ours:
        found = [(ours[name].dtype.str, ours[name].tolist()) for name in ("lens", "docs")]
    lens, docs = [len(sequence) for sequence in sequences], np.cumsum([0, *map(len, documents)]).tolist()
    assert found == [("<i4", lens), ("<i8", docs)]
    ends = np.cumsum([0, *(sum(map(len, document)) for document in documents)])
    assert offsets_of(FleetXDataset(tmp_path / "ours")) == ends.tolist()


LINES = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
ROWS = [*(" ".join("1" * count) for count in range(1, 40)), *LINES[:60], "", "\n", "  ", "\t\r\n", "\u3000", "", "last"]
"""Rows as those of Megatron's own test, and more of white space and of nothing."""


@pytest.mark.parametrize("name", ["a.jsonl", "strings.json", "array.json"])
def test_every_row_is_a_document_as_in_megatron(megatron, tmp_path, options_for, name) -> None:
    """Their builder is driven as tools/preprocess_data.py of Megatron-LM drives it: a text without a token is a
    document without a sequence, and has no end-of-document token. Rows of tables are those of JSON Lines.
    """
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for row in ROWS:
        ids = [*row.encode(), 256] if row else []
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    path = tmp_path / name
    rows = [{"text": row} for row in ROWS] if name == "a.jsonl" else ROWS
    path.write_text(json.dumps(ROWS) if name == "array.json" else "\n".join(map(json.dumps, rows)))

    def run(format: str, block_bytes: int) -> Progress:
        options = {"format": format, "block_bytes": block_bytes}
        return preprocess(options_for(path, output_prefix=tmp_path / format, **options))

    for block_bytes in (50, 1 << 20):
        result = run("indexed", block_bytes)
        (prefix,) = result.prefixes
        assert files_of(prefix) == files_of(tmp_path / "theirs")
        assert (result.documents, result.empty) == (len(ROWS), 2)
    of_fleetx = FleetXDataset(run("fleetx", 50).prefixes[0])
    pair = IndexedDataset(prefix)
    assert of_fleetx.tokens.tolist() == pair.tokens.tolist()
    assert offsets_of(of_fleetx) == offsets_of(pair)
    assert read_metadata(Path(f"{of_fleetx.prefix}.meta.json")).tokens == pair.token_count


def test_the_older_index_of_lazy_and_cached_is_read(tmp_path) -> None:
    """DeepSpeed still has the class that wrote it."""
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
    data = IndexedDataset(tmp_path / "old")
    assert [part.tolist() for part in sequences_of(data)] == [[5, 6, 7], [8], [9, 70000]]
    assert offsets_of(data) == [0, 4, 4, 6]
    whole = (tmp_path / "old.idx").read_bytes()
    for wrong, message in (
        (whole[:-8], "ends early"),
        (whole + b"x" * 16, "is too long"),
        (whole[:44], "is not a whole index"),
        (whole[:24] + struct.pack("<Q", 8) + whole[32:], "8 bytes a token and 3 dimensions for 3"),
    ):
        (tmp_path / "old.idx").write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "old")


def test_members_in_closed_form(write_pair) -> None:
    data = IndexedDataset(write_pair([3, 7, 2, 1], documents=[2, 0, 2]))
    assert offsets_of(data) == [0, 10, 10, 13] and data.tokens.tolist() == list(range(13))
    assert (data.token_count, len(data), data.document_count) == (13, 4, 3)
    for name in ("corpus.v1.2", "corpus.v1.2.bin", "corpus.v1.2.idx"):
        write_pair([4], name="corpus.v1.2")
        assert IndexedDataset(data.prefix.with_name(name)).token_count == 4


def test_the_content_key_follows_the_content(write_pair, tmp_path) -> None:
    lengths = [[4, 4], [4, 4], [8], [4, 5]]
    keys = [IndexedDataset(write_pair(each, name=f"n{n}")).content_key for n, each in enumerate(lengths)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    (tmp_path / "n0.bin").write_bytes(b"\xff\xff" + (tmp_path / "n0.bin").read_bytes()[2:])
    assert IndexedDataset(tmp_path / "n0").content_key != keys[0], "another vocabulary with the same lengths"


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
        (".idx", 0, b"XX", "is not a whole index .*begins with b'XXIDIDX"),
        (".idx", 9, struct.pack("<Q", 2), "format version 2, dtype code 8; expected version 1"),
        (".idx", 17, b"\x07", "dtype code 7"),
        (".idx", 18, struct.pack("<Q", 0), "holds no sequences"),
        (".idx", 26, struct.pack("<Q", 1), "is too long"),
        (".idx", HEADER.size, struct.pack("<i", 4), "sequence 1 of 7 tokens is at byte 6"),
        (".idx", HEADER.size + 36, struct.pack("<q", 1), "must run from 0"),
        (".idx", HEADER.size + 44, struct.pack("<q", 9), "document 2 begins before"),
        (".idx", HEADER.size - 1, None, "is not a whole index"),
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
    prefix = write_pair([3, 7])
    there = sorted(tmp_path.iterdir())
    for name in ("new", "data"):
        with (
            pytest.raises(DataError, match="token id 70000 does not fit uint16"),
            writer(tmp_path / name, "<u2") as file,
        ):
            file.append(np.array([70000]), np.array([1]))
    assert sorted(tmp_path.iterdir()) == there and IndexedDataset(prefix).sizes[:].tolist() == [3, 7]
    write_pair([1])
    assert IndexedDataset(prefix).sizes[:].tolist() == [1]


def test_ten_million_documents_are_written_with_the_memory_of_a_block(tmp_path) -> None:
    block = np.ones(100_000, dtype=np.uint16)
    tracemalloc.start()
    with IndexedWriter(tmp_path / "data", np.dtype("u2")) as file:
        for _ in range(100):
            file.append(block, block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 45e6, "8 bytes a document would be 80 MB"
    data = IndexedDataset(tmp_path / "data")
    assert (data.document_count, data.token_count) == (10_000_000, 10_000_000)
    places = (0, 1, 7_654_321, 10_000_000)
    assert tuple(data.tokens_before(place) for place in places) == places


# ---- FleetX's token files, which numpy wrote ----

TOKENS = (np.arange(13) * 7 % 50).astype(np.uint16)
LENS = np.array([3, 7, 2, 1], dtype=np.int32)
DOCS = np.array([0, 2, 2, 4], dtype=np.int64)


def write_npy(folder: Path, name: str = "data", ids: Any = TOKENS, **arrays: Any) -> Path:
    """Write both files as FleetX's preprocessing does: numpy.save and numpy.savez."""
    np.save(folder / f"{name}_ids.npy", ids)
    np.savez(folder / f"{name}_idx.npz", **(arrays or {"lens": LENS, "docs": DOCS}))
    return folder / name


def test_samples_equal_those_of_a_pair(tmp_path, write_pair) -> None:
    lengths = np.random.default_rng(1).integers(1, 30, size=60)
    pair = IndexedDataset(write_pair(lengths))
    ours = FleetXDataset(write_npy(tmp_path, "theirs", np.array(pair.tokens), lens=lengths))
    assert offsets_of(ours) == offsets_of(pair)
    one, other = (GPTDataset(data, seq_length=8, **WHOLE).read(np.arange(40)) for data in (ours, pair))
    assert (one == other).all()


@pytest.mark.parametrize("given_as", ["data", "data_ids.npy", "data_idx.npz", ""])
def test_a_prefix_a_file_or_the_folder_names_the_data(tmp_path, given_as) -> None:
    write_npy(tmp_path)
    require_data(str(tmp_path / given_as))
    samples = open_samples([str(tmp_path / given_as)], seq_length=4, shuffle=False, **WHOLE)
    assert samples.read(np.arange(2)).tolist() == [TOKENS[:5].tolist(), TOKENS[4:9].tolist()]
    assert samples.source(0) == tmp_path / "data"
    write_npy(tmp_path, "b")
    if not given_as:
        message = r"holds 2 sets of FleetX's .*name one, or a blend of weights: 1 .*b 1 .*data"
        with pytest.raises(DataError, match=message):
            require_data(str(tmp_path))


def test_the_older_form_and_one_without_documents(tmp_path) -> None:
    np.savez(tmp_path / "old_ids.npz", ids=TOKENS, lens=LENS)
    np.savez_compressed(tmp_path / "packed_ids.npz", ids=TOKENS, lens=LENS)
    for prefix in (tmp_path / "old", tmp_path / "packed_ids.npz", write_npy(tmp_path, lens=LENS)):
        data = FleetXDataset(find_fleetx(prefix))
        assert data.tokens.tolist() == TOKENS.tolist()
        assert offsets_of(data) == [0, 3, 10, 12, 13]
    assert offsets_of(FleetXDataset(write_npy(tmp_path))) == [0, 10, 10, 13]


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("ending", "data", "message"),
    [
        ("_ids.npy", None, r"data_ids\.npy: not found.*although data_idx\.npz is there"),
        ("_ids.npy", _npy(TOKENS)[:-1], "is not an array file of FleetX's"),
        ("_ids.npy", _npy(TOKENS.astype(np.float32)), "holds float32 .* expected whole numbers"),
        ("_ids.npy", _npy(np.array([print, None])), "is not an array file of FleetX"),
        ("_ids.npy", _npy(TOKENS[:12].reshape(3, 4)), r"of shape \(3, 4\), expected whole numbers"),
        ("_idx.npz", _npz(docs=DOCS), r"^\S+_idx\.npz: holds docs, expected the array lens"),
        # whose sum is 13 in 64 bits
        ("_idx.npz", _npz(lens=np.array([2**64 - 1, 14], np.uint64)), "adds up to 13 tokens"),
        ("_idx.npz", _npz(lens=LENS + 1), r"adds up to 17 tokens, but data_ids\.npy holds"),
        (
            "_idx.npz",
            _npz(lens=LENS).replace(LENS.tobytes(), (LENS ^ [1, 1, 0, 0]).astype("i4").tobytes()),
            "Bad CRC-32",
        ),
        ("_idx.npz", _npz(lens=LENS, docs=np.array([0, 3, 1, 4], np.uint64)), "docs does not rise from 0 to the 4 ent"),
        ("_idx.npz", _npz(lens=LENS, docs=np.array([0, 9])), "docs does not rise from 0 to the 4 entries"),
    ],
)
def test_broken_files_are_refused_with_their_name(tmp_path, ending, data, message) -> None:
    path = Path(f"{write_npy(tmp_path)}{ending}")
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_samples([str(tmp_path / "data")], seq_length=4, **WHOLE)


@pytest.mark.parametrize("writer", [IndexedWriter, FleetXWriter])
def test_a_full_disk_leaves_the_files_of_before(tmp_path, writer) -> None:
    with writer(tmp_path / "a", np.uint16) as file:
        file.append(TOKENS, LENS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(StorageError), writer(tmp_path / "a", np.uint16) as file:
        file.append(np.ones(99, np.uint16), np.array([99]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            file._publish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

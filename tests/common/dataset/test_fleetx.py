"""FleetX's token files: against numpy, which wrote the originals, against the same tokens in a
.bin/.idx pair, and broken.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset import GPTDataset, IndexedDataset, open_samples, require_data
from common.dataset.fleetx import FleetXDataset, FleetXWriter, fleetx_dtype
from common.dataset.preprocess import preprocess
from common.errors import DataError

TOKENS = (np.arange(13) * 7 % 50).astype(np.uint16)
LENS = np.array([3, 7, 2, 1], dtype=np.int32)
DOCS = np.array([0, 2, 2, 4], dtype=np.int64)


def write(folder: Path, name: str = "data", ids: Any = TOKENS, **arrays: Any) -> Path:
    """Write both files as FleetX's preprocessing does: numpy.save and numpy.savez."""
    np.save(folder / f"{name}_ids.npy", ids)
    np.savez(folder / f"{name}_idx.npz", **(arrays or {"lens": LENS, "docs": DOCS}))
    return folder / name


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=9), max_size=4),
    min_size=1,
    max_size=8,
).filter(any)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([301, 65534, 65535]))
def test_bytes_equal_numpys(tmp_path, documents, vocab_size, offsets_of) -> None:
    sequences = [sequence for document in documents for sequence in document]
    flat = np.array(
        [token for sequence in sequences for token in sequence],
        dtype=np.uint16 if vocab_size < 65535 else np.int32,
    )
    docs = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    theirs = write(
        tmp_path,
        "theirs",
        flat,
        lens=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        docs=docs,
    )
    with FleetXWriter(tmp_path / "ours", fleetx_dtype(vocab_size)) as writer:
        for document in documents:
            tokens = np.array(
                [token for sequence in document for token in sequence], dtype=np.int64
            )
            writer.append(
                tokens,
                np.array([len(sequence) for sequence in document]),
                np.array([len(document)]),
            )
    assert (tmp_path / "ours_ids.npy").read_bytes() == (tmp_path / "theirs_ids.npy").read_bytes()
    with np.load(tmp_path / "ours_idx.npz") as ours, np.load(f"{theirs}_idx.npz") as expected:
        for name in ("lens", "docs"):
            assert ours[name].dtype == expected[name].dtype
            assert ours[name].tolist() == expected[name].tolist()
    data = FleetXDataset(tmp_path / "ours")
    assert (
        offsets_of(data)
        == np.cumsum([0, *(sum(map(len, document)) for document in documents)]).tolist()
    )


def test_samples_equal_those_of_a_pair(tmp_path, write_pair, offsets_of) -> None:
    lengths = np.random.default_rng(1).integers(1, 30, size=60)
    pair = IndexedDataset(write_pair(lengths))
    ours = FleetXDataset(
        write(tmp_path, "theirs", np.array(pair.tokens), lens=lengths.astype(np.int32))
    )
    assert offsets_of(ours) == offsets_of(pair)
    numbers = np.arange(40)
    for shuffle in (True, False):
        rows = [
            GPTDataset(data, split="train", seq_length=8, seed=5, shuffle=shuffle).read(numbers)
            for data in (ours, pair)
        ]
        assert (rows[0] == rows[1]).all()


@pytest.mark.parametrize("given_as", ["data", "data_ids.npy", "data_idx.npz", ""])
def test_a_prefix_a_file_or_the_folder_names_the_data(tmp_path, given_as) -> None:
    write(tmp_path)
    require_data(str(tmp_path / given_as))
    samples = open_samples(
        [str(tmp_path / given_as)],
        split="train",
        split_weights=(1, 0, 0),
        seq_length=4,
        seed=0,
        shuffle=False,
    )
    assert samples.read(np.arange(2)).tolist() == [TOKENS[:5].tolist(), TOKENS[4:9].tolist()]
    assert samples.source(0) == tmp_path / "data"


def test_the_older_form_and_one_without_documents(tmp_path, offsets_of) -> None:
    np.savez(tmp_path / "old_ids.npz", ids=TOKENS, lens=LENS)
    np.savez_compressed(tmp_path / "packed_ids.npz", ids=TOKENS, lens=LENS)
    for data in map(
        FleetXDataset, (tmp_path / "old", tmp_path / "packed_ids.npz", write(tmp_path, lens=LENS))
    ):
        assert data.tokens.tolist() == TOKENS.tolist()
        assert offsets_of(data) == [0, 3, 10, 12, 13]
    assert offsets_of(FleetXDataset(write(tmp_path))) == [0, 10, 10, 13]


def test_a_folder_of_several_sets_is_refused(tmp_path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    with pytest.raises(
        DataError,
        match=r"holds 2 sets of FleetX's token files; name one, or a blend of weights: 1 .*a 1 .*b",
    ):
        require_data(str(tmp_path))


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _zip(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


BROKEN: dict[str, tuple[str, bytes | None, str]] = {
    "no ids": ("_ids.npy", None, r"data_ids\.npy: not found.*although data_idx\.npz is there"),
    "no index": ("_idx.npz", None, r"data_idx\.npz: not found.*although data_ids\.npy is there"),
    "ids empty": ("_ids.npy", b"", "is not an array file of FleetX's"),
    "ids cut short": ("_ids.npy", _npy(TOKENS)[:-1], "is not an array file of FleetX"),
    "ids of floats": (
        "_ids.npy",
        _npy(TOKENS.astype(np.float32)),
        "holds float32 .* expected whole numbers in one dimension",
    ),
    "ids of objects": (
        "_ids.npy",
        _npy(np.array([print, None], dtype=object)),
        "is not an array file of FleetX",
    ),
    "ids in rows": (
        "_ids.npy",
        _npy(TOKENS[:12].reshape(3, 4)),
        r"of shape \(3, 4\), expected whole numbers in one dimension",
    ),
    "no zip": ("_idx.npz", b"PK nothing", "is not an array file of FleetX"),
    "no lens": ("_idx.npz", _zip(docs=_npy(DOCS)), "holds docs, expected the array lens"),
    "lens cut short": ("_idx.npz", _zip(lens=_npy(LENS)[:-2]), "is not an array file of FleetX"),
    "lens empty": ("_idx.npz", _zip(lens=_npy(LENS[:0])), "lens is empty"),
    "lens below 0": (
        "_idx.npz",
        _zip(lens=_npy(np.array([14, -1]))),
        "damaged: lens has numbers that no sentence can have",
    ),
    "lens beyond": (  # their sum is 13 in 64 bits
        "_idx.npz",
        _zip(lens=_npy(np.array([2**64 - 1, 14], np.uint64))),
        "damaged: lens has numbers that no sentence can have",
    ),
    "other sum": (
        "_idx.npz",
        _zip(lens=_npy(LENS + 1)),
        r"lens adds up to 17 tokens, but data_ids\.npy holds 13",
    ),
    "a bit": (
        "_idx.npz",
        _zip(lens=_npy(LENS)).replace(
            LENS.tobytes(), (LENS ^ [1, 1, 0, 0]).astype(np.int32).tobytes()
        ),
        "Bad CRC-32",
    ),
    "docs fall": (
        "_idx.npz",
        _zip(lens=_npy(LENS), docs=_npy(np.array([0, 3, 1, 4]))),
        "damaged: docs does not rise from 0 to the 4 entries of lens",
    ),
    "docs of unsigned numbers fall": (
        "_idx.npz",
        _zip(lens=_npy(LENS), docs=_npy(np.array([0, 3, 1, 4], np.uint64))),
        "damaged: docs does not rise from 0 to the 4 entries of lens",
    ),
    "docs beyond": (
        "_idx.npz",
        _zip(lens=_npy(LENS), docs=_npy(np.array([0, 9]))),
        "damaged: docs does not rise from 0 to the 4 entries of lens",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_refused_with_their_name(tmp_path, fault) -> None:
    extension, data, message = BROKEN[fault]
    path = Path(f"{write(tmp_path)}{extension}")
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message) as error:
        open_samples(
            [str(tmp_path / "data")], split="train", split_weights=(1, 0, 0), seq_length=4, seed=0
        )
    assert "\n" not in str(error.value)


def test_preprocessing_writes_the_tokens_of_a_pair(tmp_path, options_for, offsets_of) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one two\n\nthree\n\nfour five six\n")

    def run(name: str, **options: Any) -> Path:
        return preprocess(options_for(corpus, output_prefix=tmp_path / name, **options)).prefixes[0]

    pair, ours = IndexedDataset(run("pair")), FleetXDataset(run("ours", format="fleetx"))
    assert ours.prefix.name == "ours_text_document"
    assert ours.tokens.tolist() == pair.tokens.tolist()
    assert offsets_of(ours) == offsets_of(pair)
    assert (metadata := ours.metadata()) is not None and metadata.tokens == pair.token_count
    assert sorted(path.name for path in tmp_path.glob("ours*")) == [
        "ours_text_document.meta.json",
        "ours_text_document_ids.npy",
        "ours_text_document_idx.npz",
    ]


def test_a_failed_run_leaves_nothing(tmp_path) -> None:
    with (
        pytest.raises(DataError, match="token id 65536 does not fit uint16"),
        FleetXWriter(tmp_path / "data", "<u2") as writer,
    ):
        writer.append(np.array([65536]), np.array([1]), np.array([1]))
    assert list(tmp_path.iterdir()) == []

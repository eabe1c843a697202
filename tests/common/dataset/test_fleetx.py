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

from common.dataset import GPTDataset, IndexedDataset, open_samples, require_data
from common.dataset.fleetx import FleetXDataset
from common.errors import DataError
from tests.common.dataset.conftest import WHOLE

TOKENS = (np.arange(13) * 7 % 50).astype(np.uint16)
LENS = np.array([3, 7, 2, 1], dtype=np.int32)
DOCS = np.array([0, 2, 2, 4], dtype=np.int64)


def write(folder: Path, name: str = "data", ids: Any = TOKENS, **arrays: Any) -> Path:
    """Write both files as FleetX's preprocessing does: numpy.save and numpy.savez."""
    np.save(folder / f"{name}_ids.npy", ids)
    np.savez(folder / f"{name}_idx.npz", **(arrays or {"lens": LENS, "docs": DOCS}))
    return folder / name


def test_samples_equal_those_of_a_pair(tmp_path, write_pair, offsets_of) -> None:
    lengths = np.random.default_rng(1).integers(1, 30, size=60)
    pair = IndexedDataset(write_pair(lengths))
    ours = FleetXDataset(write(tmp_path, "theirs", np.array(pair.tokens), lens=lengths))
    assert offsets_of(ours) == offsets_of(pair)
    for shuffle in (True, False):
        one, other = (
            GPTDataset(data, seq_length=8, shuffle=shuffle, **WHOLE).read(np.arange(40)) for data in (ours, pair)
        )
        assert (one == other).all()


@pytest.mark.parametrize("given_as", ["data", "data_ids.npy", "data_idx.npz", ""])
def test_a_prefix_a_file_or_the_folder_names_the_data(tmp_path, given_as) -> None:
    write(tmp_path)
    require_data(str(tmp_path / given_as))
    samples = open_samples([str(tmp_path / given_as)], seq_length=4, shuffle=False, **WHOLE)
    assert samples.read(np.arange(2)).tolist() == [TOKENS[:5].tolist(), TOKENS[4:9].tolist()]
    assert samples.source(0) == tmp_path / "data"
    write(tmp_path, "b")
    if not given_as:
        message = r"holds 2 sets of FleetX's .*name one, or a blend of weights: 1 .*b 1 .*data"
        with pytest.raises(DataError, match=message):
            require_data(str(tmp_path))


def test_the_older_form_and_one_without_documents(tmp_path, offsets_of) -> None:
    np.savez(tmp_path / "old_ids.npz", ids=TOKENS, lens=LENS)
    np.savez_compressed(tmp_path / "packed_ids.npz", ids=TOKENS, lens=LENS)
    for prefix in (tmp_path / "old", tmp_path / "packed_ids.npz", write(tmp_path, lens=LENS)):
        data = FleetXDataset(prefix)
        assert data.tokens.tolist() == TOKENS.tolist()
        assert offsets_of(data) == [0, 3, 10, 12, 13]
    assert offsets_of(FleetXDataset(write(tmp_path))) == [0, 10, 10, 13]


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


def _docs(*numbers: int, dtype: type = np.int64) -> bytes:
    return _zip(lens=_npy(LENS), docs=_npy(np.array(numbers, dtype)))


WRONG_BIT = LENS ^ np.array([1, 1, 0, 0], np.int32)


@pytest.mark.parametrize(
    ("ending", "data", "message"),
    [
        ("_ids.npy", None, r"data_ids\.npy: not found.*although data_idx\.npz is there"),
        ("_ids.npy", _npy(TOKENS)[:-1], "is not an array file of FleetX's"),
        ("_ids.npy", _npy(TOKENS.astype(np.float32)), "holds float32 .* expected whole numbers"),
        ("_ids.npy", _npy(np.array([print, None])), "is not an array file of FleetX"),
        ("_ids.npy", _npy(TOKENS[:12].reshape(3, 4)), r"of shape \(3, 4\), expected whole numbers"),
        ("_idx.npz", _zip(docs=_npy(DOCS)), "holds docs, expected the array lens"),
        ("_idx.npz", _zip(lens=_npy(LENS)[:-2]), "is not an array file of FleetX"),
        ("_idx.npz", _zip(lens=_npy(LENS[:0])), "lens is empty"),
        ("_idx.npz", _zip(lens=_npy(np.array([14, -1]))), "lens has numbers that no sentence can"),
        # whose sum is 13 in 64 bits
        ("_idx.npz", _zip(lens=_npy(np.array([2**64 - 1, 14], np.uint64))), "lens has numbers"),
        ("_idx.npz", _zip(lens=_npy(LENS + 1)), r"adds up to 17 tokens, but data_ids\.npy holds"),
        ("_idx.npz", _zip(lens=_npy(LENS)).replace(LENS.tobytes(), WRONG_BIT.tobytes()), "Bad CRC-32"),
        ("_idx.npz", _docs(0, 3, 1, 4, dtype=np.uint64), "docs does not rise from 0 to the 4 ent"),
        ("_idx.npz", _docs(0, 9), "docs does not rise from 0 to the 4 entries"),
    ],
)
def test_broken_files_are_refused_with_their_name(tmp_path, ending, data, message) -> None:
    path = Path(f"{write(tmp_path)}{ending}")
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_samples([str(tmp_path / "data")], seq_length=4, **WHOLE)

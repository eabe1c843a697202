"""One door for all formats, and what each of our writers wrote, read by our readers; the formats'
own libraries are in the tests beside.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from common.errors import CheckpointError
from common.tensor_files.arrays import NUMPY_TYPES, TensorKind
from common.tensor_files.containers import open_tensors
from common.tensor_files.mindspore_ckpt import stream_mindspore
from common.tensor_files.safetensors_file import INDEX, stream_safetensors, stream_shards
from common.tensor_files.torch_files import TensorLeaf, write_torch

tensors = st.dictionaries(
    st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12),
    st.sampled_from(sorted(NUMPY_TYPES)).flatmap(
        lambda word: st.tuples(
            st.just(word),
            hnp.arrays(
                NUMPY_TYPES[word], hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            ),
        )
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=40)
@given(tensors)
def test_written_files_are_read(
    tmp_path_factory: pytest.TempPathFactory, written: dict[str, tuple[str, np.ndarray]]
) -> None:
    folder = tmp_path_factory.mktemp("formats")
    kinds = {
        name: TensorKind(dtype=word, shape=array.shape) for name, (word, array) in written.items()
    }
    arrays = [array for _, array in written.values()]
    stream_safetensors(folder / "a.safetensors", kinds, arrays)
    stream_mindspore(folder / "a.ckpt", kinds, arrays)
    write_torch(
        folder / "a.pt",
        {
            name: TensorLeaf(name=name, dtype=kind.dtype, shape=kind.shape)
            for name, kind in kinds.items()
        },
        arrays,
    )
    for file in ("a.safetensors", "a.ckpt", "a.pt"):
        with open_tensors(folder / file) as stored:
            assert list(stored) == list(written)
            for name, (word, array) in written.items():
                assert stored[name].dtype == word and stored[name].shape == array.shape
                assert stored[name].read().tobytes() == array.tobytes()


def shards_of(folder: Path, limit: int) -> dict[str, int]:
    kinds = {name: TensorKind(dtype="bfloat16", shape=(2, 3)) for name in "abcd"}
    return stream_shards(
        folder, kinds, (np.full((2, 3), number, np.uint16) for number in range(4)), limit=limit
    )


def test_shards_are_those_of_the_library_and_read_as_one(tmp_path: Path) -> None:
    assert len(shards_of(tmp_path, 30)) == 2  # 12 bytes a tensor
    files = sorted(path.name for path in tmp_path.glob("model-*"))
    index = json.loads((tmp_path / INDEX).read_text())
    assert (
        index["metadata"] == {"total_size": 48}
        and sorted(set(index["weight_map"].values())) == files
    )
    theirs = {
        name: (file, tensor)
        for file in files
        for name, tensor in load_file(tmp_path / file).items()
    }
    assert {name: file for name, (file, _) in theirs.items()} == index["weight_map"]
    assert all(
        tensor.dtype == torch.bfloat16 and tensor.shape == (2, 3) for _, tensor in theirs.values()
    )
    with open_tensors(tmp_path / INDEX) as stored:
        assert [int(stored[name].read()[0, 0]) for name in stored] == [0, 1, 2, 3]


def test_a_small_model_has_no_index_and_a_large_tensor_a_shard_to_itself(tmp_path: Path) -> None:
    assert (
        list(shards_of(tmp_path, 48)) == ["model.safetensors"] and not (tmp_path / INDEX).exists()
    )
    assert list(shards_of(tmp_path, 5)) == [
        f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path, 24)
    index = json.loads((tmp_path / INDEX).read_text())

    def refused(content: object) -> str:
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError) as caught, open_tensors(tmp_path / INDEX):
            pass
        return str(caught.value)

    places = index["weight_map"]
    assert "do not hold the same tensors: e" in refused(
        {"weight_map": {**places, "e": places["a"]}}
    )
    assert "do not hold the same tensors: a" in refused(
        {"weight_map": {name: file for name, file in places.items() if name != "a"}}
    )
    assert "another folder" in refused({"weight_map": {"a": "../model.safetensors"}})
    assert all(
        "or not a file" in refused({"weight_map": {"a": name}})
        for name in ("", "a\0b", INDEX, "other.index.json")
    )
    assert "not an index of shards" in refused({"weights": {}}) and "found a list" in refused([1])
    (tmp_path / places["d"]).unlink()
    assert "no such file" in refused(index)


def test_a_file_is_known_by_what_it_begins_with(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "lightning.ckpt")
    stream_safetensors(
        tmp_path / "weights",
        {"a": TensorKind(dtype="float32", shape=(2,))},
        [np.ones(2, np.float32)],
    )
    for name in ("lightning.ckpt", "weights"):
        with open_tensors(tmp_path / name) as stored:
            assert stored["a"].read().tolist() == [1, 1]
    (tmp_path / "notes.txt").write_text("no weights, only words")
    with (
        pytest.raises(CheckpointError, match="not a known weight file"),
        open_tensors(tmp_path / "notes.txt"),
    ):
        pass
    (tmp_path / "empty.ckpt").touch()
    with pytest.raises(CheckpointError, match="is empty"), open_tensors(tmp_path / "empty.ckpt"):
        pass

"""One door for all formats; the formats' own libraries are in the tests beside."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.errors import CheckpointError
from common.tensor_files.arrays import TensorKind
from common.tensor_files.containers import open_tensors
from common.tensor_files.safetensors_file import INDEX, stream_safetensors, stream_shards


def shards_of(folder: Path, limit: int) -> dict[str, int]:
    folder.mkdir(exist_ok=True)
    kinds = {name: TensorKind(dtype="bfloat16", shape=(2, 3)) for name in "abcd"}
    arrays = (np.full((2, 3), number, np.uint16) for number in range(4))
    return stream_shards(folder, kinds, arrays, limit=limit)


def test_shards_are_those_of_the_library_and_read_as_one(tmp_path: Path) -> None:
    assert list(shards_of(tmp_path / "small", 48)) == ["model.safetensors"]
    assert not (tmp_path / "small" / INDEX).exists()
    names = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert list(shards_of(tmp_path / "large", 5)) == names, "a large tensor is alone"
    assert len(shards_of(tmp_path, 30)) == 2  # 12 bytes a tensor
    files = sorted(path.name for path in tmp_path.glob("model-*"))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 48}
    places = {}
    for file in files:
        for name, tensor in load_file(tmp_path / file).items():
            places[name] = file
            assert tensor.dtype == torch.bfloat16 and tensor.shape == (2, 3)
    assert places == index["weight_map"] and sorted(set(places.values())) == files
    with open_tensors(tmp_path / INDEX) as stored:
        assert [int(stored[name].read()[0, 0]) for name in stored] == [0, 1, 2, 3]


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path, 24)
    index = json.loads((tmp_path / INDEX).read_text())
    places = index["weight_map"]
    others = {name: file for name, file in places.items() if name != "a"}

    def refused(content: object, message: str) -> None:
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message), open_tensors(tmp_path / INDEX):
            pass

    refused({"weight_map": places | {"e": places["a"]}}, "do not hold the same tensors: e")
    refused({"weight_map": others}, "do not hold the same tensors: a")
    refused({"weight_map": {"a": "../model.safetensors"}}, "another folder")
    refused({"weight_map": {"a": ""}}, "or not a file")
    refused({"weight_map": {"a": INDEX}}, "or not a file")
    refused({"weights": {}}, "not an index of shards")
    refused([1], "found a list")
    (tmp_path / places["d"]).unlink()
    refused(index, "no such file")


def test_a_file_is_known_by_what_it_begins_with(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "lightning.ckpt")
    kinds = {"a": TensorKind(dtype="float32", shape=(2,))}
    stream_safetensors(tmp_path / "weights", kinds, [np.ones(2, np.float32)])
    for name in ("lightning.ckpt", "weights"):
        with open_tensors(tmp_path / name) as stored:
            assert stored["a"].read().tolist() == [1, 1]
    for name, words, message in (
        ("notes.txt", "only words", "not a known weight file"),
        ("empty.ckpt", "", "is empty"),
    ):
        (tmp_path / name).write_text(words)
        with pytest.raises(CheckpointError, match=message), open_tensors(tmp_path / name):
            pass

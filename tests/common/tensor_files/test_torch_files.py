"""Files of torch.save against torch itself, read and written; pickles that name code."""

import argparse
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from common.errors import CheckpointError, ConfigError
from common.tensor_files import pickled_values
from common.tensor_files.containers import open_tensors
from common.tensor_files.torch_files import TensorLeaf, TorchName, write_torch


def as_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.from_numpy(np.array(array).view(np.int16)).view(dtype)
        if dtype == torch.bfloat16
        else torch.from_numpy(np.array(array))
    )


def megatron_like() -> dict[str, Any]:
    matrix = torch.arange(24.0).reshape(4, 6)
    shared = torch.ones(3, 2, dtype=torch.float16)
    copy = torch.arange(3.0)
    copy.partition_dim = 0  # Megatron's float32 copies carry attributes
    return {
        "model": OrderedDict(
            {
                "matrix": matrix, "transposed": matrix.t(), "cut": matrix[1:3, 2:5],
                "every_second": matrix[:, ::2],
                "expanded": torch.ones(1, 3).expand(2, 3), "empty": torch.zeros(0, 2),
                "scalar": torch.tensor(2.5),
                "bf": matrix.bfloat16()[1:], "a.weight": shared, "b.weight": shared,
                "linear": torch.nn.Linear(2, 3).state_dict(),
                "parameter": torch.nn.Parameter(matrix.double()),
                "bytes": torch.tensor([1, 2], dtype=torch.uint8),
                "numbers": {0: torch.arange(3), 1: torch.arange(3, dtype=torch.int32)},
                "mask": torch.tensor([True, False]),
            }
        ),
        "optimizer": {"fp32_from_fp16_params": [[copy, torch.nn.Parameter(torch.ones(2))]]},
    }  # fmt: skip


def flat(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree.detach()}
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {
        name: tensor
        for key, part in parts
        for name, tensor in flat(part, f"{path}.{key}" if path else str(key)).items()
    }


@pytest.mark.parametrize("as_zip", [True, False])
def test_files_of_torch_are_read(tmp_path: Path, as_zip: bool) -> None:
    saved = megatron_like()
    saved["optimizer"]["fp32_from_fp16_params"][0][1].tensor_model_parallel = True
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=as_zip)
    expected = flat(saved)
    with open_tensors(tmp_path / "x.pt") as stored:
        assert list(stored) == list(expected)
        for name, tensor in expected.items():
            assert stored[name].shape == tensor.shape and stored[name].dtype == str(
                tensor.dtype
            ).removeprefix("torch.")
            assert torch.equal(as_torch(stored[name].read(), tensor.dtype), tensor), name
        assert np.shares_memory(stored["model.a.weight"].read(), stored["model.b.weight"].read())
        assert stored.tree["model"]["numbers"][0] is stored["model.numbers.0"]


def test_plain_values_of_a_megatron_file_are_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0).random(3)
    saved = {
        "args": argparse.Namespace(hidden_size=8, params_dtype=torch.float16, lr=1e-3,
        data_path=["a"], seed=None),
        "checkpoint_version": 3.0, "iteration": 2**40, "size": torch.Size([2, 3]),
        "device": torch.device("cpu"), "ids": {1, 2},
        "rng": {"random": random.getstate(), "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(), "array": rng,
                "big": rng.astype(">f4"), "matrix": np.asfortranarray(rng.reshape(3, 1) + rng),
                "number": np.float32(2.5)},
        "raw": b"\x00\xff", "none": b"",
    }  # fmt: skip
    torch.save(saved, tmp_path / "x.pt")
    with open_tensors(tmp_path / "x.pt") as stored:
        tree = stored.tree
        assert vars(tree["args"]) == {
            "hidden_size": 8,
            "params_dtype": "torch.float16",
            "lr": 1e-3,
            "data_path": ["a"],
            "seed": None,
        }
        assert stored.plain["args.hidden_size"] == 8 and stored.plain["iteration"] == 2**40
        assert (
            tree["size"] == (2, 3)
            and tree["device"] == "cpu"
            and tree["ids"] == {1, 2}
            and tree["raw"] == b"\x00\xff"
        )
        assert (
            tree["none"] == b""
            and tree["rng"]["random"] == random.getstate()
            and tree["rng"]["number"] == 2.5
        )
        for name in ("array", "big", "matrix"):
            np.testing.assert_array_equal(tree["rng"][name], saved["rng"][name])
        np.testing.assert_array_equal(tree["rng"]["numpy"][1], np.random.get_state()[1])
        assert torch.equal(
            torch.from_numpy(tree["rng"]["torch"].read().copy()), torch.get_rng_state()
        )


@pytest.mark.parametrize("package", ["numpy.core", "numpy._core"])
def test_arrays_of_both_numpys_are_read(tmp_path: Path, package: str) -> None:
    program = pickle.dumps({"a": np.arange(3), "b": np.float64(2.5)}, 2)
    for found in (b"numpy.core", b"numpy._core"):
        program = program.replace(found, package.encode())
    with open_tensors(archive(tmp_path / "x.pt", program)) as stored:
        assert stored.plain["a"].tolist() == [0, 1, 2] and stored.plain["b"] == 2.5


def text(content: bytes) -> bytes:
    return b"X" + len(content).to_bytes(4, "little") + content


def archive(path: Path, program: bytes, **records: bytes) -> Path:
    head = {"data.pkl": program, "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (head | records).items():
            file.writestr(f"archive/{name}", content)
    return path


CODE = {
    "call": b"cposix\nsystem\n(Vtouch {}\ntR.",
    "import": b"cbuiltins\n__import__\n(Vos\ntR.",
    "attribute": b"\x80\x04\x8c\x09posixpath\x8c\x09os.system\x93(\x8c\x04true\x85R.",
    "instance": b"(Vtouch {}\niposix\nsystem\n.",
    "eval": b"cbuiltins\neval\n(Vopen('{}', 'w')\ntR.",
}


@pytest.mark.parametrize("kind", [*CODE, "extension"])
@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_that_names_code_is_refused_and_not_executed(
    tmp_path: Path, kind: str, old: bool
) -> None:
    target = tmp_path / "executed"
    program = CODE.get(kind, b"\x82\x01.").replace(b"{}", str(target).encode())
    path = tmp_path / "x.bin"
    if old:
        head = (
            pickle.dumps(0x1950A86A20F9469CFC6C, 2)
            + pickle.dumps(1001, 2)
            + pickle.dumps({"little_endian": True}, 2)
        )
        path.write_bytes(head + program)
    else:
        archive(path, program)
    with pytest.raises(CheckpointError) as caught, open_tensors(path):
        pass
    assert not target.exists()
    assert kind in ("attribute", "instance", "extension") or (
        "nothing of it was executed" in str(caught.value) and "safetensors" in str(caught.value)
    )
    assert kind != "call" or "names posix.system" in str(caught.value)


@pytest.mark.parametrize(
    "program",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n}Vx\nK\x01sb.",  # the state of a function
        b"ctorch._utils\n_rebuild_tensor_v2\nN}V__defaults__\nNs\x86b.",  # or its attributes
        b"cargparse\nNamespace\nN}V__setstate__\nK\x01s\x86b.",  # a class
        b"cargparse\nNamespace\n.",
        b"ctorch._utils\n_rebuild_tensor_v2\n.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"cnumpy\ndtype\n(VO8\n\x89\x88tR.",
        b"}q\x00(Va\nh\x00u.",  # a dict that holds itself
        b"\x80\x02.",
        b"",
        b"Vabc",
        b"(V1\nV2\ntQ.",
        b"Na" * 3 + b"r\xff\xff\xff\xff.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    ],
)
def test_a_pickle_that_means_nothing_is_one_error(tmp_path: Path, program: bytes) -> None:
    with (
        pytest.raises(CheckpointError, match=r"not a whole file of torch\.save"),
        open_tensors(archive(tmp_path / "x.pt", program)),
    ):
        pass
    torch.save({"a": torch.ones(2)}, tmp_path / "y.pt")  # and later files are read as before
    with open_tensors(tmp_path / "y.pt") as stored:
        assert stored["a"].read().tolist() == [1, 1]


def test_lists_of_lists_that_grow_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickled_values, "MAX_VALUES", 1000)
    grown: list[Any] = []
    for _ in range(40):
        grown = [grown, grown]
    torch.save({"a": grown}, tmp_path / "x.pt")
    with (
        pytest.raises(CheckpointError, match="more than 1000 values"),
        open_tensors(tmp_path / "x.pt"),
    ):
        pass


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4), st.integers(0, 3))
def test_any_view_is_read(
    tmp_path_factory: pytest.TempPathFactory, dims: list[tuple[int, int]], offset: int
) -> None:
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.arange(100, dtype=torch.int16).as_strided(shape, strides, offset)
    path = tmp_path_factory.mktemp("view") / "x.pt"
    torch.save({"a": tensor}, path)
    with open_tensors(path) as stored:
        np.testing.assert_array_equal(stored["a"].read(), tensor.numpy())


def test_objects_of_megatron_are_records_without_code(tmp_path: Path) -> None:
    enum = text(b"kind") + b"cmegatron.core.enums\nModelType\n(K\x01tR"
    scaler = text(b"scaler") + b"cmegatron.fp16.loss_scaler\nDynamicLossScaler\n)\x81}"
    scaler += text(b"cur_scale") + b"K\x08sb"
    program = b"}(" + enum + scaler + b"u."
    with open_tensors(archive(tmp_path / "x.pt", program)) as stored:
        kind, scaler = stored.plain["kind"], stored.plain["scaler"]
    assert (kind.name, kind.arguments) == ("megatron.core.enums.ModelType", (1,))
    assert (scaler.name, scaler.state) == (
        "megatron.fp16.loss_scaler.DynamicLossScaler",
        {"cur_scale": 8},
    )


@pytest.mark.parametrize("as_zip", [True, False])
def test_every_cut_is_refused(tmp_path: Path, as_zip: bool) -> None:
    saved = {"a": torch.ones(40), "b": torch.arange(3)}
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=as_zip)
    content = (tmp_path / "x.pt").read_bytes()
    short = tmp_path / "short.bin"
    for cut in [0, 1, 3, *range(4, len(content) - 1, 39), len(content) - 1]:
        short.write_bytes(content[:cut])
        with pytest.raises(CheckpointError), open_tensors(short):
            pass


def test_a_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    """Against zipfile, which compares too; torch does not."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(300.0), "b": torch.ones(5)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(300, dtype=np.float32).tobytes()) + 77] ^= 4
    path.write_bytes(content)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() == "x/data/0"
    with open_tensors(path) as stored:
        for name in ("a", "b"):
            with pytest.raises(CheckpointError, match=r"x.pt: x/data/0 has changed since it was"):
                stored[name].read()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with open_tensors(path) as stored:
        assert stored["a"].read().tolist() == [0, 1, 2]


def test_a_changed_bit_beside_the_tensors_is_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"of_step_20": torch.ones(5)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"of_step_20") + 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x.pt: x/data.pkl has changed"), open_tensors(path):
        pass


def test_a_machine_without_torch_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"package torch, .*x.pt, is not .*'\.\[torch\]'"),
        open_tensors(tmp_path / "x.pt"),
    ):
        pass


def test_torch_loads_what_we_write(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {
        "m": ("float32", matrix), "half": ("float16", matrix.astype(np.float16)),
        "bf": ("bfloat16", np.array([0x3FC0, 0xC000], np.uint16)),
        "step": ("int64", np.array(5)), "none": ("int32", np.zeros((0, 2), np.int32)),
        "yes": ("bool", np.array([True, False])),
        "double": ("float64", np.ones(1)), "byte": ("uint8", np.array([7, 8], np.uint8)),
        "turned": ("float32", matrix.T),
    }  # fmt: skip
    leaves = {
        name: TensorLeaf(name=name, dtype=word, shape=array.shape)
        for name, (word, array) in arrays.items()
    }
    tree = {
        "model": {**leaves, "tied": leaves["m"]},
        "groups": [{"params": [0, 1], "betas": (0.9, 0.95), "none": ()}, []],
        "iteration": 2**40, "version": 3.0, "name": "é\n", "flag": True, "nothing": None, 3: -1,
        "dtype": TorchName("torch.bfloat16"),
    }  # fmt: skip
    path = tmp_path / "model_optim_rng.pt"
    write_torch(path, tree, (array for _, array in arrays.values()))
    loaded = torch.load(path, weights_only=True)
    torch.save(loaded, tmp_path / "theirs.pt")
    sums = []
    for file in (path, tmp_path / "theirs.pt"):
        with zipfile.ZipFile(file) as records:
            assert records.testzip() is None
            sums.append({Path(each.filename).name: each.CRC for each in records.infolist()})
    assert [name for name in sums[1] if sums[0][name] != sums[1][name]] == ["serialization_id"]
    for name, (word, array) in arrays.items():
        tensor = loaded["model"][name]
        assert str(tensor.dtype) == f"torch.{word}" and tuple(tensor.shape) == array.shape
        assert torch.equal(tensor, as_torch(array, tensor.dtype))
    assert loaded["model"]["tied"].data_ptr() == loaded["model"]["m"].data_ptr()
    assert torch.load(path, weights_only=True, mmap=True)["model"]["turned"].shape == (3, 2)
    plain = {key: value for key, value in loaded.items() if key != "model"}
    assert plain == {
        **{key: value for key, value in tree.items() if key != "model"},
        "dtype": torch.bfloat16,
    }


def test_a_namespace_and_numpy_values_are_written_as_torch_writes_them(tmp_path: Path) -> None:
    tree = {
        "args": argparse.Namespace(hidden_size=8, dtype=TorchName("torch.float16")),
        "state": np.random.get_state(),
    }
    write_torch(tmp_path / "x.pt", tree, [])
    loaded = torch.load(tmp_path / "x.pt", weights_only=False)
    assert loaded["args"] == argparse.Namespace(hidden_size=8, dtype=torch.float16)
    np.testing.assert_array_equal(loaded["state"][1], tree["state"][1])


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    leaf = TensorLeaf(name="a", dtype="float32", shape=(2**22,))
    with pytest.raises(OSError, match="No space left on device"):
        write_torch(Path("/dev/full"), {"a": leaf}, [np.ones(2**22, np.float32)])


def test_the_arrays_to_write_are_read_to_their_end(tmp_path: Path) -> None:
    """One that waits behind its last array would be ended by the garbage collector."""
    ended = []

    def arrays() -> Iterator[NDArray[Any]]:
        yield np.ones(3, np.float32)
        ended.append(True)

    leaf = TensorLeaf(name="a", dtype="float32", shape=(3,))
    write_torch(tmp_path / "x.pt", {"a": leaf}, arrays())
    assert ended

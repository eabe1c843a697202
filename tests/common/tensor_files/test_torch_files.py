"""Files of torch.save against torch itself, read and written; pickles that name code."""

import argparse
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import CheckpointError, ConfigError
from common.tensor_files import pickled_values
from common.tensor_files.arrays import TensorSource
from common.tensor_files.containers import open_tensors
from common.tensor_files.torch_files import TorchName, write_torch


def as_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    is_bfloat16 = dtype == torch.bfloat16
    words = torch.from_numpy(np.array(array).view(np.int16 if is_bfloat16 else array.dtype))
    return words.view(dtype) if is_bfloat16 else words


def refused(path: Path, message: str, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error, match=message) as caught:
        open_tensors(path)
    return str(caught.value)


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
    stored = open_tensors(tmp_path / "x.pt")
    assert list(stored) == list(expected)
    for name, tensor in expected.items():
        found = stored[name]
        assert (found.shape, f"torch.{found.dtype}") == (tensor.shape, str(tensor.dtype))
        assert torch.equal(as_torch(found.read(), tensor.dtype), tensor), name
    assert np.shares_memory(stored["model.a.weight"].read(), stored["model.b.weight"].read())
    assert stored.tree["model"]["numbers"][0] is stored["model.numbers.0"]


def test_plain_values_of_a_megatron_file_are_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0).random(3)
    args = {"hidden_size": 8, "params_dtype": torch.float16, "lr": 1e-3, "data_path": ["a"],
            "seed": None}  # fmt: skip
    arrays = {"array": rng, "big": rng.astype(">f4"), "matrix": np.asfortranarray(rng[:, None] + 1)}
    saved = {
        "args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 2**40, "size": torch.Size([2, 3]),
        "device": torch.device("cpu"), "ids": {1, 2}, "raw": b"\x00\xff", "none": b"", "random": random.getstate(),
        "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "number": np.float32(2.5), **arrays,
    }  # fmt: skip
    torch.save(saved, tmp_path / "x.pt")
    stored = open_tensors(tmp_path / "x.pt")
    tree = stored.tree
    assert vars(tree["args"]) == args | {"params_dtype": "torch.float16"}
    assert tree["iteration"] == 2**40
    assert (tree["size"], tree["device"], tree["number"]) == ((2, 3), "cpu", 2.5)
    for name in ("ids", "raw", "none", "random"):
        assert tree[name] == saved[name]
    for name, array in arrays.items():
        np.testing.assert_array_equal(tree[name], array)
    np.testing.assert_array_equal(tree["numpy"][1], np.random.get_state()[1])
    assert torch.equal(torch.from_numpy(tree["torch"].read().copy()), torch.get_rng_state())


@pytest.mark.parametrize("package", [b"numpy.core", b"numpy._core"])
def test_arrays_of_both_numpys_are_read(tmp_path: Path, package: bytes) -> None:
    program = pickle.dumps({"a": np.arange(3), "b": np.float64(2.5)}, 2)
    program = program.replace(b"numpy._core", b"numpy.core").replace(b"numpy.core", package)
    stored = open_tensors(archive(tmp_path / "x.pt", program))
    assert stored.tree["a"].tolist() == [0, 1, 2] and stored.tree["b"] == 2.5


def text(content: bytes) -> bytes:
    return b"X" + len(content).to_bytes(4, "little") + content


def archive(path: Path, program: bytes, **records: bytes) -> Path:
    head = {"data.pkl": program, "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (head | records).items():
            file.writestr(f"archive/{name}", content)
    return path


WHOLE = r"not a whole file of torch\.save"
EXECUTED = "nothing of it was executed.*safetensors"
PROGRAMS = {
    # a pickle that names code, or one that means nothing
    "call": (b"cposix\nsystem\n(Vtouch {}\ntR.", f"names posix.system.*{EXECUTED}"),
    "attribute": (b"\x80\x04\x8c\x09posixpath\x8c\x09os.system\x93(\x8c\x04true\x85R.", ""),
    "instance": (b"(Vtouch {}\niposix\nsystem\n.", ""),
    "eval": (b"cbuiltins\neval\n(Vopen('{}', 'w')\ntR.", EXECUTED),
    "extension": (b"\x82\x01.", ""),
    "state of a function": (b"ctorch._utils\n_rebuild_tensor_v2\n}Vx\nK\x01sb.", WHOLE),
    "state of a class": (b"cargparse\nNamespace\nN}V__setstate__\nK\x01s\x86b.", WHOLE),
    "objects": (b"cnumpy\ndtype\n(VO8\n\x89\x88tR.", WHOLE),
    "a dict that holds itself": (b"}q\x00(Va\nh\x00u.", WHOLE),
    "far more bytes": (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", WHOLE),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_that_is_not_data_is_refused_and_not_executed(tmp_path: Path, kind: str, old: bool) -> None:
    target, path, (program, message) = tmp_path / "executed", tmp_path / "x.bin", PROGRAMS[kind]
    program = program.replace(b"{}", str(target).encode())
    if old:
        heads = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        path.write_bytes(b"".join(pickle.dumps(head, 2) for head in heads) + program)
    else:
        archive(path, program)
    refused(path, f"x.bin: .*{message}")
    assert not target.exists()


def test_lists_of_lists_that_grow_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_values, "MAX_VALUES", 1000)
    grown: list[Any] = []
    for _ in range(40):
        grown = [grown, grown]
    torch.save({"a": grown}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "more than 1000 values")


def test_objects_of_megatron_are_records_without_code(tmp_path: Path) -> None:
    enum = text(b"kind") + b"cmegatron.core.enums\nModelType\n(K\x01tR"
    scaler = text(b"scaler") + b"cmegatron.fp16.loss_scaler\nDynamicLossScaler\n)\x81}"
    scaler += text(b"cur_scale") + b"K\x08sb"
    program = b"}(" + enum + scaler + b"u."
    stored = open_tensors(archive(tmp_path / "x.pt", program))
    kind, scaler = stored.tree["kind"], stored.tree["scaler"]
    assert (kind.name, kind.arguments) == ("megatron.core.enums.ModelType", (1,))
    assert (scaler.name, scaler.state) == ("megatron.fp16.loss_scaler.DynamicLossScaler", {"cur_scale": 8})


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, as_zip: bool) -> None:
    saved = {"a": torch.ones(40), "b": torch.arange(3)}
    torch.save(saved, tmp_path / "x.bin", _use_new_zipfile_serialization=as_zip)
    content = (tmp_path / "x.bin").read_bytes()
    for cut in (0, 3, 99, len(content) // 2, len(content) - 1):
        (tmp_path / "x.bin").write_bytes(content[:cut])
        refused(tmp_path / "x.bin", "x.bin: ")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """Torch does not find it. Beside tensors it is found at once."""
    path = tmp_path / "x.pt"
    torch.save({"of_step_20": torch.arange(300.0), "b": torch.ones(5)}, path)
    whole = path.read_bytes()

    def flip(content: bytes, place: int) -> None:
        at = whole.index(content) + place
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])

    flip(np.arange(300, dtype=np.float32).tobytes(), 77)
    stored = open_tensors(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"x.pt: of_step_20 has changed since it was"):
            stored["of_step_20"].read()
    assert stored["b"].read().tolist() == [1] * 5
    flip(b"of_step_20", 8)
    refused(path, r"x.pt: x/data.pkl has changed")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    stored = open_tensors(path)
    assert stored["a"].read().tolist() == [0, 1, 2]


def test_a_machine_without_torch_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(tmp_path / "x.pt", r"package torch, .*x.pt, is not .*'\.\[torch\]'", ConfigError)


def test_torch_loads_what_we_write(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {
        "m": ("float32", matrix), "half": ("float16", matrix.astype(np.float16)),
        "bf": ("bfloat16", np.array([0x3FC0, 0xC000], np.uint16)), "step": ("int64", np.array(5)),
        "none": ("int32", np.zeros((0, 2), np.int32)), "yes": ("bool", np.array([True, False])),
        "double": ("float64", np.ones(1)), "byte": ("uint8", np.array([7, 8], np.uint8)),
        "turned": ("float32", matrix.T),
    }  # fmt: skip
    sources = ((name, word, array) for name, (word, array) in arrays.items())
    leaves = {name: TensorSource(dtype=word, shape=array.shape, load=array.view) for name, word, array in sources}
    plain = {
        "groups": [{"params": [0, 1], "betas": (0.9, 0.95), "none": ()}, []],
        "iteration": 2**40, "version": 3.0, "name": "é\n", "flag": True, "nothing": None, 3: -1,
        "dtype": TorchName("torch.bfloat16"),
    }  # fmt: skip
    path = tmp_path / "model_optim_rng.pt"
    write_torch(path, {"model": {**leaves, "tied": leaves["m"]}, **plain})
    loaded = torch.load(path, weights_only=True)
    with zipfile.ZipFile(path) as records:
        assert records.testzip() is None
    model = loaded.pop("model")
    for name, (word, array) in arrays.items():
        assert str(model[name].dtype) == f"torch.{word}" and tuple(model[name].shape) == array.shape
        assert torch.equal(model[name], as_torch(array, model[name].dtype))
    assert model["tied"].data_ptr() == model["m"].data_ptr()
    assert torch.load(path, weights_only=True, mmap=True)["model"]["turned"].shape == (3, 2)
    assert loaded == plain | {"dtype": torch.bfloat16}
    args = argparse.Namespace(hidden_size=8, dtype=TorchName("torch.float16"))
    write_torch(path, {"args": args, "state": np.random.get_state()})
    loaded = torch.load(path, weights_only=False)
    assert loaded["args"] == argparse.Namespace(hidden_size=8, dtype=torch.float16)
    np.testing.assert_array_equal(loaded["state"][1], np.random.get_state()[1])


def test_a_full_disk_is_an_error_of_the_system() -> None:
    """Torch makes a RuntimeError of it."""
    leaf = TensorSource(dtype="float32", shape=(2**22,), load=lambda: np.ones(2**22, np.float32))
    with pytest.raises(OSError, match="No space left on device"):
        write_torch(Path("/dev/full"), {"a": leaf})

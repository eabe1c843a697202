"""Our safetensors reader against the safetensors library, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.errors import CheckpointError
from common.tensor_files.containers import open_tensors

TENSORS = {
    "half": torch.tensor([[1.5, -2.0, 3.25], [0.1, 1e30, -0.0]], dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "double": torch.arange(4.0, dtype=torch.float64),
}


def test_the_library_writes_what_we_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "7"})
    with open_tensors(tmp_path / "x.safetensors") as stored:
        assert stored.plain == {"format": "pt", "note": "7"}
        assert stored.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (
                stored[name].dtype == str(tensor.dtype).removeprefix("torch.")
                and stored[name].shape == tensor.shape
            )
        assert torch.equal(
            torch.from_numpy(stored["half"].read().view(np.int16).copy()).view(torch.bfloat16),
            TENSORS["half"],
        )
        assert stored["half"].read([[1, 2], [0, 2]]).shape == (1, 2)
        np.testing.assert_array_equal(stored["double"].read(), np.arange(4.0))
        assert (
            stored["scalar"].read() == 7
            and stored["mask"].read().tolist() == [True, False]
            and stored["empty"].read().shape == (0, 3)
        )


def raw(header: object, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(first: int, end: int, dtype: str = "F32", shape: object = (1,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


WHOLE = raw({"a": entry(0, 4), "b": entry(4, 8)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (WHOLE[:5], "too few"),
        (WHOLE[:40], "header should be"),
        (WHOLE[:-1], "holds 7"),
        (WHOLE + b"\0", "holds 9"),
        (raw({}, length=2**63), "header should be 9223372036854775808"),
        (raw(b"{" + b'"a":[' * 100_000), "recursion|Expecting"),
        (raw(b'{"a": 1', b""), "Expecting"),
        (raw(b'{"\xff": 1}', b""), "byte 2 is not UTF-8"),
        (raw([1]), "is not a JSON object"),
        (raw({"__metadata__": 3}), "is not a JSON object"),
        (raw({"a": 3}), "lacks"),
        (raw({"a": entry(0, 8)}), "a has 8 bytes, and float32 .1. has 4"),
        (raw({"a": entry(0, 8, "F8_E4M3", [8])}), "of type 'F8_E4M3'"),
        (raw({"a": entry(0, 8, "F32", [-2])}), "is not a list of sizes"),
        (raw({"a": entry(0, 8, "F32", [True, 2])}), "is not a list of sizes"),
        (raw({"a": entry(0, 4), "b": entry(2, 6)}), "b begins at byte 2 .* ends at 4"),
        (raw({"a": entry(4, 8)}), "a begins at byte 4"),
        (raw({"a": entry(0, 4), "b": entry(8, 12)}), "b ends at byte 12"),
        (raw({"a": entry(0, 4)}), "have 4 bytes, and the file holds 8"),
        (raw(b'{"a": 1, "a": 2}'), "twice"),
        (raw({"a": entry(0, 0, "F32", [0, 2**70])}, b""), "beyond what an array can have"),
        (raw({"a": entry(0, 4, "F32", [1] * 65)}), "beyond what an array can have"),
        (raw(b'{"a": ' + b"9" * 5000 + b"}"), "a number of more digits"),
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with (
        pytest.raises(CheckpointError, match=f"not a whole safetensors file.*({reason})"),
        open_tensors(path),
    ):
        pass

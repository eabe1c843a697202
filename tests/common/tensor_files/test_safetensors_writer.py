"""Our safetensors writer against the safetensors library."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from common.errors import CheckpointError
from common.tensor_files.safetensors_file import open_safetensors, shapes_of, write_safetensors

arrays = hnp.arrays(
    st.sampled_from([np.float32, np.float16, np.int64, np.uint8]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
        arrays,
        max_size=5,
    )
)
def test_the_library_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray]
) -> None:
    path = tmp_path_factory.mktemp("safetensors") / "x.safetensors"
    write_safetensors(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()


def test_a_transposed_array_is_written_in_order(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "x.safetensors", {"a": array})
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["a"], array)


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.ones((4, 4), np.float32)})
    path.write_bytes(path.read_bytes()[:cut])
    with (
        pytest.raises(CheckpointError, match="not a whole safetensors file"),
        open_safetensors(path) as reader,
    ):
        shapes_of(reader)

"""bfloat16 words against torch, and rectangles of stored tensors against numpy's slices."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.tensor_files.arrays import bytes_of, prefetch_arrays, round_to_bfloat16, widen_bfloat16


def test_bfloat16_is_widened_and_rounded_as_torch_does() -> None:
    words = np.arange(2**16, dtype=np.uint16)
    wide = widen_bfloat16(words)
    np.testing.assert_array_equal(wide, torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).float().numpy())
    # halves, and beyond the largest
    ties = (np.arange(0x7F60, 0x7F90, dtype=np.uint32) << 16) | 0x8000
    any_bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    only_low_payload = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    bits = [any_bits, ties, ties + 1, ties - 1, ties | 0x80000000, only_low_payload, wide.view(np.uint32)]
    values = np.concatenate(bits).view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    found, nan = round_to_bfloat16(values), np.isnan(values)
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert np.isnan(widen_bfloat16(found[nan])).all()
    assert ((found[nan] >> 15) == (values[nan].view(np.uint32) >> 31)).all()
    assert round_to_bfloat16(values[:6].reshape(2, 3).T).shape == (3, 2)


@pytest.mark.parametrize("shape", [(3, 600), (257, 255), (0, 4), (128, 512), (129, 1025)])
def test_the_bytes_of_a_transposed_matrix(shape: tuple[int, int]) -> None:
    """Shapes are smaller than a tile, as large, and a little larger."""
    array = np.random.default_rng(0).random(shape, np.float32)
    for turned in (array.T, array.T[1:], array[:, ::2].T, array[::2, ::-1].T):
        assert bytes(bytes_of(turned)) == turned.tobytes()
    heads = array[:, : shape[1] // 2 * 2].T.reshape(2, shape[1] // 2, shape[0])
    assert bytes(bytes_of(heads)) == heads.tobytes()


def test_arrays_made_ahead_are_whole_when_they_come() -> None:
    """They are what was made, views too. An error comes in its turn."""
    shapes = [(300, 7), (0, 5), (2, 900), (7, 300), (4,), (), (513, 300)]
    made = [np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) for shape in shapes]

    def broken() -> NDArray[Any]:
        raise OSError("unreadable")

    found = prefetch_arrays([*((lambda array=array: array.T) for array in made), broken])
    for array in made:
        turned = next(found)
        assert turned.base is array.base
        np.testing.assert_array_equal(turned, array.T)
        np.testing.assert_array_equal(np.frombuffer(bytes_of(turned), np.float32), array.T.reshape(-1))
    with pytest.raises(OSError, match="unreadable"):
        next(found)


def test_an_unfinished_reading_ahead_ends_without_a_wait() -> None:
    """Python's garbage collector may end it in a thread that must not wait for another."""
    release = threading.Event()
    timer = threading.Timer(20.0, release.set)
    timer.start()
    found = prefetch_arrays([lambda: np.ones(1), lambda: np.ones(int(release.wait()))])
    assert next(found).tolist() == [1.0]
    found.close()  # type: ignore[attr-defined]
    assert not release.is_set()
    release.set()
    timer.cancel()

"""Lent arrays: what is written is what was there when they were lent, however the owner and the
writer take turns.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from common.checkpoint.copy_on_write import CopyOnWriteArrays
from common.tensor_files.safetensors_file import write_safetensors


def arrays() -> dict[str, np.ndarray]:
    return {name: np.full(1000, number, np.float32) for number, name in enumerate("abcd")}


@pytest.mark.parametrize("read", range(5))
def test_an_owner_may_change_his_memory_after_detaching(read: int) -> None:
    """The reader has used ``read`` of four arrays when the owner wants to continue."""
    mine = arrays()
    lent = CopyOnWriteArrays(mine)
    assert [(name, array.shape) for name, array in lent.items()] == [
        (name, (1000,)) for name in "abcd"
    ]
    assert [float(lent[name][0]) for name in lent] == [0.0, 1.0, 2.0, 3.0], "looking uses nothing"
    iterator = lent.values()
    used = [next(iterator) for _ in range(read)]
    owner = threading.Thread(target=lent.detach)
    owner.start()
    owner.join(0.2 if read else 10)
    assert owner.is_alive() == (read > 0), "an array in use cannot be given back"
    found = [array.copy() for array in used[-1:]]
    if read == 4:
        assert next(iterator, None) is None
    elif read:
        found.append(next(iterator))
    owner.join(10)
    assert not owner.is_alive()
    for array in mine.values():
        array[:] = -1.0
    found += iterator
    assert [float(array[0]) for array in found] == [
        float(number) for number in range(max(0, read - 1), 4)
    ]


def test_release_frees_an_owner_whose_writer_has_failed() -> None:
    lent = CopyOnWriteArrays(arrays())
    next(lent.values())
    owner = threading.Thread(target=lent.detach)
    owner.start()
    lent.release()
    owner.join(10)
    assert not owner.is_alive()


def test_a_file_written_while_the_owner_changes_his_memory(tmp_path: Path) -> None:
    mine = {f"{number:03}": np.full((100, 1000), number, np.float32) for number in range(100)}
    lent = CopyOnWriteArrays(mine)
    writer = threading.Thread(target=write_safetensors, args=(tmp_path / "file", lent))
    writer.start()
    lent.detach()
    for array in mine.values():
        array[:] = np.nan
    writer.join(60)
    written = load_file(tmp_path / "file")
    assert len(written) == 100
    for name, array in written.items():
        np.testing.assert_array_equal(array, int(name))

"""Messages about tensors that are not those of the model."""

from pathlib import Path

import pytest

from common.errors import CheckpointError
from common.weights.names import check_tensors


def test_all_misfits_are_listed() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_tensors(
            Path("m"), {"a": (1,), "b": (2,), "x": (3,)}, {"a": (1,), "b": (4,), "c": (5,)}
        )
    message = str(caught.value)
    assert (
        "missing c [5]" in message
        and "unexpected x [3]" in message
        and "b is [2], the model's is [4]" in message
    )

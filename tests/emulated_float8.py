"""Products of float8 on a CPU, which takes itself for a GPU that has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import PropertyMock, patch

from torch_gpt2 import quantize
from torch_gpt2.device import TorchDevice


@contextmanager
def watch(note: Path | None = None) -> Iterator[None]:
    """Emulate them in this context, such as a rank's run. Writes nothing."""
    with (
        patch.object(quantize, "EMULATED_FLOAT8", True),
        patch.object(TorchDevice, "capability", PropertyMock(return_value=(9, 0))),
    ):
        yield

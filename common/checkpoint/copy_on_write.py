"""Arrays that a running engine lends to the checkpoint writer, so that a save needs no copy or
wait.

The writer reads them in order during the next forward and backward pass. Before the engine changes
them it calls ``detach``, which copies those not written yet.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class CopyOnWriteArrays(Mapping[str, Array]):
    """Mapping of lent arrays.

    ``values`` is for the writer: taking an array begins its use, and ends that of the previous one,
    which is then forgotten. Other methods only look.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = dict(arrays)
        self._names = tuple(arrays)
        self._lent = set(arrays)
        """Names of the arrays that are still the engine's own memory."""
        self._used: str | None = None
        self._change = threading.Condition()

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> ItemsView[str, Array]:
        return self._arrays.items()

    def values(self) -> Iterator[Array]:  # type: ignore[override]
        for name in self._names:
            with self._change:
                self._forget_used()
                self._used = name
                array = self._arrays[name]
            yield array
        with self._change:
            self._forget_used()

    def detach(self) -> None:
        """Return when the engine may change its memory.

        Unread arrays are then copied, and an array in use has been read.
        """
        with self._change:
            for name in [
                name for name in self._arrays if name in self._lent and name != self._used
            ]:
                self._arrays[name] = np.array(self._arrays[name])
                self._lent.discard(name)
            self._change.wait_for(lambda: not self._lent)

    def release(self) -> None:
        """Release all arrays, because the reader has finished or failed."""
        with self._change:
            self._arrays.clear()
            self._lent.clear()
            self._change.notify_all()

    def _forget_used(self) -> None:
        if self._used is not None:
            self._arrays.pop(self._used, None)
            self._lent.discard(self._used)
            self._change.notify_all()

"""Run an iterator ahead in one background thread, by a limited number of items."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _End:
    """Signal that the source is exhausted, or failed with ``error``."""

    error: BaseException | None


class Prefetch(Generic[Item]):
    """Iterator over ``source`` that runs ahead. An exception of the source is raised in place of
    its item.

    As a context manager it stops the thread on exit. depth: maximum number of waiting items.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._source = source
        self._queue: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._end: _End | None = None
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetch[Item]:
        return self

    def __next__(self) -> Item:
        if self._end is None and not self._stopped.is_set():
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
            if item.error is not None:
                raise item.error
        raise StopIteration

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop waiting items. Returns when the current item is done."""
        self._stopped.set()
        self._thread.join()

    def _fill(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
            self._put(_End(None))
        except BaseException as error:  # whatever it is, the consumer must learn of it
            self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

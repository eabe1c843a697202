"""Run an iterator ahead in one background thread, by a limited number of items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
_END: Any = object()


class Prefetch(Generic[Item]):
    """Iterator over ``source`` that runs ahead. An exception of the source is raised in place of
    its item.

    As a context manager it stops the thread on exit. depth: maximum number of waiting items.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._source, self._thread = source, ThreadPoolExecutor(1, "prefetch")
        self._waiting: deque[Future[Item]] = deque(self._read() for _ in range(depth))

    def _read(self) -> Future[Item]:
        return self._thread.submit(next, self._source, _END)

    def __iter__(self) -> Prefetch[Item]:
        return self

    def __next__(self) -> Item:
        if not self._waiting:
            raise StopIteration
        item = self._waiting.popleft().result()
        if item is _END:
            raise StopIteration
        self._waiting.append(self._read())
        return item

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop waiting items. Returns when the current item is done."""
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()

"""The background reader: same items, bounded lead, errors where they belong, no thread left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from common.dataset import Prefetch


def test_items_arrive_in_order_and_end() -> None:
    with Prefetch(iter(range(20)), depth=3) as items:
        assert list(items) == list(range(20))
        assert list(items) == []


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise ValueError("broken")

    items = Prefetch(source())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    items.close()


def test_an_endless_source_is_left_without_a_thread_and_is_not_read_far_ahead() -> None:
    source = itertools.count()
    before = threading.active_count()
    with Prefetch(source, depth=2) as items:
        assert [next(items) for _ in range(5)] == list(range(5))
    assert threading.active_count() == before
    assert next(source) <= 5 + 2 + 1
    with pytest.raises(StopIteration):
        next(items)

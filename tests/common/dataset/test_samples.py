"""Windows, epochs, splits and the index cache: each epoch is the shuffled document stream, cut and
shuffled, and nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset import GPTDataset, IndexedDataset, epoch_index, index_cache, parse_split
from common.dataset.epoch_index import permutation
from common.errors import DataError
from common.locks import held_lock

FROZEN_PERMUTATION = [6, 5, 2, 3, 1, 4, 0, 7]
FROZEN_ROWS = [[28, 29, 30, 31, 32], [8, 9, 10, 11, 12], [45, 46, 47, 48, 49]]
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def open_all(prefix: Path, seq_length: int, **options: object) -> GPTDataset:
    return GPTDataset(
        prefix, split="train", split_weights=(1, 0, 0), seq_length=seq_length, seed=7, **options
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=LENGTHS, seq_length=st.integers(1, 12), shuffle=st.booleans(), epoch=st.integers(0, 3)
)
def test_an_epoch_is_the_document_stream(write_pair, lengths, seq_length, shuffle, epoch) -> None:
    total = sum(lengths)
    if total < seq_length + 1:
        with pytest.raises(
            DataError,
            match=f"with {total} tokens, expected at least seq_length \\+ 1 = {seq_length + 1}",
        ):
            open_all(write_pair(lengths), seq_length)
        return
    data = IndexedDataset(write_pair(lengths))
    dataset = GPTDataset(
        data, split="train", split_weights=(1, 0, 0), seq_length=seq_length, seed=7, shuffle=shuffle
    )
    n = dataset.samples_per_epoch
    assert n == (total - 1) // seq_length
    ids = np.arange(n) + epoch * n
    rows = dataset.read(ids)
    windows = dataset.identities(ids)[:, 1] - epoch * n
    assert sorted(windows.tolist()) == list(range(n))
    by_window = rows[np.argsort(windows)]
    assert (by_window[:-1, -1] == by_window[1:, 0]).all(), "neighbours share one token"
    stream = np.concatenate([by_window[0, :1], by_window[:, 1:].ravel()])
    # The stream that the documents give in the epoch's order, rebuilt without the code under test.
    order = (
        permutation(len(lengths), f"documents/train/7/{epoch}")
        if shuffle
        else np.arange(len(lengths))
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    expected = np.concatenate([np.arange(offsets[d], offsets[d + 1]) for d in order])
    assert stream.tolist() == expected[: len(stream)].tolist()
    assert total - len(stream) < seq_length
    mixed = np.random.default_rng(0).permutation(np.concatenate([ids, ids + n]))
    assert (
        dataset.read(mixed)
        == np.concatenate([dataset.read(mixed[k : k + 1]) for k in range(len(mixed))])
    ).all()


def test_epochs_differ_and_do_not_depend_on_what_was_read_before(write_pair) -> None:
    prefix = write_pair([11] * 40)
    one, two = open_all(prefix, 8), open_all(prefix, 8)
    n = one.samples_per_epoch
    for epoch in range(5):
        one.read(np.arange(n) + epoch * n)
    far = np.arange(n) + 9 * n
    assert (one.read(far) == two.read(far)).all()
    assert (two.read(far) != two.read(far + n)).any()


def test_the_order_is_frozen(write_pair) -> None:
    """A change of these numbers breaks the resumption of every run: raise ORDER_VERSION and say
    so.
    """
    dataset = open_all(write_pair([5, 9, 2, 7, 12, 1, 8, 6, 3, 10]), 4)
    assert permutation(8, "frozen").tolist() == FROZEN_PERMUTATION
    assert dataset.read(np.arange(3)).tolist() == FROZEN_ROWS


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=LENGTHS,
    seq_length=st.integers(1, 12),
    stride=st.integers(1, 12),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_windows_overlap_by_the_stride(
    write_pair, lengths, seq_length, stride, shuffle, epoch
) -> None:
    """Windows begin every ``stride`` tokens until one would reach the end; the last ends there."""
    total, width = sum(lengths), seq_length + 1
    if total < width or stride >= seq_length:
        return
    data = IndexedDataset(write_pair(lengths))
    dataset = open_all(data, seq_length, stride=stride, shuffle=shuffle)
    order = (
        permutation(len(lengths), f"documents/train/7/{epoch}")
        if shuffle
        else np.arange(len(lengths))
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    stream = np.concatenate([np.arange(offsets[d], offsets[d + 1]) for d in order])
    expected, start = [], 0
    while start < total - width:
        expected.append(stream[start : start + width].tolist())
        start += stride
    expected.append(stream[total - width :].tolist())
    n = dataset.samples_per_epoch
    assert n == len(expected)
    ids = np.arange(n) + epoch * n
    windows = dataset.identities(ids)[:, 1] - epoch * n
    assert dataset.read(ids)[np.argsort(windows)].tolist() == expected
    assert sorted(windows.tolist()) == list(range(n))


def test_the_stride_is_part_of_what_a_data_set_is(write_pair, tmp_path) -> None:
    """A stride of seq_length is none; another one has other orders in the cache and another
    fingerprint.
    """
    prefix = write_pair([11] * 40)
    plain = cached(prefix)
    rows = plain.read(np.arange(9))
    same, other = cached(prefix, stride=4), cached(prefix, stride=3)
    assert same.fingerprint == plain.fingerprint != other.fingerprint
    assert (same.read(np.arange(9)) == rows).all()
    before = {path.name for path in (tmp_path / "data.index-cache").iterdir()}
    far = other.read(np.arange(9) + other.samples_per_epoch)
    assert len({path.name for path in (tmp_path / "data.index-cache").iterdir()} - before) == 1
    again = cached(prefix, stride=3)
    assert (again.read(np.arange(9) + other.samples_per_epoch) == far).all()
    for stride in (0, 5):
        with pytest.raises(DataError, match=f"stride={stride}: expected 1 to seq_length=4"):
            open_all(prefix, 4, stride=stride)


def test_splits_cut_at_documents_also_in_sentence_files(write_pair) -> None:
    lengths = [4] * 60
    prefix = write_pair(lengths, documents=[3] * 20)
    seen = []
    for split, documents in (("train", 16), ("valid", 3), ("test", 1)):
        dataset = GPTDataset(prefix, split=split, split_weights=(80, 15, 5), seq_length=1, seed=1)
        assert dataset.token_count == documents * 12
        seen += np.unique(dataset.read(np.arange(dataset.samples_per_epoch))).tolist()
    assert seen == list(range(240))


def test_an_empty_split_says_how_to_fix_it(write_pair) -> None:
    with pytest.raises(
        DataError,
        match=r"split 'valid' \(weights 949,50,1\) holds 0 of 3 documents with 0 tokens.*larger"
        r" weight",
    ):
        GPTDataset(write_pair([50, 50, 50]), split="valid", seq_length=8, seed=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("949,50,1", (949, 50, 1)),
        ("949/50/1", (949, 50, 1)),
        ("1", (1, 0, 0)),
        ("0.9, 0.1", (0.9, 0.1, 0)),
    ],
)
def test_parse_split(text, expected) -> None:
    assert parse_split(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,b", "1,2,3,4", "0,0,0", "-1,2,0", "nan,1,1", "1e308,1e308,1e308", "9,5/1", "9;1"],
)
def test_bad_splits_are_refused(text) -> None:
    with pytest.raises(DataError, match=r"expected|split"):
        parse_split(text)


def cached(prefix: Path, **options: object) -> GPTDataset:
    return open_all(prefix, 4, cache_minimum=0, **options)


def test_the_cache_gives_the_same_order(write_pair, tmp_path) -> None:
    prefix = write_pair([11] * 40)
    plain = open_all(prefix, 4)
    ids = np.arange(2 * plain.samples_per_epoch)
    for folder in (None, tmp_path / "elsewhere"):
        expected = folder or tmp_path / "data.index-cache"
        for _ in range(2):
            assert (cached(prefix, cache_folder=folder).read(ids) == plain.read(ids)).all()
        names = {path.name for path in expected.iterdir()}
        assert len(names) == 3 and index_cache.LOCK in names, "an entry for each epoch, and a lock"
    names = {path.name for path in (tmp_path / "elsewhere").iterdir()}
    open_all(prefix, 5, cache_minimum=0, cache_folder=tmp_path / "elsewhere").read(ids[:1])
    assert len({path.name for path in (tmp_path / "elsewhere").iterdir()} - names) == 1, (
        "another seq_length is another entry"
    )


def test_small_data_sets_leave_no_cache(write_pair, tmp_path) -> None:
    open_all(write_pair([11] * 40), 4).read(np.arange(5))
    assert not (tmp_path / "data.index-cache").exists()


@pytest.mark.parametrize("damage", ["cut", "absent", "other"])
def test_a_broken_entry_is_built_again(write_pair, tmp_path, damage) -> None:
    prefix = write_pair([11] * 40)
    rows = cached(prefix).read(np.arange(9))
    (entry,) = (tmp_path / "data.index-cache").glob("[!.]*")
    if damage == "cut":
        (entry / "stream.npy").write_bytes((entry / "stream.npy").read_bytes()[:-8])
    elif damage == "absent":
        (entry / "shuffle.npy").unlink()
    else:
        np.save(entry / "shuffle.npy", np.arange(3))
    assert (cached(prefix).read(np.arange(9)) == rows).all()
    assert len(np.load(entry / "shuffle.npy")) == cached(prefix).samples_per_epoch


def damaged(entry: Path, rng: np.random.Generator) -> str:
    """Change one file of a cached order in some way; returns what was done."""
    name = str(rng.choice([path.name for path in sorted(entry.iterdir())]))
    data = bytearray((entry / name).read_bytes())
    way = str(rng.choice(["bit", "zeros", "cut", "longer", "header", "other", "gone", "text"]))
    if way == "bit":
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif way == "zeros":
        data[-int(rng.integers(1, len(data))) :] = bytes(8)
    elif way == "cut":
        data = data[: int(rng.integers(len(data)))]
    elif way == "longer":
        data += rng.bytes(8)
    elif way == "header":  # numpy reads it with Python's own parser
        data[10:40] = bytes(rng.choice(list(b"{}()[]'\"\\\n #0:,"), 30).tolist())
    elif way == "other":
        data = bytearray((entry / "sources.npy").read_bytes())
    (entry / name).write_bytes(b"[" * 2000 if way == "text" else bytes(data))
    if way == "gone":
        (entry / name).unlink()
    return f"{name} {way}"


def test_a_changed_entry_never_gives_other_samples(write_pair, tmp_path, caplog) -> None:
    prefix = write_pair([11] * 40)
    rows, rng = cached(prefix).read(np.arange(9)), np.random.default_rng(0)
    (entry,) = (tmp_path / "data.index-cache").glob("[!.]*")
    whole = {path.name: path.read_bytes() for path in entry.iterdir()}
    for _ in range(60):
        done = damaged(entry, rng)
        same = {path.name: path.read_bytes() for path in entry.iterdir()} == whole
        caplog.clear()
        assert (cached(prefix).read(np.arange(9)) == rows).all(), done
        assert len(caplog.messages) == (not same), f"{done}: one line where it was built again"
        assert {path.name: path.read_bytes() for path in entry.iterdir()} == whole, done


def test_an_entry_of_an_older_release_is_built_again(write_pair, tmp_path, caplog) -> None:
    prefix = write_pair([11] * 40)
    rows = cached(prefix).read(np.arange(9))
    (entry,) = (tmp_path / "data.index-cache").glob("[!.]*")
    (entry / "checksums.json").unlink()
    np.save(entry / "shuffle.npy", np.zeros_like(np.load(entry / "shuffle.npy")))
    assert (cached(prefix).read(np.arange(9)) == rows).all()
    assert [entry.name in line and "it is built again" in line for line in caplog.messages] == [
        True
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("shuffle", [0, 1, 99]),
        ("shuffle", [0, -1, 2]),
        ("shuffle", [0, 1]),
        ("first_piece", [0, 2, 1, 0]),
        ("first_piece", [0, 1, 2, 3]),
        ("sources", [0, 5, 16]),
        ("stream", [0, 5, 9, 15]),
        ("stream", [0, 9, 5, 14]),
        ("sources", [0.0, 5.0, 10.0]),
    ],
)
def test_an_order_that_leads_out_of_the_split_is_none(name: str, values: list[float]) -> None:
    """The checksums say nothing about an order that was stored for other data."""
    offsets = np.array([0, 5, 10, 14])
    good = epoch_index.shuffled_epoch(offsets, 4, 0, 0, "train")
    assert epoch_index.is_epoch_of(good, offsets, 4)
    changed = dataclasses.replace(good, **{name: np.array(values)})
    assert not epoch_index.is_epoch_of(changed, offsets, 4)


def test_waiting_for_another_owner_is_bounded(write_pair, tmp_path) -> None:
    (tmp_path / "cache").mkdir()
    index = open_all(write_pair([11] * 40), 4)._epoch(0)
    with held_lock(tmp_path / "cache" / index_cache.LOCK, 0):
        kept = index_cache.cached_epoch(tmp_path / "cache", "key", lambda: index, wait_seconds=0.2)
    assert kept is index


def test_a_folder_that_cannot_be_written_costs_a_warning(write_pair, tmp_path, caplog) -> None:
    prefix = write_pair([11] * 40)
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        rows = cached(prefix, cache_folder=tmp_path / "file").read(np.arange(9))
    assert "cannot be cached" in caplog.text
    assert (rows == open_all(prefix, 4).read(np.arange(9))).all()


def build_and_report(prefix: Path, barrier, queue) -> None:
    from common.dataset import samples

    built = []
    original = samples.shuffled_epoch

    def counted(*arguments: object) -> object:
        built.append(1)
        return original(*arguments)

    samples.shuffled_epoch = counted
    barrier.wait(60)
    rows = cached(prefix).read(np.arange(50))
    queue.put((len(built), int(rows.sum())))


def test_processes_that_start_together_build_once(write_pair) -> None:
    prefix = write_pair([11] * 400)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    children = [
        context.Process(target=build_and_report, args=(prefix, barrier, queue)) for _ in range(3)
    ]
    for child in children:
        child.start()
    reports = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
    assert sum(built for built, _ in reports) == 1
    assert len({total for _, total in reports}) == 1

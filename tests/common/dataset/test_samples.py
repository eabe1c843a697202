"""Windows, epochs and splits: each epoch is the split, begun at some token, cut and shuffled, and nothing else."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.config.values import parse_split
from common.dataset.indexed import HEADER, MAGIC
from common.dataset.samples import GPTDataset, permuted, shuffled
from common.errors import DataError
from tests.common.dataset.conftest import windows_of


def expected_windows(stream: list[int], seq_length: int, stride: int | None, start: int) -> list[list[int]]:
    """Cut a stream that begins at ``start`` and goes on at its begin, by the words of the page."""
    stream = stream[start:] + stream[:start]
    width, step, begins = seq_length + 1, stride or seq_length, []
    while not begins or begins[-1] + step + width <= len(stream):
        begins.append(begins[-1] + step if begins else 0)
    if stride is not None and begins[-1] + width < len(stream):
        begins.append(len(stream) - width)
    return [stream[begin : begin + width] for begin in begins]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25),
    seq_length=st.integers(1, 12),
    stride=st.none() | st.integers(1, 11),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    weights=st.sampled_from([(1, 0, 0), (1, 1, 0), (0, 2, 1)]),
    split=st.sampled_from(["train", "valid"]),
)
def test_an_epoch_is_the_split_in_windows(
    write_pair, lengths, seq_length, stride, shuffle, epoch, weights, split
) -> None:
    stride = None if stride is None else min(stride, seq_length)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    borders = np.rint(np.cumsum([0, *weights]) / sum(weights) * len(lengths)).astype(int)
    number = ["train", "valid"].index(split)
    stream = list(range(ends[borders[number]], ends[borders[number + 1]]))
    prefix = write_pair(lengths)
    options = {"split": split, "split_weights": weights, "shuffle": shuffle, "stride": stride}
    if len(stream) < seq_length + 1:
        with pytest.raises(DataError, match=f"with {len(stream)} tokens, expected at least seq_le"):
            windows_of(prefix, seq_length, **options)
        return
    dataset = windows_of(prefix, seq_length, **options)
    n = dataset.samples_per_epoch
    ids = np.arange(n) + epoch * n
    rows, windows = dataset.read(ids), dataset.identities(ids)[:, 1] - epoch * n
    assert sorted(windows.tolist()) == list(range(n))
    start = int(rows[np.argmin(windows), 0]) - stream[0]
    assert shuffle or (start == 0 and (windows == np.arange(n)).all())
    stride = None if stride == seq_length else stride
    assert rows[np.argsort(windows)].tolist() == expected_windows(stream, seq_length, stride, start)
    mixed = np.random.default_rng(0).permutation(np.concatenate([ids, ids + n]))
    others = [windows_of(prefix, seq_length, **options) for _ in range(2)]
    alone = [others[k % 2].read(mixed[k : k + 1]) for k in range(0, len(mixed), 5)]
    assert (dataset.read(mixed)[::5] == np.concatenate(alone)).all()


def test_each_token_is_an_input_once_an_epoch_and_others_are_left_over(write_pair) -> None:
    dataset = windows_of(write_pair([7] * 40), 8)
    n, left_over = dataset.samples_per_epoch, set()
    for epoch in range(60):
        inputs = dataset.read(np.arange(n) + epoch * n)[:, :-1].ravel()
        assert len(set(inputs.tolist())) == len(inputs) == n * 8
        left_over |= set(range(280)) - set(inputs.tolist())
    assert len(left_over) > 100


def test_windows_begin_elsewhere_in_each_epoch(write_pair) -> None:
    dataset = windows_of(write_pair([997]), 8)
    n = dataset.samples_per_epoch
    begins = [int(dataset.read(np.arange(n) + epoch * n)[:, 0].min() % 8) for epoch in range(200)]
    assert min(np.bincount(begins, minlength=8)) > 8, "25 of each on average"


def test_a_batch_is_of_many_places(write_pair) -> None:
    """Pairs of a batch that lie within 1 % of the split are as many as chance gives: 1.99 %."""
    dataset = windows_of(write_pair([1000] * 60), 2)
    n = dataset.samples_per_epoch
    batches = [dataset.identities(np.arange(64) + 64 * k)[:, 1] for k in range(n // 64)]
    near = sum(int((np.abs(b[:, None] - b) < n // 100).sum()) - 64 for b in batches) / 2
    expected = len(batches) * 64 * 63 / 2 * 0.0199
    assert abs(near - expected) < 5 * np.sqrt(expected)


def test_the_order_is_frozen(write_pair) -> None:
    """A change of these numbers breaks the resumption of every run: raise ORDER_VERSION and say so."""
    dataset = windows_of(write_pair([5, 9, 2, 7, 12, 1, 8, 6, 3, 10]), 4)
    assert dataset.read(np.arange(3))[:, 0].tolist() == [34, 58, 50]


def test_the_stride_is_part_of_what_a_data_set_is(write_pair) -> None:
    """A stride of seq_length is none; another one has another fingerprint."""
    prefix = write_pair([11] * 40)
    plain, same, other = (windows_of(prefix, 4, stride=stride) for stride in (None, 4, 3))
    assert same.fingerprint == plain.fingerprint != other.fingerprint
    assert (same.read(np.arange(9)) == plain.read(np.arange(9))).all()


def test_a_start_reads_parts_of_a_long_index(tmp_path) -> None:
    """More than 2^31 documents, all but the last empty, in sparse files of 43 GB."""
    n = 2**31 + 5
    with (tmp_path / "data.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, n, n + 1))
        file.truncate(HEADER.size + 12 * n + 8 * (n + 1))
        for place, number, size in ((4 * n, 50, 4), (20 * n + 8, n, 8)):
            file.seek(HEADER.size + place - size)
            file.write(number.to_bytes(size, "little"))
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "data.bin")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    dataset = windows_of(tmp_path / "data", 7)
    rows = dataset.read(np.arange(7))
    assert (rows == (rows[:, :1] + np.arange(8)) % 50).all()
    assert len(set(rows[:, 0].tolist())) == 7
    assert dataset.data.document_count == n
    assert resident() - before < 100e6
    assert (tmp_path / "data.idx").stat().st_blocks * 512 < 1e6


def test_splits_cut_at_documents_also_in_sentence_files(write_pair) -> None:
    prefix = write_pair([4] * 60, documents=[3] * 20)
    seen = []
    for split, documents in (("train", 16), ("valid", 3), ("test", 1)):
        dataset = windows_of(prefix, 1, split=split, split_weights=(80, 15, 5))
        assert dataset.token_count == documents * 12
        seen += np.unique(dataset.read(np.arange(dataset.samples_per_epoch))).tolist()
    assert seen == list(range(240))


def test_an_empty_split_says_how_to_fix_it(write_pair) -> None:
    message = r"split 'valid' \(weights 949,50,1\) holds 0 of 3 documents with 0 tokens.*larger we"
    with pytest.raises(DataError, match=message):
        GPTDataset(write_pair([50, 50, 50]), split="valid", seq_length=8, seed=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("949,50,1", (949, 50, 1)), ("949/50/1", (949, 50, 1)), ("1", (1, 0, 0)), ("0.9, 0.1", (0.9, 0.1, 0))],
)
def test_parse_split(text, expected) -> None:
    assert parse_split(text) == expected


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2,0", "nan,1,1", "1e308,1e308,1e308", "9,5/1"])
def test_bad_splits_are_refused(text) -> None:
    with pytest.raises(DataError, match=r"expected|split"):
        parse_split(text)


# ---- the bijection behind the order of an epoch: statistics, against what chance gives ----


TRILLION = 10**12
FROZEN = [1, 2, 4, 3, 5, 0, 7, 6]
FROZEN_FAR = [792569635669, 416020943562, 416638633022]


def is_even(counts: np.ndarray) -> bool:
    """Whether all were drawn equally often: chi-square is within five deviations of its mean."""
    expected, free = counts.mean(), len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()) < free + 5 * math.sqrt(2 * free)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers())
def test_each_number_is_met_once(n: int, key: int) -> None:
    assert sorted(permuted(np.arange(n), n, str(key)).tolist()) == list(range(n))


def test_numbers_of_a_long_epoch_are_met_once_and_do_not_depend_on_their_company() -> None:
    numbers = np.arange(10**9, 10**9 + 300_000)
    found = permuted(numbers, TRILLION, "long")
    assert len(np.unique(found)) == len(found) and found.min() >= 0 and found.max() < TRILLION
    assert (found[[7, 0, 299_999]] == permuted(numbers[[7, 0, 299_999]], TRILLION, "long")).all()


def test_the_permutation_is_frozen() -> None:
    """A change of these numbers breaks the resumption of every run: raise ORDER_VERSION and say so."""
    assert permuted(np.arange(8), 8, "frozen").tolist() == FROZEN
    assert permuted(np.arange(3), TRILLION, "frozen").tolist() == FROZEN_FAR


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    orders = {order: number for number, order in enumerate(itertools.permutations(range(n)))}
    keys = range(max(400, 6 * len(orders)))
    found = [orders[tuple(permuted(np.arange(n), n, f"key {key}").tolist())] for key in keys]
    assert is_even(np.bincount(found, minlength=len(orders)))


@pytest.mark.parametrize("n", [1000, 65_537, TRILLION])
def test_the_first_places_of_many_epochs_are_even(n: int) -> None:
    found = np.concatenate([permuted(np.arange(40), n, str(key)) for key in range(1000)])
    assert is_even(np.bincount(found * 100 // n, minlength=100))


@pytest.mark.parametrize("n", [65_537, TRILLION])
@pytest.mark.parametrize("apart", [1, 2, 64, 4096])
def test_neighbours_are_any_distance_apart(n: int, apart: int) -> None:
    found = permuted(np.arange(65_536), n, "neighbours")
    far = (found[apart:] - found[:-apart]) % n - 1  # it is not 0
    assert is_even(np.bincount(far * 199 // (n - 1), minlength=199))


def test_two_epochs_have_nothing_in_common() -> None:
    one, two = (permuted(np.arange(100_000), TRILLION, f"windows/{epoch}") for epoch in (0, 1))
    assert is_even(np.bincount((two - one) % TRILLION * 199 // TRILLION, minlength=199))
    epochs, places = shuffled(np.arange(2000), 1000, "windows")
    assert epochs.tolist() == [0] * 1000 + [1] * 1000
    assert (places[:1000] == places[1000:]).mean() < 0.01  # one of 1000 by chance


def test_each_epoch_is_whole_whatever_is_asked_for_at_once() -> None:
    ids = np.arange(1234, 1234 + 5 * 300)
    epochs, places = shuffled(ids, 300, "x")
    assert (epochs == ids // 300).all()
    for epoch in range(5, 9):
        assert sorted(places[epochs == epoch].tolist()) == list(range(300))
    mixed = np.random.default_rng(0).permutation(len(ids))
    assert (shuffled(ids[mixed], 300, "x")[1] == places[mixed]).all()

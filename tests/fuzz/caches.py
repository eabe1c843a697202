"""Cached sample orders: what is read through a changed cache is what is read without one."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.dataset import GPTDataset, IndexedDataset, IndexedWriter
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case
from tests.fuzz.mutations import UNREADABLE, remove, spoil_one, unreadable

CLASSES = {
    "file": "a fault of bytes or a special file in place of one of an order's files",
    "values": "other numbers in an array: zeros, edges, repeats, negative ones, exchanged ones, one"
    " changed",
    "array": "an array of another type, shape, length or dimension, or with pickled objects",
    "exchanged": "files exchanged within an order, or with those of another epoch or seed",
    "files": "files removed or added, a file in place of the folder, left-overs of a killed writer,"
    " a lock of a dead process",
}
LENGTH, SEED = 4, 3


@dataclass
class Prepared:
    folder: Path
    expected: np.ndarray


def _open(folder: Path, seed: int = SEED) -> GPTDataset:
    return GPTDataset(
        IndexedDataset(folder / "data"),
        split="train",
        seq_length=LENGTH,
        seed=seed,
        split_weights=(1, 0, 0),
        cache_minimum=0,
    )


def _read(folder: Path) -> np.ndarray:
    """Read two epochs, with a data set that holds no order yet."""
    samples = _open(folder)
    return samples.read(np.arange(2 * samples.samples_per_epoch))


def prepare(folder: Path) -> Prepared:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 40, size=12)
    with IndexedWriter(folder / "data", np.uint16) as writer:
        writer.append(np.arange(lengths.sum()), lengths)
    samples = GPTDataset(
        IndexedDataset(folder / "data"),
        split="train",
        seq_length=LENGTH,
        seed=SEED,
        split_weights=(1, 0, 0),
    )
    expected = samples.read(np.arange(2 * samples.samples_per_epoch))  # too small for a cache
    assert not (folder / "data.index-cache").exists()
    _open(folder, seed=SEED + 1).read(np.arange(5))
    assert (_read(folder) == expected).all() and (_read(folder) == expected).all()
    return Prepared(folder=folder, expected=expected)


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    kind = dice.pick(("file", "file", "values", "values", "values", "array", "exchanged", "files"))
    shutil.copytree(prepared.folder, folder, dirs_exist_ok=True)
    cache = folder / "data.index-cache"
    files = sorted(path for path in cache.rglob("*") if path.suffix)
    arrays = [path for path in files if path.suffix == ".npy"]
    path = dice.pick(files if kind == "file" else arrays or files)
    opened: str | None = None
    if kind == "file":
        if dice.chance(0.1):
            opened = about = dice.pick(list(UNREADABLE))
        else:
            about = spoil_one(dice, path)
    elif kind == "values":
        about = _other_values(dice, path)
    elif kind == "array":
        about = _other_array(dice, path)
    elif kind == "exchanged":
        other = dice.pick([item for item in arrays if item != path])
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        if dice.chance(0.5):
            other.write_bytes(one)
        about = f"{other.name} in {path.parent.name}"
    else:
        about = _other_files(dice, path)

    def run() -> np.ndarray:
        if opened is None:
            return _read(folder)
        with unreadable(opened, path):
            return _read(folder)

    def check(found: np.ndarray) -> str | None:
        if found.shape == prepared.expected.shape and (found == prepared.expected).all():
            return None
        return (
            f"{int((found != prepared.expected).any(axis=-1).sum())} of {len(found)} samples"
            " are others"
        )

    return Case(kind=kind, run=run, names=(str(cache),), check=check, about=f"{path.name}: {about}")


def _save(path: Path, array: np.ndarray, **options: bool) -> None:
    file = io.BytesIO()
    np.save(file, array, **options)
    path.write_bytes(file.getvalue())


def _other_values(dice: Dice, path: Path) -> str:
    array = np.load(path).copy()
    kind = dice.pick(
        (
            "zeros",
            "one changed",
            "one exchanged",
            "edges",
            "negative",
            "one more",
            "reversed",
            "rolled",
        )
    )
    at, other = dice.below(len(array)), dice.below(len(array))
    if kind == "zeros":
        array[:] = 0
    elif kind == "one changed":
        array[at] = dice.below(200)
    elif kind == "one exchanged":
        array[[at, other]] = array[[other, at]]
    elif kind == "edges":
        array[at] = dice.pick((np.iinfo(array.dtype).max, np.iinfo(array.dtype).min, 2**20))
    elif kind == "negative":
        array[at] = -1 - dice.below(5)
    elif kind == "one more":
        array += 1
    else:
        array = array[::-1].copy() if kind == "reversed" else np.roll(array, 1)
    _save(path, array)
    return kind


def _other_array(dice: Dice, path: Path) -> str:
    array = np.load(path)
    made = {
        "float": array.astype(np.float64) + 0.25,
        "bool": array > 3,
        "complex": array.astype(np.complex128),
        "uint64": array.astype(np.uint64),
        "int8": array.astype(np.int8),
        "big endian": array.astype(">i8"),
        "text": array.astype("U5"),
        "objects": array.astype(object),
        "a column": array[:, None],
        "a number": np.array(5),
        "empty": array[:0],
        "shorter": array[:-1],
        "longer": np.append(array, array[-1:]),
        "dates": array.astype("M8[s]"),
        "fields": array.astype([("a", "i4")]),
    }
    kind = dice.pick(list(made))
    _save(path, made[kind], allow_pickle=True)
    return kind


def _other_files(dice: Dice, path: Path) -> str:
    kind = dice.pick(
        (
            "a file less",
            "a file more",
            "a file for the folder",
            "an empty folder",
            "a left-over",
            "a lock of the dead",
            "a folder for the cache's parent",
        )
    )
    order = path.parent
    if kind == "a file less":
        path.unlink()
    elif kind == "a file more":
        (order / "other.npy").write_bytes(path.read_bytes())
    elif kind == "a file for the folder":
        remove(order)
        order.write_text("x")
    elif kind == "an empty folder":
        remove(order)
        order.mkdir()
    elif kind == "a left-over":
        shutil.copytree(order, order.with_name(f".{order.name}.99999999.tmp"))
        path.unlink()
    elif kind == "a lock of the dead":
        (order.parent / ".lock").write_text("x")
        path.unlink()
    else:
        remove(order.parent)
        order.parent.write_text("x")
    return kind

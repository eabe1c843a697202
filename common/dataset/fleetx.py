"""PaddleFleetX's token files, whose tokens are mapped into memory. They are written in one pass.

    PREFIX_ids.npy   (tokens,) uint16 or int32: the tokens of all sentences, one after the other
    PREFIX_idx.npz   lens (sentences,) int32: tokens of each
                     docs (documents + 1,) int64: the first sentence of each document, and their
                     number; may be absent

The older form is one file, PREFIX_ids.npz, with the arrays ids and lens, read whole. Without docs
each sentence is a document. Source: PaddleFleetX release/2.4, ppfleetx/data/data_tools/gpt/preprocess_data.py and
ppfleetx/data/dataset/gpt_dataset.py.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.dataset.token_files import (
    TokenFiles,
    TokenWriter,
    content_key,
    running_sums,
    with_extension,
)
from common.errors import DataError
from common.files import atomic_write, open_input, reading
from common.paths import looked_in

IDS, INDEX, OLD = "_ids.npy", "_idx.npz", "_ids.npz"
_npy: Any = np.lib.format  # numpy's functions have no types here


def fleetx_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return FleetX's token type: uint16 for vocabularies below 65,535 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 2**16 - 1 else np.dtype("<i4")


def find_fleetx(path: str | Path) -> Path | None:
    """Return the prefix of FleetX's files; None for another format.

    path: the prefix, one of the files, or a folder with one set.
    Raises DataError for a folder of several sets, and if one file of two is missing.
    """
    path = Path(path)
    if path.is_dir():
        names = sorted({entry.name.removesuffix(end) for end in (INDEX, OLD) for entry in path.glob(f"*{end}")})
        if len(names) > 1:
            several = " ".join(f"1 {path / name}" for name in names[:5])
            raise DataError(
                f"{path}: holds {len(names)} sets of FleetX's token files; name one, or a blend of weights: {several}"
            )
        return path / names[0] if names else None
    for end in (IDS, INDEX, OLD):
        path = path.with_name(path.name.removesuffix(end)) if path.name.endswith(end) else path
    if with_extension(path, OLD).exists():
        return path
    there = [end for end in (IDS, INDEX) if with_extension(path, end).exists()]
    if len(there) == 1 and not with_extension(path, ".idx").exists():
        (missing,) = {IDS, INDEX} - set(there)
        absent = with_extension(path, missing)
        raise DataError(
            f"{absent}: not found{looked_in(absent)}, although {path.name}{there[0]} is there;"
            " the two files belong together, copy or preprocess both again"
        )
    return path if len(there) == 2 else None


class FleetXDataset(TokenFiles):
    """FleetX's token files opened for reading. prefix: as ``find_fleetx`` returns it.

    Raises DataError if a file is missing, is not of this format, or contradicts the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        old = with_extension(prefix, OLD)
        is_old = old.exists()
        index_path = old if is_old else with_extension(prefix, INDEX)
        ids_path = old if is_old else with_extension(prefix, IDS)
        self.tokens = _load_array(ids_path, "ids" if is_old else None)
        lens = _load_array(index_path, "lens")
        documents = _load_array(index_path, "docs", required=False)
        self._starts = np.zeros(len(lens) + 1, np.int64)
        np.cumsum(lens, dtype=np.int64, out=self._starts[1:])
        if (np.diff(self._starts) < 0).any() or int(self._starts[-1]) != len(self.tokens):
            raise DataError(
                f"{index_path}: lens adds up to {int(self._starts[-1])} tokens, but"
                f" {ids_path.name} holds {len(self.tokens)}; the two do not belong together,"
                " copy or preprocess both again"
            )
        self.content_key = content_key(self.tokens, *(array for array in (lens, documents) if array is not None))
        if documents is not None:
            documents = documents.astype(np.int64, copy=False)
            if len(documents) < 2 or [*documents[[0, -1]]] != [0, len(lens)] or (np.diff(documents) < 0).any():
                raise DataError(
                    f"{index_path}: is damaged: docs does not rise from 0 to the {len(lens)} entries of lens; copy"
                    " or preprocess it again"
                )
            self._starts = self._starts[documents]
        self.document_count = len(self._starts) - 1

    def tokens_before(self, document: int) -> int:
        return int(self._starts[document])


class FleetXWriter(TokenWriter):
    """Writer of both files. dtype: see ``fleetx_dtype``. The bytes equal those of numpy.save and numpy.savez."""

    @contextmanager
    def _tokens_file(self) -> Iterator[IO[bytes]]:
        with atomic_write(with_extension(self.prefix, IDS)) as file:
            header = {"descr": _npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (0,)}
            _npy.write_array_header_1_0(file, header)
            yield file
            # the length of the header does not depend on the number: numpy leaves room for 21 digits
            file.seek(0)
            _npy.write_array_header_1_0(file, header | {"shape": (self.token_count,)})

    def _publish(self) -> None:
        self._close(INDEX)
        lens = np.concatenate([np.zeros(0, "<i4"), *(sizes for sizes, _ in running_sums(self._sizes))])
        docs = np.concatenate([np.zeros(1, "<i8"), *(ends for _, ends in running_sums(self._documents))])
        # numpy.savez leaves the archive open when the disk is full, and Python says so later
        with atomic_write(with_extension(self.prefix, INDEX)) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in (("lens", lens), ("docs", docs)):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    _npy.write_array(member, array)


# ---- numpy's files, without its pickles ----


def _load_array(path: Path, name: str | None, *, required: bool = True) -> Any:
    """Return a one-dimensional array of integers: an .npy, or the array ``name`` of an .npz.

    An .npy is mapped, and an .npz read, as FleetX does. An absent array that is not required is None. Raises DataError.
    """
    try:
        with open_input(path, DataError), reading(path, DataError):
            found = np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(found, np.ndarray) != (name is None):
                raise ValueError("it does not begin as an array file of its name does")
            if name is not None:
                with found:
                    if name not in found:
                        if not required:
                            return None
                        held = ", ".join(found)[:80] or "nothing"
                        raise DataError(f"{path}: holds {held}, expected the array {name}")
                    found = found[name]
            if found.ndim != 1 or found.dtype.kind not in "iu":
                raise ValueError(
                    f"it holds {found.dtype} of shape {found.shape}, expected whole numbers in one dimension"
                )
            return np.asarray(found)  # slices of a memmap are several times slower
    except DataError:
        raise
    except Exception as error:  # a broken file may raise anything
        said = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise DataError(f"{path}: is not an array file of FleetX's: {said}; copy or preprocess it again") from None

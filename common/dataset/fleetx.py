"""PaddleFleetX's token files, read by memory map and written in one pass.

    PREFIX_ids.npy   (tokens,) uint16 or int32: the tokens of all sentences, one after the other
    PREFIX_idx.npz   lens (sentences,) int32: tokens of each
                     docs (documents + 1,) int64: the first sentence of each document, and their
                     number; may be absent

The older form is one file, PREFIX_ids.npz, with the arrays ids and lens. Without docs each sentence
is a document. Source: PaddleFleetX release/2.4, ppfleetx/data/data_tools/gpt/preprocess_data.py and
ppfleetx/data/dataset/gpt_dataset.py.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from common.dataset.token_files import TokenFiles, TokenWriter, content_key, with_extension
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
        names = sorted(
            {entry.name.removesuffix(end) for end in (INDEX, OLD) for entry in path.glob(f"*{end}")}
        )
        if len(names) > 1:
            several = " ".join(f"1 {path / name}" for name in names[:5])
            raise DataError(
                f"{path}: holds {len(names)} sets of FleetX's token files; name one, or a blend of"
                f" weights: {several}"
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
    """FleetX's token files opened for reading. prefix: see ``find_fleetx``.

    Raises DataError if a file is missing, is not of this format, or contradicts the other.
    """

    def __init__(self, prefix: str | Path) -> None:
        found = find_fleetx(prefix)
        if found is None:
            raise DataError(
                f"{prefix}{IDS}: not found{looked_in(Path(f'{prefix}{IDS}'))}; give the prefix of"
                " FleetX's token files"
            )
        self.prefix = found
        old = with_extension(found, OLD)
        self._index_path = old if old.exists() else with_extension(found, INDEX)
        self._ids_path = old if old.exists() else with_extension(found, IDS)
        self.tokens = _load_array(self._ids_path, "ids" if old.exists() else None)
        lens = _load_array(self._index_path, "lens")
        documents = _load_array(self._index_path, "docs", required=False)
        self._require_lens(lens)
        sentences = np.zeros(len(lens) + 1, dtype=np.int64)
        np.cumsum(lens, out=sentences[1:])
        if int(sentences[-1]) != len(self.tokens):
            raise DataError(
                f"{self._index_path}: lens adds up to {int(sentences[-1])} tokens, but"
                f" {self._ids_path.name} holds {len(self.tokens)}; the two do not belong together,"
                " copy or preprocess both again"
            )
        self._offsets = (
            sentences
            if documents is None
            else sentences[self._require_documents(documents, len(lens))]
        )
        self.content_key = content_key(self._offsets, self.tokens)

    def __reduce__(self) -> tuple[type[FleetXDataset], tuple[str]]:
        return FleetXDataset, (str(self.prefix),)

    @property
    def document_count(self) -> int:
        return len(self._offsets) - 1

    def document_offsets(self) -> npt.NDArray[np.int64]:
        return self._offsets

    def _require_lens(self, lens: npt.NDArray[Any]) -> None:
        if not len(lens):
            raise DataError(f"{self._index_path}: lens is empty; preprocess a corpus that has text")
        most = len(self.tokens)
        if int(lens.min()) < 0 or int(lens.max()) > most:
            at = int(np.argmax((lens < 0) | (lens > most)))
            raise DataError(
                f"{self._index_path}: lens[{at}] is {int(lens[at])}, expected 0 to the {most}"
                f" tokens of {self._ids_path.name}; the file is corrupt, preprocess again"
            )

    def _require_documents(self, documents: npt.NDArray[Any], sentences: int) -> npt.NDArray[Any]:
        if (
            len(documents) < 2
            or int(documents[0])
            or int(documents[-1]) != sentences
            or (documents[1:] < documents[:-1]).any()
        ):
            raise DataError(
                f"{self._index_path}: docs must rise from 0 to the {sentences} entries of lens,"
                f" found {documents[:3].tolist()} ... {documents[-1:].tolist()}; the file is"
                " corrupt, preprocess again"
            )
        return documents


class FleetXWriter(TokenWriter):
    """Writer of both files. dtype: see ``fleetx_dtype``. The bytes equal those of numpy.save and
    numpy.savez.
    """

    def __enter__(self) -> Self:
        self._file = self._stack.enter_context(atomic_write(with_extension(self.prefix, IDS)))
        self._write_header()
        return self

    def _publish(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._close(INDEX)
        documents = np.zeros(self.document_count + 1, dtype=np.int64)
        if self._documents:
            np.cumsum(np.concatenate(self._documents), out=documents[1:])
        lens = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int32)
        with atomic_write(with_extension(self.prefix, INDEX)) as file:
            np.savez(file, lens=lens, docs=documents)

    def _write_header(self) -> None:
        """Write the header of the .npy.

        Its length does not depend on the number of tokens: numpy leaves room for 21 digits.
        """
        header = {
            "descr": _npy.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.token_count,),
        }
        _npy.write_array_header_1_0(self._file, header)


# ---- numpy's files, without its pickles ----


def _load_array(path: Path, name: str | None, *, required: bool = True) -> Any:
    """Return a one-dimensional array of integers: an .npy mapped, or the array ``name`` of an .npz.

    An absent array that is not required is None. Raises DataError.
    """
    with open_input(path, DataError), _named(path):
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
                f"it holds {found.dtype} of shape {found.shape}, expected whole numbers in one"
                " dimension"
            )
        if name is None and found.offset + found.nbytes != path.stat().st_size:
            raise ValueError("it has more bytes than its head says")
        return np.asarray(found)  # slices of a memmap are several times slower


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn errors of numpy and zipfile about a broken file into one error with its name."""
    try:
        with reading(path, DataError):
            yield
    except (
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        OverflowError,
        SyntaxError,
        TokenError,
    ) as error:
        said = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise DataError(
            f"{path}: is not an array file of FleetX's: {said}; copy or preprocess it again"
        ) from None

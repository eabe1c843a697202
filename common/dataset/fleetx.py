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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from common.dataset.metadata import METADATA_EXTENSION
from common.dataset.token_files import TokenFiles, content_key, map_file, with_extension
from common.errors import DataError
from common.files import atomic_write, open_input, reading
from common.paths import looked_in

IDS, INDEX, OLD = "_ids.npy", "_idx.npz", "_ids.npz"
MOST_UNPACKED = 2**32
"""Maximum tokens of a compressed array, which is held in memory."""
_npy: Any = np.lib.format  # numpy's functions have no types here
_HEADERS = {(1, 0): _npy.read_array_header_1_0, (2, 0): _npy.read_array_header_2_0}


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
        self.tokens = _map_member(old, "ids") if old.exists() else _map_npy(self._ids_path)
        lens, documents = _read_members(self._index_path, len(self.tokens) + 2)
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
        if int(lens.min()) < 0:
            at = int(np.argmax(lens < 0))
            raise DataError(
                f"{self._index_path}: lens[{at}] is {int(lens[at])}, expected 0 or more; the file"
                " is corrupt, preprocess again"
            )

    def _require_documents(self, documents: npt.NDArray[Any], sentences: int) -> npt.NDArray[Any]:
        if (
            len(documents) < 2
            or int(documents[0])
            or int(documents[-1]) != sentences
            or (np.diff(documents) < 0).any()
        ):
            raise DataError(
                f"{self._index_path}: docs must rise from 0 to the {sentences} entries of lens,"
                f" found {documents[:3].tolist()} ... {documents[-1:].tolist()}; the file is"
                " corrupt, preprocess again"
            )
        return documents


class FleetXWriter:
    """Context manager that publishes both files on normal exit, and leaves nothing after an
    exception.

    prefix: beginning of the names. dtype: see ``fleetx_dtype``. The bytes equal those of numpy.save
    and numpy.savez.
    Memory: 4 bytes per sequence and 4 per document. Raises StorageError if the disk fails.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.token_count = self.sequence_count = self.document_count = 0
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int32]] = []
        self._stack = ExitStack()
        self._file: IO[bytes]

    def __enter__(self) -> FleetXWriter:
        self._file = self._stack.enter_context(atomic_write(with_extension(self.prefix, IDS)))
        self._write_header()
        return self

    def append(
        self, tokens: npt.NDArray[Any], sizes: npt.NDArray[Any], documents: npt.NDArray[Any]
    ) -> None:
        """Append whole documents: tokens, tokens per sequence and sequences per document.

        Raises DataError for a token that does not fit the dtype.
        """
        limits = np.iinfo(self.dtype)
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise DataError(
                    f"{self.prefix}: token id {wrong} does not fit {self.dtype.name}; check the"
                    " vocabulary files"
                )
            self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._sizes.append(np.asarray(sizes, dtype=np.int32))
        self._documents.append(np.asarray(documents, dtype=np.int32))
        self.token_count += len(tokens)
        self.sequence_count += len(sizes)
        self.document_count += len(documents)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        self._file.seek(0)
        self._write_header()
        # The old index goes first: a crash between the renames leaves no set of files, never a
        # wrong one.
        for extension in (INDEX, METADATA_EXTENSION):
            with_extension(self.prefix, extension).unlink(missing_ok=True)
        self._stack.close()
        documents = np.zeros(self.document_count + 1, dtype=np.int64)
        if self._documents:
            np.cumsum(np.concatenate(self._documents), out=documents[1:])
        with atomic_write(with_extension(self.prefix, INDEX)) as file:
            np.savez(
                file,
                lens=np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int32),
                docs=documents,
            )

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


def _map_npy(path: Path) -> npt.NDArray[Any]:
    """Map a one-dimensional array of integers."""
    with open_input(path, DataError) as file, _named(path):
        return _map(path, file, 0, path.stat().st_size)


def _map_member(path: Path, name: str) -> npt.NDArray[Any]:
    """Return a one-dimensional array of integers of an .npz.

    An array that is stored uncompressed, as numpy.savez does, is mapped.
    """
    with _open_npz(path) as (file, archive):
        info = _require_member(path, archive, name)
        if info.compress_type != zipfile.ZIP_STORED:
            return _unpack(path, archive, info, MOST_UNPACKED)
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
        start = (
            info.header_offset
            + 30
            + int.from_bytes(lengths[:2], "little")
            + int.from_bytes(lengths[2:], "little")
        )
        return _map(path, file, start, start + info.file_size)


def _read_members(path: Path, most: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return lens and docs (None if absent) after comparing their checksums.

    most: maximum number of entries of each.
    """
    with _open_npz(path) as (_, archive):
        lens = _unpack(path, archive, _require_member(path, archive, "lens"), most)
        has_documents = "docs.npy" in archive.namelist()
        return lens, _unpack(
            path, archive, archive.getinfo("docs.npy"), most
        ) if has_documents else None


@contextmanager
def _open_npz(path: Path) -> Iterator[tuple[IO[bytes], zipfile.ZipFile]]:
    with open_input(path, DataError) as file, _named(path):
        if file.read(2) != b"PK":  # zipfile accepts other bytes before the archive, numpy does not
            raise ValueError("it does not begin as an .npz does")
        with zipfile.ZipFile(file) as archive:
            yield file, archive


def _require_member(path: Path, archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    names = archive.namelist()
    if f"{name}.npy" not in names:
        raise DataError(
            f"{path}: holds {', '.join(names)[:80] or 'nothing'}, expected the array {name}"
        )
    return archive.getinfo(f"{name}.npy")


def _unpack(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int
) -> npt.NDArray[Any]:
    with archive.open(info) as packed:
        dtype, count = _read_header(packed)
        if count > most:
            raise DataError(
                f"{path}: {info.filename} has {count} entries, expected at most {most}; the files"
                " do not belong together"
            )
        data = packed.read(count * dtype.itemsize)
        if len(data) != count * dtype.itemsize or packed.read(1):
            raise ValueError(
                f"the header of {info.filename} says {count} numbers, but its data has another"
                " length"
            )
        return np.frombuffer(data, dtype=dtype)


def _map(path: Path, file: IO[bytes], start: int, end: int) -> npt.NDArray[Any]:
    file.seek(start)
    dtype, count = _read_header(file)
    at = file.tell()
    size = path.stat().st_size
    if at + count * dtype.itemsize != end or end > size:
        raise ValueError(
            f"its header says {count} numbers of {dtype.itemsize} bytes, and"
            f" {max(0, min(end, size) - at)} bytes are there"
        )
    return map_file(path)[at:end].view(dtype)


def _read_header(file: Any) -> tuple[np.dtype[Any], int]:
    """Return the type and the number of entries of a one-dimensional array of integers.

    Raises ValueError for anything else.
    """
    version = _npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its version is {version}, expected 1.0 or 2.0")
    shape, _, dtype = _HEADERS[version](file, max_header_size=10_000)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(
            f"it holds {dtype} of shape {shape}, expected whole numbers in one dimension"
        )
    return dtype, int(shape[0])


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

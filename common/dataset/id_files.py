"""Files of ids as text, separated by spaces.

GPT2-Chinese writes tokenized_train_{i}.txt, where i is the number of a share of the corpus.
Source of the format: GPT2-Chinese, build_files of train.py.
"""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from common.dataset.token_files import CHUNK, TokenWriter, running_sums
from common.errors import ConfigError, DataError
from common.files import atomic_write, reading
from common.whole_numbers import MAX_DIGITS

_log = logging.getLogger(__name__)
_NAME = re.compile(r"tokenized_train_(\d+)\.txt")


def numbered_files(path: Path) -> list[Path]:
    """Return the tokenized_train_{i}.txt of a folder in the order of their numbers, or a given file.

    Raises DataError if a number is missing.
    """
    if not path.is_dir():
        return [path]
    with reading(path, DataError):
        names = [match for entry in path.iterdir() if (match := _NAME.fullmatch(entry.name))]
    found = {int(match[1]): path / match[0] for match in names}
    missing = next((number for number in range(len(found)) if number not in found), None)
    if missing is not None or not found:
        raise DataError(
            f"{path}: tokenized_train_{missing or 0}.txt is not there, {len(found)} others are;"
            " write them again with --format pieces, or name the files that you mean"
        )
    return [found[number] for number in range(len(found))]


def parse_ids(
    data: bytes, where: str, offset: int, vocab_size: int, end_id: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the ids of a text, and the number of ids of each document.

    A document ends after each ``end_id``. offset: bytes before ``data``, for messages. Raises
    DataError for anything but an id.
    """
    words = data.split()
    # numpy takes signs and underscores too
    strange = data.translate(None, b"0123456789 \t\n\r\f\v")
    if strange or max(map(len, words), default=0) > MAX_DIGITS:
        wrong = next(word for word in words if not re.fullmatch(rb"\d{1,18}", word))
        place = offset + data.find(wrong)
        raise DataError(
            f"{where}: byte {place}: found {wrong[:20].decode(errors='replace')!r}, expected ids"
            " separated by spaces; leave --input-format out for text"
        )
    ids = np.array(words, dtype=np.bytes_).astype(np.int64) if words else np.zeros(0, np.int64)
    beyond = np.flatnonzero(ids >= vocab_size)
    if beyond.size:
        raise DataError(
            f"{where}: id {ids[beyond[0]]} (number {beyond[0] + 1} from byte {offset}) is beyond the {vocab_size}"
            " tokens of the vocabulary; give the vocabulary that these ids were made with"
        )
    stops = np.flatnonzero(ids == end_id) + 1
    if len(ids) and (not len(stops) or stops[-1] < len(ids)):
        stops = np.append(stops, len(ids))
    return ids.astype(np.int32), np.diff(stops, prepend=0)


class PiecesWriter(TokenWriter):
    """Writer of PREFIX_{i}.txt for each of ``pieces`` shares.

    Shares have equal numbers of documents, and the last one also takes the rest. A document of 0
    sequences was left out, and still counts when the corpus is divided.
    Raises ConfigError if earlier pieces of higher numbers would stay beside the new ones.
    """

    def __init__(self, prefix: Path, pieces: int) -> None:
        super().__init__(prefix, "<i4")
        self._pieces = pieces
        if (later := self.path(pieces)).exists():
            raise ConfigError(
                f"{later}: is of an earlier run of more than {pieces} pieces; remove those, or choose another output"
            )

    def path(self, number: int) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}_{number}.txt")

    def _tokens_file(self) -> AbstractContextManager[IO[bytes]]:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        return TemporaryFile(dir=self.prefix.parent)

    def append(
        self, tokens: npt.NDArray[Any], sizes: npt.NDArray[Any], documents: npt.NDArray[Any] | None = None
    ) -> None:
        super().append(tokens, sizes, documents)
        self.document_count -= int(np.count_nonzero(documents == 0))

    def _publish(self) -> None:
        if not self.document_count:
            return
        ends, documents = (
            np.concatenate([np.zeros(1, np.int64), *(ends for _, ends in running_sums(file))])
            for file in (self._sizes, self._documents)
        )
        share, rest = divmod(len(documents) - 1, self._pieces)
        if not share:
            _log.warning(
                "--num-pieces %d: the corpus has %d documents, all but the last piece are empty", self._pieces, rest
            )
        borders = [*ends[documents[share * np.arange(self._pieces)]], self.token_count]
        self._file.seek(0)
        for number, count in enumerate(np.diff(borders).tolist()):
            with atomic_write(self.path(number), "w") as file:
                while count:
                    ids = np.frombuffer(self._file.read(4 * min(count, CHUNK)), dtype="<i4")
                    file.write(" ".join(map(str, ids.tolist())) + " ")
                    count -= len(ids)

"""Kind of a corpus file, decided by its content: plain text, JSON Lines or a JSON array, each also
gzipped; parquet or Arrow.

A folder may hold parquet, or be one that ``datasets`` of Hugging Face saved. Source of its layout:
``save_to_disk`` of datasets 5.2: state.json names the .arrow files in the order of the rows,
dataset_dict.json the splits, each a folder of its own.
"""

from __future__ import annotations

import codecs
import gzip
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from common.dataset.encodings import Recoded, require_no_nul
from common.dataset.tables import ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC, PARQUET_MAGIC
from common.errors import ConfigError, DataError
from common.file_kinds import GZIP_MAGIC, foreign_kind
from common.files import open_input, reading
from common.paths import require_package
from common.structured_files import MalformedError, parse_json, parse_json_item, read_json_mapping

_log = logging.getLogger(__name__)
_HEAD_BYTES = 1 << 20
UTF_8 = "utf-8"
_JSON_NAMES = (".json", ".jsonl", ".ndjson")


CorpusFormat = Literal["text", "jsonl", "array", "ids", "parquet", "arrow"]
TABLES = ("parquet", "arrow")
"""Formats of columns, which pyarrow reads."""
_MAGICS: dict[bytes, CorpusFormat] = {
    PARQUET_MAGIC: "parquet",
    ARROW_FILE_MAGIC: "arrow",
    ARROW_STREAM_MAGIC: "arrow",
}
_WIDE = {"UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}
"""Byte order marks. One of UTF-32 begins with one of UTF-16."""
_WORDS: dict[CorpusFormat, str] = {
    "text": "plain text",
    "jsonl": "JSON Lines, an object or a string on each line",
    "array": "a JSON array",
    "ids": "ids",
    "parquet": "parquet",
    "arrow": "Arrow",
}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One input file.

    size: bytes on disk, compressed if it is gzipped. encoding: codec of Python. Blocks are UTF-8,
    whatever the encoding of the file.
    """

    path: Path
    format: CorpusFormat
    size: int
    gzipped: bool
    encoding: str = UTF_8

    @contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, BinaryIO]]:
        """Yield (text, raw): the uncompressed bytes, and the file on disk whose position tells the progress.

        Raises DataError when the gzip stream breaks inside the ``with`` block.
        """
        with open_input(self.path, DataError) as raw, _readable(self.path):
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if self.gzipped else raw
            if self.encoding != UTF_8:
                file = cast(BinaryIO, Recoded(file, self.path, self.encoding))
            yield file, raw


def open_corpus(path: Path, forced: CorpusFormat | None = None, encoding: str = UTF_8) -> Corpus:
    """Detect the format of ``path`` from its first MiB, and log it.

    forced: format to use without detection. encoding: of the text, as
    ``encodings.checked_encoding`` names it.
    Raises DataError when the file is missing, empty, UTF-16, an archive or binary, or JSON of a
    shape that holds no list of texts, or has the name of JSON and holds none. Raises ConfigError
    for parquet and Arrow without pyarrow.
    """
    with open_input(path, DataError) as raw, reading(path, DataError), _readable(path):
        gzipped = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        head = (gzip.GzipFile(fileobj=raw) if gzipped else raw).read(_HEAD_BYTES)
    if (foreign := foreign_kind(head)) is not None:
        raise DataError(f"{path}: {foreign}")
    table = _table_format(path, head, gzipped, forced, encoding)
    if table is not None:
        require_package("pyarrow", extra="parquet", purpose=f"which reads {path}")
        _log.info("%s: read as %s (by content)", path, _WORDS[table])
        return Corpus(path=path, format=table, size=path.stat().st_size, gzipped=False)
    complete = len(head) < _HEAD_BYTES
    if complete and not head.strip() and forced != "ids":
        raise DataError(f"{path}: is empty; a corpus needs text")
    wide = next((name for name, marks in _WIDE.items() if head.startswith(marks)), None)
    if encoding == UTF_8 and wide:
        raise DataError(
            f"{path}: is {wide} (its byte order mark is at byte 0), expected UTF-8; convert it"
            f" (iconv -f {wide} -t UTF-8), or use a tool that takes --encoding {wide.lower()}"
        )
    text = head.decode(encoding, "ignore")
    require_no_nul(head if encoding == UTF_8 else text.encode(), f"{path}:")
    name = path.with_suffix("") if path.suffix == ".gz" else path
    named_json = name.suffix.lower() in _JSON_NAMES
    chosen = forced or _judge(path, text, complete, named_json)
    if named_json and not forced and chosen == "text":
        raise DataError(
            f"{path}: is neither a JSON array nor JSON Lines, though its name says"
            f" {name.suffix!r}; if it is plain text, name it .txt (or give preprocess_data.py --input-format text)"
        )
    why = "as asked" if forced else "by content"
    if not forced and not named_json and chosen != "text":
        _log.warning("%s: read as %s (by content), although its name says %r", path, _WORDS[chosen], name.suffix)
    else:
        _log.info("%s: read as %s (%s)%s", path, _WORDS[chosen], why, ", gzipped" if gzipped else "")
    return Corpus(path=path, format=chosen, size=path.stat().st_size, gzipped=gzipped, encoding=encoding)


def _table_format(
    path: Path, head: bytes, gzipped: bool, forced: CorpusFormat | None, encoding: str
) -> CorpusFormat | None:
    """Return the format of a file of columns, None for others.

    Raises DataError where an option or gzip does not go together with it.
    """
    found = next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)
    if forced in TABLES and found != forced:
        raise DataError(
            f"{path}: does not begin as {_WORDS[forced]} does, which --input-format asks for; leave"
            " the option out, or copy the file again"
        )
    if found is None or forced not in (None, found):
        return None
    if gzipped:
        raise DataError(f"{path}: is gzipped {_WORDS[found]}, which is compressed inside; unpack it with gunzip")
    if encoding != UTF_8:
        raise DataError(
            f"{path}: is {_WORDS[found]}, whose text is always UTF-8; leave --encoding {encoding}"
            " out, and preprocess files of that encoding in a run of their own"
        )
    return found


def _judge(path: Path, head: str, complete: bool, named_json: bool) -> CorpusFormat:
    """Return the format of a file: JSON if its first item parses as JSON, else text.

    If the name says JSON, a broken first item is an error. If not, strings must stand on each of several lines, since a
    text may well begin with one. head: first bytes. complete: whether ``head`` is the whole file.
    """
    text = head.lstrip("\ufeff \t\r\n")
    if text.startswith("["):
        return "array" if named_json or _is_array(text, complete) else "text"
    if text.startswith("{"):
        first_line, _, rest = text.partition("\n")
        if _parses(first_line) or (not rest and not complete):
            return "jsonl"
        if complete and _parses(text):
            raise DataError(
                f"{path}: is one JSON object over several lines, expected an array of texts or one"
                ' object per line; write ["text", ...] or {"text": "..."} on a line of its own'
                " for each document"
            )
        return "jsonl" if named_json else "text"
    if text.startswith('"'):
        whole = text if complete else text[: text.rfind("\n") + 1]
        lines = [line for line in whole.split("\n") if line.strip()]
        if named_json or (len(lines) > 1 and all(line.startswith('"') and _parses(line) for line in lines)):
            return "jsonl"
    return "text"


def _is_array(text: str, complete: bool) -> bool:
    rest = text[1:].lstrip()
    if not rest.startswith(('"', "{")):
        return rest.startswith("]")
    try:
        _, end = parse_json_item(rest)
    except MalformedError:
        return not complete and "\n" not in rest  # the first item may be longer than the head
    return rest[end:].lstrip()[:1] in ("", ",", "]")


def _parses(text: str) -> bool:
    try:
        parse_json(text, strict=False)
    except MalformedError:
        return False
    return True


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: the gzip stream is broken ({error}); copy the file again, check it with gzip -t"
        ) from None


# ---- folders as inputs ----


_SPLITS, _STATE = "dataset_dict.json", "state.json"


def files_of(inputs: Sequence[Path], split: str | None) -> list[Path]:
    """Return the inputs with the files of each folder in its place, in the order of their rows.

    split: its name in folders that have splits. Raises DataError for a folder without such files,
    or one that is incomplete. Raises ConfigError for a split that is missing or not there.
    """
    found: list[Path] = []
    has_splits = False
    for path in inputs:
        with reading(path, DataError):
            if not path.is_dir():
                found.append(path)
                continue
            if (path / _SPLITS).exists():
                has_splits = True
                path = _folder_of_split(path, split)
            if (path / _STATE).exists():
                found += _saved_files(path)
                continue
            tables = sorted(each for each in path.iterdir() if each.suffix == ".parquet" and each.name[0] != ".")
        if not tables:
            raise DataError(
                f"{path}: is a folder without *.parquet files and without {_STATE}, with which"
                f" datasets saves its own; give its files, for example {path}/*.txt"
            )
        found += tables
    if split is not None and not has_splits:
        raise ConfigError(f"--dataset-split {split}: no --input is a folder of splits ({_SPLITS}); leave it out")
    return found


def _folder_of_split(folder: Path, split: str | None) -> Path:
    splits = read_json_mapping(folder / _SPLITS, error=DataError).get("splits")
    if not isinstance(splits, list) or not splits:
        raise DataError(f"{folder / _SPLITS}: splits: expected a list of names; save it again")
    if split is None or split not in splits:
        problem = f", not {split!r}" if split else ""
        raise ConfigError(
            f"{folder}: holds the splits {', '.join(map(repr, splits))}{problem}; choose one:"
            f" --dataset-split {splits[0]}"
        )
    return folder / split


def _saved_files(folder: Path) -> list[Path]:
    state = folder / _STATE
    saved = read_json_mapping(state, error=DataError)
    if saved.get("_indices_data_files"):
        raise DataError(
            f"{state}: _indices_data_files: the order of the rows is in a file of its own, which"
            " old versions of datasets wrote; load the dataset there and save it again"
        )
    entries, files = saved.get("_data_files"), list[Path]()
    for entry in entries if isinstance(entries, list) else [None]:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise DataError(
                f"{state}: _data_files: expected the names of files in this folder, found {name!r}; copy the folder"
                " again, or save the dataset again with save_to_disk"
            )
        files.append(folder / name)
    return files

"""Small data sets with known content, and a tokenizer that needs no vocabulary files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.dataset.indexed import IndexedDataset, IndexedWriter
from common.dataset.options import PreprocessOptions
from common.dataset.preprocess import preprocess
from common.dataset.samples import GPTDataset
from common.dataset.token_files import TokenFiles
from common.tokenizer import TOKENIZERS, Framing, PackedIds

WritePair = Callable[..., Path]
WHOLE: dict[str, Any] = {"split": "train", "split_weights": (1, 0, 0), "seed": 7}
"""Options of open_samples for all of the data."""


@pytest.fixture
def write_pair(tmp_path: Path) -> WritePair:
    """write_pair(lengths, name="data", dtype="uint16") -> prefix; token i of the file is i, modulo 60,000."""

    def write(
        lengths: Sequence[int], name: str = "data", dtype: str = "uint16", documents: Sequence[int] | None = None
    ) -> Path:
        tokens = np.arange(sum(lengths)) % 60_000
        with IndexedWriter(tmp_path / name, dtype) as writer:
            writer.append(tokens, np.array(lengths), None if documents is None else np.array(documents))
        return tmp_path / name

    return write


def offsets_of(data: TokenFiles) -> list[int]:
    """The first token of each document, and the number of tokens."""
    return [data.tokens_before(n) for n in range(data.document_count + 1)]


def sequences_of(data: IndexedDataset) -> list[np.ndarray]:
    return np.split(data.tokens, np.cumsum(data.sizes[:])[:-1])


def windows_of(data: Path | TokenFiles, seq_length: int, **changes: Any) -> GPTDataset:
    return GPTDataset(data, seq_length=seq_length, **{**WHOLE, **changes})


def files_of(prefix: Path, *endings: str) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in endings or (".bin", ".idx")]


def write_table(pa: Any, path: Path, rows: Any, kind: str = "parquet", group: int = 130, column: str = "body") -> Path:
    """Write a table of the columns number and ``column``, in groups of ``group`` rows."""
    from pyarrow import parquet

    array = rows if isinstance(rows, pa.Array | pa.ChunkedArray) else pa.array(rows, pa.string())
    table = pa.table({"number": list(range(len(array))), column: array})
    if kind.startswith("parquet"):
        options = {"compression": "zstd", "data_page_size": 4096, "use_dictionary": "dict" in kind}
        parquet.write_table(table, path, row_group_size=group, **options)
        return path
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "zstd" else None)
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=group)
    return path


class ByteTokenizer:
    """One id per byte of UTF-8, 256 behind a document."""

    kind, backend, vocab_size, eod_id, sha256 = "Byte", "python", 257, 256, "0" * 64
    framing, has_marks, special, unknown_id = Framing(suffix=(256,)), False, {"¶": 256}, None

    def __init__(self, *_: object) -> None: ...

    def encode_packed(self, texts: Sequence[str], allow_special: bool = False) -> PackedIds:
        data = [text.encode() for text in texts]
        offsets = np.zeros(len(data) + 1, dtype=np.int64)
        np.cumsum([len(text) for text in data], out=offsets[1:])
        return PackedIds(ids=np.frombuffer(b"".join(data), dtype=np.uint8).astype(np.int32), offsets=offsets)


@pytest.fixture
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Registers the tokenizer kind ``Byte`` for this process."""
    monkeypatch.setitem(TOKENIZERS, "Byte", (f"{__name__}:ByteTokenizer", ""))
    return {"tokenizer_type": "Byte", "vocab_file": Path(__file__)}


@pytest.fixture
def options_for(tmp_path: Path, byte_tokenizer: dict[str, Any]) -> Callable[..., PreprocessOptions]:
    """options_for(file, file, ..., **options): of bytes, to the prefix ``out``."""

    def make(*inputs: Path, **options: Any) -> PreprocessOptions:
        return PreprocessOptions(inputs=inputs, **{"output_prefix": tmp_path / "out", **byte_tokenizer, **options})

    return make


@pytest.fixture
def read_back(options_for: Callable[..., PreprocessOptions]) -> Callable[..., list[str]]:
    """read_back(file or files, **options) -> the documents of the one pair that preprocessing writes, as text."""

    def run(inputs: Path | Sequence[Path], **options: Any) -> list[str]:
        files = (inputs,) if isinstance(inputs, Path) else inputs
        (prefix,) = preprocess(options_for(*files, **options)).prefixes
        texts = [ids.astype(np.int32) for ids in sequences_of(IndexedDataset(prefix))]
        return [bytes(ids[ids < 256].tolist()).decode() + "¶" * int((ids == 256).sum()) for ids in texts]

    return run

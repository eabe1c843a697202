"""GPT-2's byte-level BPE from vocab.json and merges.txt, with the fastest installed library that is
exact.

Text is never changed: decode(encode(x)) == x for every valid Unicode text. Source of the algorithm:
openai/gpt-2, src/encoder.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import TokenizerError
from common.tokenizer.base import Framing, Ids, PackedIds, TokenIds
from common.tokenizer.bpe_backends import choose_backend
from common.tokenizer.bpe_files import END_OF_TEXT, read_vocabulary
from common.tokenizer.checks import (
    checked_ids,
    checked_text,
    checked_texts,
    decoded_texts,
    refuse_surrogate,
)
from common.tokenizer.recognise import BPE_FILES
from common.tokenizer.streams import ByteStream


def files_in(folder: Path) -> tuple[Path, Path]:
    """Return the vocabulary and merges of a folder, under Hugging Face's or OpenAI's names.

    Raises TokenizerError.
    """
    for vocab_name, merge_name in BPE_FILES:
        if (folder / vocab_name).is_file() and (folder / merge_name).is_file():
            return folder / vocab_name, folder / merge_name
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder}: is not a folder; expected the folder of a GPT-2 vocabulary; check the path"
        )
    present = [name for pair in BPE_FILES for name in pair if (folder / name).is_file()]
    pairs = " or ".join(f"{vocab_name} with {merge_name}" for vocab_name, merge_name in BPE_FILES)
    raise TokenizerError(
        f"{folder}: no GPT-2 vocabulary: looked for {pairs}, found"
        f" {', '.join(present) or 'none of them'}; copy the missing file there, or name both files"
    )


class GPT2BPETokenizer:
    """Tokenizer of a GPT-2 vocabulary. ``<|endoftext|>`` begins, ends and pads.

    It can be shared between threads. Pickling stores its file names, so a worker process builds its
    own.
    """

    kind = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path, backend: str = "auto") -> None:
        self.vocab_file = vocab_file
        self.merge_file = merge_file
        vocabulary = read_vocabulary(vocab_file, merge_file)
        self._token_bytes = vocabulary.token_bytes
        self._eod_id = vocabulary.eod_id
        self._sha256 = vocabulary.sha256
        self._backend, self.passed_over = choose_backend(vocabulary, backend)

    @classmethod
    def from_files(
        cls,
        vocab_file: str | os.PathLike[str],
        merge_file: str | os.PathLike[str],
        backend: str = "auto",
    ) -> GPT2BPETokenizer:
        """Build from vocab.json and merges.txt, or encoder.json and vocab.bpe.

        The merges may lack their ``#version`` header. backend: "auto" (gigatoken, else tiktoken,
        else tokenizers), or one of these names.
        Raises TokenizerError for broken files, and for a named backend that is missing or not
        exact.
        """
        return cls(Path(vocab_file), Path(merge_file), backend)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], backend: str = "auto") -> GPT2BPETokenizer:
        """Build from the pair of files in ``folder``, under Hugging Face's names or OpenAI's.
        Raises TokenizerError.
        """
        return cls(*files_in(Path(folder)), backend)

    @property
    def backend(self) -> str:
        """Name of the library in use. ``passed_over`` holds the reasons against faster ones."""
        return self._backend.name

    @property
    def vocab_size(self) -> int:
        """Number of ids: 50257 for GPT-2."""
        return len(self._token_bytes)

    @property
    def eod_id(self) -> int:
        """Id of ``<|endoftext|>``: 50256 for GPT-2."""
        return self._eod_id

    @property
    def unknown_id(self) -> None:
        return None

    @property
    def framing(self) -> Framing:
        return Framing(suffix=(self._eod_id,))

    @property
    def sha256(self) -> str:
        """Hex digest of the parsed content. It does not depend on the file names or the header."""
        return self._sha256

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        """Return the ids of ``text``, int32 (n,).

        ``<|endoftext|>`` in the text is ordinary text, unless ``allow_special``.
        Raises TokenizerError for a lone surrogate, with its position.
        """
        checked_text(text)
        if allow_special and END_OF_TEXT in text:
            return self._encode_with_special(text)
        try:
            return self._backend.encode_one(text)
        except (TypeError, UnicodeError) as error:
            refuse_surrogate([text], error)

    def _encode_with_special(self, text: str) -> Ids:
        end = np.array([self._eod_id], dtype=np.int32)
        parts: list[Ids] = []
        # Encode each part separately: no piece of ordinary text crosses a special token.
        for part in text.split(END_OF_TEXT):
            parts += [self.encode(part), end]
        return np.concatenate(parts[:-1])

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text as ordinary text: int32 arrays, views of one buffer per call.

        Uses all cores, but only one in a worker process. Raises TokenizerError for a lone
        surrogate, with the text and the position.
        """
        return self._encode_strings(checked_texts(texts)).rows()

    def encode_packed(self, texts: Sequence[str] | Sequence[bytes]) -> PackedIds:
        """Encode like ``encode_batch``, into one buffer with offsets.

        This is the fastest form, for preprocessing. Raises TokenizerError for bytes that are not
        UTF-8, with the text and the byte.
        """
        return self._encode_strings(decoded_texts(texts))

    def _encode_strings(self, texts: list[str]) -> PackedIds:
        try:
            return self._backend.encode_many(texts)
        except (TypeError, UnicodeError) as error:
            refuse_surrogate(texts, error)

    def decode(self, ids: TokenIds) -> str:
        """Return the text of ``ids``. An incomplete character, as at a cut, becomes U+FFFD.

        Raises TokenizerError like ``decode_bytes``.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: TokenIds) -> bytes:
        """Return the exact bytes of ``ids``.

        Raises TokenizerError for an id outside 0 .. vocab_size - 1, with its position.
        """
        found = checked_ids(ids, self.vocab_size)
        return b"".join(map(self._token_bytes.__getitem__, found))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id. Raises TokenizerError for an id outside the vocabulary."""
        return self.decode_bytes([token_id])

    def stream(self, after: Sequence[int] = ()) -> ByteStream:
        return ByteStream(self.decode_bytes, after)

    def __reduce__(self) -> tuple[type[GPT2BPETokenizer], tuple[Path, Path, str]]:
        return type(self), (self.vocab_file, self.merge_file, self.backend)

    def __repr__(self) -> str:
        return (
            f"GPT2BPETokenizer({self.vocab_size} ids, backend={self.backend},"
            f" vocab_file={str(self.vocab_file)!r})"
        )

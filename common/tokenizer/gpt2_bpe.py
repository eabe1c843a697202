"""GPT-2's byte-level BPE from vocab.json and merges.txt or from a tokenizer.json, with the fastest
installed library that is exact.

Text is never changed: decode(encode(x)) == x for every valid Unicode text. Source of the algorithm:
openai/gpt-2, src/encoder.py.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import TokenizerError
from common.tokenizer.base import PackedIds, TextStream, TokenIds
from common.tokenizer.bpe_backends import choose_backend
from common.tokenizer.bpe_files import byte_level_parts, read_vocabulary
from common.tokenizer.folder import BPE_FILES, TOKENIZER_JSON
from common.tokenizer.text_tokenizer import CONTEXT, Tokenizer, checked_ids


def files_in(folder: Path) -> tuple[Path, Path | None]:
    """Return the vocabulary and merges of a folder, under Hugging Face's or OpenAI's names, or its
    tokenizer.json if that holds both. A tokenizer.json may also be given itself.

    Raises TokenizerError.
    """
    file = folder / TOKENIZER_JSON if folder.is_dir() else folder
    if file.suffix == ".json" and byte_level_parts(file):
        return file, None
    for vocab_name, merge_name in BPE_FILES:
        if (folder / vocab_name).is_file() and (folder / merge_name).is_file():
            return folder / vocab_name, folder / merge_name
    if not folder.is_dir():
        raise TokenizerError(
            f"GPT2BPETokenizer: a vocabulary was given ({folder}) but no merge file; give"
            " merges.txt (OpenAI's name: vocab.bpe) too, or a folder that holds both"
        )
    present = [name for pair in BPE_FILES for name in pair if (folder / name).is_file()]
    pairs = " or ".join(f"{vocab_name} with {merge_name}" for vocab_name, merge_name in BPE_FILES)
    raise TokenizerError(
        f"{folder}: no GPT-2 vocabulary: looked for {pairs}, found"
        f" {', '.join(present) or 'none of them'}; copy the missing file there, or name both files"
    )


class GPT2BPETokenizer(Tokenizer):
    """Tokenizer of a byte-level BPE. GPT-2's ``<|endoftext|>`` begins and ends."""

    kind = "GPT2BPETokenizer"

    def __init__(
        self,
        vocab_file: str | os.PathLike[str],
        merge_file: str | os.PathLike[str] | None = None,
        backend: str = "auto",
    ) -> None:
        """Build from vocab.json and merges.txt, encoder.json and vocab.bpe, tokenizer.json, or
        the folder of such files.

        The merges may lack their ``#version`` header. backend: "auto" (gigatoken, else tiktoken,
        else tokenizers), or one of these names.
        Raises TokenizerError for broken files, and for a named backend that is missing or not
        exact.
        """
        file, self.merge_file = (
            files_in(Path(vocab_file)) if merge_file is None else (Path(vocab_file), Path(merge_file))
        )
        self.vocabulary = vocabulary = read_vocabulary(file, self.merge_file)
        self._token_bytes = vocabulary.token_bytes
        name, self._encode = choose_backend(vocabulary, backend)
        super().__init__(
            file,
            kind=self.kind,
            backend=name,
            sha256=vocabulary.marks.sha256(vocabulary.content_sha256, vocabulary.prefix_space),
            marks=vocabulary.marks,
            framing=vocabulary.framing,
        )

    def _encode_many(self, texts: list[str]) -> PackedIds:
        if self.vocabulary.prefix_space:
            texts = [f" {text}" if text and text[0] != " " else text for text in texts]
        return self._encode(texts)

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

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self.decode_bytes(after[-CONTEXT:]))
        return lambda ids, final=False: decoder.decode(self.decode_bytes(ids), final)

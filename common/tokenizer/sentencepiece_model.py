"""Tokenizers of SentencePiece models, through the library ``sentencepiece``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from common.errors import TokenizerError
from common.paths import install
from common.structured_files import MAX_JSON_BYTES, read_bytes
from common.tokenizer.base import PackedIds, TokenIds
from common.tokenizer.bpe_backends import pack
from common.tokenizer.folder import Folder
from common.tokenizer.marks import FRAME, framing_of, read_marks
from common.tokenizer.text_tokenizer import TextTokenizer, WindowStream, checked_ids


class SentencePieceTokenizer(TextTokenizer):
    """Tokenizer of a SentencePiece model.

    Documents end with the model's end of sequence. A model with the pieces ``[MASK] [CLS] [SEP]``
    has GPT2-Chinese's frame.
    """

    def __init__(self, file: Path, kind: str, processor: Any, sha256: str) -> None:
        self._processor = processor
        self._size = processor.get_piece_size()
        ids = {processor.id_to_piece(number): number for number in range(self._size)}
        own = [
            text
            for text, number in ids.items()
            if processor.is_control(number) or processor.is_unknown(number) or text in FRAME
        ]
        ends = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id()}
        names = {name: processor.id_to_piece(end) for name, end in ends.items() if end >= 0}
        marks = read_marks(Folder(file.parent), ids, own, names)
        super().__init__(
            file,
            kind=kind,
            backend="sentencepiece",
            sha256=marks.sha256(sha256),
            marks=marks,
            framing=framing_of(marks, file),
            unknown_id=processor.unk_id(),
        )
        self._texts = {number: text for text, number in self.added.items() if number >= self._size}

    @classmethod
    def from_file(cls, file: Path, kind: str) -> Self:
        sentencepiece = import_sentencepiece(f"{file}: a SentencePiece model")
        raw = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.load_from_serialized_proto(raw)
            pieces = processor.get_piece_size()
        except (RuntimeError, OSError, ValueError) as error:
            pieces = 0
            reason = str(error).splitlines()[0][:200] if str(error) else "no reason given"
        else:
            reason = "it holds no pieces"
        if not pieces:
            raise TokenizerError(
                f"{file}: not a SentencePiece model ({len(raw)} bytes; {reason}); expected the"
                " .model that SentencePiece's trainer wrote; fetch the file again"
            )
        return cls(file, kind, processor, hashlib.sha256(raw).hexdigest())

    def _encode_many(self, texts: list[str]) -> PackedIds:
        for text in texts:
            text.isascii() or text.encode()  # raises for a lone surrogate
        return pack(self._processor.encode(texts, out_type=int, num_threads=1) if texts else [])

    def piece(self, token_id: int) -> str:
        if token_id >= self._size:
            return self._texts.get(token_id, "")
        text: str = self._processor.id_to_piece(token_id)
        return text

    def decode(self, ids: TokenIds) -> str:
        found = checked_ids(ids, self.vocab_size)
        if max(found, default=0) < self._size:
            text: str = self._processor.decode(found)
            return text
        runs = groupby(found, key=lambda number: number < self._size)
        return "".join(
            self._processor.decode(list(run)) if known else "".join(map(self.piece, run)) for known, run in runs
        )

    def stream(self, after: Sequence[int] = ()) -> WindowStream:
        return WindowStream(self.decode, after)


def import_sentencepiece(purpose: str) -> Any:
    """Return the library. Raises TokenizerError if it is not installed. purpose: begins the message."""
    try:
        import sentencepiece
    except ImportError as error:
        raise TokenizerError(
            f"{purpose} needs sentencepiece, which is not installed ({error}); install it with: {install('chinese')}"
        ) from None
    return sentencepiece

"""Tokenizers of SentencePiece models, through the library ``sentencepiece``."""

from __future__ import annotations

import hashlib
from itertools import groupby
from pathlib import Path

from common.errors import TokenizerError
from common.paths import require_package
from common.structured_files import MAX_JSON_BYTES, read_bytes
from common.tokenizer.base import PackedIds, TokenIds
from common.tokenizer.bpe_backends import pack
from common.tokenizer.folder import Folder
from common.tokenizer.marks import FRAME, framing_of, read_marks
from common.tokenizer.text_tokenizer import Tokenizer, checked_ids


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a SentencePiece model.

    Documents end with the model's end of sequence. A model with the pieces ``[MASK] [CLS] [SEP]``
    has GPT2-Chinese's frame.
    """

    def __init__(self, file: Path, kind: str) -> None:
        purpose = f"which reads {file}"
        sentencepiece = require_package("sentencepiece", extra="chinese", purpose=purpose, error=TokenizerError)
        raw = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.load_from_serialized_proto(raw)
            self._size, reason = processor.get_piece_size(), "it holds no pieces"
        except (RuntimeError, OSError, ValueError) as error:
            self._size, reason = 0, str(error).partition("\n")[0][:200] or "no reason given"
        if not self._size:
            raise TokenizerError(
                f"{file}: not a SentencePiece model ({len(raw)} bytes; {reason}); expected the"
                " .model that SentencePiece's trainer wrote; fetch the file again"
            )
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
            sha256=marks.sha256(hashlib.sha256(raw).hexdigest()),
            marks=marks,
            framing=framing_of(marks, file),
            unknown_id=processor.unk_id(),
        )
        self._texts = {number: text for text, number in self.added.items() if number >= self._size}

    def _encode_many(self, texts: list[str]) -> PackedIds:
        for text in texts:
            text.isascii() or text.encode()  # raises for a lone surrogate
        return pack(self._processor.encode(texts, out_type=int, num_threads=1) if texts else [])

    def piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id."""
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

"""Tokenizers from any tokenizer.json of Hugging Face, through the library ``tokenizers``."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from common.errors import TokenizerError
from common.structured_files import MAX_JSON_BYTES, read_bytes
from common.tokenizer.base import PackedIds, TokenIds
from common.tokenizer.bpe_backends import pack
from common.tokenizer.folder import Folder, begin_of
from common.tokenizer.marks import FRAME, Mark, framing_of, read_marks
from common.tokenizer.text_tokenizer import Tokenizer, checked_ids


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, other than a byte-level BPE of GPT-2's kind.

    Documents end with the ``eos_token`` that a file beside it names. Without one, they end with the
    first known end token of the vocabulary.
    """

    def __init__(self, file: Path, kind: str) -> None:
        from tokenizers import Tokenizer as Model

        folder = Folder(file.parent, file.name)
        sha256 = hashlib.sha256(repr(_sorted(folder.json)).encode()).hexdigest()
        raw = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        try:
            model: Any = Model.from_buffer(raw)
        except Exception as error:  # the library raises no more specific type
            raise TokenizerError(
                f"{file}: not a tokenizer.json ({len(raw)} bytes; {str(error)[:200]}); expected"
                " what Tokenizer.save of Hugging Face's tokenizers writes; fetch the file again"
            ) from None
        model.no_truncation()
        model.no_padding()
        self._model, self._lock = model, threading.Lock()
        ids = model.get_vocab(with_added_tokens=True)
        marks = read_marks(folder, ids, FRAME)
        beyond = [mark for mark in marks.marks if not self._holds(mark, file)]
        unknown = getattr(model.model, "unk_token", None)
        super().__init__(
            file,
            kind=kind,
            backend="tokenizers",
            sha256=marks.sha256(sha256) if beyond else sha256,
            marks=marks,
            framing=framing_of(marks, file, begin_of(folder.json.get("post_processor"))),
            unknown_id=ids.get(unknown) if unknown else None,
        )

    def _holds(self, mark: Mark, file: Path) -> bool:
        """Return whether the library has a mark, and give it one that it has not."""
        from tokenizers import AddedToken

        if mark.id in self._model.get_added_tokens_decoder():
            return True
        flags = {name: getattr(mark, name) for name in ("special", "lstrip", "rstrip")}
        token = AddedToken(mark.text, **flags, single_word=mark.single_word, normalized=False)
        self._model.add_tokens([token])
        if (found := self._model.token_to_id(mark.text)) != mark.id:
            raise TokenizerError(
                f"{file}: the added token {mark.text!r} has the id {mark.id} in a file beside"
                f" it, and {found} is the next one; take all files of one tokenizer"
            )
        return False

    def _encode_many(self, texts: list[str]) -> PackedIds:
        encode = self._model.encode_batch_fast
        return pack([encoding.ids for encoding in encode(texts, add_special_tokens=False)])

    def _encode_marked(self, texts: list[str], allow_special: bool) -> PackedIds:
        with self._lock:  # the library's own search knows what stands before a part of a text
            self._model.encode_special_tokens = not allow_special
            return self._encode_many(texts)

    def piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id."""
        text: str = self._model.id_to_token(token_id)
        return text

    def decode(self, ids: TokenIds) -> str:
        found = checked_ids(ids, self.vocab_size)
        text: str = self._model.decode(found, skip_special_tokens=False)
        return text


def _sorted(value: Any) -> Any:
    """Return a JSON value with sorted keys."""
    if isinstance(value, dict):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return list(map(_sorted, value)) if isinstance(value, list) else value

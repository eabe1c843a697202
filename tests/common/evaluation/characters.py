"""A tokenizer whose ids can be read: one a character, and <|endoftext|>."""

import numpy as np

from common.tokenizer.base import Framing, Ids, PackedIds


class Characters:
    kind, sha256, vocab_size, eod_id = "Characters", "0" * 64, 101, 100
    framing, unknown_id, has_marks = Framing(suffix=(100,)), None, False

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        parts = text.split("<|endoftext|>") if allow_special else [text]
        ids = [[min(ord(character) - 9, 99) for character in part] for part in parts]
        return np.array([*ids[0], *(each for part in ids[1:] for each in (100, *part))], np.int32)

    def encode_packed(self, texts: list[str], allow_special: bool = False) -> PackedIds:
        rows = [self.encode(text, allow_special) for text in texts]
        offsets = np.cumsum([0, *map(len, rows)])
        return PackedIds(ids=np.concatenate(rows), offsets=offsets)

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Tokenizer of characters with an id each; é stands for the others."""
        return "".join(
            "é" if each == 99 else "<|endoftext|>" if each == 100 else chr(each + 9) for each in ids
        ).encode()

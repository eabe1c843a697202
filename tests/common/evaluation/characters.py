"""A tokenizer whose ids can be read: one a character, and <|endoftext|>."""

import numpy as np

from common.tokenizer.base import Ids


class Characters:
    kind, sha256, vocab_size, eod_id = "Characters", "0" * 64, 101, 100

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        parts = text.split("<|endoftext|>") if allow_special else [text]
        ids = [[min(ord(character) - 9, 99) for character in part] for part in parts]
        return np.array([*ids[0], *(each for part in ids[1:] for each in (100, *part))], np.int32)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

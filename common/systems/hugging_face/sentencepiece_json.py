"""SentencePiece models as tokenizer.json, which transformers opens without sentencepiece.

Format of the model: sentencepiece_model.proto of google/sentencepiece.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import TokenizerError
from common.tensor_files.arrays import Bytes
from common.tensor_files.protobuf import read_fields

_SPACE = "\u2581"
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of pieces that are not ordinary text."""
_UNIGRAM, _BPE = 1, 2


def tokenizer_json(model: bytes) -> str:
    """Return a tokenizer.json with the ids of a SentencePiece model. Raises TokenizerError for a
    model that ``tokenizers`` cannot express.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces, trainer, normalizer = _read(model)
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or trainer.get(24, 0):
        raise TokenizerError(
            "the SentencePiece model is one of words, of characters, or of spaces at the end of"
            " words, which tokenizer.json cannot express; only the .model file goes along"
        )
    ids = {text: number for number, (text, _, _) in enumerate(pieces)}
    unknown = next((number for number, piece in enumerate(pieces) if piece[2] == _UNKNOWN), 0)
    fallback = any(piece[2] == _BYTE for piece in pieces)
    scores = [(text, score) for text, score, _ in pieces]
    if kind == _UNIGRAM:
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=unknown, byte_fallback=fallback))
    else:
        tokenizer = Tokenizer(
            models.BPE(
                ids,
                _merges(pieces, ids),
                unk_token=pieces[unknown][0],
                fuse_unk=True,
                byte_fallback=fallback,
            )
        )
    steps: list[Any] = []
    charsmap = normalizer.get(2)
    if charsmap is not None and charsmap.size:
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    if normalizer.get(4, 1):
        from tokenizers import Regex

        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    has_prefix = bool(normalizer.get(3, 1))
    # not Metaspace, which adds no space before a text that begins with one
    steps += [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    _add_marks(tokenizer, pieces)
    text: str = tokenizer.to_str()
    return text


def _read(model: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Return the pieces (text, score, type), and the fields of trainer_spec and of
    normalizer_spec.
    """
    pieces: list[tuple[str, float, int]] = []
    specs: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in read_fields(_bytes(model)):
        if number == _PIECE and not isinstance(value, int):
            fields: dict[int, Any] = dict(read_fields(value))
            score = float(np.frombuffer(fields[2].tobytes(), "<f4")[0]) if 2 in fields else 0.0
            pieces.append((fields[1].tobytes().decode(), score, fields.get(3, 1)))
        elif number in specs and not isinstance(value, int):
            specs[number] = dict(read_fields(value))
    return pieces, specs[_TRAINER], specs[_NORMALIZER]


def _bytes(raw: bytes) -> Bytes:
    return np.frombuffer(raw, dtype=np.uint8)


def _merges(pieces: list[tuple[str, float, int]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, highest score first."""
    found = [
        (-score, ids[text[:at]], ids[text[at:]], text[:at], text[at:])
        for text, score, kind in pieces
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _add_marks(tokenizer: Any, pieces: list[tuple[str, float, int]]) -> None:
    from tokenizers import AddedToken

    special = [text for text, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    own = [text for text, _, kind in pieces if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in own])

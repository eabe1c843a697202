"""Tokenizers by name, and the recognition of a kind by its files. A tokenizer library is loaded when a
tokenizer is built, not at this import.
"""

from __future__ import annotations

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from common.config.values import kind_named
from common.errors import TokenizerError
from common.paths import looked_in
from common.tokenizer.base import Framing, PackedIds
from common.tokenizer.bpe_files import byte_level_parts
from common.tokenizer.folder import BPE_FILES, TOKENIZER_JSON, Folder
from common.tokenizer.text_tokenizer import Tokenizer

__all__ = ["TOKENIZERS", "Framing", "PackedIds", "Tokenizer", "kind_of_files", "load_tokenizer", "require_files"]

TOKENIZERS = {
    "GPT2BPETokenizer": ("common.tokenizer.gpt2_bpe:GPT2BPETokenizer", ""),
    "BertWordPieceLowerCase": ("common.tokenizer.bert:BertTokenizer", "vocab.txt"),
    "BertWordPieceCase": ("common.tokenizer.bert:BertTokenizer", "vocab.txt"),
    "BertWordLevel": ("common.tokenizer.bert:BertTokenizer", "vocab.txt"),
    "SentencePieceTokenizer": ("common.tokenizer.sentencepiece_model:SentencePieceTokenizer", "*.model"),
    "HuggingFaceTokenizer": ("common.tokenizer.hugging_face:HuggingFaceTokenizer", TOKENIZER_JSON),
}
"""Class of each kind, and the name of its file in a folder. GPT-2's has two files, and names for them in ``BPE_FILES``.
"""
WORDS = {"word_segmenter": "jieba"}
"""Entry of tokenizer_config.json that marks a vocab.txt as one of words."""


def require_files(*files: str | os.PathLike[str] | None) -> None:
    """Raise TokenizerError for a file or folder of a tokenizer that does not exist."""
    for file in files:
        if file is not None and not Path(file).exists():
            raise TokenizerError(
                f"{file}: does not exist{looked_in(Path(file))}; give the vocabulary (vocab.json) and the merges"
                " (merges.txt), vocab.txt, a SentencePiece .model or tokenizer.json, or the folder that holds them"
            )


def load_tokenizer(
    kind: str | None,
    vocab_file: str | os.PathLike[str],
    merge_file: str | os.PathLike[str] | None = None,
    backend: str = "auto",
    model: str | os.PathLike[str] | None = None,
) -> Tokenizer:
    """Build a tokenizer from its files.

    kind: a key of ``TOKENIZERS`` or another system's name for it. None: detect it from the files.
    vocab_file: the vocabulary, or a folder that holds all files of the tokenizer. merge_file: BPE
    merges, for kinds that have them. model: weights whose folder names the ends of texts, before
    that of the vocabulary.
    Raises TokenizerError for an unknown kind, broken files, or a missing backend.
    """
    require_files(vocab_file, merge_file)
    source = Path(vocab_file)
    known = kind_of_files(kind_named(kind), source, merge_file)
    if known not in TOKENIZERS:
        from difflib import get_close_matches

        near = get_close_matches(known, TOKENIZERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TokenizerError(
            f"tokenizer kind {kind!r} is not known; {hint}choose one of: {', '.join(sorted(TOKENIZERS))}"
        )
    name, pattern = TOKENIZERS[known]
    build = resolve_name(name)
    if known == "GPT2BPETokenizer":
        tokenizer = build(source, merge_file, backend)
    elif merge_file is not None:
        raise TokenizerError(
            f"{merge_file}: {known} has no merges; leave the merge file out, or choose GPT2BPETokenizer"
        )
    else:
        file = _only(source, pattern) if source.is_dir() else source
        if file is None:
            present = sorted(entry.name for entry in source.iterdir() if entry.is_file())[:8]
            raise TokenizerError(
                f"{source}: {known} needs {pattern} there, exactly one; found"
                f" {', '.join(present) or 'no file'}; name the file"
            )
        tokenizer = build(file, known)
    if model is not None:
        folder = Folder(Path(model) if Path(model).is_dir() else Path(model).parent)
        tokenizer.ends = folder.ids("eos_token_id", tokenizer.vocab_size) or tokenizer.ends
    return cast(Tokenizer, tokenizer)


def kind_of_files(kind: str | None, source: Path, merge_file: object) -> str:
    """Return ``kind``, or if it is None the kind of the files.

    source: the vocabulary, or the folder of the files. Raises TokenizerError for other files.
    """
    json = source / TOKENIZER_JSON if source.is_dir() else source
    if kind == "HuggingFaceTokenizer" and byte_level_parts(json) is not None:
        return "GPT2BPETokenizer"
    if kind is not None:
        return kind
    if merge_file is not None:
        return "GPT2BPETokenizer"
    if source.is_dir():
        if any(all((source / name).is_file() for name in pair) for pair in BPE_FILES):
            other = json.is_file() and byte_level_parts(json) is None
            return "HuggingFaceTokenizer" if other else "GPT2BPETokenizer"
        file = next(filter(None, (_only(source, name) for name in ("vocab.txt", "*.model", TOKENIZER_JSON))), None)
        if file is None:
            pairs = ", ".join(" with ".join(pair) for pair in BPE_FILES)
            raise TokenizerError(
                f"{source}: no vocabulary: looked for {pairs}, vocab.txt, one SentencePiece .model or"
                " tokenizer.json; copy the missing file there, or name the files"
            )
        source = file
    if source.suffix == ".model":
        return "SentencePieceTokenizer"
    if source.name in {names[0] for names in BPE_FILES}:
        return "GPT2BPETokenizer"  # its loader asks for the merges
    if source.suffix == ".json":
        return "GPT2BPETokenizer" if byte_level_parts(source) else "HuggingFaceTokenizer"
    settings = Folder(source.parent).settings  # beside a vocab.txt
    if WORDS.items() <= settings.items():
        return "BertWordLevel"
    cased = settings.get("do_lower_case", True) is False  # transformers' BertTokenizer lowers it by default
    return "BertWordPieceCase" if cased else "BertWordPieceLowerCase"


def _only(folder: Path, pattern: str) -> Path | None:
    found = [path for path in folder.glob(pattern) if path.is_file()]
    return found[0] if len(found) == 1 else None

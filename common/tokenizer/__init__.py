"""Tokenizers by name. A tokenizer library is loaded when a tokenizer is built, not at this
import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from common.config.values import kind_named
from common.errors import TokenizerError
from common.paths import looked_in
from common.tokenizer.base import Framing, PackedIds, TextStream
from common.tokenizer.folder import Folder
from common.tokenizer.recognise import file_in, kind_of_files
from common.tokenizer.text_tokenizer import Tokenizer

__all__ = ["TOKENIZERS", "Framing", "PackedIds", "TextStream", "Tokenizer", "load_tokenizer", "require_files"]


def _load(kind: str, class_name: str, vocab_file: Path, merge_file: Path | None, backend: str) -> Tokenizer:
    """Load a tokenizer by the class ``module.name`` of this package. Only GPT-2's has two files."""
    module, _, name = class_name.partition(".")
    loader: Any = getattr(import_module(f"{__name__}.{module}"), name)
    if kind == "GPT2BPETokenizer":
        return cast(Tokenizer, loader(vocab_file, merge_file, backend))
    if merge_file is not None:
        raise TokenizerError(
            f"{merge_file}: {kind} has no merges; leave the merge file out, or choose GPT2BPETokenizer"
        )
    return cast(Tokenizer, loader.from_file(file_in(vocab_file, kind), kind))


TOKENIZERS: dict[str, Callable[[Path, Path | None, str], Tokenizer]] = {
    kind: partial(_load, kind, class_name)
    for kind, class_name in {
        "GPT2BPETokenizer": "gpt2_bpe.GPT2BPETokenizer",
        "BertWordPieceLowerCase": "bert.BertTokenizer",
        "BertWordPieceCase": "bert.BertTokenizer",
        "BertWordLevel": "bert.BertTokenizer",
        "SentencePieceTokenizer": "sentencepiece_model.SentencePieceTokenizer",
        "HuggingFaceTokenizer": "hugging_face.HuggingFaceTokenizer",
    }.items()
}
"""Loaders by kind.

To add a tokenizer, add one entry whose loader imports its module when called.
"""


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
    vocab_file, merge_file = Path(vocab_file), None if merge_file is None else Path(merge_file)
    known = kind_of_files(kind_named(kind), vocab_file, merge_file)
    loader = TOKENIZERS.get(known)
    if loader is None:
        from difflib import get_close_matches

        near = get_close_matches(known, TOKENIZERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TokenizerError(
            f"tokenizer kind {kind!r} is not known; {hint}choose one of: {', '.join(sorted(TOKENIZERS))}"
        )
    tokenizer = loader(vocab_file, merge_file, backend)
    if model is not None:
        folder = Folder(Path(model) if Path(model).is_dir() else Path(model).parent)
        tokenizer.ends = folder.ids("eos_token_id", tokenizer.vocab_size) or tokenizer.ends
    return tokenizer

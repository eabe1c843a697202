"""Recognition of a tokenizer's kind by its files, and of the file in a folder that holds it."""

from __future__ import annotations

from pathlib import Path

from common.errors import TokenizerError
from common.tokenizer.bpe_files import byte_level_parts
from common.tokenizer.folder import TOKENIZER_JSON, Folder

BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names of a GPT-2 vocabulary and its merges: Hugging Face's, OpenAI's and Megatron-LM's."""
_FILE_OF = {
    "BertWordPieceLowerCase": "vocab.txt",
    "BertWordPieceCase": "vocab.txt",
    "BertWordLevel": "vocab.txt",
    "SentencePieceTokenizer": "*.model",
    "HuggingFaceTokenizer": "tokenizer.json",
}
"""File name in a folder, for each kind with a single file."""
_EXPECTED = (
    f"{', '.join(' with '.join(pair) for pair in BPE_FILES)}, vocab.txt, one SentencePiece .model or tokenizer.json"
)

WORDS = {"word_segmenter": "jieba"}
"""Entry of tokenizer_config.json that marks a vocab.txt as one of words."""
_NAMES = ("vocab.txt", "*.model", "tokenizer.json")
"""Files that hold a whole tokenizer, in order of preference."""


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
        file = next(filter(None, (_only(source, name) for name in _NAMES)), None)
        if file is None:
            raise TokenizerError(
                f"{source}: no vocabulary: looked for {_EXPECTED}; copy the missing file there, or name the files"
            )
        source = file
    if source.suffix == ".model":
        return "SentencePieceTokenizer"
    if source.name in {names[0] for names in BPE_FILES}:
        return "GPT2BPETokenizer"  # its loader asks for the merges
    if source.suffix == ".json":
        return "GPT2BPETokenizer" if byte_level_parts(source) else "HuggingFaceTokenizer"
    return _kind_of_vocab_txt(source)


def _kind_of_vocab_txt(file: Path) -> str:
    """Return the kind named by tokenizer_config.json beside a vocab.txt.

    The default is lower case, as for transformers' BertTokenizer.
    """
    settings = Folder(file.parent).settings
    if WORDS.items() <= settings.items():
        return "BertWordLevel"
    cased = settings.get("do_lower_case", True) is False
    return "BertWordPieceCase" if cased else "BertWordPieceLowerCase"


def file_in(source: Path, kind: str) -> Path:
    """Return the file of a kind: ``source`` itself, or the file in that folder. Raises TokenizerError."""
    if not source.is_dir():
        return source
    if found := _only(source, _FILE_OF[kind]):
        return found
    present = sorted(entry.name for entry in source.iterdir() if entry.is_file())[:8]
    raise TokenizerError(
        f"{source}: {kind} needs {_FILE_OF[kind]} there, exactly one; found"
        f" {', '.join(present) or 'no file'}; name the file"
    )


def _only(folder: Path, pattern: str) -> Path | None:
    found = [path for path in folder.glob(pattern) if path.is_file()]
    return found[0] if len(found) == 1 else None

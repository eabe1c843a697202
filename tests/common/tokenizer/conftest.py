"""Two oracles built from the files without any code of the project, and a small vocabulary to break."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.tokenizer.bpe_files import byte_alphabet
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.reference import MERGES

Encode = Callable[[str], list[int]]
BACKENDS = ("gigatoken", "tiktoken", "tokenizers")


@pytest.fixture(scope="session")
def tiktoken_ids(gpt2_vocab_files: tuple[Path, Path]) -> Encode:
    """Ids by tiktoken, with tiktoken's own loader and the pattern of the original release."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    vocab_file, merge_file = gpt2_vocab_files
    return tiktoken.Encoding(
        "oracle",
        pat_str=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=data_gym_to_mergeable_bpe_ranks(str(merge_file), str(vocab_file)),
        special_tokens={"<|endoftext|>": 50256},
    ).encode_ordinary


@pytest.fixture(scope="session")
def huggingface_ids(gpt2_vocab_files: tuple[Path, Path]) -> Encode:
    """Ids by Hugging Face tokenizers, reading the files itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab_file, merge_file = gpt2_vocab_files
    model = Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: model.encode_batch_fast([text])[0].ids


@pytest.fixture(scope="session", params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest, gpt2_vocab_files: tuple[Path, Path]) -> GPT2BPETokenizer:
    """The tokenizer under test, once with each backend."""
    pytest.importorskip(request.param)
    built = GPT2BPETokenizer(*gpt2_vocab_files, backend=request.param)
    assert built.backend == request.param
    return built


class SmallVocabulary:
    """256 bytes, a few merges, <|endoftext|>: change ``ids`` or ``merges``, then write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.merges = folder, list(MERGES)
        tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
        self.ids: dict[str, object] = {token: number for number, token in enumerate(tokens)}

    def write(self, vocab_text: str | None = None, merge_text: str | None = None) -> tuple[Path, Path]:
        files = self.folder / "vocab.json", self.folder / "merges.txt"
        merges = "\n".join(["#version: 0.2", *self.merges, ""])
        files[0].write_text(json.dumps(self.ids) if vocab_text is None else vocab_text, encoding="utf-8")
        files[1].write_text(merges if merge_text is None else merge_text, encoding="utf-8")
        return files

    def build(self, backend: str = "tokenizers") -> GPT2BPETokenizer:
        return GPT2BPETokenizer(*self.write(), backend=backend)


@pytest.fixture
def small(tmp_path: Path) -> SmallVocabulary:
    return SmallVocabulary(tmp_path)

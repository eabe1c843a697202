"""GGUF files, read back by the library of llama.cpp's authors."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.errors import CheckpointError
from common.inference.source import find_source
from common.systems.direct import foreign_format
from common.systems.hugging_face.weights import open_hugging_face
from common.tokenizer.bpe_files import byte_alphabet
from tools.convert_weight import main

KINDS = {"float32": "F32", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32, "float16": gguf.LlamaFileType.MOSTLY_F16,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0, "int4": gguf.LlamaFileType.MOSTLY_Q4_0,
}  # fmt: skip
TOKENS = [*byte_alphabet(), "ab", "<|endoftext|>"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=len(TOKENS), n_positions=9, bos_token_id=257,
        eos_token_id=257,
    )  # fmt: skip
    folder = tmp_path / "hf"
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(TOKENS)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    return folder


@pytest.mark.parametrize("dtype", KINDS)
def test_the_library_reads_back_what_was_meant(source: Path, tmp_path: Path, dtype: str) -> None:
    words = ["--to", "gguf", "--input", str(source), "--output", str(tmp_path / "out")]
    assert main([*words, "--dtype", dtype]) == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    sizes = {
        "general.architecture": "gpt2", "gpt2.block_count": 2, "gpt2.context_length": 9,
        "gpt2.embedding_length": 64, "gpt2.feed_forward_length": 256,
        "gpt2.attention.head_count": 2, "gpt2.vocab_size": len(TOKENS), "general.type": "model",
        "general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 257, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.token_type": [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL],
    }  # fmt: skip
    assert {name: fields[name] for name in sizes} == sizes
    assert fields["tokenizer.ggml.tokens"] == TOKENS
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["tokenizer.ggml.eos_token_id"] == 257
    with open_hugging_face(source) as weights:
        expected = {name: weight.load() for name, weight in weights.tensors.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    qkv = np.concatenate([expected[f"h.1.attn.{part}_proj.weight"] for part in "qkv"])
    kind = gguf.GGMLQuantizationType[KINDS[dtype]]
    for name, array, matrix in (
        ("blk.1.attn_qkv.weight", qkv, True),
        ("blk.0.ffn_down.weight", expected["h.0.mlp.c_proj.weight"], True),
        ("token_embd.weight", expected["wte.weight"], True),
        ("position_embd.weight", expected["wpe.weight"], False),
        ("output_norm.bias", expected["ln_f.bias"], False),
    ):
        found = stored[name]
        assert found.tensor_type == (kind if matrix else gguf.GGMLQuantizationType.F32), name
        meant = gguf.quants.quantize(np.ascontiguousarray(array), found.tensor_type)
        assert np.array_equal(found.data, meant), name
    assert len(stored) == 2 + 2 * 12 + 2


def test_each_row_of_the_embedding_has_a_token(source: Path, tmp_path: Path, capsys: Any) -> None:
    """The tokens lack that of a row, are too many, or are not byte-level BPE."""

    def fields(name: str, vocabulary: list[str]) -> dict[str, Any]:
        ids = {token: number for number, token in enumerate(vocabulary)}
        (source / "vocab.json").write_text(json.dumps(ids))
        words = ["--to", "gguf", "--input", str(source), "--output", str(tmp_path / name)]
        if main(words):
            return {"error": capsys.readouterr().err}
        reader = gguf.GGUFReader(tmp_path / name / "model.gguf")
        return {name: field.contents() for name, field in reader.fields.items()}

    kept = [*TOKENS[:256], "<|endoftext|>"]
    (source / "merges.txt").write_text("#version: 0.2\n")
    found = fields("fewer", kept)
    assert found["tokenizer.ggml.tokens"] == [*kept, "[PAD257]"]
    types = [gguf.TokenType.CONTROL, gguf.TokenType.UNUSED]
    assert found["tokenizer.ggml.token_type"][256:] == types
    error = fields("more", [*kept, "<a>", "<b>"])["error"]
    assert "259 tokens, and the model has 258" in error
    (source / "merges.txt").rename(source / "vocab.txt")
    found = fields("none", kept)
    assert found["tokenizer.ggml.model"] == "none" and found["gpt2.vocab_size"] == len(TOKENS)


def test_it_is_written_only(source: Path, tmp_path: Path, capsys: Any) -> None:
    """llama.cpp runs the file; what made it can be read."""
    folder = tmp_path / "out"
    assert main(["--to", "gguf", "--input", str(source), "--output", str(folder)]) == 0
    assert main(["--to", "hf", "--input", str(folder), "--output", str(tmp_path / "back")]) == 2
    assert "format is written only; give the weights that it was made of" in capsys.readouterr().err
    for path in (folder, folder / "model.gguf"):
        assert foreign_format(path) is None
        with pytest.raises(CheckpointError, match=r"it is a GGUF file .* which is written only"):
            find_source(path)

"""Files of transformers beside weights go along: ids, marks, settings and the template."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from common.conversion.convert import convert
from common.errors import CheckpointError
from common.tokenizer import load_tokenizer
from common.tokenizer.bpe_files import byte_alphabet
from tools.convert_weight import main

SIZES = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
BASE = [*byte_alphabet(), "hi", "<|endoftext|>"]
MARKS = {"<|pad|>": 258, "<|im_end|>": 259, "<|user|>": 260, "<|bot|>": 261, "newword": 262}
PROMPT = "<|user|> hi newword<|bot|>hi<|im_end|>"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def ids_of(folder: Path, file: str) -> dict[str, Any]:
    fields = json.loads((folder / file).read_text())
    return {name: fields.get(name) for name in IDS}


def save(folder: Path, vocabulary: int, **ids: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, vocab_size=vocabulary, **ids))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A fine-tune of transformers 4: the files of the base, and its marks beside them."""
    ends = [MARKS["<|im_end|>"], 257]
    folder = save(tmp_path / "chat", 263, bos_token_id=257, eos_token_id=ends, pad_token_id=258)
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(BASE)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh i\n")
    (folder / "added_tokens.json").write_text(json.dumps(MARKS))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    names |= {"unk_token": "<|endoftext|>"}
    special = names | {"additional_special_tokens": ["<|user|>", "<|bot|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    settings = {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(params=["transformers 4", "transformers 5"])
def folder(chat: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "transformers 5":
        theirs = transformers.AutoTokenizer.from_pretrained(chat)
        for name in ("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"):
            (chat / name).unlink()
        theirs.save_pretrained(chat)
        assert (chat / "tokenizer.json").is_file() and not (chat / "vocab.json").exists()
    return chat


@pytest.mark.parametrize("way", [("torch_gpt2", "hf"), ("mindformers", "hf"), ("onnx",)])
@pytest.mark.parametrize("has_settings", [True, False])
def test_ids_and_settings_go_along_without_a_tokenizer(
    tmp_path: Path, way: tuple[str, ...], has_settings: bool
) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}
    source = last = save(tmp_path / "source", 99, layer_norm_epsilon=1e-6, **ids)
    settings = json.dumps(ids | {"do_sample": True, "top_k": 7})
    (source / "generation_config.json").write_text(settings)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    if not has_settings:
        (source / "generation_config.json").unlink()
    for number, format in enumerate(way):
        convert(last, tmp_path / str(number), target_format=format)
        last = tmp_path / str(number)
    assert ids_of(last, "config.json") == ids_of(last, "generation_config.json") == ids
    assert (last / "chat_template.jinja").read_text() == TEMPLATE
    assert not has_settings or (last / "generation_config.json").read_text() == settings
    if way[-1] == "hf":
        model = transformers.GPT2LMHeadModel.from_pretrained(last)
        assert model.generation_config.eos_token_id == [2, 5] and model.config.layer_norm_epsilon == 1e-6


@pytest.mark.parametrize("way", [("hf",), ("torch_gpt2", "hf"), ("onnx",)])
def test_marks_go_along(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: tuple[str, ...]) -> None:
    last = folder
    for number, format in enumerate(way):
        words = ["--to", format, "--input", str(last), "--output", str(tmp_path / str(number))]
        assert main([*words, "--verify"]) == 0
        said = capsys.readouterr().out
        assert "tokens of a text with every mark are equal" in said
        assert format != "onnx" or ("logits: largest difference" in said and "read back" not in said)
        last = tmp_path / str(number)
    before, after = (transformers.AutoTokenizer.from_pretrained(each) for each in (folder, last))
    assert after(PROMPT).input_ids == before(PROMPT).input_ids
    assert len(after) == 263 and after.eos_token_id == 259 and after.pad_token_id == 258
    assert after.chat_template == TEMPLATE
    assert ids_of(last, "config.json") == ids_of(folder, "config.json")


def test_the_library_of_gguf_reads_the_marks(folder: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    convert(folder, tmp_path / "out", target_format="gguf", dtype="float16", verify=True)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.tokens"] == theirs.convert_ids_to_tokens(range(263))
    control, own = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    types = [gguf.TokenType.NORMAL] * 257 + [control] * 5 + [own]
    assert fields["tokenizer.ggml.token_type"] == types
    assert fields["tokenizer.ggml.merges"] == ["h i"]
    named = {"bos": 257, "eos": 259, "eot": 257, "padding": 258}
    assert {key: fields[f"tokenizer.ggml.{key}_token_id"] for key in named} == named
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert fields["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("format", ["torch_gpt2", "mindformers", "gguf"])
def test_a_mark_without_a_row_stays_with_the_tokenizer(chat: Path, tmp_path: Path, format: str) -> None:
    """Many a fine-tune has added a padding token and left the table as it was."""
    ends = {"bos_token_id": 257, "eos_token_id": 257, "pad_token_id": None}
    save(chat, 258, **ends)
    (chat / "tokenizer_config.json").unlink()
    (chat / "added_tokens.json").write_text('{"<|pad|>": 258}')
    (chat / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>"}')
    convert(chat, tmp_path / "out", target_format=format, verify=True)
    if format == "torch_gpt2":
        assert load_tokenizer(None, tmp_path / "out").vocab_size == 258
    if format == "gguf":
        fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
        assert fields["tokenizer.ggml.tokens"].contents() == BASE
        assert fields["tokenizer.ggml.padding_token_id"].contents() == 257


def test_a_library_that_cannot_be_loaded_is_named_by_a_conversion(tmp_path, break_package) -> None:
    break_package("sentencepiece")
    source = save(tmp_path / "source", 99)
    (source / "tokenizer.model").touch()
    said = convert(source, tmp_path / "out", target_format="hf", verify=True)
    assert "not compared, the package sentencepiece" in str(said) and (tmp_path / "out").is_dir()


def test_verify_finds_another_tokenizer(chat: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def lost(folder: Path, weights: Any) -> None:
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(chat / name, folder)

    monkeypatch.setattr("common.conversion.convert.put_tokenizer", lost)
    with pytest.raises(CheckpointError, match=r"its tokenizer gives other ids than that of .*chat"):
        convert(chat, tmp_path / "out", target_format="hf", verify=True)
    assert load_tokenizer(None, chat).ends == (259, 257)

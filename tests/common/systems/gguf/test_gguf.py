"""GGUF files, read back by the library of llama.cpp's authors, and in llama.cpp.

The campaign builds llama.cpp and runs it; llama_cpp.json keeps what it answered, and the suite
holds our own model against that. UPDATE_GOLDEN=1 with the campaign replaces the answers.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.config.resolved import resolve_model
from common.config.schema import ModelConfig, PrecisionConfig, PredictConfig
from common.errors import CheckpointError
from common.generation.generate import generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.inference.source import find_source
from common.systems.direct import foreign_format
from common.systems.gguf import FILE, write_gguf
from common.systems.hugging_face.weights import open_hugging_face
from common.tokenizer.bpe_files import byte_alphabet
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from common.weights.names import initial_rows, parameter_shapes
from tests.common.systems.tiny_weights import as_weights
from tests.peers import peer_python
from tools.convert_weight import main
from torch_gpt2.device import select_device
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder

KINDS = {"float32": "F32", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
TOKENS = [*byte_alphabet(), "ab", "<|endoftext|>"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=len(TOKENS), n_positions=9, bos_token_id=257, eos_token_id=257
    )
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
    form = f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{KINDS[dtype]}"
    sizes = {
        "general.architecture": "gpt2", "gpt2.block_count": 2, "gpt2.context_length": 9,
        "gpt2.embedding_length": 64, "gpt2.feed_forward_length": 256,
        "gpt2.attention.head_count": 2, "gpt2.vocab_size": len(TOKENS), "general.type": "model",
        "general.file_type": gguf.LlamaFileType[form], "general.quantization_version": 2,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 257, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.token_type": [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL],
    }  # fmt: skip
    assert {name: fields[name] for name in sizes} == sizes
    assert fields["tokenizer.ggml.tokens"] == TOKENS
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    weights = open_hugging_face(source)
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
        (source / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(vocabulary)}))
        if main(["--to", "gguf", "--input", str(source), "--output", str(tmp_path / name)]):
            return {"error": capsys.readouterr().err}
        reader = gguf.GGUFReader(tmp_path / name / "model.gguf")
        return {name: field.contents() for name, field in reader.fields.items()}

    kept = [*TOKENS[:256], "<|endoftext|>"]
    (source / "merges.txt").write_text("#version: 0.2\n")
    found = fields("fewer", kept)
    assert found["tokenizer.ggml.tokens"] == [*kept, "[PAD257]"]
    assert found["tokenizer.ggml.token_type"][256:] == [gguf.TokenType.CONTROL, gguf.TokenType.UNUSED]
    assert "259 tokens, and the model has 258" in fields("more", [*kept, "<a>", "<b>"])["error"]
    (source / "merges.txt").rename(source / "vocab.txt")
    found = fields("none", kept)
    assert found["tokenizer.ggml.model"] == "none" and found["gpt2.vocab_size"] == len(TOKENS)


def test_another_activation_is_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"activation_function": "quick_gelu"}))
    assert main(["--to", "gguf", "--input", str(source), "--output", str(tmp_path / "out")]) == 2
    assert "model.activation=quick_gelu: GGUF means gelu_new" in capsys.readouterr().err


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


# ---- llama.cpp ----

ANSWERS = Path(__file__).with_name("llama_cpp.json")
TEXTS = list(json.loads(ANSWERS.read_text())["ids"])
LLAMA_CPP = "llama-cpp-python==0.3.36"
MODEL = resolve_model(ModelConfig(num_layers=2, hidden_size=64, num_heads=2, seq_length=64, vocab_size=258))
SEED, SCALE = 32, 12
"""Deviation of the initial weights. Larger ones give many different tokens with a clear lead."""
PROMPT = [7, 200, 33, 120, 250, 3, 91, 18]
NEW = 24
BOUNDS = {"F32": 1e-3, "F16": 4e-3, "Q8_0": 8e-2, "Q4_0": 8e-2}
"""Largest difference of logits, as a part of the largest logit. llama.cpp takes gelu from a table
of float16 (2**-11 = 5e-4). It rounds what it multiplies: for F16 likewise, for Q8_0 and Q4_0 to
8 bits in blocks. That is 0.5 % of each of nine products in a row; 4 deviations. Twice what was
seen.
"""
DIALOGUE = "<|user|> Hello newword<|bot|>"
ADDED = {"<|im_end|>": 50257, "<|user|>": 50258, "<|bot|>": 50259, "newword": 50260}
"""Marks of a dialogue, of which the first ends; the last is a word."""


def value_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = initial_rows(MODEL, SEED, name, shape)
    return values * np.float32(SCALE if len(shape) == 2 else 1)


def dequantized(name: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Content of the file, by the library of llama.cpp's authors."""
    values = value_of(name, shape)
    if len(shape) == 1 or name == "wpe.weight":
        return values
    type_ = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_)


def our_model(kind: str) -> GPT2:
    model = GPT2(MODEL, PrecisionConfig(), MODEL.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(dequantized(name, tuple(parameter.shape), kind)))
    return model


def our_greedy(model: GPT2) -> list[int]:
    decoder = Decoder(model, select_device("cpu"), 1)
    prompt = Prompt(text="", ids=PROMPT, new_tokens=NEW)
    rules = LogitRules(PredictConfig(stop_at_end_of_text=False), ends=(0,))
    (found,) = generate(decoder, [prompt], rules, seed=0)
    return found.tokens


def test_answers_are_those_of_llama_cpp(tmp_path: Path, gpt2_vocab_files: tuple[Path, Path]) -> None:
    answers = json.loads(ANSWERS.read_text())
    assert {kind: our_greedy(our_model(kind)) for kind in KINDS.values()} == answers["greedy"]
    tokenizer = GPT2BPETokenizer(*gpt2_vocab_files)
    ids = {text: tokenizer.encode(text, allow_special=True).tolist() for text in TEXTS}
    assert ids == answers["ids"]
    copy_tokenizer(tmp_path, gpt2_vocab_files)
    marked = GPT2BPETokenizer(tmp_path)
    assert answers["dialogue"] == {
        "ids": marked.encode(DIALOGUE, allow_special=True).tolist(), "eos": marked.eod_id,
        "bos": marked.bos_id, "finish": "stop", "text": "",
    }  # fmt: skip


_SCRIPT = """
import json, sys
import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama

asked = json.loads(sys.argv[1])
answer = {}
for kind, file in asked["files"].items():
    options = dict(n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True,
                   type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32)
    model = Llama(file, **options)
    model.eval(asked["known"][kind])
    logits = np.array(model.scores[: len(asked["known"][kind])]).tolist()
    model.reset()
    model.eval(asked["prompt"])
    tokens = []
    for _ in range(asked["new"]):
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(tokens[-1:])
    answer[kind] = {"logits": logits, "greedy": tokens}
model = Llama(asked["tokenizer"], vocab_only=True, verbose=False)
ids = {text: model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]}
texts = {text: model.detokenize(ids[text], special=True).decode() for text in ids}
model = Llama(asked["marked"], n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
ids_of_marks = model.tokenize(asked["dialogue"].encode(), add_bos=False, special=True)
said = model.create_completion(asked["dialogue"], max_tokens=8, temperature=0)["choices"][0]
marked = {"ids": ids_of_marks, "eos": model.token_eos(), "bos": model.token_bos(),
          "finish": said["finish_reason"], "text": said["text"]}
json.dump({"kinds": answer, "ids": ids, "texts": texts, "dialogue": marked}, sys.stdout)
"""


@pytest.mark.campaign
def test_llama_cpp_answers(tmp_path: Path, gpt2_vocab_files: tuple[Path, Path]) -> None:
    """Building it takes 10 minutes of two cores, once."""
    parts = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER", "LLAVA_BUILD")
    flags = " ".join(f"-D{part}=OFF" for part in (*parts, "GGML_OPENMP"))
    python = peer_python("llama_cpp", LLAMA_CPP, CMAKE_ARGS=flags, CMAKE_BUILD_PARALLEL_LEVEL="2")
    asked: dict[str, Any] = {"prompt": PROMPT, "new": NEW, "texts": TEXTS, "dialogue": DIALOGUE}
    asked |= {"files": {}, "known": {}}
    shapes = parameter_shapes(MODEL)
    weights = as_weights(MODEL, {name: value_of(name, shape) for name, shape in shapes.items()})
    models = {kind: our_model(kind) for kind in KINDS.values()}
    tokens = {kind: our_greedy(model) for kind, model in models.items()}
    for dtype, kind in KINDS.items():
        folder = tmp_path / kind
        folder.mkdir()
        write_gguf(folder, weights, dtype)
        asked["files"][kind] = str(folder / FILE)
        asked["known"][kind] = PROMPT + tokens[kind]
    for name, added in (("tokenizer", False), ("marked", True)):
        asked[name] = str(file_of_zeros(tmp_path / name, gpt2_vocab_files, added=added))
    words = [python, "-c", _SCRIPT, json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for kind, model in models.items():
        with torch.no_grad():
            expected = model.logits(model(torch.tensor([asked["known"][kind]])))[0].numpy()
        answer = found["kinds"][kind]
        difference = np.abs(np.array(answer["logits"]) - expected).max()
        assert difference < BOUNDS[kind] * np.abs(expected).max(), (kind, difference)
    assert found["texts"] == {text: text for text in TEXTS}
    greedy = {kind: answer["greedy"] for kind, answer in found["kinds"].items()}
    answers = {"by": LLAMA_CPP, "greedy": greedy, "ids": found["ids"], "dialogue": found["dialogue"]}
    if os.environ.get("UPDATE_GOLDEN"):
        text = json.dumps(answers, ensure_ascii=False, indent=1)
        ANSWERS.write_text(re.sub(r"\n   *(\d+|\])", r" \1", text) + "\n")
    assert answers == json.loads(ANSWERS.read_text())


def copy_tokenizer(folder: Path, files: tuple[Path, Path], *, added: bool = True) -> None:
    for file, name in zip(files, ("vocab.json", "merges.txt"), strict=True):
        (folder / name).write_bytes(file.read_bytes())
    if not added:
        return
    (folder / "added_tokens.json").write_text(json.dumps(ADDED))
    marks = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|user|>", "<|bot|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(marks))


def file_of_zeros(folder: Path, files: tuple[Path, Path], *, added: bool) -> Path:
    """Write a model of zeros with more rows than the tokenizer has. added: its marks too, and it
    says the end at once.
    """
    folder.mkdir()
    copy_tokenizer(folder, files, added=added)
    model = MODEL.model_copy(update={"vocab_size": 50261 if added else 50260})
    arrays = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(model).items()}
    if added:
        arrays["wte.weight"][ADDED["<|im_end|>"]] = 1
        arrays["ln_f.bias"][:] = 1
    write_gguf(folder, as_weights(model, arrays), "float32")
    return folder / FILE

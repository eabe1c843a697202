"""A fine-tune of marked dialogues stops at its mark, here and in the programs that take it over."""

import json
import random
from pathlib import Path

import gguf
import pytest
import torch
import transformers
import yaml

from common.inference.load import load_model
from common.tokenizer.bpe_files import byte_alphabet
from run_gpt2 import main
from tests.tiny import tiny_run
from tools.convert_weight import main as convert
from tools.preprocess_data import main as preprocess

BASE = [*byte_alphabet(), "tw", "<|endoftext|>"]
MARKS = {"<|pad|>": 258, "<|im_end|>": 259, "<|user|>": 260, "<|bot|>": 261}
TURNS = {"hi": "hello", "one": "two", "red": "green", "cat": "dog"}
PROMPT = "<|user|>one<|bot|>"


def make_base(folder: Path) -> None:
    """A model of transformers whose table has rows for the marks that were added."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 257, "eos_token_id": 259, "pad_token_id": 258}
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "n_positions": 24, "vocab_size": 262}
    rates = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **rates)).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(BASE)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt w\n")
    (folder / "added_tokens.json").write_text(json.dumps(MARKS))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    special = names | {"additional_special_tokens": ["<|user|>", "<|bot|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def train(folder: Path) -> Path:
    """Train on the dialogues. Return the config of the run."""
    lines = [json.dumps({"text": f"<|user|>{asked}<|bot|>{said}<|im_end|>"}) for asked, said in TURNS.items()]
    text = folder.parent / "dialogues.jsonl"
    text.write_text("\n".join(random.Random(0).sample(lines * 20, 20 * len(lines))))
    prefix = str(folder.parent / "data")
    words = ["--input", str(text), "--output-prefix", prefix, "--vocab-file", str(folder)]
    assert preprocess(words) == 0
    tree = tiny_run(
        folder.parent / "run", Path(f"{prefix}_text_document"), model="from_checkpoint",
        checkpoint={"init_from": str(folder)}, train={"max_steps": 150, "micro_batch_size": 16},
        optimizer={"learning_rate": 0.01}, data__split="1,0,0", data__tokenizer=str(folder),
        predict={"max_new_tokens": 12},
    )  # fmt: skip
    file = folder.parent / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert main(["--config", str(file), "--run_mode", "finetune"]) == 0
    return file


@pytest.mark.long
def test_a_marked_dialogue_stops_at_its_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_base(tmp_path / "base")
    run, here = train(tmp_path / "base"), tmp_path / "run"
    for format in ("hf", "onnx", "gguf"):
        words = ["--to", format, "--input", str(here), "--output", str(tmp_path / format)]
        assert convert([*words, "--verify"]) == 0

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert ids[0, [0, -1]].tolist() == [260, 261] and ids.shape == (1, 5)
    said = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == "two<|im_end|>"

    for where in (here, tmp_path / "hf", tmp_path / "onnx"):
        (found,) = load_model(where).generate([PROMPT], max_new_tokens=12)
        assert (found.text, found.finish_reason) == ("two", "end_of_text"), where
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 259
    assert fields["tokenizer.ggml.tokens"].contents()[258:] == [*MARKS]
    capsys.readouterr()
    words = ["--config", str(run), "--run_mode", "predict", f"predict.prompt={PROMPT}"]
    assert main(words) == 0
    assert f"Generation: {PROMPT}two\n" in capsys.readouterr().out

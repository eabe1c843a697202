"""Independent models to compare with: transformers' GPT-2 holding our weights, or its own."""

import json
import shutil
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.config.schema import ModelConfig
from common.tokenizer.bpe_files import byte_alphabet

POSITIONS = 64
"""Configuration of ``save_model``."""
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t"]


def write_vocabulary(folder: Path, merges: list[str]) -> Path:
    """A vocabulary of bytes and merges under OpenAI's names, the merges without a header."""
    folder.mkdir()
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(tokens)}
    (folder / "encoder.json").write_text(json.dumps(ids))
    (folder / "vocab.bpe").write_text("\n".join(merges))
    return folder


def save_model(folder: Path, vocabulary: Path, size: int) -> Path:
    """Random weights, which with 262 tokens end some continuations early, and the tokenizer's files."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=POSITIONS, vocab_size=size,
        initializer_range=0.3, bos_token_id=size - 1, eos_token_id=size - 1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        # or a tied model of random weights repeats itself
        model.transformer.wpe.weight.normal_(std=2.0)
        model.transformer.ln_f.bias.copy_(model.transformer.wte.weight[-1])
    model.save_pretrained(folder)
    shutil.copy(vocabulary / "encoder.json", folder / "vocab.json")
    head, merges = "#version: 0.2\n", (vocabulary / "vocab.bpe").read_text()
    (folder / "merges.txt").write_text(head + merges.removeprefix(head))
    return folder


def hugging_face_model(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    """transformers' model in evaluation mode with a copy of our parameters."""
    theirs = GPT2Config(
        n_layer=config.num_layers, n_embd=config.hidden_size, n_head=config.num_heads,
        n_positions=config.max_positions, vocab_size=config.vocab_size,
        n_inner=config.ffn_hidden_size, activation_function=config.activation,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(theirs).eval()
    state = model.state_dict()
    named = hugging_face_names(tensors, config.vocab_size)
    assert set(named) | {"lm_head.weight"} == set(state)
    with torch.no_grad():
        for name, tensor in named.items():
            assert state[name].shape == tensor.shape, name
            state[name].copy_(tensor)
    return model


def hugging_face_names(tensors: dict[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """Ours -> transformers': fused c_attn, Conv1D (in, out), no padding rows."""
    result = {}
    for name, tensor in tensors.items():
        theirs = name.replace("q_proj", "c_attn")
        if name == "wte.weight":
            tensor = tensor[:vocab_size]
        elif theirs != name:
            parts = ("q_proj", "k_proj", "v_proj")
            tensor = torch.cat([tensors[name.replace("q_proj", part)] for part in parts])
        elif ".k_proj" in name or ".v_proj" in name:
            continue
        if name.endswith("weight") and any(part in theirs for part in ("c_attn", "c_proj", "c_fc")):
            tensor = tensor.t()
        result[f"transformer.{theirs}"] = tensor
    return result

"""GPT2-Chinese's command lines and model_config.json in our words: the flags of the study's scripts
against its preset, and what each flag becomes.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from common.config.load import flatten
from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.systems.config import COMMAND_LINES, find_command_line, open_config, open_flags

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "compat" / "gpt2_chinese" / "config"
STUDY = """python3 -m torch.distributed.launch --nproc_per_node=4 train.py \\
    --model_config config/model_config.json --tokenized_data_path data/tokenized/ \\
    --tokenizer_path cache/vocab_user.txt --raw_data_path data/train.json --epochs 800 \\
    --log_step 200 --stride 512 --output_dir model/ --device 0,1,2,3 --num_pieces 100 --raw \\
    --batch_size 4 --fp16 --fp16_opt_level O2
"""
GENERATE = """python3 generate.py --device 0 --length 15000 --tokenizer_path cache/vocab_user.txt \\
    --model_path model/final_model --prefix 她 --nsamples 5 --topp 1 --temperature 1.0
"""
FLAGS = {
    "gpt2_chinese": """device model_config tokenizer_path raw_data_path tokenized_data_path raw
        epochs batch_size lr warmup_steps log_step stride gradient_accumulation fp16 fp16_opt_level
        max_grad_norm num_pieces min_length output_dir pretrained_model writer_dir segment bpe_token
        encoder_json vocab_bpe local_rank""",
    "gpt2_chinese_generate": """device length batch_size nsamples temperature topk topp model_config
        tokenizer_path model_path prefix no_wordpiece segment fast_pattern save_samples
        save_samples_path repetition_penalty save_path articles_per_title titles titles_file""",
    "gpt2_chinese_eval": """device model_config tokenizer_path raw_data_path tokenized_data_path raw
        batch_size log_step stride num_pieces min_length pretrained_model output_dir""",
}


def keys_of(system: str, *words: str) -> dict[str, Any]:
    return dict(flatten(open_flags(system, words).ours.tree))


def test_the_flags_of_the_originals_are_all_known() -> None:
    for system, names in FLAGS.items():
        assert set(names.split()) <= set(COMMAND_LINES[system].table)


def test_the_study_s_train_sh_is_its_preset(tmp_path: Path) -> None:
    """On 4 ranks; it validates nothing, and saves after each epoch."""
    script = tmp_path / "train.sh"
    script.write_text(STUDY)
    found, expected = (
        dict(flatten(resolve_config(config, world_size=4).model_dump()))
        for config in (
            open_config(script).config,
            load_config(ROOT / "configs/gpt2/run_gpt2_chinese_106m.yaml"),
        )
    )
    differing = {key for key in found if found[key] != expected.get(key)}
    assert differing == {
        "output_dir", "data.train", "data.stride",
        "checkpoint.epoch_models", "checkpoint.interval", "logging.interval", "predict.strategy",
        "predict.top_k", "validation.max_samples", "loss_scale.window",
    }  # fmt: skip
    assert (found["data.stride"], found["model.seq_length"]) == (512, 512)
    assert found["logging.interval"] == 200 and found["checkpoint.epoch_models"]


def test_generate_sh_slides_its_window(tmp_path: Path) -> None:
    """The model and its n_ctx are those of --model_path."""
    weights = tmp_path / "model" / "final_model"
    weights.mkdir(parents=True)
    fields = json.loads((CONFIGS / "model_config.json").read_text())
    (weights / "config.json").write_text(json.dumps(fields | {"model_type": "gpt2"}))
    script = tmp_path / "generate.sh"
    script.write_text(GENERATE.replace("model/final_model", str(weights)))
    opened = open_config(script)
    predict, model = opened.config.predict, opened.config.model
    assert (model.seq_length, model.max_positions, model.num_layers) == (512, 1024, 12)
    assert (predict.window, predict.max_new_tokens, predict.num_sequences) == (512, 15000, 5)
    assert (predict.prompt, predict.strategy, predict.top_k, predict.top_p) == (
        ["她"], "sampling", 8, 1.0,
    )  # fmt: skip
    assert not predict.stop_at_end_of_text
    assert opened.config.checkpoint.load == str(weights)
    assert "#   device: CUDA_VISIBLE_DEVICES says it" in opened.yaml


BECOME: dict[str, dict[str, Any]] = {
    # program and flags: keys
    "train --epochs 3 --lr 1e-3 --warmup_steps 7 --max_grad_norm 0.5": {
        "train.max_epochs": 3, "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 7,
        "optimizer.clip_grad": 0.5, "optimizer.schedule": "linear", "data.split": "1,0,0"},
    "train --batch_size 3 --gradient_accumulation 4 --log_step 9": {
        "train.micro_batch_size": 3, "train.accumulation_steps": 4, "logging.interval": 3,
        "logging.style": "gpt2-chinese"},
    "train --fp16 --fp16_opt_level O3 --output_dir out/ --stride 100": {
        "precision": "pure_fp16", "output_dir": "out", "data.stride": 100},
    "train": {"precision": "float32", "data.stride": 768, "train.max_epochs": 5},
    "train --stride 9999": {"data.stride": 1024},
    "train --tokenized_data_path ids/ --pretrained_model elsewhere": {
        "data.train": "ids/tokenized_train_text_document", "checkpoint.init_from": "elsewhere"},
    "train --segment --tokenizer_path cache/vocab_seg.txt": {
        "data.tokenizer.type": "BertWordLevel",
        "data.tokenizer.vocab_file": "cache/vocab_seg.txt"},
    "train --bpe_token --encoder_json own/spm.model --vocab_bpe ''": {
        "data.tokenizer.type": "SentencePieceTokenizer",
        "data.tokenizer.vocab_file": "own/spm.model"},
    "train --bpe_token": {
        "data.tokenizer.type": "GPT2BPETokenizer",
        "data.tokenizer.vocab_file": "tokenizations/encoder.json",
        "data.tokenizer.merge_file": "tokenizations/vocab.bpe"},
    "generate --prefix 1.5 --save_samples --save_samples_path out": {
        "predict.prompt": "1.5", "predict.output_file": "out/samples.txt"},
    "generate --prefix [CLS][MASK]": {"predict.prompt": "[CLS][MASK]"},
    "generate --model_path 007 --prefix [1]": {"checkpoint.load": "007"},
    "generate --titles '萧炎 林动' --articles_per_title 3 --save_path made/": {
        "predict.prompt": ["萧炎", "林动"], "predict.num_sequences": 3,
        "predict.output_folder": "made", "predict.max_new_tokens": 1024},
    "generate --titles_file titles.txt --repetition_penalty 1.2 --topk 0": {
        "predict.prompt_file": "titles.txt", "predict.repetition_penalty": 1.2,
        "predict.top_k": 0, "predict.num_sequences": 5, "predict.prompt": None},
    "generate --batch_size 4 --temperature 0.5 --topp 0.9 --fast_pattern": {
        "predict.batch_size": 4, "predict.temperature": 0.5, "predict.top_p": 0.9,
        "predict.num_sequences": 10},
}  # fmt: skip


@pytest.mark.parametrize("text", BECOME)
def test_flags_become_keys(text: str) -> None:
    program, *words = shlex.split(text)
    system = {"train": "gpt2_chinese", "generate": "gpt2_chinese_generate"}[program]
    found = keys_of(system, *words)
    assert {key: found.get(key) for key in BECOME[text]} == BECOME[text]


def test_model_config_json_is_a_configuration() -> None:
    """With the defaults of train.py, which are the preset of 82M."""
    own = ("data.train=data/corpus_chinese_text_document",)
    own += ("data.tokenizer={type: BertTokenizer, vocab_file: data/vocab.txt}",)
    opened = open_config(CONFIGS / "model_config_small.json", own)
    preset = load_config(ROOT / "configs/gpt2/run_gpt2_chinese_82m.yaml")
    found, expected = (dict(flatten(each.model_dump())) for each in (opened.config, preset))
    differing = {key for key in found if found[key] != expected.get(key)}
    assert found["train.accumulation_steps"] == 1
    differing = {key.partition(".")[0] for key in differing - {"train.accumulation_steps"}}
    assert differing <= {"output_dir", "checkpoint", "validation", "predict", "model", "data"}
    assert opened.config.data.stride == preset.data.stride == 768
    test = open_config(CONFIGS / "model_config_test.json", own).config
    assert (test.model.seq_length, test.data.stride) == (64, 64)


def test_fields_that_change_no_function(tmp_path: Path) -> None:
    """Sizes that are left out are those of GPT2Config of transformers 2.1.1."""
    fields = {"vocab_size": 5, "n_positions": 64, "reorder_and_upcast_attn": True}
    fields |= {"activation_function": "gelu_fast", "pruned_heads": {}, "use_cache": True}
    (tmp_path / "model.json").write_text(json.dumps(fields))
    opened = open_flags("gpt2_chinese", ["--model_config", str(tmp_path / "model.json")])
    off = open_flags(
        "gpt2_chinese", ["--model_config", str(tmp_path / "model.json")], ["model.dropout=0"]
    )
    assert resolve_config(off.config).model.attention_dropout == 0
    model = opened.config.model
    assert (model.hidden_size, model.num_layers, model.num_heads) == (768, 12, 12)
    assert (model.seq_length, model.max_positions, model.attention_dropout) == (64, 64, None)
    assert model.dropout == 0.1
    assert "#   use_cache: it does not change what GPT-2 computes" in opened.yaml
    assert len(opened.ours.without_effect) == 1, "flags that were not given are not listed"


def test_the_last_of_two_equal_flags_counts(tmp_path: Path) -> None:
    """Argparse does so too. The YAML has a line about it."""
    words = ["--epochs", "800", "--lr", "1", "--epochs", "1", "--lr", "1"]
    (tmp_path / "train.sh").write_text(f"python3 train.py {' '.join(words)}\n")
    for opened, place in (
        (open_flags("gpt2_chinese", words), "command line"),
        (open_config(tmp_path / "train.sh"), f"{tmp_path}/train.sh:1"),
    ):
        assert opened.config.train.max_epochs == 1
        assert opened.ours.without_effect == {
            "--epochs 800": f"{place}: --epochs 1 is given later and counts"
        }


def test_the_later_generate_py() -> None:
    """Since April 2021: its window is a flag, and its tokenizer begins each text with [CLS]."""
    own = ["--model_config", "config/model_config_test.json"]
    found = keys_of("gpt2_chinese_generate", "--n_ctx", "32", *own)
    assert found["predict.window"] == 32 and found["predict.prompt"] == "[CLS]我"
    assert found["predict.max_new_tokens"] == 512
    assert found["checkpoint.load"] == "model/epoch=0-step=99.ckpt"
    assert found["data.tokenizer.vocab_file"] == "vocab/vocab.txt"
    words = ["--model_path", "model/a.ckpt", "--prefix", "她", *own]
    found = keys_of("gpt2_chinese_generate", *words)
    assert (found["predict.window"], found["predict.prompt"]) == (64, "[CLS]她")


def test_the_system_of_flags() -> None:
    """By the program that a script starts, else by most names."""
    words = ["--tokenized_data_path", "x", "--stride", "5", "--model_config", "y"]
    assert find_command_line(words) == "gpt2_chinese"
    assert find_command_line(words, "eval.py") == "gpt2_chinese_eval"
    assert find_command_line(["--prefix", "她"]) == "gpt2_chinese_generate"
    assert find_command_line(["--num-layers", "2"], "pretrain_gpt.py") == "megatron"

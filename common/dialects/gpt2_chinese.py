"""Flags of GPT2-Chinese's commands. Its model_config.json has the fields of ``hugging_face``.

Sources: train.py of Morizeyao/GPT2-Chinese 898a0ac, generate_texts.py of c4288cd, generate.py of
the study DistributedTrainingGPT2. Both programs since April 2021 are those of a22ba9a.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.dialects.rules import ByHand, Ignored, MapTo, Table, above_zero, each, number, whole

SYSTEM = "GPT2-Chinese"


def _folder(value: Any) -> str:
    return str(Path(value))


_COMMON: Table = {
    "model_config": ByHand("model"),
    "tokenizer_path": ByHand("data.tokenizer"),
    "encoder_json": ByHand("data.tokenizer.vocab_file"),
    "vocab_bpe": ByHand("data.tokenizer.merge_file"),
    "segment": ByHand("data.tokenizer.type=BertWordLevel", switch=True),
    "bpe_token": ByHand("data.tokenizer.type=GPT2BPETokenizer", switch=True),
}
DATA: Table = {
    "raw": ByHand("data.train", switch=True),
    "raw_data_path": ByHand("data.train (the output of tools/preprocess_data.py)"),
    "num_pieces": Ignored("data are not split into pieces"),
    "min_length": ByHand("data.train"),
}
"""Flags of the data, which are made before the run."""
SINCE_2021 = {
    "data_path": "--raw --raw_data_path", "config_path": "--model_config",
    "vocab_path": "--tokenizer_path", "max_length": "the n_ctx of --model_config",
    "t_total": "optimizer.decay_steps=N", "eval_interval": "validation.interval=N",
    "val_examples": "data.split=W,W,W",
}  # fmt: skip
"""Flags of the later train.py, which trains with PyTorch Lightning, and what says it here. A step
there has one text a row, which is cut or padded to --max_length. The padding is learnt too.
"""
TRAIN: Table = {
    **_COMMON,
    **DATA,
    **each(ByHand(), " ".join(SINCE_2021)),
    "vocab_path": ByHand("data.tokenizer.vocab_file"),
    "tokenized_data_path": ByHand("data.train"),
    "stride": ByHand("data.stride"),
    "epochs": MapTo("train.max_epochs", number),
    "batch_size": MapTo("train.micro_batch_size"),
    "gradient_accumulation": MapTo("train.accumulation_steps"),
    "lr": MapTo("optimizer.learning_rate", number),
    "warmup_steps": MapTo("optimizer.warmup_steps"),
    "max_grad_norm": MapTo("optimizer.clip_grad", above_zero("optimizer.clip_grad=0 clips nothing")),
    "fp16": ByHand("precision=fp16", switch=True),
    "fp16_opt_level": ByHand("precision"),
    "output_dir": MapTo("output_dir", _folder),
    "pretrained_model": MapTo("checkpoint.init_from", str),
    "log_step": ByHand("logging.interval"),
    "device": Ignored("CUDA_VISIBLE_DEVICES says it; torchrun starts a process a device"),
    "local_rank": Ignored("the launcher says it"),
    "writer_dir": Ignored("TensorBoard's events are in output_dir/tensorboard",
        "logging.tensorboard (in the run folder)"),
}  # fmt: skip
TRAIN_DEFAULTS: dict[str, Any] = {
    "model_config": "config/model_config_small.json", "tokenizer_path": "cache/vocab_small.txt",
    "raw_data_path": "data/train.json", "tokenized_data_path": "data/tokenized/",
    "epochs": 5, "batch_size": 8, "lr": 1.5e-4, "warmup_steps": 2000, "log_step": 1, "stride": 768,
    "gradient_accumulation": 1, "fp16_opt_level": "O1", "max_grad_norm": 1.0, "num_pieces": 100,
    "min_length": 128, "output_dir": "model/", "encoder_json": "tokenizations/encoder.json",
    "vocab_bpe": "tokenizations/vocab.bpe",
}  # fmt: skip
"""Values of flags that are left out; the others are off."""

EVAL: Table = {
    **_COMMON,
    **DATA,
    "tokenized_data_path": ByHand("data.validation"),
    "batch_size": MapTo("validation.micro_batch_size"),
    "log_step": MapTo("logging.interval", whole),
    "output_dir": MapTo("output_dir", _folder),
    "pretrained_model": MapTo("checkpoint.load", str),
    "device": Ignored("CUDA_VISIBLE_DEVICES says it"),
    "stride": Ignored("each token is scored once"),
}
EVAL_DEFAULTS: dict[str, Any] = {
    "model_config": "config/model_config_small.json", "tokenizer_path": "cache/vocab_small.txt",
    "raw_data_path": "data/eval.json", "tokenized_data_path": "data/tokenized_eval/",
    "batch_size": 8, "log_step": 1, "num_pieces": 100, "min_length": 128,
    "output_dir": "eval_result/",
}  # fmt: skip

GENERATE: Table = {
    **_COMMON,
    "batch_size": MapTo("predict.batch_size"),
    "temperature": MapTo("predict.temperature", number),
    "topk": MapTo("predict.top_k", lambda value: max(0, whole(value))),
    "topp": MapTo("predict.top_p", lambda value: min(max(0.0, number(value)), 1.0)),
    "repetition_penalty": MapTo("predict.repetition_penalty", number),
    "length": ByHand("predict.max_new_tokens"),
    "n_ctx": ByHand("predict.window"),
    "nsamples": ByHand("predict.num_sequences"),
    "prefix": ByHand("predict.prompt", text=True),
    "save_samples": ByHand("predict.output_file", switch=True),
    "save_samples_path": ByHand("predict.output_file"),
    "titles": ByHand("predict.prompt", text=True),
    "titles_file": ByHand("predict.prompt_file"),
    "articles_per_title": ByHand("predict.num_sequences"),
    "save_path": ByHand("predict.output_folder"),
    "model_path": MapTo("checkpoint.load", str),
    "device": Ignored("CUDA_VISIBLE_DEVICES says it"),
    "fast_pattern": Ignored("keys and values are kept as long as the text fits the window",
        "predict"),
    "no_wordpiece": Ignored("generate.py does not look at it: the vocabulary has no pieces of"
        " Chinese words", "data.tokenizer.type"),
}  # fmt: skip
GENERATE_DEFAULTS: dict[str, Any] = {
    "length": -1, "temperature": 1, "topk": 8, "topp": 0, "repetition_penalty": 1.0,
    "model_config": "config/model_config_small.json", "tokenizer_path": "cache/vocab_small.txt",
    "model_path": "model/final_model",
}  # fmt: skip
OF_SAMPLES: dict[str, Any] = {
    "batch_size": 1, "nsamples": 10, "prefix": "她", "save_samples_path": ".",
}  # fmt: skip
OF_TITLES: dict[str, Any] = {
    "save_path": "generated/", "articles_per_title": 5, "titles": "萧炎", "titles_file": "",
}  # fmt: skip
OF_LATER: dict[str, Any] = {
    "length": 512, "n_ctx": 1024, "prefix": "我", "model_config": "config/model_config.json",
    "tokenizer_path": "vocab/vocab.txt", "model_path": "model/epoch=0-step=99.ckpt",
}  # fmt: skip
"""Defaults of the later generate.py."""

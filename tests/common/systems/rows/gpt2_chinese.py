"""GPT2-Chinese's programs and its model_config.json.

Sources: Morizeyao/GPT2-Chinese 898a0ac, train.py; c1c7d8e, eval.py; c4288cd, generate_texts.py;
generate.py of the study DistributedTrainingGPT2; transformers 2.1.1, configuration_gpt2.py.
"""

from __future__ import annotations

from common.systems.gpt2_chinese import EVALUATION, FILES, GENERATION, TRAINING
from tests.common.systems.foreign_runs import Rows, Sentinel

_FAILS = "divides by it"
ROWS = {
    "gpt2_chinese": Rows(
        FILES,
        {"vocab_size": 100},
        {
            "vocab_size": "from_json_file leaves -1, and a run there ends",
            "n_inner": "it is 4 n_embd, there and here",
        },
    ),
    "gpt2_chinese_train": Rows(
        TRAINING,
        {},
        {"pretrained_model": "it is empty there: the model is new"},
        {
            "fp16_opt_level": {"fp16": True},
            "encoder_json": {"bpe_token": True},
            "vocab_bpe": {"bpe_token": True},
        },
        [
            Sentinel(
                "max_grad_norm",
                0,
                "makes all gradients 0 (clip_grad_norm_)",
                "expected a number above 0",
            ),
            Sentinel("max_grad_norm", -1, "turns gradients round", "expected a number above 0"),
            Sentinel("warmup_steps", 0, "no warm-up", {"optimizer.warmup_steps": 0}),
            Sentinel("epochs", 0, "trains nothing, and saves a new model", "train.max_epochs"),
            Sentinel("log_step", 0, _FAILS, "log_step=0: expected a whole number above 0"),
            Sentinel(
                "gradient_accumulation", 0, _FAILS, "gradient_accumulation=0: expected a whole"
            ),
            Sentinel("batch_size", 0, _FAILS, "train.micro_batch_size"),
            Sentinel("stride", 0, _FAILS, "data.stride"),
            Sentinel(
                "num_pieces", 0, "reads no piece", "num_pieces=0: expected a whole number above 0"
            ),
            Sentinel("min_length", 0, "leaves only empty texts out", {"data.split": "1,0,0"}),
            Sentinel(
                "min_length", 1.5, "argparse refuses it", "min_length=1.5: expected a whole number"
            ),
            # "log_step counts micro batches": (overall_step + 1) % log_step
            Sentinel(
                "log_step",
                8,
                "a line every 8 micro batches",
                {"logging.interval": 2},
                {"gradient_accumulation": 4},
            ),
        ],
    ),
    "gpt2_chinese_generate": Rows(
        GENERATION,
        {},
        {"batch_size": "only generate.py has it: OF_SAMPLES"},
        sentinels=[
            Sentinel("length", -1, "as many tokens as n_ctx", {"predict.max_new_tokens": 1024}),
            Sentinel("length", 0, "adds nothing", "predict.max_new_tokens"),
            Sentinel("topk", 0, "all tokens (top_k > 0 filters)", {"predict.top_k": 0}),
            Sentinel("topk", -1, "all tokens (top_k > 0 filters)", {"predict.top_k": 0}),
            Sentinel("topp", 0, "all tokens (top_p > 0 filters)", {"predict.top_p": 1.0}),
            Sentinel("topp", -1, "all tokens (top_p > 0 filters)", {"predict.top_p": 1.0}),
            Sentinel("topp", 2, "all tokens: no sum is above it", {"predict.top_p": 1.0}),
            Sentinel(
                "temperature",
                0,
                "divides by it; greedy here",
                "num_sequences=10: greedy gives equal",
            ),
            Sentinel("repetition_penalty", 0, "divides by it", "predict.repetition_penalty"),
            Sentinel("nsamples", 0, "writes nothing", "predict.num_sequences"),
            Sentinel("batch_size", 0, "divides by it", "predict.batch_size"),
            Sentinel("articles_per_title", 0, "writes nothing", "predict.num_sequences"),
        ],
    ),
    "gpt2_chinese_eval": Rows(
        EVALUATION,
        {"pretrained_model": "model/final_model"},
        {"pretrained_model": "eval.py ends without it"},
        sentinels=[
            Sentinel("log_step", 0, "divides by it", "logging.interval"),
            Sentinel("batch_size", 0, "divides by it", "validation.micro_batch_size"),
            Sentinel(
                "num_pieces", 0, "reads no piece", "num_pieces=0: expected a whole number above 0"
            ),
        ],
    ),
}

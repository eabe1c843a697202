"""PaddleFleetX's smallest file, its keys without a default, and its values that mean off or all.

Sources: PaddleFleetX release/2.4 and PaddlePaddle 2.4.
"""

from __future__ import annotations

from typing import Any

from common.systems.fleetx import config as DIALECT
from tests.common.systems.foreign_runs import Sentinel

__all__ = ["BESIDE", "DIALECT", "MINIMAL", "SENTINELS", "WITHOUT_DEFAULT"]

MINIMAL: dict[str, Any] = {
    "Global.local_batch_size": 8, "Global.micro_batch_size": 4,
    "Model.vocab_size": 50304, "Model.hidden_size": 768, "Model.num_layers": 2,
    "Data.Train.dataset.max_seq_len": 512, "Data.Train.dataset.input_dir": "./data",
    "Optimizer.lr.max_lr": 5e-5,
}  # fmt: skip
_GENERATION = {"Generation.max_dec_len": 20}
_AMP = {"Engine.mix_precision.enable": True}
BESIDE: dict[str, dict[str, Any]] = {
    **{name: _GENERATION for name in DIALECT.DEFAULTS if name.startswith("Generation.")},
    "Engine.mix_precision.level": _AMP, "Engine.mix_precision.dtype": _AMP,
    "Engine.mix_precision.scale_loss": {"Engine.mix_precision.use_pure_fp16": True},
    "Engine.eval_freq": {"Engine.eval_iters": 10}, "Engine.eval_iters": {"Engine.eval_freq": 5},
    "Distributed.sharding.sharding_stage": {"Distributed.sharding.sharding_degree": 2},
    "Model.recompute_granularity": {"Model.use_recompute": True},
}  # fmt: skip
_REQUIRED = "a run there ends without it"
_DERIVED = "it follows from other keys, there and here"
WITHOUT_DEFAULT: dict[str, str] = {
    **dict.fromkeys(
        (
            "Global.device", "Global.seed", "Global.micro_batch_size", "Model.vocab_size",
            "Model.hidden_size", "Model.num_layers", "Data.Train.dataset.input_dir",
            "Data.Train.dataset.split", "Data.Train.dataset.max_seq_len", "Optimizer.name",
            "Optimizer.lr.name", "Optimizer.lr.decay_steps", "Optimizer.lr.warmup_rate",
            "Optimizer.lr.max_lr", "Optimizer.lr.min_lr", "Generation.max_dec_len",
            "Offline_Eval.eval_path", "Offline_Eval.cloze_eval", "Offline_Eval.overlapping_eval",
            "Offline_Eval.batch_size",
        ),
        _REQUIRED,
    ),
    **dict.fromkeys(("Global.global_batch_size", "Model.ffn_hidden_size"), _DERIVED),
    "Generation.input_text": "a script there has its own prompt, which compat/fleetx gives",
}  # fmt: skip
SENTINELS = [
    Sentinel(
        "Engine.eval_freq", -1, "never validates (eager_engine.py: eval_freq > 0)",
        {"validation.interval": "never"},
    ),
    Sentinel(
        "Engine.eval_freq", 0, "never validates (eager_engine.py: eval_freq > 0)",
        {"validation.interval": "never"},
    ),
    Sentinel(
        "Optimizer.grad_clip.clip_norm", 0, "makes all gradients 0 (ClipGradByGlobalNorm)",
        "for no clip leave the section grad_clip out",
    ),
    Sentinel(
        "Generation.top_k", 0, "all tokens (GPTForGeneration.sample: top_k != 0)",
        {"predict.top_k": 0}, _GENERATION,
    ),
    Sentinel(
        "Generation.top_p", 0, "the most probable token only (GPTForGeneration.sample)",
        {"predict.top_p": 1e-9}, _GENERATION,
    ),
]  # fmt: skip

"""PaddleFleetX's smallest file, its keys without a default, and its values that mean off or all.

Sources: PaddleFleetX release/2.4 and PaddlePaddle 2.4.
"""

from __future__ import annotations

from typing import Any

from common.systems.fleetx.config import DIALECT
from tests.common.systems.foreign_runs import Rows, Sentinel

MINIMAL: dict[str, Any] = {
    "Global.local_batch_size": 8, "Global.micro_batch_size": 4,
    "Model.vocab_size": 50304, "Model.hidden_size": 768, "Model.num_layers": 2,
    "Data.Train.dataset.max_seq_len": 512, "Data.Train.dataset.input_dir": "./data",
    "Optimizer.lr.max_lr": 5e-5,
}  # fmt: skip
_GENERATION = {"Generation.max_dec_len": 20}
_AMP = {"Engine.mix_precision.enable": True}
_SPLIT = {"Data.Train.dataset.split": [949, 50, 1]}
BESIDE: dict[str, dict[str, Any]] = {
    **{name: _GENERATION for name in DIALECT.defaults if name.startswith("Generation.")},
    "Engine.mix_precision.level": _AMP, "Engine.mix_precision.dtype": _AMP,
    "Engine.mix_precision.scale_loss": {"Engine.mix_precision.use_pure_fp16": True},
    "Engine.eval_freq": {"Engine.eval_iters": 10}, "Engine.eval_iters": {"Engine.eval_freq": 5},
    "Distributed.sharding.sharding_stage": {"Distributed.sharding.sharding_degree": 2},
    "Model.recompute_granularity": {"Model.use_recompute": True},
    "Engine.num_train_epochs": {"Engine.run_mode": "epoch", "Engine.max_steps": -1},
    "Optimizer.momentum": {"Optimizer.name": "Momentum"},
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
    **dict.fromkeys(
        (key for key in DIALECT.table if "Quantization." in key),
        "PaddleSlim's, which config.py sets, or as here",
    ),
    "Generation.input_text": "a script there has its own prompt, which compat/fleetx gives",
}  # fmt: skip
_EVAL = {"Engine.eval_freq": 500, "Engine.eval_iters": 10}
_LM_EVAL = {"Offline_Eval.cloze_eval": False, "Offline_Eval.eval_path": "wiki.valid.tokens"}
_NO_LOOP = "FleetX's training loop, eager_engine.py"
_FLOAT16 = {f"precision.{part}": "float16" for part in ("parameters", "compute", "softmax")}
_EPOCHS = {"Engine.run_mode": "epoch", "Engine.num_train_epochs": 3}
SENTINELS = [
    Sentinel("Engine.eval_freq", -1, f"never: eval_freq > 0 ({_NO_LOOP})",
             {"validation.interval": "never"}, _EVAL),
    Sentinel("Engine.eval_freq", 0, f"never: eval_freq > 0 ({_NO_LOOP})",
             {"validation.interval": "never"}, _EVAL),
    Sentinel("Engine.eval_iters", 0, "FleetX's default, for no validation (utils/config.py)",
             {"validation.interval": "never", "validation.max_batches": None}, _EVAL),
    Sentinel("Engine.eval_iters", -1, "one batch, since the loop ends after its body",
             "0 is off", _EVAL),
    Sentinel("Engine.eval_iters", -1, "no limit in epochs (_evaluate_one_epoch)",
             {"validation.interval": 0, "validation.max_samples": 0}, {**_EVAL, **_EPOCHS}),
    Sentinel("Engine.max_steps", -1, "in epochs: all samples of the data (GPTDataset)",
             {"train.max_epochs": 3, "train.max_steps": None}, _EPOCHS),
    Sentinel("Engine.max_steps", -1, "in steps: the first step is the last", "run_mode: epoch"),
    Sentinel("Engine.max_steps", 100, "each epoch has as many samples (process_data_configs)",
             {"train.max_steps": 300}, _EPOCHS),
    Sentinel("Engine.num_train_epochs", 2, "each epoch ends at max_steps (fit)",
             {"train.max_steps": 20}, {"Engine.max_steps": 10}),
    Sentinel("Engine.num_train_epochs", 0, "nothing is trained", "above 0"),
    Sentinel("Engine.save_load.save_steps", -1, "at the end only (utils/config.py)",
             {"checkpoint.interval": 0}),
    Sentinel("Engine.save_load.save_steps", 0, f"at the end only: save_steps > 0 ({_NO_LOOP})",
             {"checkpoint.interval": 0}),
    Sentinel("Engine.logging_freq", 0, "a ZeroDivisionError", "greater than 0"),
    Sentinel("Engine.test_iters", -1, "no test part is read in training",
             {"validation.interval": "never"}),
    Sentinel("Engine.mix_precision.level", "o2", "auto-parallel's name of O2",
             _FLOAT16 | {"loss_scale.initial": 32768.0}, _AMP),
    Sentinel("Engine.mix_precision.level", "o1", "paddle.amp.auto_cast: weights stay float32",
             {"precision.compute": "float16", "precision.parameters": "float32"}, _AMP),
    Sentinel("Engine.mix_precision.level", "O0", "float32", {"precision.compute": "float32"}, _AMP),
    Sentinel("Engine.mix_precision.level", "o3", "as O2 with float16 updates (use_optimizer_fp16)",
             "float32 weights here; use O2", _AMP),
    Sentinel("Engine.mix_precision.level", "O9", "an error", "expected O0, O1 or O2", _AMP),
    Sentinel("Engine.mix_precision.dtype", "bfloat16", "bfloat16, without a loss scale",
             {"precision.compute": "bfloat16", "loss_scale.mode": "auto"}, _AMP),
    Sentinel("Engine.mix_precision.custom_black_list", ["layer_norm"], "it stays float32",
             "precision says the type of each part instead"),
    Sentinel("Optimizer.grad_clip.clip_norm", 0, "makes all gradients 0 (ClipGradByGlobalNorm)",
             "for no clip leave the section grad_clip out"),
    Sentinel("Optimizer.name", "Adam", "its weight_decay is None (paddle.optimizer.Adam)",
             {"optimizer.weight_decay": 0.0}),
    Sentinel("Optimizer.name", "Momentum", "0.9 and no decay (paddle.optimizer.Momentum)",
             {"optimizer.momentum": 0.9, "optimizer.weight_decay": 0.0}),
    Sentinel("Optimizer.lr.use_increments", True, "the schedule counts samples",
             "decay_steps counts samples with it"),
    Sentinel("Model.hidden_dropout_prob", 0.0, "attention keeps its 0.1 (GPTModel)",
             {"model.dropout": 0.0, "model.attention_dropout": 0.1}),
    Sentinel("Data.Eval.dataset.input_dir", "data/", "the same documents, by the split",
             {"data.validation": None, "data.split": "949,50,1"}, _SPLIT),
    Sentinel("Data.Eval.dataset.input_dir", "./eval", "5 % of another folder (GPTDataset)",
             "or the splits [1, 0, 0] and [0, 1, 0]", _SPLIT),
    Sentinel("Data.Eval.dataset.input_dir", "./eval", "all of another folder (GPTDataset)",
             {"data.train": ["./data"], "data.validation": ["./eval"]},
             {"Data.Train.dataset.split": [1, 0, 0], "Data.Eval.dataset.split": [0, 1, 0]}),
    Sentinel("Data.Eval.dataset.split", [900, 100, 0], "other documents than Train's split leaves",
             "or the splits [1, 0, 0] and [0, 1, 0]", _SPLIT),
    Sentinel("Data.Eval.dataset.max_seq_len", 256, "other windows", "set 512", _SPLIT),
    Sentinel("Generation.top_k", 0, "all tokens (GPTForGeneration.sample: top_k != 0)",
             {"predict.top_k": 0}, _GENERATION),
    Sentinel("Generation.top_p", 0, "the most probable token only (GPTForGeneration.sample)",
             {"predict.top_p": 1e-9}, _GENERATION),
    Sentinel("Generation.max_dec_len", -1, "512 (GPTGenerationModule.adjust_length_to_model)",
             {"predict.max_new_tokens": 512}),
    Sentinel("Offline_Eval.overlapping_eval", 0, "1, the least (LM_Eval_Dataset)",
             {"evaluation.stride": 1, "evaluation.detokenize": "wikitext"}, _LM_EVAL),
    Sentinel("Offline_Eval.max_seq_len", 128, "other windows (LM_Eval_Dataset)", "set 512",
             _LM_EVAL),
    Sentinel("Profiler.scheduler", None, "all steps (paddle.profiler.Profiler)",
             {"profile.start": 1, "profile.stop": 2**40}, {"Profiler.enable": True}),
    Sentinel("Profiler.scheduler", [1, 5], "the second to the fifth: counted from 0, without 5",
             {"profile.start": 2, "profile.stop": 5}, {"Profiler.enable": True}),
]  # fmt: skip
ROWS = {"fleetx": Rows(DIALECT, MINIMAL, WITHOUT_DEFAULT, BESIDE, SENTINELS)}

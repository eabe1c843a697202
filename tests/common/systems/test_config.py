"""Configurations of MindFormers, FleetX, Megatron and OneFlow, whole, in our words: held against
the presets that follow them.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import run_gpt2
from common.config.load import dump_config, flatten
from common.errors import ConfigError
from common.parallel.learning_rate import learning_rate
from common.parallel.operator_plan import splits_vocabulary
from common.resolve.derive import resolve_config, resolve_mode
from common.resolve.engine_checks import check_here
from common.run_config import load_config
from common.systems.config import open_config, open_flags
from common.systems.flags import read_command
from common.systems.oneflow.flags import start_nodes_devices
from compat.programs import main_with_flags
from tests.common.resolve.test_parallel_mode import TUTORIAL
from tools import convert_config

ORIGINALS = Path(__file__).parent / "originals"
PRESETS = Path(__file__).parents[3] / "configs" / "gpt2"
OURS = {
    "data.train", "data.tokenizer", "output_dir", "logging", "validation", "checkpoint", "device",
    "predict",
}  # fmt: skip
"""Choices of the presets: places of the data and the run folder, and how often a run saves and
logs.
"""


def differences(config: Any, preset: str, world_size: int) -> dict[str, tuple[Any, Any]]:
    """The resolved keys in which a configuration differs from a preset, with both values."""
    found, expected = (
        dict(flatten(resolve_config(each, world_size=world_size).model_dump()))
        for each in (config, load_config(PRESETS / f"{preset}.yaml"))
    )
    return {
        key: (found.get(key), expected.get(key))
        for key in sorted(found.keys() | expected.keys())
        if found.get(key) != expected.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in OURS)
    }


def test_mindformers_13b_with_its_base_files_is_the_preset() -> None:
    opened = open_config(ORIGINALS / "mindformers_r0.3" / "run_gpt2_13b.yaml")
    assert opened.system == "MindFormers"
    assert differences(opened.config, "run_gpt2_13b", 32) == {
        "context.save_graphs_path": ("./graph", None),
        "data.split": ("1,0,0", "949,50,1"),  # a validation has files of its own there
        # of no part: embedding, attention and hidden dropout are given
        "model.dropout": (0.0, 0.1),
        "parallel.full_batch": (True, None),
        "parallel.parallel_mode": ("semi_auto_parallel", None),
        "parallel.strategy_ckpt_config.save_file": ("./ckpt_strategy.ckpt", None),
        "train.sink_size": (2, 1),
    }


@pytest.mark.parametrize(("name", "devices"), [("run_gpt2", 8), ("run_gpt2_52b", 128)])
def test_mindformers_smallest_and_largest_run_are_the_presets(name, devices) -> None:
    """But for keys that change no result on the devices of the preset."""
    opened = open_config(ORIGINALS / "mindformers_r0.3" / f"{name}.yaml")
    without_effect = {
        "data.split", "context.save_graphs_path", "context.max_device_memory", "model.dropout",
        "parallel.parallel_mode", "parallel.full_batch", "train.sink_size",
        "parallel.strategy_ckpt_config.save_file",
    }  # fmt: skip
    found = differences(opened.config, name, devices)
    # its data have only the column input_ids, and the compiler's graphs have one mask
    masks = {"data.eod_mask_loss": ("targets", False), "data.eod_id": (50256, None)}
    assert {key: found.pop(key, None) for key in masks} == (
        masks if devices == 8 else dict.fromkeys(masks)
    )
    assert found.keys() <= without_effect
    assert ("parallel.parallel_mode" in found) == (devices == 128)  # where it is by itself


NEUTRAL: dict[str, Any] = {
    "context": {
        "mode": 0, "device_target": "Ascend", "enable_graph_kernel": False,
        "graph_kernel_flags": "--enable_parallel_fusion=true", "max_call_depth": 10000,
        "max_device_memory": "30GB", "save_graphs": False, "save_graphs_path": "./graph",
        "device_id": 0,
    },
    "parallel": {
        "gradients_mean": True, "loss_repeated_mean": True, "enable_alltoall": False,
        "full_batch": True, "search_mode": "sharding_propagation",
        "enable_parallel_optimizer": True,
        "strategy_ckpt_config": {"save_file": "./s.ckpt", "only_trainable_params": False},
    },
    "parallel_config": {
        "expert_parallel": 1, "context_parallel": 1, "use_seq_parallel": True,
        "micro_batch_num": 4, "vocab_emb_dp": True, "gradient_aggregation_group": 4,
    },
    "micro_batch_interleave_num": 1,
    "recompute_config": {
        "recompute": True, "select_comm_recompute": False,
        "parallel_optimizer_comm_recompute": True, "mp_comm_recompute": False,
        "recompute_slice_activation": True,
    },
    "swap_config": {"swap": False},
}  # fmt: skip
"""Sections of MindFormers' files that say how a device is used, and keys that tune it: no result
depends on them.
"""


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2), (8, 1, 1), (1, 8, 1)])
@pytest.mark.parametrize(
    ("words", "graph"),
    [
        (["device=npu"], 0), (["device=cpu"], 0), (["device=cpu"], 1), (["device=auto"], 0),
        (["backend=torch", "device=cpu"], 0), (["backend=torch", "device=npu"], 1),
    ],
)  # fmt: skip
def test_keys_that_change_no_result_pass_everywhere(layout, words, graph, tmp_path) -> None:
    """On every backend and device, in both modes of the context, on one device and several."""
    text = (ORIGINALS / "mindformers_r1.yaml").read_text()
    tree = yaml.safe_load(text) | copy.deepcopy(NEUTRAL)
    tree["context"]["mode"] = graph
    tree["parallel"]["parallel_mode"] = 3 if graph else 1
    names = ("data_parallel", "model_parallel", "pipeline_stage")
    tree["parallel_config"] |= dict(zip(names, layout, strict=True))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = [*words, "model.num_heads=8"]
    opened = open_config(tmp_path / "run.yaml", words)
    found = resolve_config(opened.config, world_size=math.prod(layout))
    assert tuple(getattr(found.parallel, name) for name in names) == layout
    assert found.parallel.zero_stage == (layout[0] > 1)
    assert found.train.recompute == ("none" if graph and "backend=torch" not in words else "full")
    if found.device == "auto":
        assert check_here(found, tmp_path) == "cpu"


@pytest.mark.parametrize("words", [["backend=torch"], ["device=cpu"], ["device=auto"], []])
def test_the_tutorials_sections_below_our_bases_run_everywhere(words, tmp_path) -> None:
    """Keys without effect are named by --show_config and in a line of the log; the rest is kept."""
    path = tmp_path / "tutorial.yaml"
    path.write_text(TUTORIAL.format(folder=PRESETS))
    opened = open_config(path, words)
    found = resolve_config(opened.config, world_size=32)
    shipped = resolve_config(load_config(PRESETS / "run_gpt2_13b.yaml"), world_size=32)
    parts = {"data_parallel", "model_parallel", "pipeline_stage", "zero_stage"}
    assert found.parallel.model_dump(include=parts) == shipped.parallel.model_dump(include=parts)
    assert found.train.global_batch_size == 192 and found.train.recompute == "full"
    # with a pipeline vocab_emb_dp is false in r0.3, whatever the file says
    assert splits_vocabulary(found)
    if words:
        assert "parallel.full_batch" in opened.yaml
        assert "have no effect here" in (opened.remark or "")
    else:  # on Ascends all of it acts
        assert (opened.yaml, opened.remark, found.device) == ("", None, "npu")
        said = {"parallel_mode": "semi_auto_parallel", "full_batch": True, "vocab_emb_dp": True}
        assert found.parallel == shipped.parallel.model_copy(update=said)
        assert found.train == shipped.train
    (tmp_path / "again.yaml").write_text(opened.yaml or dump_config(opened.config))
    assert load_config(tmp_path / "again.yaml") == opened.config


SCRIPTS = {
    "pretrain_gpt_345M_mp8_qat": (
        "Engine.max_steps=100000", "Model.hidden_dropout_prob=0.0",
        "Model.attention_probs_dropout_prob=0.0", "Model.use_recompute=False",
        "Optimizer.lr.decay_steps=72000", "Optimizer.weight_decay=0.02",
        "Optimizer.lr.max_lr=5.0e-6", "Optimizer.lr.min_lr=1.0e-6",
    )
}  # fmt: skip
"""Overrides behind the file in a script of FleetX: qat_gpt_345M_mp8.sh, of release 2.4."""


@pytest.mark.parametrize(
    ("name", "preset", "devices"),
    [
        ("pretrain_gpt_345M_single_card", "run_gpt2_345m_fleetx", 1),
        ("pretrain_gpt_345M_mp8_qat", "run_gpt2_345m_fleetx_qat", 8),
        ("pretrain_gpt_1.3B_dp8", "run_gpt2_1.3b_fleetx", 8),
        ("pretrain_gpt_6.7B_sharding16", "run_gpt2_6.7b", 16),
        ("pretrain_gpt_175B_mp8_pp16", "run_gpt2_175b", 128),
    ],
)
def test_fleetx_runs_are_the_presets(name, preset, devices) -> None:
    opened = open_config(ORIGINALS / "fleetx" / f"{name}.yaml", SCRIPTS.get(name, ()))
    # theirs is the padded size
    expected = {"model.vocab_size": (51200 if "175b" in preset else 50304, 50257)}
    expected["data.eod_id"] = (50256, None)  # that of the data's tokenizer
    if "6.7b" in preset:
        expected["parallel.shard_size"] = (16, None)  # all 16 ranks, said
    assert differences(opened.config, preset, devices) == expected


def test_fleetx_overrides_and_generation() -> None:
    theirs = {
        "Engine.save_load.ckpt_dir": "out/epoch_0_step_1", "Model.hidden_size": "512",
        "Data.Train.dataset.split.0": "900", "Generation.top_k": "7",
        "Generation.input_text": "[CLS]Hi, [1]", "Optimizer.lr.name": "LinearDecayWithWarmup",
    }  # fmt: skip
    words = ["predict.temperature=0.5", *(f"{key}={value}" for key, value in theirs.items())]
    folder = ORIGINALS / "fleetx"
    config = open_config(folder / "generation_gpt_345M_dp8.yaml", words).config
    found = dict(flatten(config.model_dump()))
    expected = {
        "predict.strategy": "sampling", "predict.top_k": 7, "predict.top_p": 0.75,
        "predict.temperature": 0.5, "predict.prompt": ["[CLS]Hi, [1]"],
        "predict.min_new_tokens": 1, "predict.max_new_tokens": 200, "model.hidden_size": 512,
        "checkpoint.load": "out/epoch_0_step_1", "data.split": "900,50,1",
        "optimizer.schedule_start": 0,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    cosine = open_config(folder / "pretrain_gpt_345M_single_card.yaml").config  # Paddle steps it
    assert cosine.optimizer.schedule_start == 1


def test_an_override_fills_a_section_that_the_file_leaves_empty(tmp_path) -> None:
    base = ORIGINALS / "fleetx" / "pretrain_gpt_345M_single_card.yaml"
    (tmp_path / "own.yaml").write_text(f"_base_: {base}\nOffline_Eval:\n")
    opened = open_config(tmp_path / "own.yaml", ["Offline_Eval.batch_size=3"])
    assert opened.config.evaluation.batch_size == 3


COMMON = """--lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-fraction .01 \
--weight-decay 1e-2 --clip-grad 1.0
 --train-iters 500000 --log-interval 100 --save-interval 100000 --eval-interval 1000 \
--eval-iters 10 --split 949,50,1
 --attention-dropout 0.0 --hidden-dropout 0.0 --data-path data/my-gpt_text_sentence \
--vocab-file data/gpt2-vocab.json
 --merge-file data/gpt2-merges.txt --data-impl mmap --distributed-backend nccl \
--num-workers 16 --seed 1234 --fp16
 --save ckpts/ckpts_tmp --load ckpts/ckpts_tmp --tensorboard-dir ckpts/ckpts_tmp/tensorboard_dir
 --initial-loss-scale 4096 --loss-scale-window 500 --hysteresis 2"""
RECOMPUTED = " --checkpoint-activations --deepspeed-activation-checkpointing"
MODELZOO = {
    # size: (tensor, pipeline), (width, layers, heads, positions), (global, micro), (rate, least)
    "run_gpt2_345m_modelzoo": ((1, 2), (1024, 24, 16, 1024), (16, 4), ("1.5e-4", "1.5e-5")),
    "run_gpt2_1.3b_modelzoo": ((2, 2), (2048, 24, 16, 1024), (32, 8), ("2e-4", "2e-5")),
    "run_gpt2_2.7b": ((2, 2), (2560, 32, 32, 2048), (32, 8), ("1.6e-4", "1.6e-5")),
    "run_gpt2_3.7b": ((2, 2), (3072, 32, 32, 2048), (16, 4), ("1.2e-4", "1.2e-5")),
    "run_gpt2_345m_modelzoo_without_mp": (
        (1, 1),
        (1024, 24, 16, 1024),
        (64, 8),
        ("1.5e-4", "1e-5"),
    ),
}


def modelzoo_flags(preset: str) -> str:
    layout, sizes, batch, rates = MODELZOO[preset]
    names = {
        "tensor-model-parallel-size": layout[0], "pipeline-model-parallel-size": layout[1],
        "num-layers": sizes[1], "hidden-size": sizes[0], "num-attention-heads": sizes[2],
        "seq-length": sizes[3], "max-position-embeddings": sizes[3],
        "micro-batch-size": batch[1], "global-batch-size": batch[0], "lr": rates[0],
        "min-lr": rates[1],
    }  # fmt: skip
    text = " ".join(f"--{name} {value}" for name, value in names.items())
    return f"{text} {COMMON}" + (" --loss-scale 65536" if "without_mp" in preset else RECOMPUTED)


@pytest.mark.parametrize("preset", MODELZOO)
def test_the_modelzoos_flags_are_the_presets(preset, tmp_path) -> None:
    file, text = tmp_path / "flags.txt", modelzoo_flags(preset).replace("\n", " \\\n")
    file.write_text(f"python3 run.py pretrain_gpt.py {text}")
    opened = open_flags("megatron", read_command(file)[2], where=str(file))
    assert opened.system == "Megatron"
    assert differences(opened.config, preset, 8) == {}
    assert opened.config.data.train == ["data/my-gpt_text_sentence"]


SMALL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8"


def megatron_of(text: str) -> Any:
    return open_flags("megatron", f"{SMALL} --lr 1e-4 --micro-batch-size 4 {text}".split())


def test_megatrons_growing_batch_is_ours() -> None:
    """train-samples are counted as by update_train_iters of its training.py: whole batches."""
    batch = "--micro-batch-size 2 --global-batch-size 12 --rampup-batch-size 4 4 24"
    config = megatron_of(f"{batch} --train-samples 75").config
    assert (config.train.rampup_batch_size, config.train.global_batch_size) == ([4, 4, 24], 12)
    steps = resolve_config(config, samples_per_epoch=1).train.max_steps
    assert steps == 8  # 3 x 4, 2 x 8, 3 x 12 = 64 samples, and 76 would be too many


@pytest.mark.parametrize(("system", "rate"), [("megatron", "--lr"), ("oneflow", "--learning-rate")])
@pytest.mark.parametrize(("ranks", "steps"), [(1, 10), (2, 5)])
def test_the_length_of_a_run_in_samples_follows_the_ranks(system, rate, ranks, steps) -> None:
    """The global batch is micro batch x data parallel where it is left out."""
    text = f"{SMALL} {rate} 1e-4 --micro-batch-size 4 --train-samples 40"
    opened = open_flags(system, text.split())
    resolved = resolve_config(opened.config, world_size=ranks)
    assert resolved.train.max_steps == steps


@pytest.mark.parametrize(
    ("text", "words", "mode", "ranks", "samples"),
    [
        ("--eval-iters 3", [], "train", 1, 3 * 4),
        ("--eval-iters 3", [], "train", 2, 3 * 4 * 2),
        ("--eval-iters 3", [], "eval", 2, 3 * 4),
        ("--global-batch-size 8", [], "eval", 1, 100 * 8),
        ("--global-batch-size 8", ["validation.max_samples=7"], "train", 1, 7),
    ],
)
def test_the_length_of_a_validation_in_batches_follows_the_ranks(
    text, words, mode, ranks, samples
) -> None:
    flags = f"{SMALL} --lr 1e-4 --micro-batch-size 4 --train-iters 5 {text}".split()
    resolved = resolve_mode(open_flags("megatron", flags, words).config, mode, world_size=ranks)
    assert resolved.validation.max_samples == samples


def test_a_dropout_that_is_left_out_is_megatrons() -> None:
    """Beside --hidden-dropout 0.0 attention keeps its 0.1; our defaults are not listed."""
    opened = megatron_of("--train-iters 5 --hidden-dropout 0.0")
    assert "  attention_dropout: 0.1  # not given: as in Megatron\n" in opened.yaml
    assert "beta1" not in opened.yaml and "weight_decay: 0.01" in opened.yaml
    model = resolve_config(opened.config).model
    assert (model.hidden_dropout, model.embedding_dropout, model.attention_dropout) == (0, 0, 0.1)


@pytest.mark.parametrize("text", ["0:8 1K:16, 4K:32", "4000:32 0:8 1e3:16", "0:8 .5:16"])
def test_megatrons_sizes_by_tokens_are_ours(text: str) -> None:
    """In samples of 8 tokens, as in its num_microbatches_calculator.py of 2026."""
    flags = f"{SMALL} --lr 1e-4 --micro-batch-size 4 --train-samples 800".split()
    words = [*flags, "--step-batch-size-schedule", text]
    if "e" in text or text.endswith(".5:16"):
        with pytest.raises(ConfigError, match=r"expected TOKENS:SIZE TOKENS:SIZE \.\.\., such as"):
            open_flags("megatron", words)
        return
    train = open_flags("megatron", words).config.train
    assert (train.rampup_batch_size, train.global_batch_size) == (
        [[0, 8], [125, 16], [500, 32]], 32,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="keep one of them"):
        open_flags("megatron", [*words, "--global-batch-size", "64"])


BECOME: dict[str, dict[str, Any]] = {
    # flags: keys. Megatron-LM, megatron/training/checkpointing.py load_checkpoint and others
    "--load x --save y --finetune": {"checkpoint.init_from": "x", "checkpoint.resume": "auto"},
    "--load x --save y --finetune --no-load-optim --no-load-rng": {"checkpoint.init_from": "x"},
    "--load x --save y": {"checkpoint.init_from": None, "checkpoint.resume": "x"},
    "--load x --save x": {"checkpoint.init_from": None, "checkpoint.resume": "auto"},
    "--save y --finetune --no-load-optim --use-checkpoint-args": {
        "checkpoint.init_from": None, "checkpoint.resume": "auto"},
    "--load x --save x --pretrained-checkpoint p": {
        "checkpoint.init_from": "p", "checkpoint.resume": "auto"},
    "--load x --save x --override-opt-param-scheduler": {"checkpoint.resume": "auto"},
    "--wandb-project gpt": {"logging.trackers": ["wandb"], "logging.project": "gpt"},
    "--wandb-exp-name first": {
        "logging.trackers": [], "data.reset_position_ids": False,
        "data.reset_attention_mask": False, "data.eod_mask_loss": False},
    "--reset-position-ids --reset-attention-mask --eod-mask-loss": {
        "data.reset_position_ids": True, "data.reset_attention_mask": True,
        "data.eod_mask_loss": True},
    "--reset-position-ids": {"data.reset_position_ids": True, "data.eod_mask_loss": False},
    "--recompute-granularity full --recompute-num-layers 1 --recompute-method block": {
        "train.recompute": "full", "train.recompute_layers": 1},
    "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform": {
        "train.recompute": "full", "train.recompute_layers": None},
}  # fmt: skip


@pytest.mark.parametrize("text", BECOME)
def test_megatrons_flags_become_keys(text: str) -> None:
    found = dict(flatten(megatron_of(f"--train-iters 5 {text}").config.model_dump()))
    assert {key: found[key] for key in BECOME[text]} == BECOME[text]


@pytest.mark.parametrize(
    ("given", "warmup", "decay"),
    [
        ("", 0, 10_000),
        ("--lr-warmup-fraction 0.1", 1000, 10_000),
        ("--lr-warmup-samples 320 --lr-decay-samples 8000", 320, 8000),
        ("--lr-warmup-fraction 0.1 --lr-decay-samples 8000", 800, 8000),
    ],
)
def test_megatrons_schedule_counts_samples(given: str, warmup: int, decay: int) -> None:
    """The end is that of the samples to train on, and a fraction is of the end, as in
    get_optimizer_param_scheduler of its training.py.
    """
    batch = "--micro-batch-size 8 --global-batch-size 32 --rampup-batch-size 8 8 1000"
    words = f"{SMALL} --lr 1e-3 {batch} --train-samples 10000 {given}".split()
    config = resolve_config(open_flags("megatron", words).config, samples_per_epoch=100)
    optimizer = config.optimizer
    found = (optimizer.schedule_unit, optimizer.warmup, optimizer.decay)
    assert found == ("samples", warmup, decay)
    if warmup == 1000:
        rates = [
            learning_rate(optimizer, config.batch_sizes.samples_after(updates))
            for updates in (10, 36, 100)
        ]  # of megatron-core 0.16.1's OptimizerParamScheduler after as many updates
        assert rates == pytest.approx([8e-5, 2.88e-4, 9.17e-4], rel=1e-3)


def test_oneflows_flags_are_the_preset() -> None:
    script = ORIGINALS / "oneflow" / "distribute_pretrain_4n8d_2x4x4_512_2304x24.sh"
    assert differences(open_config(script).config, "run_gpt2_2304x24", 32) == {}


def test_convert_config_refuses_another_system_and_a_file_of_ours(tmp_path, capsys) -> None:
    """That what it writes is the same run, test_originals.py says of each file."""
    name, own = str(ORIGINALS / "mindformers_r1.yaml"), str(tmp_path / "ours.yaml")
    assert convert_config.main([name, "--output", own]) == 0
    assert open_config(own).system is None
    assert convert_config.main(["--from", "fleetx", name]) == 2
    assert "not in those of --from fleetx" in capsys.readouterr().err
    assert convert_config.main([own]) == 2
    assert "is in the words of this project already" in capsys.readouterr().err


def test_convert_config_takes_flags(capsys) -> None:
    flags = modelzoo_flags("run_gpt2_2.7b").split()
    assert convert_config.main(["--from", "megatron", "--", *flags]) == 0
    text = capsys.readouterr().out
    assert "model_parallel: 2  # tensor_model_parallel_size" in text
    assert "#   distributed_backend: the device says how ranks talk" in text
    assert convert_config.main(["--from", "megatron"]) == 2
    assert "give a file of flags, or the flags behind --" in capsys.readouterr().err


def test_a_file_of_fleetx_that_is_not_there_names_the_way_that_works() -> None:
    name = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"
    with pytest.raises(ConfigError) as caught:
        open_config(name)
    said = str(caught.value)
    assert "work in your checkout with PYTHONPATH=" in said
    folder = re.findall(r"PYTHONPATH=(\S+),", said)[0]
    assert (Path(folder) / "paddle" / "distributed" / "launch.py").is_file()
    assert load_config(re.findall(r"the preset of this run is (\S+)", said)[0])


MERGED = {
    "FleetX": (
        "x-sizes: &sizes {hidden_size: 64, num_layers: 2, num_attention_heads: 4}\n"
        "common: {name: &name x-more, window: &window 32}\n"
        "Model: {<<: *sizes, num_layers: 3, vocab_size: 50304}\n"
        "Data: {Train: {dataset: {input_dir: a, max_seq_len: *window}}}\n"
        "Global: {local_batch_size: 1, micro_batch_size: 1}\n"
        "Optimizer: {lr: {max_lr: 1.0e-4}}\n"
    ),
    "MindFormers": (
        "x-sizes: &sizes {hidden_size: 64, num_layers: 2, num_heads: 4}\n"
        "common: {name: &name x-more, window: &window 32}\n"
        "model: {model_config: {<<: *sizes, num_layers: 3, seq_length: *window}}\n"
        "runner_config: {epochs: 1, batch_size: 1}\n"
        "lr_schedule: {type: constant, learning_rate: 1.0e-4}\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("system", MERGED)
def test_merge_keys_and_sections_with_only_anchors(system: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(MERGED[system])
    model = open_config(path).config.model
    sizes = (model.hidden_size, model.num_layers, model.num_heads, model.seq_length)
    assert sizes == (64, 3, 4, 32)
    path.write_text(MERGED[system].replace("x-sizes: &sizes {", "x-sizes: &sizes {hiden_size: 1, "))
    with pytest.raises(ConfigError, match=r"own.yaml:1: .*hiden_size: unknown key; did you mean"):
        open_config(path)
    for more in ("x-more: 3", "x-more: *window", "*name : 3"):
        path.write_text(f"{MERGED[system]}{more}\n")
        with pytest.raises(ConfigError, match=r"own.yaml:[267]?: x-more: unknown key"):
            open_config(path)
    *lines, last = MERGED[system].splitlines()
    path.write_text("\n".join((f"x-more: &more {{{last}}}", "<<: *more", *lines)))
    assert open_config(path).config.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(("system", "rate"), [("Megatron", "--lr"), ("OneFlow", "--learning-rate")])
def test_a_file_of_flags_is_a_configuration(system, rate, tmp_path) -> None:
    """The names of flags show the system they belong to."""
    (tmp_path / "run.sh").write_text(f"torchrun pretrain.py {rate} 1e-4 \\\n {SMALL}")
    opened = open_config(tmp_path / "run.sh", ["train.max_steps=3", "train.micro_batch_size=1"])
    config = opened.config
    found = (opened.system, config.optimizer.learning_rate, config.train.max_steps)
    assert found == (system, 1e-4, 3)


def test_lines_around_the_flags_are_skipped(tmp_path) -> None:
    text = "set -e\npython3 run.py --include localhost:0,1 pretrain_gpt.py \\\n  --lr -1e-4 \\\n"
    (tmp_path / "run.sh").write_text(f"{text}  --split 9,1,0 2>&1 | tee log --flush\necho done\n")
    assert read_command(tmp_path / "run.sh")[2] == ["--lr", "-1e-4", "--split", "9,1,0"]
    (tmp_path / "run.sh").write_text("python -m oneflow_gpt.training --seed 1 &\nwait\n")
    assert read_command(tmp_path / "run.sh")[2] == ["--seed", "1"]


@pytest.mark.parametrize("detached", ["", "1"])
def test_flags_stay_for_ranks_that_read_them_later(
    detached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETACH", detached)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = ["model.hidden_size=8", "model.num_heads=1", "train.max_steps=1"]
    files, words = [], ["--num-layers", "2"]

    def main(argv: list[str], *, program: str) -> int:
        files.append(Path(argv[1]))
        assert read_command(files[0]) == ("command line", "oneflow_gpt.training", words)
        assert open_config(files[0], own).system == "OneFlow"  # no flag says it
        return 7

    assert main_with_flags(main, words, "oneflow_gpt.training") == 7
    assert files[0].exists() == bool(detached)


@pytest.mark.parametrize("entry", ["pretrain_gpt.py", "oneflow_gpt.training", "run_gpt2.py"])
def test_a_dry_run_on_one_device_shows_the_plan(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.chdir(tmp_path)
    rate = "--learning-rate" if "oneflow" in entry else "--lr"
    flags = f"{SMALL} {rate} 1e-4 --micro-batch-size 4 --train-iters 2 --save ck".split()
    main = run_gpt2.main
    if "oneflow" in entry:
        main = start_nodes_devices(main, lambda _: 1, flags)
    if entry == "run_gpt2.py":
        (tmp_path / "flags.txt").write_text(" ".join(flags))
        assert main(["--config", "flags.txt", "--run_mode", "train"]) == 0
    else:
        assert main_with_flags(main, flags, entry) == 0
    assert "\nworld: 1 rank" in capsys.readouterr().out
    assert not (tmp_path / "ck").exists()

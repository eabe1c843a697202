"""Command lines of Megatron, OneFlow and GPT2-Chinese, and scripts with them, in our words."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest

import run_gpt2
from common.config.load import flatten
from common.errors import ConfigError
from common.parallel.learning_rate import learning_rate
from common.resolve.derive import resolve_config, resolve_mode
from common.run_config import load_config
from common.systems.config import COMMAND_LINES, find_command_line, open_config, open_flags
from common.systems.flags import read_command
from common.systems.oneflow.flags import start_nodes_devices
from compat.programs import main_with_flags
from tests.common.systems.test_config import ORIGINALS, PRESETS, differences
from tools import convert_config

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
    # preset: (tensor, pipeline), (width, layers, heads, positions), (global, micro), (rate, least)
    "run_gpt2_345m_modelzoo": ((1, 2), (1024, 24, 16, 1024), (16, 4), ("1.5e-4", "1.5e-5")),
    "run_gpt2_1.3b_modelzoo": ((2, 2), (2048, 24, 16, 1024), (32, 8), ("2e-4", "2e-5")),
    "run_gpt2_2.7b": ((2, 2), (2560, 32, 32, 2048), (32, 8), ("1.6e-4", "1.6e-5")),
    "run_gpt2_3.7b": ((2, 2), (3072, 32, 32, 2048), (16, 4), ("1.2e-4", "1.2e-5")),
    "run_gpt2_345m_modelzoo_without_mp": (
        (1, 1), (1024, 24, 16, 1024), (64, 8), ("1.5e-4", "1e-5")),
}  # fmt: skip


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


BASES = {
    "megatron": f"{SMALL} --lr 1e-4 --micro-batch-size 4",
    "oneflow": f"{SMALL} --learning-rate 1e-4 --micro-batch-size 4",
}
FIVE = "--train-iters 5"
LENGTHS: dict[tuple[str, str, str, int], dict[str, Any]] = {
    # system, flags, mode, ranks: keys of the resolved run. The global batch is micro batch x data
    # parallel where it is left out; samples are counted in whole batches, as by
    # update_train_iters of Megatron's training.py: 3 x 4, 2 x 8, 3 x 12 = 64, and 76 are too many
    ("megatron", "--micro-batch-size 2 --global-batch-size 12 --rampup-batch-size 4 4 24"
     " --train-samples 75", "train", 1): {
        "train.rampup_batch_size": [4, 4, 24], "train.global_batch_size": 12, "train.max_steps": 8},
    ("megatron", "--train-samples 40", "train", 1): {"train.max_steps": 10},
    ("megatron", "--train-samples 40", "train", 2): {"train.max_steps": 5},
    ("oneflow", "--train-samples 40", "train", 2): {"train.max_steps": 5},
    ("megatron", f"{FIVE} --eval-iters 3", "train", 2): {"validation.max_samples": 3 * 4 * 2},
    ("megatron", f"{FIVE} --eval-iters 3", "eval", 2): {"validation.max_samples": 3 * 4},
    ("megatron", f"{FIVE} --global-batch-size 8", "eval", 1): {"validation.max_samples": 100 * 8},
}  # fmt: skip


@pytest.mark.parametrize("row", LENGTHS, ids=lambda row: " ".join(map(str, row)))
def test_lengths_in_samples_and_batches_follow_the_ranks(row: tuple[str, str, str, int]) -> None:
    system, text, mode, ranks = row
    config = open_flags(system, f"{BASES[system]} {text}".split()).config
    found = dict(flatten(resolve_mode(config, mode, world_size=ranks).model_dump()))
    assert {key: found[key] for key in LENGTHS[row]} == LENGTHS[row]


def test_a_dropout_that_is_left_out_is_megatrons() -> None:
    """Beside --hidden-dropout 0.0 attention keeps its 0.1; our defaults are not listed."""
    opened = open_flags("megatron", f"{BASES['megatron']} {FIVE} --hidden-dropout 0".split())
    assert "  attention_dropout: 0.1  # not given: as in Megatron\n" in opened.yaml
    assert "beta1" not in opened.yaml and "weight_decay: 0.01" in opened.yaml
    model = resolve_config(opened.config).model
    assert (model.hidden_dropout, model.embedding_dropout, model.attention_dropout) == (0, 0, 0.1)


@pytest.mark.parametrize("text", ["0:8 1K:16, 4K:32", "4000:32 0:8 1e3:16", "0:8 .5:16"])
def test_megatrons_sizes_by_tokens_are_ours(text: str) -> None:
    """In samples of 8 tokens, as in its num_microbatches_calculator.py of 2026."""
    words = f"{BASES['megatron']} --train-samples 800 --step-batch-size-schedule".split()
    words.append(text)
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
    # system and flags: keys; of Megatron-LM, load_checkpoint and others
    "megatron --load x --save y --finetune": {
        "checkpoint.init_from": "x", "checkpoint.resume": "auto"},
    "megatron --load x --save y": {"checkpoint.init_from": None, "checkpoint.resume": "x"},
    "megatron --load x --save x": {"checkpoint.init_from": None, "checkpoint.resume": "auto"},
    "megatron --save y --finetune --no-load-optim --use-checkpoint-args": {
        "checkpoint.init_from": None, "checkpoint.resume": "auto"},
    "megatron --load x --save x --pretrained-checkpoint p": {
        "checkpoint.init_from": "p", "checkpoint.resume": "auto"},
    "megatron --load x --save x --override-opt-param-scheduler": {"checkpoint.resume": "auto"},
    "megatron --wandb-project gpt": {"logging.trackers": ["wandb"], "logging.project": "gpt"},
    "megatron --wandb-exp-name first": {
        "logging.trackers": [], "data.reset_position_ids": False,
        "data.reset_attention_mask": False, "data.eod_mask_loss": False},
    "megatron --reset-position-ids --reset-attention-mask --eod-mask-loss": {
        "data.reset_position_ids": True, "data.reset_attention_mask": True,
        "data.eod_mask_loss": True},
    "megatron --reset-position-ids": {"data.reset_position_ids": True, "data.eod_mask_loss": False},
    "megatron --recompute-granularity full --recompute-num-layers 1 --recompute-method block": {
        "train.recompute": "full", "train.recompute_layers": 1},
    "megatron --recompute-granularity full --recompute-num-layers 1 --recompute-method uniform": {
        "train.recompute": "full", "train.recompute_layers": None},
    "gpt2_chinese --epochs 3 --lr 1e-3 --warmup_steps 7 --max_grad_norm 0.5": {
        "train.max_epochs": 3, "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 7,
        "optimizer.clip_grad": 0.5, "optimizer.schedule": "linear", "data.split": "1,0,0"},
    "gpt2_chinese --batch_size 3 --gradient_accumulation 4 --log_step 9": {
        "train.micro_batch_size": 3, "train.accumulation_steps": 4, "logging.interval": 3,
        "logging.style": "gpt2-chinese"},
    "gpt2_chinese --fp16 --fp16_opt_level O3 --output_dir out/ --stride 100": {
        "precision": "pure_fp16", "output_dir": "out", "data.stride": 100},
    "gpt2_chinese": {"precision": "float32", "data.stride": 768, "train.max_epochs": 5},
    "gpt2_chinese --stride 9999": {"data.stride": 1024},
    "gpt2_chinese --tokenized_data_path ids/ --pretrained_model elsewhere": {
        "data.train": "ids/tokenized_train_text_document", "checkpoint.init_from": "elsewhere"},
    "gpt2_chinese --segment --tokenizer_path cache/vocab_seg.txt": {
        "data.tokenizer.type": "BertWordLevel",
        "data.tokenizer.vocab_file": "cache/vocab_seg.txt"},
    "gpt2_chinese --bpe_token --encoder_json own/spm.model --vocab_bpe ''": {
        "data.tokenizer.type": "SentencePieceTokenizer",
        "data.tokenizer.vocab_file": "own/spm.model"},
    "gpt2_chinese --bpe_token": {
        "data.tokenizer.type": "GPT2BPETokenizer",
        "data.tokenizer.vocab_file": "tokenizations/encoder.json",
        "data.tokenizer.merge_file": "tokenizations/vocab.bpe"},
    "gpt2_chinese_generate --prefix 1.5 --save_samples --save_samples_path out": {
        "predict.prompt": "1.5", "predict.output_file": "out/samples.txt"},
    "gpt2_chinese_generate --prefix [CLS][MASK]": {"predict.prompt": "[CLS][MASK]"},
    "gpt2_chinese_generate --model_path 007 --prefix [1]": {"checkpoint.load": "007"},
    "gpt2_chinese_generate --titles '萧炎 林动' --articles_per_title 3 --save_path made/": {
        "predict.prompt": ["萧炎", "林动"], "predict.num_sequences": 3,
        "predict.output_folder": "made", "predict.max_new_tokens": 1024},
    "gpt2_chinese_generate --titles_file titles.txt --repetition_penalty 1.2 --topk 0": {
        "predict.prompt_file": "titles.txt", "predict.repetition_penalty": 1.2,
        "predict.top_k": 0, "predict.num_sequences": 5, "predict.prompt": None},
    "gpt2_chinese_generate --batch_size 4 --temperature 0.5 --topp 0.9 --fast_pattern": {
        "predict.batch_size": 4, "predict.temperature": 0.5, "predict.top_p": 0.9,
        "predict.num_sequences": 10},
    # since April 2021: its window is a flag, and its tokenizer begins each text with [CLS]
    "gpt2_chinese_generate --n_ctx 32 --model_config config/model_config_test.json": {
        "predict.window": 32, "predict.prompt": "[CLS]我", "predict.max_new_tokens": 512,
        "checkpoint.load": "model/epoch=0-step=99.ckpt",
        "data.tokenizer.vocab_file": "vocab/vocab.txt"},
    "gpt2_chinese_generate --model_path model/a.ckpt --prefix 她 --model_config"
    " config/model_config_test.json": {"predict.window": 64, "predict.prompt": "[CLS]她"},
}  # fmt: skip


@pytest.mark.parametrize("text", BECOME)
def test_flags_become_keys(text: str) -> None:
    system, *words = shlex.split(text)
    base = f"{BASES[system]} {FIVE}".split() if system in BASES else []
    opened = open_flags(system, [*base, *words])
    tree = opened.config.model_dump() if system in BASES else opened.ours.tree
    found = dict(flatten(tree))
    assert {key: found.get(key) for key in BECOME[text]} == BECOME[text]


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


def test_convert_config_takes_flags(capsys) -> None:
    flags = modelzoo_flags("run_gpt2_2.7b").split()
    assert convert_config.main(["--from", "megatron", "--", *flags]) == 0
    text = capsys.readouterr().out
    assert "model_parallel: 2  # tensor_model_parallel_size" in text
    assert "#   distributed_backend: the device says how ranks talk" in text
    assert convert_config.main(["--from", "megatron"]) == 2
    assert "give a file of flags, or the flags behind --" in capsys.readouterr().err


SCRIPT = """#!/bin/bash
# Runs a small model
GPUS_PER_NODE=4; NNODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
export MICRO=$(( ((((((WORLD_SIZE)))) - 2)) / 3 ))
DATA="0.3 ${ROOT:-data}/a 0.7 data/b"; BLEND=$DATA
DISTRIBUTED="--nproc_per_node $GPUS_PER_NODE \\
             --nnodes $NNODES"
MODEL=(
    --num-layers 24 --hidden-size 1024  # the sizes
    --save "my folder"
)
SEED=(1 2); SEED=3; LAST=$SEED; LAST=7
MODEL+=(--seed $LAST)
cat <<'THE-END'
options=" \\
    --data-path ${BLEND} \\
    --micro-batch-size $MICRO "
cat <<EOT > ds.json
{ "steps": '$(date) }
EOT
OUT=`pwd`/log
if [ -n "$1" ]; then SIZE=$1; else SIZE=2; fi
"""
EXPECTED = [
    "--num-layers", "24", "--hidden-size", "1024", "--save", "my folder", "--seed", "7",
    "--data-path", "0.3", "data/a", "0.7", "data/b", "--micro-batch-size", "2",
]  # fmt: skip


COMMANDS = {
    "launcher": 'torchrun $DISTRIBUTED pretrain_gpt.py "${MODEL[@]}" $@ $options 2>&1 | tee "$OUT"',
    "lines": """CUDA=0 python -m torch.distributed.launch $DISTRIBUTED $OUT/pretrain_gpt.py \\
        "${MODEL[@]}" \\
        ${options} &> $OUT &
wait""",
    "sh -c": """run="python pretrain_gpt.py --num-layers 24 --hidden-size 1024 \\
        --save 'my folder' --seed 7 ${options}"
srun -l --output=$OUT sh -c "${run}"
""",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_scripts_are_followed(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT + command)
    assert read_command(file) == (str(file), "pretrain_gpt.py", EXPECTED)


def test_a_script_that_doubles_a_variable_ends(tmp_path) -> None:
    (tmp_path / "run.sh").write_text("A=ab\n" + "A=$A$A\n" * 60 + "python a.py --x $A")
    with pytest.raises(ConfigError, match=r"run.sh:2\d: the values of variables are longer"):
        read_command(tmp_path / "run.sh")


def test_other_commands_of_a_script_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    for text, words in (
        ("set -e\npython3 run.py --include localhost:0,1 pretrain_gpt.py \\\n  --lr -1e-4 \\\n"
         "  --split 9,1,0 2>&1 | tee log --flush\necho done\n",
         ["--lr", "-1e-4", "--split", "9,1,0"]),
        ("python -m oneflow_gpt.training --seed 1 &\nwait\n", ["--seed", "1"]),
        ("if x; then\npython pretrain_gpt.py --lr 2\nelse\npython tools/other.py x\nfi",
         ["--lr", "2"]),
    ):  # fmt: skip
        file.write_text(text)
        assert read_command(file)[2] == words


@pytest.mark.parametrize(("system", "rate"), [("Megatron", "--lr"), ("OneFlow", "--learning-rate")])
def test_a_file_of_flags_is_a_configuration(system, rate, tmp_path) -> None:
    """The names of flags show the system they belong to."""
    (tmp_path / "run.sh").write_text(f"torchrun pretrain.py {rate} 1e-4 \\\n {SMALL}")
    opened = open_config(tmp_path / "run.sh", ["train.max_steps=3", "train.micro_batch_size=1"])
    config = opened.config
    found = (opened.system, config.optimizer.learning_rate, config.train.max_steps)
    assert found == (system, 1e-4, 3)


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


CONFIGS = PRESETS.parents[1] / "compat" / "gpt2_chinese" / "config"
STUDY = """python3 -m torch.distributed.launch --nproc_per_node=4 train.py \\
    --model_config config/model_config.json --tokenized_data_path data/tokenized/ \\
    --tokenizer_path cache/vocab_user.txt --raw_data_path data/train.json --epochs 800 \\
    --log_step 200 --stride 512 --output_dir model/ --device 0,1,2,3 --num_pieces 100 --raw \\
    --batch_size 4 --fp16 --fp16_opt_level O2
"""
GENERATE = """python3 generate.py --device 0 --length 15000 --tokenizer_path cache/vocab_user.txt \\
    --model_path model/final_model --prefix 她 --nsamples 5 --topp 1 --temperature 1.0
"""
CHINESE_FLAGS = {
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


def test_the_flags_of_the_originals_are_all_known() -> None:
    for system, names in CHINESE_FLAGS.items():
        assert set(names.split()) <= set(COMMAND_LINES[system].table)


def test_the_study_s_train_sh_is_its_preset(tmp_path: Path) -> None:
    """On 4 ranks; it validates nothing, and saves after each epoch."""
    script = tmp_path / "train.sh"
    script.write_text(STUDY)
    found, expected = (
        dict(flatten(resolve_config(config, world_size=4).model_dump()))
        for config in (
            open_config(script).config,
            load_config(PRESETS / "run_gpt2_chinese_106m.yaml"),
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


def test_model_config_json_is_a_configuration() -> None:
    """With the defaults of train.py, which are the preset of 82M."""
    own = ("data.train=data/corpus_chinese_text_document",)
    own += ("data.tokenizer={type: BertTokenizer, vocab_file: data/vocab.txt}",)
    opened = open_config(CONFIGS / "model_config_small.json", own)
    preset = load_config(PRESETS / "run_gpt2_chinese_82m.yaml")
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


def test_the_system_of_flags() -> None:
    """By the program that a script starts, else by most names."""
    words = ["--tokenized_data_path", "x", "--stride", "5", "--model_config", "y"]
    assert find_command_line(words) == "gpt2_chinese"
    assert find_command_line(words, "eval.py") == "gpt2_chinese_eval"
    assert find_command_line(["--prefix", "她"]) == "gpt2_chinese_generate"
    assert find_command_line(["--num-layers", "2"], "pretrain_gpt.py") == "megatron"

"""Command lines of Megatron, OneFlow and GPT2-Chinese, and scripts with them, in our words."""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import run_gpt2
from common.config.load import flatten
from common.errors import ConfigError
from common.parallel.updates import learning_rate
from common.resolve.derive import resolve_config, resolve_mode
from common.run_config import load_config
from common.systems.config import COMMAND_LINES, find_command_line, open_config, open_flags
from common.systems.flags import read_command
from common.systems.oneflow.flags import start_nodes_devices
from compat.programs import main_with_flags
from tests.common.systems.test_config import ORIGINALS, PRESETS, differences
from tools import convert_config

MODELZOO = {
    # preset: (tensor, pipeline), (width, layers, heads, positions), (global, micro), (rate, least)
    "run_gpt2_345m_modelzoo": ((1, 2), (1024, 24, 16, 1024), (16, 4), ("1.5e-4", "1.5e-5")),
    "run_gpt2_1.3b_modelzoo": ((2, 2), (2048, 24, 16, 1024), (32, 8), ("2e-4", "2e-5")),
    "run_gpt2_2.7b": ((2, 2), (2560, 32, 32, 2048), (32, 8), ("1.6e-4", "1.6e-5")),
    "run_gpt2_3.7b": ((2, 2), (3072, 32, 32, 2048), (16, 4), ("1.2e-4", "1.2e-5")),
    "run_gpt2_345m_modelzoo_without_mp": (
        (1, 1), (1024, 24, 16, 1024), (64, 8), ("1.5e-4", "1e-5")),
}  # fmt: skip


def modelzoo_flags(preset: str) -> list[str]:
    """Return the flags of the original script with those of another size behind them. The scale
    of the loss is in flags, where DeepSpeed is not used.
    """
    words = read_command(ORIGINALS / "modelzoo" / "train_345M.sh")[2]
    words = words[: words.index("--deepspeed")]
    text = " --initial-loss-scale 4096 --loss-scale-window 500 --hysteresis 2"
    if "without_mp" in preset:
        words = words[: words.index("--checkpoint-activations")]
        text += " --loss-scale 65536"
    layout, sizes, batch, rates = MODELZOO[preset]
    names = {
        "tensor-model-parallel-size": layout[0], "pipeline-model-parallel-size": layout[1],
        "num-layers": sizes[1], "hidden-size": sizes[0], "num-attention-heads": sizes[2],
        "seq-length": sizes[3], "max-position-embeddings": sizes[3],
        "micro-batch-size": batch[1], "global-batch-size": batch[0], "lr": rates[0],
        "min-lr": rates[1],
    }  # fmt: skip
    own = " ".join(f"--{name} {value}" for name, value in names.items())
    return [*words, *text.split(), *own.split()]


@pytest.mark.parametrize("preset", MODELZOO)
def test_the_modelzoos_flags_are_the_presets(preset: str) -> None:
    opened = open_flags("megatron", modelzoo_flags(preset))
    assert opened.system == "Megatron"
    assert differences(opened.config, preset, 8) == {}
    assert opened.config.data.train == ["./data/my-gpt_text_sentence"]


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
    assert not opened.ours.without_effect, "flags that were not given are not listed"
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


BECOME = yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("system", "text", "keys"), [(system, *row) for system in BECOME for row in BECOME[system]])
def test_flags_become_keys(system: str, text: str, keys: dict[str, Any]) -> None:
    base = f"{BASES[system]} {FIVE}".split() if system in BASES else []
    opened = open_flags(system, [*base, *shlex.split(text)])
    tree = opened.config.model_dump() if system in BASES else opened.ours.tree
    found = dict(flatten(tree))
    assert {key: found.get(key) for key in keys} == keys


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
            learning_rate(optimizer, config.batch_sizes.samples_after(updates)) for updates in (10, 36, 100)
        ]  # of megatron-core 0.16.1's OptimizerParamScheduler after as many updates
        assert rates == pytest.approx([8e-5, 2.88e-4, 9.17e-4], rel=1e-3)


def test_oneflows_flags_are_the_preset() -> None:
    script = ORIGINALS / "oneflow" / "distribute_pretrain_4n8d_2x4x4_512_2304x24.sh"
    assert differences(open_config(script).config, "run_gpt2_2304x24", 32) == {}


def test_convert_config_takes_flags(capsys) -> None:
    flags = modelzoo_flags("run_gpt2_2.7b")
    assert convert_config.main(["--from", "megatron", "--", *flags]) == 0
    text = capsys.readouterr().out
    assert "model_parallel: 2  # tensor_model_parallel_size" in text
    assert "#   distributed_backend: the device says how ranks talk" in text
    assert convert_config.main(["--from", "megatron"]) == 2
    assert "give a file of flags, or the flags behind --" in capsys.readouterr().err


SCRIPT = Path(__file__).with_name("script.txt").read_text()
"""What of a shell is followed, and what only a shell knows."""
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
CHINESE = ORIGINALS / "gpt2_chinese"


def test_the_flags_of_the_originals_are_all_known() -> None:
    for line in (CHINESE / "flag_names.txt").read_text().splitlines()[1:]:
        system, *names = line.split()
        assert set(names) <= set(COMMAND_LINES[system].table)


def test_the_study_s_train_sh_is_its_preset() -> None:
    """On 4 ranks; it validates nothing, and saves after each epoch."""
    found, expected = (
        dict(flatten(resolve_config(config, world_size=4).model_dump()))
        for config in (open_config(CHINESE / "train.sh").config, load_config(PRESETS / "run_gpt2_chinese_106m.yaml"))
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
    text = (CHINESE / "generate.sh").read_text(encoding="utf-8")
    script.write_text(text.replace("model/final_model", str(weights)))
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
    flags = ["--model_config", str(tmp_path / "model.json")]
    opened, off = (open_flags("gpt2_chinese", flags, own) for own in ([], ["model.dropout=0"]))
    assert resolve_config(off.config).model.attention_dropout == 0
    model = opened.config.model
    assert (model.hidden_size, model.num_layers, model.num_heads) == (768, 12, 12)
    assert (model.seq_length, model.max_positions, model.attention_dropout) == (64, 64, None)
    assert model.dropout == 0.1
    assert "#   use_cache: it does not change what GPT-2 computes" in opened.yaml
    assert len(opened.ours.without_effect) == 1, "flags that were not given are not listed"


def test_the_last_of_two_equal_flags_counts(tmp_path: Path) -> None:
    """Argparse does so too. The YAML has a line about it."""
    script = tmp_path / "train.sh"
    script.write_text("python3 train.py --epochs 800 --lr 1 --epochs 1 --lr 1\n")
    opened = open_config(script)
    assert opened.config.train.max_epochs == 1
    assert opened.ours.without_effect == {"--epochs 800": f"{script}:1: --epochs 1 is given later and counts"}


def test_the_system_of_flags() -> None:
    """By the program that a script starts, else by most names."""
    words = ["--tokenized_data_path", "x", "--stride", "5", "--model_config", "y"]
    assert find_command_line(words) == "gpt2_chinese"
    assert find_command_line(words, "eval.py") == "gpt2_chinese_eval"
    assert find_command_line(["--prefix", "她"]) == "gpt2_chinese_generate"
    assert find_command_line(["--num-layers", "2", "--learning-rate", "1"]) == "oneflow"
    assert find_command_line(["--num-layers", "2"], "pretrain_gpt.py") == "megatron"

"""Command lines of Megatron, OneFlow and GPT2-Chinese, and scripts with them, in our words; what is
refused of them and of files, one row of refusals.yaml each.
"""

import functools
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
from common.systems.config import COMMAND_LINES, find_command_line, open_config, open_flags
from common.systems.flags import read_command
from common.systems.oneflow.flags import start_nodes_devices
from common.systems.run_state import MODEL_YAML, read_model_yaml
from compat.programs import main_with_flags
from tests.common.systems.test_config import ORIGINALS, PRESETS, differences

MODELZOO = yaml.safe_load((ORIGINALS / "modelzoo" / "presets.yaml").read_text())


def modelzoo_flags(preset: str) -> list[str]:
    """Return the flags of the original script with those of another size behind them. The scale
    of the loss is in flags, where DeepSpeed is not used.
    """
    words = read_command(ORIGINALS / "modelzoo" / "train_345M.sh")[2]
    words = words[: words.index("--checkpoint-activations" if "without_mp" in preset else "--deepspeed")]
    text = "--initial-loss-scale 4096 --loss-scale-window 500 --hysteresis 2"
    return [*words, *text.split(), *MODELZOO[preset].split()]


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


def test_a_dropout_that_is_left_out_is_megatrons() -> None:
    """Beside --hidden-dropout 0.0 attention keeps its 0.1; our defaults are not listed."""
    opened = open_flags("megatron", f"{BASES['megatron']} {FIVE} --hidden-dropout 0".split())
    assert "  attention_dropout: 0.1  # not given: as in Megatron\n" in opened.yaml
    assert "beta1" not in opened.yaml and "weight_decay: 0.01" in opened.yaml
    assert not opened.ours.without_effect, "flags that were not given are not listed"
    model = resolve_config(opened.config).model
    assert (model.hidden_dropout, model.embedding_dropout, model.attention_dropout) == (0, 0, 0.1)


def test_megatrons_sizes_by_tokens_are_ours() -> None:
    """In samples of 8 tokens, as in its num_microbatches_calculator.py of 2026."""
    words = f"{BASES['megatron']} --train-samples 800 --step-batch-size-schedule".split()
    train = open_flags("megatron", [*words, "0:8 1K:16, 4K:32"]).config.train
    assert (train.rampup_batch_size, train.global_batch_size) == ([[0, 8], [125, 16], [500, 32]], 32)
    for more, message in (
        (["0:8 1K:16", "--global-batch-size", "64"], "keep one of them"),
        (["0:8 .5:16"], r"expected TOKENS:SIZE TOKENS:SIZE \.\.\., such as"),
        (["4000:32 0:8 1e3:16"], r"expected TOKENS:SIZE TOKENS:SIZE \.\.\., such as"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_flags("megatron", [*words, *more])


BECOME = yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("system", "row"), [(system, row) for system in BECOME for row in BECOME[system]])
def test_flags_become_keys(system: str, row: list[Any]) -> None:
    text, keys, *resolved = row
    words = shlex.split(text)
    base = f"{BASES[system]} {'' if '--train-samples' in words else FIVE}".split() if system in BASES else []
    is_file = system == "fleetx"
    opened = open_config(ORIGINALS / system / words[0], words[1:]) if is_file else open_flags(system, [*base, *words])
    tree = opened.config.model_dump() if system in (*BASES, "fleetx") else opened.ours.tree
    if resolved:
        mode, ranks = resolved
        tree = resolve_mode(opened.config, mode, world_size=ranks).model_dump()
    found = dict(flatten(tree))
    assert {key: found.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("given", "warmup", "decay"),
    [("--lr-warmup-fraction 0.1", 1000, 10_000), ("--lr-warmup-fraction 0.1 --lr-decay-samples 8000", 800, 8000)],
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


SCRIPT = Path(__file__).with_name("script.txt").read_text()
"""What of a shell is followed, and what only a shell knows."""
EXPECTED = [
    "--num-layers", "24", "--hidden-size", "1024", "--save", "my folder", "--seed", "7",
    "--data-path", "0.3", "data/a", "0.7", "data/b", "--micro-batch-size", "2",
]  # fmt: skip


COMMANDS = {
    SCRIPT + 'torchrun $DISTRIBUTED pretrain_gpt.py "${MODEL[@]}" $@ $options 2>&1 | tee "$OUT"': EXPECTED,
    SCRIPT
    + """CUDA=0 python -m torch.distributed.launch $DISTRIBUTED $OUT/pretrain_gpt.py \\
        "${MODEL[@]}" \\
        ${options} &> $OUT &
wait""": EXPECTED,
    SCRIPT
    + """run="python pretrain_gpt.py --num-layers 24 --hidden-size 1024 \\
        --save 'my folder' --seed 7 ${options}"
srun -l --output=$OUT sh -c "${run}"
""": EXPECTED,
    "set -e\npython3 run.py --include localhost:0,1 pretrain_gpt.py \\\n  --lr -1e-4 \\\n"
    "  --split 9,1,0 2>&1 | tee log --flush\necho done\n": ["--lr", "-1e-4", "--split", "9,1,0"],
    """[ -z "$GPUS" ] && exit\nlr=${LR:-"1"} split="${S:-"9,1"}"\n
    python pretrain_gpt.py --lr $lr --split $split --save ${OUT:-'my folder'}""": [
        "--lr",
        "1",
        "--split",
        "9,1",
        "--save",
        "my folder",
    ],
    "if x; then\npython pretrain_gpt.py --lr 2\nelse\npython tools/other.py x\nfi": ["--lr", "2"],
}


@pytest.mark.parametrize(("text", "words"), COMMANDS.items())
def test_scripts_are_followed_and_other_commands_skipped(text: str, words: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "run.sh").write_text(text)
    assert read_command(file) == (str(file), "pretrain_gpt.py", words)
    file.write_text("python -m oneflow_gpt.training --seed 1 &\nwait\n")
    assert read_command(file)[2] == ["--seed", "1"]


def test_a_script_that_doubles_a_variable_ends(tmp_path) -> None:
    (tmp_path / "run.sh").write_text("A=ab\n" + "A=$A$A\n" * 60 + "python a.py --x $A")
    with pytest.raises(ConfigError, match=r"run.sh:2\d: the values of variables are longer"):
        read_command(tmp_path / "run.sh")


@pytest.mark.parametrize("detached", ["", "1"])
def test_flags_stay_for_ranks_that_read_them_later(detached: str, tmp_path: Path, monkeypatch: Any) -> None:
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
def test_a_dry_run_on_one_device_shows_the_plan(entry: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.chdir(tmp_path)
    rate = "--learning-rate" if "oneflow" in entry else "--lr"
    flags = f"{SMALL} {rate} 1e-4 --micro-batch-size 4 --train-iters 2 --save ck".split()
    main = run_gpt2.main
    if "oneflow" in entry:
        main = start_nodes_devices(main, lambda _: 1, flags)
    if entry == "run_gpt2.py":
        (tmp_path / "job.slurm").write_text(f"#!/bin/bash\npython pretrain_gpt.py {' '.join(flags)}\n")
        assert main(["--config", __file__, "--run_mode", "train"]) == 2
        assert "no program is run for its values" in capsys.readouterr().err
        assert main(["--config", "job.slurm", "--run_mode", "train"]) == 0
    else:
        assert main_with_flags(main, [*flags, "--run-mode", "plan", "--accelerator", "A100"], entry) == 0
        assert ", A100\n" in capsys.readouterr().out
        assert main_with_flags(main, flags, entry) == 0
    assert "\nworld: 1 rank" in capsys.readouterr().out
    assert not (tmp_path / "ck").exists()


CONFIGS = PRESETS.parents[1] / "compat" / "gpt2_chinese" / "config"
CHINESE = ORIGINALS / "gpt2_chinese"


def test_the_flags_of_the_originals_are_all_known() -> None:
    for line in (CHINESE / "flag_names.txt").read_text().splitlines()[1:]:
        system, *names = line.split()
        assert set(names) <= set(COMMAND_LINES[system].table)


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
    assert (predict.prompt, predict.strategy, predict.top_k, predict.top_p) == (["她"], "sampling", 8, 1.0)
    assert not predict.stop_at_end_of_text
    assert opened.config.checkpoint.load == str(weights)
    assert "#   device: CUDA_VISIBLE_DEVICES says it" in opened.yaml


def test_fields_that_change_no_function(tmp_path: Path) -> None:
    """Sizes that are left out are those of GPT2Config of transformers 2.1.1."""
    fields = {"vocab_size": 5, "n_positions": 64, "reorder_and_upcast_attn": True, "use_cache": True}
    fields |= {"activation_function": "gelu_fast", "pruned_heads": {}}
    (tmp_path / "model.json").write_text(json.dumps(fields))
    opened = open_flags("gpt2_chinese", ["--model_config", str(tmp_path / "model.json")])
    model = opened.config.model
    assert (model.hidden_size, model.num_layers, model.num_heads, model.dropout) == (768, 12, 12, 0.1)
    assert (model.seq_length, model.max_positions, model.attention_dropout) == (64, 64, None)
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


REFUSED = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
BASE = REFUSED.pop("base")
ROWS = [
    pytest.param(kind, given, message, id=f"{kind}: {message[:60]}")
    for kind, listed in REFUSED.items()
    for *given, message in listed
]


def put(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with other values at dotted keys."""
    tree = json.loads(json.dumps(tree))
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[key] = value
    return tree


def read(kind: str, given: list[Any]) -> object:
    """Read what is given, in the folder of the process."""
    text = given[0]
    if kind in COMMAND_LINES:
        return open_flags(kind, shlex.split(text))
    if kind == "small":
        words = f"{SMALL} --lr 1e-4 --micro-batch-size 4 --train-iters 5 {text}"
        return open_flags("megatron", words.split())
    if kind == "words":
        return open_config(ORIGINALS / "fleetx" / "pretrain_gpt_1.3B_dp8.yaml", [text])
    if kind == "model_yaml":
        Path(MODEL_YAML).write_text(yaml.safe_dump(put(BASE, text)))
        return read_model_yaml(Path(MODEL_YAML))
    if kind == "model_config":
        sizes = {} if "n_embd" in text else {"n_ctx": 8, "n_head": 1, "vocab_size": 5}
        Path("model.json").write_text(json.dumps(sizes | text))
        return open_config(Path("model.json"), ["data.train=x"])
    if kind == "ds_config":
        folder = ORIGINALS / "modelzoo"
        tree = json.loads((folder / "ds_config.json").read_text())
        if text is not None:
            Path("ds_config.json").write_text(json.dumps(put(tree, text)))
        return open_config(folder / "train_345M.sh")
    if kind == "files":
        for name, text in zip("ab", given, strict=False):
            Path(f"{name}.yaml").write_text(text)
        return open_config(Path("a.yaml"))
    text = f"{SCRIPT}\npython pretrain_gpt.py {text}\n" if kind == "script" else text
    Path("flags.txt").write_text(text)
    return open_config(Path("flags.txt"))


@pytest.mark.parametrize(("kind", "given", "message"), ROWS)
def test_refused(kind: str, given: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read(kind, given)

"""Scripts and configurations of other systems, run: their losses are those of the YAML that they become."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_gpt2
from common.dataset.indexed import IndexedWriter
from common.run_config import read_config
from common.systems.fleetx import scripts
from compat import programs
from tests.run_scripts import clean_environment
from tests.tiny import rows_of

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / "compat"
ORIGINALS = ROOT / "tests" / "common" / "systems" / "originals"
SMALL = shlex.split("""device=cpu model.num_layers=2 model.hidden_size=32 model.ffn_hidden_size=128
    model.num_heads=2 model.seq_length=16 model.max_positions=null model.vocab_size=101
    data.tokenizer=null logging.tensorboard=false logging.plot=false
    validation.max_samples=4""")
MEGATRON = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --vocab-size 101 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 0.01 --min-lr 0.001
    --lr-decay-style cosine --clip-grad 1.0
    --eval-iters 1 --log-interval 1 --split 90,10,0 --distributed-backend gloo --num-workers 2"""
ONEFLOW = MEGATRON.partition("--eval-iters")[0].replace("--max-position-embeddings 16", "")
ONEFLOW = ONEFLOW.replace("--lr ", "--learning-rate ").split()
"""The same run in OneFlow's words."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the ModelZoo's preprocessing leaves it: 300 documents of 30 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    tokens = np.random.default_rng(0).integers(0, 101, size=9000)
    with IndexedWriter(folder / "my-gpt_text_sentence", "uint16") as writer:
        writer.append(tokens, np.full(300, 30))
    return folder


def losses(folder: Path) -> list[Any]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(folder)]


def start(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(**variables)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def fleetx_words(corpus: Path) -> list[str]:
    """With -c and -o, in FleetX's words and in ours, on FleetX's token files in input_dir."""
    data = Path("data")
    data.mkdir()
    np.save(data / "small_ids.npy", np.fromfile(corpus / "my-gpt_text_sentence.bin", np.uint16))
    np.savez(data / "small_idx.npz", lens=np.full(300, 30, np.int32), docs=np.arange(301, dtype=np.int64))
    theirs = shlex.split("""Engine.max_steps=3 Global.local_batch_size=4 Global.micro_batch_size=2
        Data.Train.dataset.input_dir=data Engine.mix_precision.use_pure_fp16=False
        Engine.save_load.output_dir=theirs Optimizer.lr.max_lr=0.01""")
    words = ["-c", str(ORIGINALS / "fleetx" / "pretrain_gpt_345M_single_card.yaml")]
    return words + [word for each in (*theirs, *SMALL) for word in ("-o", each)]


SHORT = shlex.split("""precision=float32 data.split=90,10,0 train.max_steps=3 logging.interval=1
    output_dir=theirs""")
FLAGS = shlex.split("""optimizer.learning_rate=0.01 optimizer.decay_steps=null
    optimizer.warmup_fraction=null""")


@pytest.mark.parametrize(
    ("file", "words", "line"),
    [
        ("fleetx", [], "global step 3, epoch: 0"),
        ("modelzoo/train_345M.sh", [*FLAGS, "engine=native", "parallel.pipeline_stage=1", "train.global_batch_size=8"],
            " iteration        3/       3 |"),
        ("oneflow/pretrain_345M.sh", FLAGS, "| 3        | 3               | 24              |"),
        pytest.param(
            "mindformers_r1.yaml",
            shlex.split("""train.max_epochs=null runner_config.batch_size=4 checkpoint.interval=0
                model.dropout=0 model.embedding_dropout=0.0 model.attention_dropout=0.0
                model.hidden_dropout=0.0"""),
            "- mindformers - INFO - Epoch:[  1/",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_file_of_theirs_trains_as_the_yaml_that_it_becomes(
    file, words, line, corpus, tmp_path, capsys, monkeypatch
) -> None:
    """Three steps, in the log lines of their system."""
    framework = "mindspore" if "mindformers" in file else "torch"
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    shutil.copy(ORIGINALS / "modelzoo" / "ds_config.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["--config", str(ORIGINALS / file), *SMALL, *words, *SHORT]
    command += [f"data.train={corpus / 'my-gpt_text_sentence'}"]
    if file == "fleetx":
        command = fleetx_words(corpus)
    command += ["--run_mode", "train"]
    assert run_gpt2.main([*command, "--show_config"]) == 0
    Path("ours.yaml").write_text(capsys.readouterr().out)
    assert run_gpt2.main(command) == 0
    assert line in capsys.readouterr().out
    ours = ["--config", "ours.yaml", "--run_mode", "train", "output_dir=ours"]
    assert run_gpt2.main(ours) == 0
    found = losses(tmp_path / "theirs")
    assert len({loss for _, loss, _ in found}) == 3 and found == losses(tmp_path / "ours")


def test_a_fleetx_export_generates_from_its_own_folder(corpus, tmp_path, capsys, monkeypatch, gpt2_vocab_files) -> None:
    """Trained without a tokenizer at FleetX's padded size, exported with one, moved, and run by
    inference.py: the text of generation.py, in FleetX's words for sampling.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(tmp_path)
    folder = ORIGINALS / "fleetx"
    sizes = [word for word in SMALL if not word.startswith(("model.vocab_size", "data.tokenizer"))]
    data = f"data.train={corpus / 'my-gpt_text_sentence'}"
    shared = ["-o", "Engine.mix_precision.use_pure_fp16=False", *sizes, "data.split=90,10,0"]
    pretrain = ["-c", str(folder / "pretrain_gpt_345M_single_card.yaml"), *shared, data]
    words = [*pretrain, "-o", "Engine.max_steps=1", "-o", "Engine.eval_freq=0"]
    assert run_gpt2.main(["--run_mode", "train", *words]) == 0
    vocabulary, merges = map(str, gpt2_vocab_files)
    tokenizer = [f"data.tokenizer.vocab_file={vocabulary}", f"data.tokenizer.merge_file={merges}"]
    generation = ["-c", str(folder / "generation_gpt_345M_dp8.yaml"), *shared, *tokenizer]
    generation += ["-o", "Engine.save_load.ckpt_dir=output", "-o", "Generation.max_dec_len=3"]
    capsys.readouterr()
    given = "predict", generation, "tasks/gpt/generation.py"
    assert scripts.run_script(run_gpt2.main, read_config, *given) == 0
    theirs = capsys.readouterr().out
    assert "Prompt: Hi, GPT2. Tell me who Jack Ma is.\nGeneration: Hi, GPT2." in theirs
    # a file for training names the same weights
    export = [*generation, "-o", "Model.module=GPTModule"]
    export += ["-o", "Engine.save_load.output_dir=exported"]
    assert scripts.run_script(run_gpt2.main, read_config, "export", export, "tools/export.py") == 0
    (tmp_path / "exported" / "weights").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "output")
    inference = tmp_path / "inference.yaml"
    inference.write_text(f"_base_: {folder}/pretrain_gpt_345M_single_card.yaml\nInference: {{model_dir: moved}}\n")
    command = ["-c", str(inference), "-o", "Global.device=cpu"]
    capsys.readouterr()
    assert scripts.infer(run_gpt2.main, read_config, command, "tools/inference.py") == 0
    assert capsys.readouterr().out == theirs[theirs.index("Prompt:") :]
    greedy = [*command, "-o", "Generation.decode_strategy=greedy_search", "predict.prompt=Once"]
    assert scripts.infer(run_gpt2.main, read_config, greedy, "tools/inference.py") == 0
    assert "Prompt: Once\nGeneration: Once" in capsys.readouterr().out
    for place, message in (("nowhere", "no such folder"), (".", "no export is here")):
        word = f"Inference.model_dir={place}"
        script = str(COMPAT / "fleetx" / "tools" / "inference.py")
        assert programs.main([script, *command, "-o", word]) == 2
        assert f"{word}: {message}" in capsys.readouterr().err


def test_paddles_launcher_starts_a_rank_a_device(tmp_path) -> None:
    """Commands as typed in FleetX's folder. Other scripts than the training are one process."""
    fleetx = COMPAT / "fleetx"
    config = str(ORIGINALS / "fleetx" / "pretrain_gpt_1.3B_dp8.yaml")
    launch = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", str(tmp_path)]
    words = ["--devices", "0,1,4", "tools/train.py", "-c", config, "-o", "Global.device=cpu"]
    words += ["-o", "Distributed.dp_degree=3", "-o", "Model.hidden_size=1024"]
    done = start([*launch, *words], fleetx, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"# rank \d: logs in .*(mf_parallel\d), also (workerlog\.\d)", done.stdout) == [
        (f"mf_parallel{rank}", f"workerlog.{rank}") for rank in range(3)
    ]
    assert re.findall("DEVICE_ID=(.)", done.stdout) == ["0", "1", "4"]
    assert done.stdout.count("Model.hidden_size=1024") == 1
    hosts = ["--devices", "0", "--master", "10.0.0.1:29500", "--nnodes", "2", "--rank", "1"]
    assert scripts.launch_command([*hosts, "tools/train.py", "-c", config, "-o", "seed=1"])[2:] == [
        *["distribute", "--master", "10.0.0.1:29500", "--nnodes", "2", "--node_rank", "1"],
        *["--log_dir", "log", "--devices", "0", "none", config, "train", "seed=1"],
    ]
    plan = ["--devices", "0", "tools/train.py", "-c", config, "--run_mode", "plan", "--accelerator", "A100"]
    assert scripts.launch_command(plan)[3:] == [
        *["--accelerator", "A100", "--log_dir", "log", "--devices", "0", "none", config, "plan"]
    ]
    shown = ["tools/train.py", "-c", config, "--show_config"]
    assert scripts.launch_command(["--devices", "0,1", *shown])[2:] == ["--run_mode", "train", *shown[1:]]
    one = ["--gpus", "3,4", "tasks/gpt/generation.py", "-c", config]
    ours = str(fleetx / "tasks" / "gpt" / "generation.py")  # also where a checkout of FleetX has its own
    assert scripts.launch_command(one)[1:] == [ours, *one[3:], "context.device_id=3"]
    with pytest.raises(SystemExit, match="2"):
        scripts.launch_command(["--devices", "0", "projects/gpt/inference.py", "-c", config])


@pytest.mark.long
def test_train_full_8p_trains_and_prints_what_its_own_grep_reads(corpus, tmp_path) -> None:
    """On two ranks, a pipeline of two stages; the mean of samples/sec has no row of the Final lines."""
    script = ["bash", str(COMPAT / "modelzoo" / "test" / "train_full_8p.sh")]
    small = [word for word in SMALL if word != "data.tokenizer=null"]
    command = [*script, f"--data_path={corpus}", "--model_size=345M", "--train_iters=4", *small]
    command += shlex.split("""data.tokenizer.vocab_file=null data.tokenizer.merge_file=null
        precision=float32 train.global_batch_size=4 data.split=90,10,0
        train.micro_batch_size=2 logging.interval=1 data.tokenizer=null""")
    # rows of the run before it count in no mean
    assert start([*command, "train.max_steps=2"], tmp_path, DEVICES="2").returncode == 0
    done = start(command, tmp_path, DEVICES="2")
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "test" / "output" / "0" / "train_0.log").read_text()
    speeds = [float(word) for word in re.findall(r"samples/sec: ([\d.]+)", log)]
    assert len(speeds) == 2 and log.count("samples/sec") == 2
    shown = float(re.findall(r"Final Performance samples/sec : ([\d.]+)", done.stdout)[-1])
    assert shown == pytest.approx(sum(speeds) / 2, rel=1e-4)
    assert re.search(r"Final Train lm loss PPL\(accuracy\): [\d.]+E\+\d+", done.stdout)
    assert (tmp_path / "ckpts" / "ckpts_tmp" / "checkpoints" / "step_00000004").is_dir()
    assert start([*script, "--model_size=9B", "--data_path=x"], tmp_path).returncode == 1
    assert 'para "data_path" must be confing' in start(script, tmp_path).stderr


def test_env_npu_sets_what_is_not_set_where_cann_is(tmp_path) -> None:
    toolkit = tmp_path / "ascend-toolkit"
    toolkit.mkdir()
    (toolkit / "set_env.sh").write_text("export FROM_CANN=1\n")
    names = "$FROM_CANN $TASK_QUEUE_ENABLE $HCCL_WHITELIST_DISABLE $HCCL_EXEC_TIMEOUT"
    command = f'set -eu; source "{COMPAT}/modelzoo/test/env_npu.sh"; echo "{names}"'
    there = {"ASCEND_TOOLKIT_HOME": str(toolkit), "HCCL_EXEC_TIMEOUT": "60"}
    done = start(["bash", "-c", command], tmp_path, **there)
    assert done.stdout == "1 1 1 60\n", done.stderr
    done = start(["bash", "-c", command], tmp_path, HOME=str(tmp_path))
    assert "FROM_CANN: unbound variable" in done.stderr


@pytest.mark.long
def test_megatron_and_oneflow_commands_train_alike(corpus, tmp_path, monkeypatch) -> None:
    """One run by pretrain_gpt.py, by oneflow_gpt.training and by pretrain.sh on two ranks."""
    data = str(corpus / "my-gpt_text_sentence")
    own = ["data.tokenizer=null", "device=cpu", "precision=float32", "model.dropout=0"]
    monkeypatch.chdir(tmp_path)
    megatron = [*MEGATRON.split(), "--data-path", data, "--save", "megatron", *own, "train.recompute=full"]
    assert programs.main([str(COMPAT / "modelzoo" / "pretrain_gpt.py"), *megatron]) == 0
    words = shlex.split("--save oneflow seed=1234 --checkpoint-activations --log-interval 1 --split 90,10,0")
    oneflow = [sys.executable, "-m", "oneflow_gpt.training", *ONEFLOW, "--dataset", data, *words, *own]
    done = start(oneflow, tmp_path, PYTHONPATH=str(COMPAT / "oneflow"))
    assert done.returncode == 0, done.stdout + done.stderr
    settings = f"""NUM_LAYERS=2 HIDDEN_SIZE=32 NUM_ATTENTION_HEADS=2 SEQ_LENGTH=16
        MICRO_BATCH_SIZE=2 GLOBAL_BATCH_SIZE=4 NUM_GPUS_PER_NODE=2 TRAIN_ITERS=3 DATASET={data}
        SAVE_PATH=examples LOAD_PATH=examples"""
    words = shlex.split("""model.vocab_size=101 seed=1234 data.split=90,10,0 logging.interval=1
        optimizer.learning_rate=0.01 optimizer.min_learning_rate=0.001 optimizer.decay_steps=null
        optimizer.warmup_fraction=null""")
    script = COMPAT / "oneflow" / "examples" / "pretrain_117M.sh"
    environment = dict(f"ONEFLOW_GPT_{each}".split("=") for each in settings.split())
    done = start(["bash", str(script), *words, *own], tmp_path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third = (np.array(losses(tmp_path / name)) for name in ("megatron", "oneflow", "examples"))
    assert len(first) == 3
    assert np.array_equal(first, second), "one process, the same run by two systems' flags"
    assert np.allclose(first, third, rtol=1e-5), "two ranks sum in another order"


def test_oneflows_command_starts_the_devices_of_its_node(tmp_path) -> None:
    """The node finds its place by its address, as OneFlow's does; ranks are not started twice."""
    words = [*ONEFLOW, "--dataset", "x", "--num-gpus-per-node", "2", "--num-nodes", "2"]
    words += ["--use-rdma"]
    command = [sys.executable, "-m", "oneflow_gpt.training", *words, "device=cpu"]
    there = {"PYTHONPATH": str(COMPAT / "oneflow"), "DRY_RUN": "1"}
    batch = ["train.global_batch_size=8"]
    done = start([*command, *batch, "--node-ips", "198.51.100.1,127.0.0.1"], tmp_path, **there)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\bRANK=(\d)", done.stdout) == ["2", "3"]
    assert "MASTER_ADDR=198.51.100.1" in done.stdout and "NCCL_NET=IB" in done.stdout
    done = start([*command, *batch], tmp_path, **there)
    assert done.returncode == 2 and "--num-nodes 2 needs --node-ips" in done.stderr
    ranks = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    done = start([*command, "train.global_batch_size=9"], tmp_path, **there, **ranks)
    assert done.returncode == 2 and "global_batch_size=9 is not a multiple" in done.stderr
    assert not any(tmp_path.iterdir())


def test_the_slurm_job_finds_its_repository_or_says_what_it_needs(tmp_path: Path) -> None:
    """Started by bash it lies there; Slurm runs a copy from elsewhere."""
    scripts = tmp_path / "repository" / "compat" / "gpt2_chinese"
    (scripts / "cache").mkdir(parents=True)
    names = ["cache/make_vocab.sh", "train.sh", "generate.sh"]
    for name in names:
        (scripts / name).write_text(f"echo {name}")
    for folder in (scripts, tmp_path):
        shutil.copy(COMPAT / "gpt2_chinese" / "run.swb", folder)
    done = start(["bash", str(scripts / "run.swb"), "x", "a remark"], tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, [*names, "Comments: a remark"])
    done = start(["bash", str(tmp_path / "run.swb")], tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "set GPT2_ROOT" in done.stderr

"""run_gpt2.py as a user starts it: exit codes, one clear message, a kill, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run_gpt2.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def run(*words: str, **options: Any) -> tuple[int, str, str]:
    with start(*words, **options) as child:
        out, error = child.communicate(timeout=120)
    return child.returncode, out, error


@pytest.fixture
def config(tmp_path: Path, corpus_prefix: Path, gpt2_vocab_files: tuple[Path, Path]) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "output_dir": str(tmp_path / "out"),
                "device": "cpu",
                "model": {
                    "num_layers": 1,
                    "hidden_size": 16,
                    "num_heads": 2,
                    "seq_length": 32,
                    "vocab_size": 50257,
                },
                "train": {"max_steps": 3, "micro_batch_size": 2},
                "optimizer": {"learning_rate": 0.01},
                "data": {
                    "train": str(corpus_prefix),
                    "split": "90,10,0",
                    "tokenizer": {
                        "vocab_file": str(gpt2_vocab_files[0]),
                        "merge_file": str(gpt2_vocab_files[1]),
                    },
                },
                "validation": {"max_samples": 2},
            }
        )
    )
    return path


@pytest.mark.representative  # of the commands of the pages
def test_train_eval_predict(config: Path, tmp_path: Path) -> None:
    code, out, error = run("--config", str(config), "--run_mode", "train")
    assert code == 0, error
    assert "step 3/3" in out and "finished: step 3" in out
    assert "\r" not in error, "no progress bar where there is no terminal"
    code, out, error = run("--config", str(config), "--run_mode", "eval")
    assert code == 0 and "perplexity" in out, error
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["tokens"] == 64
    words = [
        "predict.prompt=Hello world",
        "predict.max_new_tokens=5",
        "predict.stop_at_end_of_text=false",
    ]
    code, greedy, error = run("--config", str(config), "--run_mode", "predict", *words)
    assert code == 0 and greedy.startswith("Prompt: Hello world\nGeneration: Hello world"), error
    sampled = [
        run(
            "--config",
            str(config),
            "--run_mode",
            "predict",
            *words,
            "predict.strategy=sampling",
            f"seed={s}",
        )[1]
        for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("mode", "words", "message"),
    [
        (
            "train",
            ["train.max_step=3"],
            "command line: train.max_step: unknown key; did you mean train.max_steps?",
        ),
        (
            "train",
            ["model.vocab_size=50000", "data.train={small}"],
            "has 50257 tokens but model.vocab_size=50000",
        ),
        (
            "train",
            ["backend=mindspore", "train.compile=true"],
            "train.compile=true is for backend torch",
        ),
        ("finetune", [], "give checkpoint.init_from"),
        ("eval", [], "no whole checkpoint here"),
        ("predict", ["predict.prompt=Hello"], "no whole checkpoint here"),
        ("predict", [], "predict.prompt is not given"),
        ("predict", ["predict.prompt="], "predict.prompt is empty"),
        (
            "predict",
            ["predict.prompt=Hello", "predict.max_new_tokens=32"],
            "beyond the model's 32 positions; shorten the prompt or ask for"
            " predict.max_new_tokens=31",
        ),
        ("train", ["parallel.model_parallel=2"], "does not divide the 1 running process"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    config: Path, tmp_path: Path, mode: str, words: list[str], message: str
) -> None:
    if "data.train={small}" in words:
        from tools.preprocess_data import main as preprocess

        (tmp_path / "small.txt").write_text("Hello world. " * 50)
        vocabulary = yaml.safe_load(config.read_text())["data"]["tokenizer"]
        files = ["--vocab-file", vocabulary["vocab_file"], "--merge-file", vocabulary["merge_file"]]
        assert (
            preprocess(
                [
                    "--input",
                    str(tmp_path / "small.txt"),
                    "--output-prefix",
                    str(tmp_path / "small"),
                    *files,
                ]
            )
            == 0
        )
        words = [words[0], f"data.train={tmp_path / 'small_text_document'}"]
    code, _, error = run("--config", str(config), "--run_mode", mode, *words)
    assert code == 2
    assert message in error and error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "environment: RANK=0, but WORLD_SIZE is not set; set both, or unset RANK"),
        (
            {"RANK_ID": "3", "RANK_SIZE": "2"},
            "environment: RANK_ID=3, but there are 2 processes: expected 0 to 1",
        ),
        (
            {"RANK_TABLE_FILE": "/nowhere/hccl.json", "RANK_ID": "0"},
            "/nowhere/hccl.json: no such file",
        ),
    ],
)
def test_impossible_variables_give_one_message(
    config: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, error = run("--config", str(config), "--run_mode", "train")
    assert code == 2
    assert message in error and error.startswith("error: ") and len(error.splitlines()) == 1


def test_keys_may_be_flags_too(config: Path) -> None:
    """Arguments as platforms that start jobs by a form write them."""
    words = [
        f"--config={config}",
        "--run_mode=plan",
        "--train.micro_batch_size=3",
        "--train.accumulation_steps",
        "5",
    ]
    code, out, error = run(*words)
    assert code == 0 and "15" in out, error
    code, _, error = run(*words, "--nonsense=1")
    assert code == 2 and "unrecognized arguments: --nonsense=1" in error


def test_usage_errors_exit_with_2(config: Path) -> None:
    assert run("--config", str(config))[0] == 2
    assert run("--config", str(config), "--run_mode", "dance")[0] == 2
    assert run("--config", str(config) + "x", "--run_mode", "train")[0] == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.campaign), signal.SIGKILL]
)
def test_a_stopped_or_killed_run_resumes(config: Path, tmp_path: Path, number: int) -> None:
    words = [
        "--config",
        str(config),
        "--run_mode",
        "train",
        "train.max_steps=150",
        "checkpoint.interval=5",
        "logging.plot=false",
    ]
    metrics = tmp_path / "out" / "metrics.jsonl"
    with start(*words) as child:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (
            metrics.is_file() and len(metrics.read_text().splitlines()) > 20
        ):
            time.sleep(0.05)
        child.send_signal(number)
        _, error = child.communicate(timeout=60)
    assert child.returncode == (128 + number if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM after step" in error
    code, out, error = run(*words)
    assert code == 0, error
    assert "resuming" in out
    steps = [
        row["step"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row
    ]
    assert steps == list(range(1, 151))


def test_a_full_disk_while_saving_leaves_the_old_checkpoint(config: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(small)],
        capture_output=True,
        text=True,
    )
    if mount.returncode:
        pytest.skip(f"no right to mount a small file system: {mount.stderr.strip()}")
    try:
        # a checkpoint is 3 x 3.2 MB: two fit, a third beside them does not
        words = [
            f"output_dir={small / 'run'}",
            "checkpoint.interval=1",
            "checkpoint.keep=0",
            "train.max_steps=9",
            "logging.tensorboard=false",
        ]
        code, _, error = run("--config", str(config), "--run_mode", "train", *words)
        assert code == 1
        assert (
            "No space left on device" in error
            and "earlier checkpoints are whole" in error
            and len(error.splitlines()) == 1
        )
        code, _, error = run("--config", str(config), "--run_mode", "eval", words[0])
        assert code == 0, error
    finally:
        subprocess.run(["umount", str(small)], check=True)

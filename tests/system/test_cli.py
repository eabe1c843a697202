"""run_gpt2.py as a user starts it: exit codes, one clear message, a full disk."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from run_gpt2 import main
from tests.run_scripts import run_program
from tests.tiny import tiny_run


@pytest.fixture
def config(tmp_path: Path, corpus_prefix: Path, gpt2_vocab_files: tuple[Path, Path]) -> Path:
    files = dict(zip(("vocab_file", "merge_file"), map(str, gpt2_vocab_files), strict=True))
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 32}
    tree = tiny_run(
        tmp_path / "out", corpus_prefix, model=sizes | {"vocab_size": 50257},
        train={"max_steps": 3, "micro_batch_size": 2}, optimizer={"learning_rate": 0.01},
        validation__max_samples=2, data__tokenizer=files, logging={},
    )  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.representative  # of the commands of the pages
def test_train_eval_predict(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run_program("--config", str(config), "--run_mode", "train")
    assert code == 0, error
    assert "step 3/3" in out and "finished: step 3" in out
    assert "\r" not in error, "no progress bar where there is no terminal"
    assert main(["--config", str(config), "--run_mode", "eval"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["tokens"] == 64
    words = ["predict.prompt=Hello world", "predict.max_new_tokens=5"]
    assert main(["--config", str(config), "--run_mode", "predict", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Prompt: Hello world\nGeneration: Hello world")


REFUSED: list[tuple[str, str, str]] = [
    ("train", "train.max_step=3", "command line: train.max_step: unknown key; did you mean train.max_steps?"),
    ("predict", "predict.prompt=Hello", "no whole checkpoint here"),
    ("predict", "predict.prompt=", "predict.prompt is empty"),
    (
        "predict",
        "predict.prompt=Hello predict.max_new_tokens=32",
        "beyond the model's 32 positions; shorten the prompt or ask for predict.max_new_tokens=31",
    ),
    ("train", "parallel.model_parallel=2", "does not divide the 1 running process"),
    ("train RANK=0", "", "environment: RANK=0, but WORLD_SIZE is not set; set both, or unset RANK"),
    ("train RANK_TABLE_FILE=/nowhere/hccl.json RANK_ID=0", "", "/nowhere/hccl.json: no such file"),
    ("plan", "parallel.model_parallel=3", "parallel.model_parallel=3 does not divide model.num_heads=2; choose 1 or 2"),
    ("plan WORLD_SIZE=16", "parallel.data_parallel=2", "= 2 processes, but 16 are running"),
    ("plan", "--accelerator abacus", "--accelerator abacus: no figures are known for it; choose H200, "),
]


@pytest.mark.parametrize(("mode", "words", "message"), REFUSED)
def test_bad_input_is_one_message_and_exit_code_2(config, tmp_path, monkeypatch, capsys, mode, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    mode, *variables = mode.split()
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    assert main(["--config", str(config), "--run_mode", mode, *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--run_mode"),
        ("--run_mode dance", "invalid choice: 'dance'"),
        ("--run_mode train --all", "--all is for --run_mode plan, not train"),
        ("--run_mode train --accelerator H100", "--accelerator is for --run_mode plan, not train"),
        ("--run_mode train --devices 8", "--devices is for --run_mode plan, not train"),
        ("--run_mode plan --nonsense=1", "unrecognized arguments: --nonsense=1"),
        ("--run_mode plan --devices 32xH100 --accelerator 16xH100", "differ: 16 and 32"),
        ("--run_mode plan --devices 8", "of what kind the devices are; add --accelerator NAME"),
    ],
)
def test_usage_errors_exit_with_2(config: Path, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(config), *words.split()])
    assert message in capsys.readouterr().err
    assert main(["--config", f"{config}x", "--run_mode", "train"]) == 2


def test_a_full_disk_while_saving_leaves_the_old_checkpoint(config, tmp_path, capsys) -> None:
    small = tmp_path / "small"
    small.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(small)]
    mount = subprocess.run(words, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no right to mount a small file system: {mount.stderr.strip()}")
    try:
        # a checkpoint is 3 x 3.2 MB: two fit, a third beside them does not
        words = [f"output_dir={small / 'run'}", "checkpoint.interval=1", "checkpoint.keep=0"]
        words += ["train.max_steps=9", "logging.tensorboard=false"]
        assert main(["--config", str(config), "--run_mode", "train", *words]) == 1
        error = capsys.readouterr().err
        assert "No space left on device" in error and error.count("\n") == 1
        assert "earlier checkpoints are whole" in error
        assert main(["--config", str(config), "--run_mode", "eval", words[0]]) == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)

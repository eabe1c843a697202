"""run_gpt2.py as a user starts it: exit codes, one clear message, a full disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from run_gpt2 import main
from tests.reference import MERGES, write_vocabulary
from tests.run_scripts import ROOT, clean_environment, run_program, run_words
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


def test_bad_input_is_one_message_and_exit_code_2(config, tmp_path, monkeypatch, capsys) -> None:
    """More of them are in tests/tools/refusals.yaml."""
    monkeypatch.chdir(tmp_path)
    longer = "shorten the prompt or ask for predict.max_new_tokens=31"
    for words, message in (
        ("predict.prompt=Hello", "no whole checkpoint here"),
        ("predict.prompt=", "predict.prompt is empty"),
        ("predict.prompt=Hello predict.max_new_tokens=32", f"beyond the model's 32 positions; {longer}"),
    ):
        assert main(["--config", str(config), "--run_mode", "predict", *words.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and len(error.splitlines()) == 1


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


# ---- a program opens each file of its configuration once, and resolves the configuration once ----


CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
LARGE = "configs/gpt2/run_gpt2_13b.yaml"
STUDY = f"""\
title: Opened once
base: {ROOT}/{LARGE}
axes:
  train.recompute: [none, full]
  parallel.model_parallel: [1, 2]
"""
EVAL = f"{ROOT}/compat/fleetx/tools/eval.py"
FLEETX = f"{ROOT}/tests/common/systems/originals/fleetx/eval_gpt_345M_single_card.yaml"
PROGRAM = """
import collections, importlib, json, os, sys
from common.resolve import derive
found, opened, resolve = [], collections.Counter(), derive.resolve_config
def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".yaml") and not arguments[2] & os.O_WRONLY:
        opened[os.path.realpath(arguments[0])] += 1
def counted(config, **options):
    opened["resolved"] += 1
    return resolve(config, **options)
sys.addaudithook(note)
derive.resolve_config = counted
for module, words in json.loads(sys.argv[1]):
    opened.clear()
    os.environ["DRY_RUN"] = "1" if module == "tools.launch" else ""
    code, resolved = importlib.import_module(module).main(words), opened.pop("resolved", 0)
    found.append([code, max(opened.values()), len(opened), resolved])
print(json.dumps(found), file=sys.stderr)
"""


def test_each_file_is_opened_once(tmp_path: Path, corpus_prefix: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocabulary", MERGES)
    run = run_words(
        tmp_path / "run", corpus_prefix, data__tokenizer=vocabulary, train__max_steps=2,
        predict__prompt="ab", model__vocab_size=262,
    )  # fmt: skip
    (tmp_path / "study.yaml").write_text(STUDY)
    own = ["--config", CONFIG, *run, "--run_mode"]
    programs = {
        "train": ("run_gpt2", [*own, "train"]),
        "resume": ("run_gpt2", [*own, "train"]),
        "predict": ("run_gpt2", [*own, "predict"]),
        "plan": ("run_gpt2", ["--config", LARGE, "--run_mode", "plan"]),
        "launch": ("tools.launch", ["distribute", "none", CONFIG, "[0,2]", "train", *run]),
        "mindformer": ("run_mindformer", [*own, "plan"]),
        "fleetx": ("compat.programs", [EVAL, "-c", FLEETX, "--show_config"]),
        "study": ("tools.study", ["--config", f"{tmp_path}/study.yaml", "--plan"]),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps([*programs.values()])]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(zip(programs, json.loads(done.stderr.splitlines()[-1]), strict=True))
    once = {name: [0, 1, 1, 1] for name in programs}
    # a preset and its bases, a cell of the study each
    assert found == once | {"plan": [0, 1, 6, 1], "study": [0, 1, 7, 4], "fleetx": [0, 1, 3, 0]}

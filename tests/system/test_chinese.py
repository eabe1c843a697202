"""GPT2-Chinese's commands, run: what they train, write and measure is that of the YAML that their flags become."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_gpt2
from common.conversion.gpt2_chinese import one_at_a_time, run_command
from common.errors import ConfigError
from common.log import start_log
from common.systems.config import open_flags
from compat import programs
from tests.run_scripts import ROOT, clean_environment
from tests.tiny import rows_of

POEM = "白日依山盡，黃河入海流。\n欲窮千里目，更上一層樓。\n床前明月光，疑是地上霜。"
CHARACTERS = "".join(sorted(set(POEM) - {"\n"}))
SMALL = {"n_ctx": 16, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32}
TRAIN = """
    --device 0 --model_config model.json --tokenizer_path vocab.txt --raw_data_path train.json
    --tokenized_data_path ids/ --raw --epochs 2 --batch_size 8 --lr 0.02 --warmup_steps 3
    --log_step 2 --stride 12 --gradient_accumulation 1 --max_grad_norm 1.0 --num_pieces 3
    --min_length 4 --output_dir model/ --writer_dir summary/ --fp16_opt_level O1
    --encoder_json e.json --vocab_bpe v.bpe device=cpu logging.plot=false"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as GPT2-Chinese's users have it: 9 poems, one of them too short."""
    monkeypatch.chdir(tmp_path)
    poems = [POEM[shift:] + POEM[:shift] for shift in range(8)]
    (tmp_path / "train.json").write_text(json.dumps([*poems, "短"], ensure_ascii=False))
    vocabulary = ["[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]", *CHARACTERS]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    fields = SMALL | {"vocab_size": len(vocabulary), "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    (tmp_path / "model.json").write_text(json.dumps(fields | {"attn_pdrop": 0.0}))
    return tmp_path


def run(program: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process; returns what it printed."""
    assert run_command(run_gpt2.main, program, words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def losses(folder: str) -> list[Any]:
    return [(row["step"], row["loss"], row["sample_hash"]) for row in rows_of(Path(folder))]


def test_the_commands_do_what_their_yaml_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train.py with all its flags, then generate.py, generate_texts.py and eval.py on its model."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    yaml = run("train.py", [*TRAIN.split(), "--show_config"], capsys)
    assert not Path("ids").exists() and not Path("model").exists()
    out = run("train.py", TRAIN.split(), capsys)
    assert "train.json: 8 documents, 320 tokens, 1 short ones left out (0 % of the text)" in out
    assert "the flags became model/train.yaml" in out and Path("model/train.yaml").read_text() == yaml
    pieces = [Path(f"ids/tokenized_train_{i}.txt").read_text().split() for i in range(3)]
    assert [piece[0] for piece in pieces] == ["2", "2", "2"] and sum(map(len, pieces)) == 320, "[MASK] begins each text"
    assert {path.name for path in Path("model").iterdir()} >= {"final_model", "model_epoch1", "model_epoch2"}
    assert run_gpt2.main(["--config", "model/train.yaml", "--run_mode", "train", "output_dir=again"]) == 0
    assert losses("model") == losses("again") and len(losses("model")) >= 6
    capsys.readouterr()

    model = transformers.AutoModelForCausalLM.from_pretrained("model/final_model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model/final_model")
    kept = torch.load("again/final_model/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert (model.config.n_ctx, model.config.n_positions) == (16, 32) and tokenizer.tokenize("白日") == ["白", "日"]

    read = {path: path.stat().st_mtime_ns for path in Path("model").rglob("*")}
    words = "--tokenizer_path vocab.txt --length 40 --prefix 白日 --nsamples 3 --batch_size 2"
    words += " --topk 3 --topp 0.9 --temperature 0.8 --repetition_penalty 1.1 --fast_pattern"
    generate = f"{words} --save_samples --save_samples_path out device=cpu".split()
    Path("generate.yaml").write_text(run("generate.py", [*generate, "--show_config"], capsys))
    shown, samples = run("generate.py", generate, capsys), Path("out/samples.txt").read_text()
    texts = re.findall(r"=+ SAMPLE \d =+\n(.*?)\n={90}", samples, flags=re.S)
    assert len(texts) == 3 and all(text.startswith("白日") for text in texts)
    assert {char for text in texts for char in text} <= {*POEM}, "no [UNK], no halves"
    assert all(text in shown for text in texts) and shown.endswith("=" * 80 + "\n")
    assert run_gpt2.main(["--config", "generate.yaml", "--run_mode", "predict", "predict.output_file=b.txt"]) == 0
    assert Path("b.txt").read_text() == samples

    Path("titles.txt").write_text("白日\n床前短\n")
    titles = ["--titles_file", "titles.txt", "--articles_per_title", "2", "--save_path", "made/", "--length", "9"]
    titles += ["--tokenizer_path", "vocab.txt", "device=cpu"]
    assert "prompt '床前短': the vocabulary lacks 1 of its 3 tokens" in run("generate_texts.py", titles, capsys)
    articles = {path.name: path.read_text() for path in Path("made").glob("*.txt")}
    assert sorted(articles) == ["0-0.txt", "0-1.txt", "1-0.txt", "1-1.txt"]
    assert all(text.startswith("白日" if name[0] == "0" else "床前") for name, text in articles.items())
    Path("made/1-0.txt").unlink()
    assert "3 texts are there already" in run("generate_texts.py", titles, capsys)
    assert Path("made/1-0.txt").read_text() == articles["1-0.txt"]

    words = "--model_config model.json --tokenizer_path vocab.txt --raw_data_path train.json --raw"
    words += " --tokenized_data_path evalids/ --num_pieces 1 --min_length 4 --batch_size 4"
    evaluate = [*words.split(), "--pretrained_model", "model/final_model", "device=cpu"]
    run("eval.py", evaluate, capsys)
    assert read == {path: path.stat().st_mtime_ns for path in Path("model").rglob("*")}
    value = float(Path("eval_result/result.txt").read_text())
    ids = np.fromfile("evalids/tokenized_train_text_document.bin", np.uint16).astype(np.int64)
    windows = torch.tensor(np.array([ids[start : start + 17] for start in range(0, len(ids) - 16, 16)]))
    logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert value == pytest.approx(loss.exp().item(), rel=1e-5)


def test_a_model_that_a_killed_run_did_not_write_comes_with_the_next_start(folder, capsys) -> None:
    """Also where an older final_model is there."""
    pytest.importorskip("torch", reason="torch is not installed")
    words = [*TRAIN.split(), "train.max_epochs=null"]
    run("train.py", [*words, "train.max_steps=1"], capsys)
    old = Path("model/final_model/pytorch_model.bin").read_bytes()
    run("train.py", [*words, "train.max_steps=2"], capsys)
    new = Path("model/final_model/pytorch_model.bin").read_bytes()
    Path("model/final_model/pytorch_model.bin").write_bytes(old)
    os.utime("model/final_model/config.json", ns=(0, 0))
    out = run("train.py", [*words, "train.max_steps=2"], capsys)
    assert "nothing to train" in out and "model/final_model: the weights after step 2" in out
    assert Path("model/final_model/pytorch_model.bin").read_bytes() == new != old
    assert "final_model: the" not in run("train.py", [*words, "train.max_steps=2"], capsys)
    words += ["--batch_size", "4", "train.max_steps=3"]
    assert "the run ends with 20 samples, not 12, since" in run("train.py", words, capsys)


def test_nobody_waits_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prepared" / ".lock").mkdir(parents=True)  # stands for a folder without locks
    start_log(rank=0)
    prepared, ids = (one_at_a_time(tmp_path / name, limit=0) for name in ("prepared", "ids"))
    with prepared, ids, pytest.raises(ConfigError, match="there for 0 s"), one_at_a_time(tmp_path / "ids", limit=0):
        pass
    assert "ids: another process makes data there; waiting for it" in capsys.readouterr().out


def test_train_single_has_no_frame_and_data_are_made_once(folder, capsys, monkeypatch) -> None:
    """All texts are one there; a second start of the command, or another rank, finds the data."""
    pytest.importorskip("torch", reason="torch is not installed")
    words = [word for word in TRAIN.split() if word not in ("--min_length", "4")]
    words += ["train.max_steps=2", "train.max_epochs=null", "checkpoint.epoch_models=false"]
    assert "305 tokens, 1 of them unknown (the vocabulary lacks their text)" in run("train_single.py", words, capsys)
    ids = " ".join(Path(f"ids/tokenized_train_{i}.txt").read_text() for i in range(3)).split()
    assert "2" not in ids and "1" not in ids and len(ids) == 8 * 38 + 1
    before = {path: path.stat().st_mtime_ns for path in Path("ids").iterdir()}
    run("train_single.py", words, capsys)
    assert {path: path.stat().st_mtime_ns for path in Path("ids").iterdir()} == before
    # GPT2-Chinese's data file since 2021: a JSON string on each line
    (folder / "train.json").write_text(json.dumps(POEM) + "\n")
    run("train_single.py", [*words, "output_dir=other"], capsys)
    ids = " ".join(Path(f"ids/tokenized_train_{i}.txt").read_text() for i in range(3)).split()
    assert len(ids) == 38


def test_bad_input_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = ["--raw", "--raw_data_path", "train.json"]
    late = "--min_length 4 --tokenized_data_path ids --pretrained_model none --output_dir refused"
    for program, words, message in (
        ("train.py", ["--model_config", "."], "--model_config: .: is a folder; expected GPT2-Chinese's"),
        ("train.py", ["--tokenized_data_path", "none/"], "none: no tokenized_train_0.txt"),
        ("train.py", ["--raw", "--raw_data_path", "vocab.txt"], "vocab.txt: is text, expected a"),
        ("train.py", [*raw, "--num_pieces", "3.5"], "num_pieces=3.5: expected a whole number"),
        ("train.py", [*raw, "--min_length", "-1"], "min_length=-1: expected a number that is not"),
        ("train.py", ["--tokenizer_path", "no.txt", "--raw"], "no.txt: does not exist"),
        ("eval.py", [], "--pretrained_model is not given"),
        ("generate.py", ["--model_path", "nowhere"], "nowhere"),
        ("train.py", [*raw, *late.split()], "none: no whole checkpoint here"),
    ):
        script, own = f"{ROOT}/compat/gpt2_chinese/{program}", "--model_config model.json --tokenizer_path vocab.txt"
        assert programs.main([script, *own.split(), *words, "device=cpu"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error
    assert not any(Path(name).exists() for name in ("none", "data", "refused"))


def train_sh(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "compat" / "gpt2_chinese" / "train.sh"), *words], cwd=folder,
        env=clean_environment(DEVICES="2", **variables), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("", "--epochs 400 --batch_size 2 parallel.strategy=SPS"),
        ("-Distributed", "--epochs 800 --batch_size 2"),
        ("-Distributed-Apex", "--epochs 800 --batch_size 4 --fp16 --fp16_opt_level O2"),
        ("-Distributed-Horovod", "--epochs 4000 --batch_size 4 parallel.strategy=horovod"),
        ("-Distributed-Horovod-Apex", "--epochs 4000 --batch_size 4 --fp16 parallel.strategy=horovod"),
    ],
)
def test_the_study_s_train_sh_in_each_of_its_folders(tmp_path: Path, variant: str, expected: str) -> None:
    """Its flags are those of a run; programs that only print what they get stand in for two."""
    folder, programs = tmp_path / f"GPT2-Chinese-Parallel{variant}", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    for name, text in (
        ("python", f'case "$*" in *train.py*) echo "$@" ;; *) exec {sys.executable} "$@" ;; esac'),
        ("horovodrun", 'echo "horovodrun $@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path, python = f"{programs}:{os.environ['PATH']}", str(programs / "python")
    done = train_sh(folder, "seed=7", PATH=path, PYTHON=python)
    assert done.returncode == 0, done.stderr
    prepared, started = done.stdout.splitlines()
    command, _, flags = started.partition("train.py ")
    assert prepared.partition("train.py ")[2] == f"{flags} --prepare"
    assert ("horovodrun -np 2" if "Horovod" in variant else "--nproc_per_node=2") in command
    assert flags.endswith(f"{expected} seed=7")
    theirs = flags.removesuffix(" seed=7").partition(" parallel.")[0]
    opened = open_flags("gpt2_chinese", shlex.split(theirs))
    assert opened.config.model.seq_length == 512 and opened.config.data.stride == 512


def test_train_sh_says_what_is_wrong_once_before_there_are_ranks(tmp_path: Path) -> None:
    """A flag of the user wins over the script's, and a wrong one is one line."""
    for word, code, found in (
        ("--show_config", 0, "  max_epochs: 1.0  # epochs"),
        ("--epoch=9", 2, "error: command line: --epoch: epoch: unknown key; did you mean epochs?"),
        ("Horovod", 2, "error: horovodrun: not found; install Horovod, or set VARIANT to a folder without it"),
    ):
        variant = f"GPT2-Chinese-Parallel-Distributed-{word}"
        done = train_sh(tmp_path, "--epochs", "1", word, PYTHON=sys.executable, VARIANT=variant)
        lines = (done.stdout + done.stderr).splitlines()
        assert done.returncode == code and lines.count(found) == 1 and (code == 0 or len(lines) == 1)
    assert not [*tmp_path.iterdir()]

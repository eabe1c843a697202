"""--engine ray gives the bytes of one process, whatever dies on the way. Skips without ray."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.dataset.preprocess import PreprocessOptions
from common.dataset.ray_engine import preprocess_on_ray
from common.dataset.workers import TokenizerChoice
from common.errors import ConfigError
from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"
LIMIT = 240
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (extra ray)"
)


def command(files: tuple[Path, Path], *words: object) -> list[str]:
    vocabulary = ("--vocab-file", files[0], "--merge-file", files[1])
    tokenizer = ("--tokenizer-backend", "tokenizers", "--documents", "line")
    return [sys.executable, str(TOOL), *map(str, (*vocabulary, *tokenizer, *words))]


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def task_of(child: subprocess.Popen[str], *, after: int = 0) -> psutil.Process:
    """Return a process that works on a shard, once ``after`` shards are there."""
    until = time.monotonic() + LIMIT
    folder = Path(psutil.Process(child.pid).cwd())
    while time.monotonic() < until and child.poll() is None:
        if len(list(folder.glob("ray.shard-*.meta.json"))) >= after:
            for process in psutil.Process(child.pid).children(recursive=True):
                try:
                    if process.name().startswith("ray::shard") or any(
                        word.startswith("ray::shard") for word in process.cmdline()
                    ):
                        return process
                except psutil.Error:
                    continue
        time.sleep(0.02)
    raise AssertionError("no task of Ray was seen")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [
        f"{n} is the number of this line, {n * n} its square, 中文 {n}. " * 30 for n in range(3000)
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


@needs_ray
def test_killed_tasks_and_a_stopped_run_give_the_bytes_of_one_process(
    corpus: Path, gpt2_vocab_files: tuple[Path, Path]
) -> None:
    words = command(gpt2_vocab_files, "--input", "a.txt", "--output-prefix")
    subprocess.run([*words, "one"], cwd=corpus, check=True, capture_output=True, timeout=LIMIT)
    engine = [*words, "ray", "--engine", "ray", "--shards", "6"]

    child = start(engine, corpus)
    try:
        family = psutil.Process(child.pid)
        task_of(child, after=1)
        processes = family.children(recursive=True)
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT) == 143
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert alive == []
        assert "stopped by SIGTERM; no output is left in part" in child.stderr.read()
    finally:
        child.kill()
        child.stderr.close()
    finished = {path: path.stat().st_ino for path in corpus.glob("ray.shard-*.meta.json")}
    assert 1 <= len(finished) < 6 and not (corpus / "ray_text_document.idx").exists()

    child = start(engine, corpus)
    try:
        killed = task_of(child, after=len(finished) + 1)
        assert all(path.stat().st_ino == inode for path, inode in finished.items())
        killed.kill()
        _, said = child.communicate(timeout=LIMIT)
    finally:
        child.kill()
    assert child.returncode == 0, said
    assert "wrote ray_text_document.bin/.idx: 3000 documents" in said
    for extension in (".bin", ".idx", ".meta.json"):
        one = (corpus / f"one_text_document{extension}").read_bytes()
        assert (corpus / f"ray_text_document{extension}").read_bytes() == one
    assert not [path for path in corpus.iterdir() if "shard" in path.name]


@needs_ray
def test_an_error_of_a_task_is_one_line(corpus: Path, gpt2_vocab_files: tuple[Path, Path]) -> None:
    with (corpus / "a.txt").open("ab") as file:
        file.write(b"\n\xff\n")
    words = ("--input", "a.txt", "--output-prefix", "ray", "--engine", "ray", "--shards", 3)
    child = start(command(gpt2_vocab_files, *words), corpus)
    try:
        _, said = child.communicate(timeout=LIMIT)
    finally:
        child.kill()
    assert child.returncode == 2
    assert "a.txt: line 3001, column 1: byte" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "ray"], "--engine ray and --shards N belong together"),
        (["--shards", "3"], "--engine ray and --shards N belong together"),
        (["--engine", "ray", "--shards", "3", "--workers", "2"], "each shard is one process"),
        (["--engine", "ray", "--shards", "3", "--shard", "1/3"], "leave --shard and --format out"),
        (["--engine", "ray", "--shards", "3", "--format", "pieces"], "leave --shard and --format"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    file = tmp_path / "a.txt"
    options = ["--input", file, "--output-prefix", tmp_path / "b", "--vocab-file", file]
    assert main([*map(str, options), *words]) == 2
    assert said in capsys.readouterr().err


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TokenizerChoice(kind=None, vocab_file=tmp_path, merge_file=None, backend="auto")
    options = PreprocessOptions(
        inputs=(tmp_path / "a.txt",), output_prefix=tmp_path / "b", tokenizer=choice
    )
    with pytest.raises(ConfigError, match="--shards 0: expected 1 to"):
        preprocess_on_ray(options, 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray, which --engine ray needs, is not installed; pip"):
        preprocess_on_ray(options, 2)

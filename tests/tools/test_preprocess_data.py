"""The command line: exit codes, one line for each error, nothing left by a kill."""

from __future__ import annotations

import gzip
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.dataset.indexed import IndexedDataset, IndexedWriter
from common.dataset.metadata import read_metadata
from common.dataset.mindrecord import MindRecordSamples
from common.dataset.samples import GPTDataset
from tools import merge_datasets
from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"
VOCABULARY = ("--vocab-file", "vocab.json", "--merge-file", "merges.txt")

Run = Callable[[str], tuple[object, str]]


@pytest.fixture
def run(tmp_path, gpt2_vocab_files: tuple[Path, Path], monkeypatch, capsys) -> Run:
    """Give a function that runs the tool in ``tmp_path``: its exit code and its messages."""
    monkeypatch.chdir(tmp_path)
    for path in gpt2_vocab_files:
        Path(path.name).symlink_to(path)

    def run(words: str) -> tuple[object, str]:
        capsys.readouterr()
        code = main([*VOCABULARY, *words.split()])
        return code, capsys.readouterr().err

    return run


def test_the_formats_give_equal_pairs(tmp_path, run) -> None:
    texts = ["Hello world", "Ünïcode 中文 text.\nTwo lines", "third"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(texts), encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pairs = []
    for name in ("a.txt", "b.json", "c.jsonl.gz"):
        code, said = run(f"--input {name} --output-prefix out/{name} --log-interval 1")
        assert code == 0, said
        assert "3 documents" in said and "processed 3 documents, 100 %" in said
        prefix = tmp_path / "out" / f"{name}_text_document"
        pairs.append([Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")])
        assert IndexedDataset(prefix).tokens[:3].tolist() == [15496, 995, 50256]
    assert pairs[0] == pairs[1] == pairs[2]


def test_megatrons_older_names_are_aliases(tmp_path, run) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "Hello world"}\n')
    words = "--input a.jsonl --vocab vocab.json --json-key body --no-append-eod --output-prefix x"
    code, said = run(f"{words} --dataset-impl mmap --workers 1")
    assert code == 0, said
    assert IndexedDataset(tmp_path / "x_body_document").tokens.tolist() == [15496, 995]


def test_without_mindspore_its_format_says_what_to_install(tmp_path, run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", None)
    (tmp_path / "a.txt").write_text("text")
    code, said = run("--input a.txt --format mindrecord --output-prefix x")
    assert code == 2 and "pip install -c constraints.txt -e '.[mindspore]'" in said


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [pytest.param(signal.SIGKILL, -9, 2, marks=pytest.mark.long), (signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)],
)
def test_a_stopped_run_leaves_no_output(tmp_path, number, code, workers) -> None:
    sentence = "The quick brown fox jumps over the lazy dog, again and again. "
    (tmp_path / "a.txt").write_text((sentence * 10 + "\n\n") * 20_000)
    words = "--input a.txt --output-prefix out/x --tokenizer-backend tokenizers --log-interval 1"
    command = [sys.executable, TOOL, *VOCABULARY, *words.split(), "--workers", str(workers)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        assert any(line.startswith("processed") for line in child.stderr)
        child.send_signal(number)
        assert child.wait(60) == code
        rest = child.stderr.read()  # ends when the last worker has closed it
    finally:
        child.kill()
        child.stderr.close()
    assert "Traceback" not in rest
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert [name for name in left if not name.startswith(".")] == []
    assert number == signal.SIGKILL or left == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, run) -> None:
    """No file may grow beyond a limit."""
    (tmp_path / "a.txt").write_text("some words\n\n" * 50_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, said = run("--input a.txt --output-prefix out/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and "x_text_document.bin: could not be written" in said
    assert list((tmp_path / "out").iterdir()) == []


def test_mindrecord_holds_the_windows_of_the_pair(tmp_path, run) -> None:
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    for name in "ab":
        stories = {k: f"{name} story, number {k}. " * (k % 7) for k in range(1, 60)}
        rows = [{"text": text, "note": f"note {name} {k}"} for k, text in stories.items()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = "--input a.jsonl b.jsonl --json-keys text note"
    assert run(f"{words} --output-prefix pair/x")[0] == 0
    words += " --format mindrecord --seq-length 16 --num-splits 3"
    code, said = run(f"{words} --output-prefix out/x")
    assert code == 0, said
    settings = {"split": "train", "split_weights": (1, 0, 0), "seq_length": 16, "seed": 1, "shuffle": False}
    for key in ("text", "note"):
        pair = GPTDataset(tmp_path / "pair" / f"x_{key}_document", **settings)
        rows, target = pair.samples_per_epoch, tmp_path / "out" / f"x_{key}_document.mindrecord"
        found = MindRecordSamples(target, **settings).read(np.arange(rows))
        assert (found == pair.read(np.arange(rows))).all()
        left = pair.token_count - 16 * rows - 1
        assert f"{rows} rows of 17 tokens, {left} tokens left over" in said
        first, second = (read_metadata(Path(f"{each}.meta.json")) for each in (target, pair.data.prefix))
        assert first.tokenizer_sha256 == second.tokenizer_sha256
    # no pair and no temporary file is left
    assert len(list((tmp_path / "out").iterdir())) == 2 * (2 * 3 + 1)


# ---- merge_datasets ----


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    for number, name in enumerate(("b", "a"), 1):
        with IndexedWriter(tmp_path / "pairs" / name, np.uint16) as writer:
            writer.append(np.full(3 * number, number), np.full(number, 3))
    return tmp_path / "pairs"


def merge(output: Path, *inputs: Path) -> int:
    words = ["--input", *inputs, "--output-prefix", output]
    return merge_datasets.main([str(word) for word in words])


def test_pairs_follow_one_another_as_named(pairs: Path, tmp_path, capsys) -> None:
    # as a pattern of a shell names them, each with both of its files
    names = [pairs / name for name in ("b.bin", "b.idx", "a.bin", "a.idx")]
    assert merge(tmp_path / "out", *names) == 0
    assert IndexedDataset(tmp_path / "out").tokens.tolist() == [1] * 3 + [2] * 6
    assert capsys.readouterr().err.endswith("out.bin/.idx: 3 documents, 9 tokens of 2 inputs\n")
    assert merge(tmp_path / "sorted.bin", pairs) == 0
    assert IndexedDataset(tmp_path / "sorted").tokens.tolist() == [2] * 6 + [1] * 3
    written = {path.name for path in tmp_path.glob("*.*")}
    assert written == {"out.bin", "out.idx", "sorted.bin", "sorted.idx"}


def test_a_broken_pair_is_named_and_nothing_is_left(pairs: Path, tmp_path, capsys) -> None:
    (pairs / "a.bin").write_bytes(b"12")
    assert merge(tmp_path / "out", pairs) == 2
    assert "a.bin: is smaller (cut short?) than a.idx says" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))

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

from common.dataset import GPTDataset, IndexedDataset
from common.dataset.metadata import read_metadata
from common.dataset.mindrecord import MindRecordSamples
from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"


def command(files: tuple[Path, Path], words: str) -> list[str]:
    vocab, merges = map(str, files)
    return ["--vocab-file", vocab, "--merge-file", merges, *words.split()]


Run = Callable[[str], tuple[object, str]]


@pytest.fixture
def run(
    tmp_path: Path,
    gpt2_vocab_files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Give a function that runs the tool in ``tmp_path``: its exit code and its messages."""
    monkeypatch.chdir(tmp_path)

    def run(words: str) -> tuple[object, str]:
        capsys.readouterr()
        try:
            code: object = main(command(gpt2_vocab_files, words))
        except SystemExit as stop:  # by argparse
            code = stop.code
        return code, capsys.readouterr().err

    return run


def test_the_formats_give_equal_pairs(tmp_path, run) -> None:
    texts = ["Hello world", "Ünïcode 中文 text.\nTwo lines", "third"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(texts), encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    )
    pairs = []
    for name in ("a.txt", "b.json", "c.jsonl.gz"):
        code, said = run(f"--input {name} --output-prefix out/{name} --log-interval 1")
        assert code == 0, said
        assert "3 documents" in said and "processed 3 documents, 100 %" in said
        prefix = tmp_path / "out" / f"{name}_text_document"
        pairs.append([Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")])
        assert IndexedDataset(prefix)[0].tolist() == [15496, 995, 50256]
    assert pairs[0] == pairs[1] == pairs[2]


def test_a_split_that_datasets_saved_by_two_workers(tmp_path, run, caplog) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")
    folder = ROOT / "tests" / "common" / "dataset" / "data" / "splits"
    texts = ["the last row", "Hello world"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = []
    for name, words in {"a": "a.jsonl", "b": f"{folder} --dataset-split test --workers 2"}.items():
        code, said = run(f"--input {words} --output-prefix {name} --log-interval 1")
        assert code == 0, said
        assert "processed 2 documents, 100 %" in said
        pairs.append((tmp_path / f"{name}_text_document.bin").read_bytes())
    assert pairs[0] == pairs[1]
    assert "test/data-00000-of-00001.arrow: read as Arrow (by content)" in caplog.text


def test_megatrons_older_names_are_aliases(tmp_path, gpt2_vocab_files) -> None:
    """As a user starts it."""
    (tmp_path / "a.jsonl").write_text('{"body": "Hello world"}\n')
    vocab, merges = gpt2_vocab_files
    words = f"--input a.jsonl --vocab {vocab} --merge-file {merges} --json-key body"
    words += " --no-append-eod --output-prefix x --dataset-impl mmap --workers 1"
    done = subprocess.run(
        [sys.executable, str(TOOL), *words.split()],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(tmp_path / "x_body_document").tokens.tolist() == [15496, 995]


MINDRECORD = "a.txt --format mindrecord"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("absent.txt", "absent.txt: not found"),
        ("bad.jsonl", "bad.jsonl: line 2, column 1: the key 'text' is missing"),
        ("bad.txt", "bad.txt: line 1, column 2: byte 1 is not UTF-8"),
        ("a.txt --dataset-impl lazy", "--dataset-impl lazy: only mmap is written"),
        ("a.txt --workers 0", "--workers=0"),
        ("a.txt --tokenizer-type GPT2BPETokeniser", "did you mean GPT2BPETokenizer"),
        ("a.txt --keep-newlines", "--split-sentences"),
        ("a.txt --inp b.txt", "--inp"),
        (f"{MINDRECORD} --split-sentences", "rows of equal length know no sentences"),
        (f"{MINDRECORD} --seq-length 0", "--seq-length: '0': expected a whole number of 1"),
        (f"{MINDRECORD} --num-splits 0", "--num-splits: '0': expected a whole number of 1"),
        ("a.txt --num-splits 2", "only mean something with --format mindrecord"),
        (f"{MINDRECORD} --seq-length 9", "expected at least seq_length + 1 = 10"),
        (MINDRECORD, "pip install -c constraints.txt -e '.[mindspore]'"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(
    tmp_path, run, monkeypatch, words, message
) -> None:
    if words == MINDRECORD:  # without MindSpore
        monkeypatch.delitem(sys.modules, "mindformers_gpt2.mindrecord", raising=False)
        monkeypatch.setitem(sys.modules, "mindspore.mindrecord", None)
    elif words.endswith("--seq-length 9"):
        needs_mindspore()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    code, said = run(f"--input {words} --output-prefix out/x")
    assert code == 2
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [
        (signal.SIGKILL, -9, 1),
        (signal.SIGKILL, -9, 2),
        (signal.SIGINT, 130, 2),
        (signal.SIGTERM, 143, 1),
    ],
)
def test_a_stopped_run_leaves_no_output(tmp_path, gpt2_vocab_files, number, code, workers) -> None:
    sentence = "The quick brown fox jumps over the lazy dog, again and again. "
    (tmp_path / "a.txt").write_text((sentence * 10 + "\n\n") * 20_000)
    words = "--input a.txt --output-prefix out/x --tokenizer-backend tokenizers --log-interval 1"
    child = subprocess.Popen(
        [sys.executable, TOOL, *command(gpt2_vocab_files, f"{words} --workers {workers}")],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # a suite started in the background of a shell would pass on that SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("processed"):
                break
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


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, gpt2_vocab_files) -> None:
    (tmp_path / "a.txt").write_text("some words\n\n" * 50_000)

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [sys.executable, TOOL, *command(gpt2_vocab_files, "--input a.txt --output-prefix out/x")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        preexec_fn=small_files_only,
    )
    assert done.returncode == 1
    assert "x_text_document.bin: could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def needs_mindspore() -> None:
    pytest.importorskip(
        "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_mindrecord_holds_the_windows_of_the_pair(tmp_path, run, splits) -> None:
    needs_mindspore()
    for n, name in enumerate(("a", "b")):
        lines = [
            json.dumps(
                {
                    "text": f"{name} story, number {k}. " * (k % 7),
                    "note": f"note {n} {k} and more words",
                }
            )
            for k in range(1, 60)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = "--input a.jsonl b.jsonl --json-keys text note"
    assert run(f"{words} --output-prefix pair/x")[0] == 0
    words += f" --format mindrecord --seq-length 16 --num-splits {splits}"
    code, said = run(f"{words} --output-prefix out/x")
    assert code == 0, said
    for key in ("text", "note"):
        settings = {
            "split": "train",
            "split_weights": (1, 0, 0),
            "seq_length": 16,
            "seed": 1,
            "shuffle": False,
        }
        pair = GPTDataset(tmp_path / "pair" / f"x_{key}_document", **settings)
        rows, target = pair.samples_per_epoch, tmp_path / "out" / f"x_{key}_document.mindrecord"
        assert (
            MindRecordSamples(target, **settings).read(np.arange(rows))
            == pair.read(np.arange(rows))
        ).all()
        assert (
            f"{rows} rows of 17 tokens, {pair.token_count - 16 * rows - 1} tokens left over" in said
        )
        metadata = read_metadata(target.with_name(f"{target.name}.meta.json"))
        assert (
            metadata is not None
            and metadata.tokenizer_sha256 == pair.data.metadata().tokenizer_sha256
        )
    assert len(list((tmp_path / "out").iterdir())) == 2 * (2 * splits + 1), (
        "no pair and no temporary file is left"
    )

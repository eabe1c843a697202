"""Preprocessing of text, reading of windows and conversion of weights: whole processes, medians."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import Row, compared, initial_weights
from common.errors import RunError
from common.paths import ROOT

# Peer of preprocessing: one process, one document after the other, ids written as uint16.
BASELINE = """
import sys
import numpy as np
from tokenizers import ByteLevelBPETokenizer
corpus, vocab, merges, out, batched = sys.argv[1:]
tokenizer = ByteLevelBPETokenizer(vocab, merges)
documents = [
    text.strip("\\n")
    for text in open(corpus, encoding="utf-8").read().split("\\n\\n")
    if text.strip()
]
with open(out, "wb") as file:
    if batched == "batched":
        for start in range(0, len(documents), 1000):
            for encoding in tokenizer._tokenizer.encode_batch_fast(documents[start : start + 1000]):
                file.write(np.array([*encoding.ids, 50256], dtype=np.uint16).tobytes())
    else:
        for text in documents:
            file.write(np.array([*tokenizer.encode(text).ids, 50256], dtype=np.uint16).tobytes())
"""
LIBRARIES = ("gigatoken", "tiktoken")


def preprocessing_rows(inputs: Sequence[Path], repeats: int) -> Iterator[Row]:
    """inputs: corpus, vocabulary and merges. Raises RunError where a library makes other tokens than the peer."""
    corpus, vocab, merges = inputs
    size = corpus.stat().st_size / 1e6
    core = {min(os.sched_getaffinity(0))}
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    options: dict[str, Any] = {"check": True, "env": environment, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), [str(corpus), str(vocab), str(merges)]
        baseline = [sys.executable, "-c", BASELINE, *files, str(folder / "baseline.bin")]
        tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", files[0]]
        tool += ["--vocab-file", files[1], "--merge-file", files[2], "--workers", "1"]
        peers = {"tokenizers, loop": [*baseline, "loop"], "tokenizers, encode_batch_fast": [*baseline, "batched"]}
        ours = {name: [*tool, "--output-prefix", str(folder / name), "--tokenizer-backend", name] for name in LIBRARIES}
        seconds: dict[str, list[float]] = {name: [] for name in (peers | ours)}
        for _ in range(repeats):
            for name, command in (peers | ours).items():
                start = time.perf_counter()
                subprocess.run(command, **options, preexec_fn=lambda: os.sched_setaffinity(0, core))
                seconds[name].append(time.perf_counter() - start)
        expected = (folder / "baseline.bin").read_bytes()
        for name in ours:
            if (folder / f"{name}_text_document.bin").read_bytes() != expected:
                raise RunError(f"{name}: other tokens than the baseline's; speeds mean nothing")
    described = {name: f"{name}: {size / statistics.median(each):.1f} MB/s" for name, each in seconds.items()}
    for own in ours:
        for peer in peers:
            ratio = compared(seconds[own], seconds[peer], digits=1)
            yield f"preprocessing {size:.0f} MB, one core", described[own], described[peer], ratio, ""


def loader_rows(repeats: int) -> Iterator[Row]:
    from common.dataset import indexed, samples

    for length in (1000, 100):
        with tempfile.TemporaryDirectory() as folder:
            random, prefix = np.random.default_rng(0), Path(folder) / "data"
            sizes = random.integers(length // 2, length * 3 // 2, size=64_000_000 // length)
            with indexed.IndexedWriter(prefix, np.uint16) as writer:
                ids = random.integers(0, 50257, size=int(sizes.sum()), dtype=np.uint16)
                writer.append(ids, sizes)
            dataset = samples.GPTDataset(prefix, split="train", split_weights=(1, 0, 0), seq_length=1024, seed=1)
            n, rates = dataset.samples_per_epoch, []
            for _ in range(repeats + 1):  # the first round warms the page cache and the index
                start = time.perf_counter()
                for first in range(0, n, 64):
                    dataset.read(np.arange(first, min(n, first + 64)))
                rates.append(n * 1025 / (time.perf_counter() - start) / 1e6)
        what = f"loader, documents of about {length} tokens"
        yield what, f"{statistics.median(rates[1:]):.0f} million tokens/s", "", "", ""


# ---- conversion ----


def make_source(config: Path, folder: Path) -> None:
    from common.resolve.derive import resolve_config
    from common.run_config import load_config
    from common.systems.hugging_face.weights import write_hugging_face

    folder.mkdir()
    run = resolve_config(load_config(config, ["output_dir=unused"]))
    write_hugging_face(folder, initial_weights(run), None)


def convert_here(source: Path, target: Path, wanted: str) -> None:
    """Print a line of JSON: the peak of anonymous memory, which no file backs, beyond that after the imports."""
    from common.conversion.convert import convert

    name, _, shards = wanted.partition(":")
    tensor, pipeline = map(int, (shards or "1x1").split("x"))
    process, done = psutil.Process(), threading.Event()

    def held() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    sizes = [held()]

    def watch() -> None:
        while not done.wait(0.005):
            sizes.append(held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        convert(source, target, target_format=name, model_parallel=tensor, pipeline_stage=pipeline)
    finally:
        done.set()
        watcher.join()
    print(json.dumps(max(sizes) - sizes[0]))


def measure(source: Path, folder: Path, wanted: str, repeats: int) -> Row:
    """Convert and copy in turns. Seconds are those of whole processes, imports included."""
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    seconds, copied, peaks = [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(["cp", "-r", "--reflink=never", str(source), str(folder / "copy")], check=True)
        subprocess.run(["sync", "-f", str(folder / "copy")], check=True)
        copied.append(time.perf_counter() - start)
        shutil.rmtree(folder / "copy")
        child = [sys.executable, "-m", __name__, str(source), str(folder / "target"), wanted]
        start = time.perf_counter()
        answer = subprocess.run(child, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
        seconds.append(time.perf_counter() - start)
        peaks.append(int(answer))
        shutil.rmtree(folder / "target")
    return (
        f"{size:.2f} GB hf to {wanted}",
        f"{size / statistics.median(seconds):.2f} GB/s, the process whole",
        f"cp and sync {size / statistics.median(copied):.2f} GB/s",
        compared(seconds, copied),
        f"{max(peaks) / 1e6:.0f} MB anonymous, beyond imports",
    )


def conversion_rows(config: Path, folder: Path, repeats: int) -> Iterator[Row]:
    """Convert a Hugging Face folder of random float32 weights, beside cp and sync of its files.

    Needs three times the weights' size on the disk of ``folder``.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="conversion-") as name:
        source = Path(name) / "source"
        make_source(config, source)
        heads = json.loads((source / "config.json").read_text())["n_head"]
        tensor = 5 if heads % 2 else 2  # 1558M has 25
        for wanted in ("mindspore", "mindformers", f"megatron:{tensor}x2"):  # tensor x pipeline shards
            yield measure(source, Path(name), wanted, repeats)


if __name__ == "__main__":  # the child that converts
    convert_here(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

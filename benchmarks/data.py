"""Measure the speed of preprocessing and loading: whole processes, one core, medians.

    python benchmarks/data.py preprocess --corpus FILE.txt --vocab-file vocab.json \\
        --merge-file merges.txt [--limit-mb 8] [--repeats 3]
    python benchmarks/data.py read [--mega-tokens 64]
    python benchmarks/data.py index [--mega-tokens 1000]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.interleaved import median_ratio
from benchmarks.table import report
from common.flags import make_parser

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


def _one_core(command: list[str]) -> float:
    """Wall seconds of a child that may use one core and one thread."""
    core = min(os.sched_getaffinity(0))
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return time.perf_counter() - start


def preprocess(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        data = args.corpus.read_bytes()
        if args.limit_mb:
            data = data[: data.rfind(b"\n\n", 0, int(args.limit_mb * 1e6))]
        corpus.write_bytes(data)
        files = [str(args.vocab_file), str(args.merge_file)]
        baseline = [
            sys.executable,
            "-c",
            BASELINE,
            str(corpus),
            *files,
            str(Path(folder) / "baseline.bin"),
        ]
        tool = [
            sys.executable,
            str(ROOT / "tools" / "preprocess_data.py"),
            "--input",
            str(corpus),
            "--vocab-file",
            files[0],
        ]
        tool += ["--merge-file", files[1], "--workers", "1"]
        commands = {
            "tokenizers, loop": [*baseline, "loop"],
            "tokenizers, encode_batch_fast": [*baseline, "batched"],
        }
        for backend in args.backends:
            commands[backend] = [
                *tool,
                "--output-prefix",
                str(Path(folder) / backend),
                "--tokenizer-backend",
                backend,
            ]
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.repeats):
            for name, command in commands.items():
                seconds[name].append(_one_core(command))
        for backend in args.backends:
            same = (Path(folder) / f"{backend}_text_document.bin").read_bytes() == (
                Path(folder) / "baseline.bin"
            ).read_bytes()
            print(f"{backend}: output {'equal to' if same else 'DIFFERENT FROM'} the baseline's")

    def describe(name: str) -> str:
        return f"{name}: {len(data) / statistics.median(seconds[name]) / 1e6:.1f} MB/s"

    peers, what = (
        [name for name in seconds if name.startswith("tokenizers,")],
        f"preprocessing {len(data) / 1e6:.0f} MB, one core",
    )
    rows = []
    for backend in args.backends:
        for peer in peers:
            ratio, least, greatest = median_ratio(seconds[backend], seconds[peer])
            rows.append(
                (
                    what,
                    describe(backend),
                    describe(peer),
                    f"{ratio:.1f} ({least:.1f} to {greatest:.1f} in {args.repeats})",
                    "",
                )
            )
    report(rows)


def read(args: argparse.Namespace) -> None:
    import numpy as np

    from common.dataset import GPTDataset, IndexedWriter

    for length in (1000, 100):
        with tempfile.TemporaryDirectory() as folder:
            rng = np.random.default_rng(0)
            sizes = rng.integers(
                length // 2, length * 3 // 2, size=int(args.mega_tokens * 1e6 / length)
            )
            with IndexedWriter(Path(folder) / "data", np.uint16) as writer:
                writer.append(rng.integers(0, 50257, size=int(sizes.sum()), dtype=np.uint16), sizes)
            dataset = GPTDataset(
                Path(folder) / "data",
                split="train",
                split_weights=(1, 0, 0),
                seq_length=1024,
                seed=1,
            )
            n = dataset.samples_per_epoch
            rates = []
            for _ in range(args.repeats + 1):  # the first round warms the page cache and the index
                start = time.perf_counter()
                for first in range(0, n, 64):
                    dataset.read(np.arange(first, min(n, first + 64)))
                rates.append(n * 1025 / (time.perf_counter() - start) / 1e6)
            what = f"loader, documents of about {length} tokens"
            report([(what, f"{statistics.median(rates[1:]):.0f} million tokens/s", "", "", "")])


def index(args: argparse.Namespace) -> None:
    import numpy as np

    from common.dataset import GPTDataset, IndexedWriter

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        prefix = Path(folder) / "data"
        sizes = rng.integers(500, 1500, size=int(args.mega_tokens * 1e3))
        with IndexedWriter(prefix, np.uint16) as writer:
            for part in np.array_split(sizes, max(1, len(sizes) // 10000)):
                writer.append(np.zeros(int(part.sum()), dtype=np.uint16), part)
        # Against what is resident now, not against the peak so far, which writing the data has
        # raised.
        before = (
            int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024
        )
        for name in ("cold", "cached"):
            start = time.perf_counter()
            dataset = GPTDataset(
                prefix, split="train", split_weights=(949, 50, 1), seq_length=1024, seed=1
            )
            dataset.read(np.arange(8))
            taken = time.perf_counter() - start
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            print(
                f"{name}: {len(sizes)} documents, {sizes.sum() / 1e6:.0f} million tokens:"
                f" {taken:.2f} s, at most {peak:.0f} MiB more memory"
            )


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("preprocess")
    command.add_argument("--corpus", type=Path, required=True, help="text to preprocess")
    command.add_argument(
        "--vocab-file", type=Path, required=True, help="vocabulary of the tokenizer"
    )
    command.add_argument("--merge-file", type=Path, required=True, help="merges of the tokenizer")
    command.add_argument(
        "--backends",
        nargs="+",
        default=["gigatoken", "tiktoken"],
        help="libraries of tokenizers to compare (default: gigatoken tiktoken)",
    )
    command.add_argument(
        "--limit-mb", type=float, help="megabytes of the corpus to use (default: all)"
    )
    command.set_defaults(run=preprocess)
    command = commands.add_parser("read")
    command.add_argument(
        "--mega-tokens", type=float, default=64, help="millions of tokens to read (default: 64)"
    )
    command.set_defaults(run=read)
    command = commands.add_parser("index")
    command.add_argument(
        "--mega-tokens", type=float, default=1000, help="millions of tokens to read (default: 1000)"
    )
    command.set_defaults(run=index)
    for command in commands.choices.values():
        command.add_argument(
            "--repeats", type=int, default=3, help="number of repeats (default: 3)"
        )
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

"""All benchmarks, one table at the end.

    python benchmarks/run.py [--device cpu] [--data data/quickstart] [--mindspore]

Takes half an hour or more on two cores; the machine should do nothing else. --data: a folder with
corpus.txt, vocab.json and merges.txt, as tools/fetch_quickstart_data.py makes. --device cuda trains
124M to 1558M in bfloat16 beside transformers, compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.table import GATHER, report

GPT2 = ("--config", "configs/gpt2/run_gpt2_124m.yaml")
ONE_WINDOW = ("train.micro_batch_size=1", "train.global_batch_size=1")
ON_GPU = {"_124m": 16, "_345m": 8, "_774m": 8, "_1558m": 4}
"""Configs and micro batch sizes; two micro batches a step."""


def commands(arguments: argparse.Namespace) -> list[list[str]]:
    """Script and arguments of each benchmark."""
    found: list[list[str]] = []
    device = f"device={arguments.device}"
    if arguments.device == "cpu":
        pair = ["--systems", "torch,transformers"]
        found.append(["training.py", *GPT2, device, *ONE_WINDOW, "precision=float32", *pair])
        # without kernels for bf16 a processor takes 15 s a step even so
        short = "model.seq_length=32"
        found.append(["training.py", *GPT2, device, *ONE_WINDOW, "precision=bf16", short, *pair])
        found.append(
            [
                "training.py",
                *GPT2,
                device,
                *ONE_WINDOW,
                "precision=float32",
                "--systems",
                "torch-compiled,transformers",
            ]
        )
        small = (
            "--config",
            "configs/gpt2/run_gpt2_tiny.yaml",
            "train.global_batch_size=2",
            "train.micro_batch_size=1",
            device,
        )
        found += [["overhead.py", *small], ["overhead.py", "--ranks", "2", *small]]
        if arguments.mindspore:
            systems = ["--systems", "mindspore,torch"]
            found.append(
                ["training.py", "--config", "configs/gpt2/run_gpt2_tiny.yaml", device, *systems]
            )
    else:
        for size, micro in ON_GPU.items():
            batch = (
                f"train.micro_batch_size={micro}",
                f"train.global_batch_size={2 * micro}",
                "train.accumulation_steps=2",
            )
            config = (
                "--config",
                f"configs/gpt2/run_gpt2{size}.yaml",
                device,
                "precision=bf16",
                "train.recompute=none",
                *batch,
            )
            found.append(
                ["training.py", *config, "--systems", "torch,torch-compiled,transformers-compiled"]
            )
    found.append(["generation.py", "--device", arguments.device])
    files = [str(arguments.data / name) for name in ("corpus.txt", "vocab.json", "merges.txt")]
    found.append(
        [
            "data.py",
            "preprocess",
            "--corpus",
            files[0],
            "--vocab-file",
            files[1],
            "--merge-file",
            files[2],
        ]
    )
    found.append(["data.py", "read"])
    with_state = ("--config", "configs/gpt2/run_gpt2_124m.yaml", device)
    found.append(
        [
            "checkpoint.py",
            *with_state,
            "--folder",
            str(arguments.folder),
            "--repeats",
            "3",
            "--passes",
            "8",
        ]
    )
    found.append(
        [
            "conversion.py",
            "--config",
            "configs/gpt2/run_gpt2_345m.yaml",
            "--folder",
            str(arguments.folder),
        ]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "quickstart")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk that checkpoints are measured on",
    )
    parser.add_argument("--mindspore", action="store_true", help="also MindSpore beside torch")
    arguments = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        for command in commands(arguments):
            print("\n$ python benchmarks/" + " ".join(command), flush=True)
            done = subprocess.run(
                [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]],
                cwd=ROOT,
                env={**os.environ, GATHER: str(rows)},
            )
            failed += [] if done.returncode == 0 else [" ".join(command)]
        gathered = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    print()
    report(gathered)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()

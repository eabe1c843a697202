"""Run all benchmarks and print one table at the end.

    python benchmarks/run.py [--device cuda] [--parts training,loader] [--data data/quickstart]
    python benchmarks/run.py --plan
        show the commands; start nothing

Takes half an hour on two cores; the machine should do nothing else. Needs nothing but the project
with its extra `peers`; preprocessing needs --data, as tools/fetch_quickstart_data.py makes it.
--device cuda trains 124M to 1558M in bfloat16, eager and compiled, and compares the speeds with the
prediction of a roofline. --output_dir has the report of the training steps and the table; with an
earlier one, the training steps resume there. Exit code 2: bad arguments; 1: a benchmark has failed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.table import GATHER, report
from common.errors import ConfigError
from common.flags import flag
from common.program import command

ROWS = "rows.jsonl"
CORPUS = ("corpus.txt", "vocab.json", "merges.txt")


def commands(arguments: Request) -> dict[str, list[list[str]]]:
    """Return script and arguments of each benchmark, by the name of its part."""
    device = f"device={arguments.device}"
    tiny = ["--config", "configs/gpt2/run_gpt2_tiny.yaml", "train.global_batch_size=2"]
    tiny += ["train.micro_batch_size=1", device]
    corpus, words, merges = (str(arguments.data / name) for name in CORPUS)
    vocabulary = ["--vocab-file", words, "--merge-file", merges]
    often = ["--repeats", "3", "--passes", "8"]
    disk = ["--folder", str(arguments.folder)]
    training = ["--device", arguments.device, "--output_dir", str(arguments.output_dir)]
    for word in arguments.only:
        training += ["--only", word]
    return {
        "training": [["training.py", *training, f"repeats={arguments.repeats}"]],
        "overhead": [["overhead.py", *tiny], ["overhead.py", "--ranks", "2", *tiny]]
        if arguments.device == "cpu"
        else [],
        "generation": [["generation.py", "--device", arguments.device]],
        "preprocessing": [["data.py", "preprocess", "--corpus", corpus, *vocabulary]],
        "loader": [["data.py", "read"]],
        "checkpoint": [
            ["checkpoint.py", "--config", "configs/gpt2/run_gpt2_124m.yaml", device, *disk, *often]
        ],
        "conversion": [["conversion.py", "--config", "configs/gpt2/run_gpt2_345m.yaml", *disk]],
    }


@dataclass(kw_only=True)
class Request:
    device: Literal["cpu", "cuda"] = flag("kind of device", default="cpu")
    parts: str | None = flag("A,B,...: benchmarks to run (default: all)")
    plan: bool = flag("show the commands; start nothing")
    repeats: int = flag("N: runs of each training step", default=3)
    only: tuple[str, ...] = flag(
        "AXIS=LABEL: training steps to keep, such as model=124m_b64; may be given several times"
    )
    data: Path = flag(
        "folder with corpus.txt, vocab.json and merges.txt (default: data/quickstart)",
        default=ROOT / "data" / "quickstart",
    )
    folder: Path = flag(
        "folder on the disk that checkpoints are measured on (default: the temporary one)",
        default=Path(tempfile.gettempdir()),
    )
    output_dir: Path = flag(
        "DIR: folder of results (default: output/benchmark/DATE_TIME)",
        default=ROOT / "output" / "benchmark" / f"{datetime.now():%Y%m%d_%H%M%S}",
    )

    def __post_init__(self) -> None:
        for name in ("data", "folder", "output_dir"):  # children run in another folder
            setattr(self, name, getattr(self, name).resolve())
        if unknown := [part for part in self.chosen if part not in commands(self)]:
            raise ConfigError(
                f"--parts {','.join(unknown)}: expected some of {', '.join(commands(self))}"
            )

    @property
    def chosen(self) -> list[str]:
        return self.parts.split(",") if self.parts else list(commands(self))


def why_no_gpu() -> str:
    """Return why torch cannot use a GPU here; empty where it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} finds no GPU"


@command(Request)
def main(arguments: Request) -> int:
    if arguments.device == "cuda" and not arguments.plan and (reason := why_no_gpu()):
        advice = "run it on a machine with an NVIDIA GPU, or leave --device out"
        print(f"error: --device cuda: {reason}; {advice}", file=sys.stderr)
        return 2
    chosen = commands(arguments)
    missing = [name for name in CORPUS if not (arguments.data / name).is_file()]
    left_out = {}
    if missing and "preprocessing" in arguments.chosen:
        left_out["preprocessing"] = f"{arguments.data} has no {', '.join(missing)}"
    todo = [
        command for part in arguments.chosen if part not in left_out for command in chosen[part]
    ]
    for part, reason in left_out.items():
        print(f"left out: {part}: {reason}; make it by tools/fetch_quickstart_data.py")
    if arguments.plan:
        for script, *words in todo:
            print(shlex.join(["python", f"benchmarks/{script}", *words]))
        return 0
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    rows, failed = arguments.output_dir / ROWS, []
    rows.write_text("", encoding="utf-8")
    for each in todo:
        print("\n$ python benchmarks/" + shlex.join(each), flush=True)
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / each[0]), *each[1:]],
            cwd=ROOT,
            env={**os.environ, GATHER: str(rows)},
        )
        if done.returncode == 2:  # bad arguments; their message is above
            return 2
        failed += [] if done.returncode == 0 else [shlex.join(each)]
    print(f"\n{arguments.output_dir}")
    report([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()])
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

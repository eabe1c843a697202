"""A training step of MindSpore beside torch eager: one process each, which step in turn, so that neither's threads disturb the other.

python benchmarks/backends.py --config configs/gpt2/run_gpt2_tiny.yaml [--repeats 9] [section.key=value ...]

Prints the time from start to the end of the first step (imports apart), which for MindSpore is mostly compilation, the medians of
the steps after it, and the median of the ratios of neighbouring steps. Tokens are random; weights are equal.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PACKAGES = {"torch": "torch_gpt2", "mindspore": "mindformers_gpt2"}
WARM_UP = 2


def work(arguments: argparse.Namespace) -> None:
    """One step for each line on stdin; the answer is its seconds and its loss."""
    os.environ.setdefault("GLOG_v", "3")
    from common.config.load import load_config
    from common.config.resolve import resolve_config, resolve_length
    from common.dataset import Batch

    package = PACKAGES[arguments.worker]
    words = [*arguments.overrides, f"backend={arguments.worker}", "output_dir=unused"]
    config = resolve_length(resolve_config(load_config(arguments.config, words)), 1)
    device_room, model_room, engine_room = (importlib.import_module(f"{package}.{room}") for room in ("device", "model", "engine"))
    device = device_room.open_device(config)
    engine = engine_room.Engine(model_room.build_model(config, device), config, device)
    model_room.initialise(engine.master.tensors, config)
    engine.master.write_back()
    shape = (config.train.global_batch_size or 1, config.model.seq_length + 1)

    def batches() -> Iterator[Batch]:
        random = np.random.default_rng(0)
        while True:
            tokens = random.integers(0, config.model.vocab_size, shape).astype(np.int32)
            yield Batch(tokens=tokens, consumed_samples=0, sample_hash="")

    source = batches()
    for _ in sys.stdin:
        start = time.perf_counter()
        result = engine.run(source, 1)[0]
        print(time.perf_counter() - start, result.loss, flush=True)


class Worker:
    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", name, "--config", arguments.config, *arguments.overrides]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> tuple[float, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if len(answer) != 2:
            sys.exit(f"{' '.join(self.process.args[1:4])} ended; its message is above")  # type: ignore[arg-type, index]
        seconds, loss = answer
        return float(seconds), float(loss)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def compare(arguments: argparse.Namespace) -> None:
    workers = {name: Worker(name, arguments) for name in PACKAGES}
    first = {name: worker.step() for name, worker in workers.items()}
    for _ in range(WARM_UP):
        for worker in workers.values():
            worker.step()
    steps: list[dict[str, tuple[float, float]]] = []
    for _ in range(arguments.repeats):
        steps.append({name: worker.step() for name, worker in workers.items()})
        if abs(steps[-1]["torch"][1] - steps[-1]["mindspore"][1]) > 1e-3 * steps[-1]["torch"][1]:
            sys.exit(f"the losses differ: {steps[-1]}; a comparison of speeds means nothing")
    for worker in workers.values():
        worker.end()
    for name in PACKAGES:
        seconds = [step[name][0] for step in steps]
        print(
            f"{name:10} first step {first[name][0]:6.2f} s   then {statistics.median(seconds):7.3f} s"
            f" ({min(seconds):.3f} to {max(seconds):.3f})   losses {first[name][1]:.5f} to {steps[-1][name][1]:.5f}"
        )
    ratios = [step["mindspore"][0] / step["torch"][0] for step in steps]
    print(f"mindspore / torch: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {len(ratios)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--repeats", type=int, default=9, choices=range(1, 1000), metavar="N")
    parser.add_argument("--worker", choices=PACKAGES, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

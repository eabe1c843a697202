"""Measure time and memory of converting weights, beside cp and sync of the same files.

    python benchmarks/conversion.py --config configs/gpt2/run_gpt2_1558m.yaml --folder DIR \\
        [--to mindformers megatron:2x2] [--repeats 3] [section.key=value ...]

The source is a Hugging Face folder of random float32 weights. A target may say tensor x pipeline
shards. Needs three times the weights' size on the disk of --folder; peak memory is RssAnon, without
the mapped input.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import report
from common.flags import flag, parse


def make_source(config: str, folder: Path, overrides: Sequence[str] = ()) -> None:
    import numpy as np

    from common.resolve.derive import resolve_config
    from common.run_config import load_config
    from common.systems.hugging_face.write import write_hugging_face
    from common.systems.weights import Weight, Weights
    from common.weights.names import parameter_shapes

    model = resolve_config(load_config(Path(config), ["output_dir=unused", *overrides])).model
    generator = np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> Weight:
        return Weight(
            dtype="float32", shape=shape, load=lambda: generator.standard_normal(shape, np.float32)
        )

    weights = {name: random(shape) for name, shape in parameter_shapes(model).items()}
    folder.mkdir()
    write_hugging_face(
        folder, Weights(path=folder, format="random", model=model, tensors=weights), None
    )


def anonymous_memory() -> int:
    """Bytes of this process that no file backs."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def convert_here(source: Path, target: Path, wanted: str) -> None:
    """Print a line of JSON: the peak of anonymous memory beyond that after the imports."""
    from common.conversion.convert import convert

    name, _, shards = wanted.partition(":")
    tensor, _, pipeline = shards.partition("x")
    layout: dict[str, Any] = (
        {"model_parallel": int(tensor), "pipeline_stage": int(pipeline or 1)} if shards else {}
    )
    before, peak, done = anonymous_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        convert(source, target, target_format=name, **layout)
    finally:
        done.set()
        watcher.join()
    print(json.dumps(peak - before))


@dataclass(frozen=True)
class Measured:
    size: int
    """Bytes of the source."""
    seconds: list[float]
    """Seconds of the whole process that converts, imports included."""
    copied: list[float]
    peak: int
    """Bytes of anonymous memory beyond the imports, at most."""


def measure(source: Path, folder: Path, wanted: str, repeats: int) -> Measured:
    """Converting and copying in turns."""
    seconds, copied, peaks = [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(
            ["cp", "-r", "--reflink=never", str(source), str(folder / "copy")], check=True
        )
        subprocess.run(["sync", "-f", str(folder / "copy")], check=True)
        copied.append(time.perf_counter() - start)
        shutil.rmtree(folder / "copy")
        words = [__file__, "--child", str(source), str(folder / "target"), wanted]
        start = time.perf_counter()
        answer = subprocess.run(
            [sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        seconds.append(time.perf_counter() - start)
        peaks.append(int(answer))
        shutil.rmtree(folder / "target")
    return Measured(
        sum(path.stat().st_size for path in source.iterdir()), seconds, copied, max(peaks)
    )


def row(wanted: str, found: Measured) -> tuple[str, str, str, str, str]:
    size = found.size / 1e9
    ratios = [one / other for one, other in zip(found.copied, found.seconds, strict=True)]
    return (
        f"{size:.2f} GB hf to {wanted}",
        f"{size / statistics.median(found.seconds):.2f} GB/s, the process whole",
        f"cp and sync {size / statistics.median(found.copied):.2f} GB/s",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in"
        f" {len(ratios)})",
        f"{found.peak / 1e6:.0f} MB anonymous, beyond imports",
    )


@dataclass(kw_only=True)
class Request:
    config: str = flag("YAML of the model", required=True)
    folder: Path = flag(
        "folder on the disk to measure; a folder inside is made and removed", required=True
    )
    to: tuple[str, ...] = flag(
        "FORMAT[:TxP]: formats to write, with tensor x pipeline ranks",
        default=("mindspore", "mindformers", "megatron:2x2"),
        nargs="+",
    )
    repeats: int = flag("N: pairs of converting and copying", default=3, choices=range(1, 100))
    overrides: tuple[str, ...] = flag(
        "keys of the configuration to set", positional=True, nargs="*", metavar="section.key=value"
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        convert_here(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
        return
    arguments = parse(Request, None, __doc__)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="conversion-") as name:
        folder = Path(name)
        make_source(arguments.config, folder / "source", arguments.overrides)
        report(
            [
                row(wanted, measure(folder / "source", folder, wanted, arguments.repeats))
                for wanted in arguments.to
            ]
        )


if __name__ == "__main__":
    main()

"""Measure how long a save delays training, and the rate of writing beside cp and sync.

    python benchmarks/checkpoint.py --config configs/gpt2/run_gpt2_1558m.yaml --folder DIR \\
        [--passes 4] [--repeats 1] [section.key=value ...]

Needs 12 bytes of memory a parameter and twice that on the disk of --folder. A step would also need
gradients: forward passes over one window stand for it, between the save and the moment at which the
update would change the weights.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Row, compared, table
from common.flags import flag, parse


def make_engine(arguments: Request):  # type: ignore[no-untyped-def]
    """An engine in the middle of training, of random numbers."""
    import torch

    from common.resolve.derive import resolve_config
    from common.run_config import load_config
    from torch_gpt2.device import open_device
    from torch_gpt2.engine import Engine

    words = [
        "backend=torch",
        "output_dir=unused",
        "precision=float32",
        "train.max_steps=100",
        *arguments.overrides,
    ]
    config = resolve_config(load_config(arguments.config, words), samples_per_epoch=1)
    device = open_device(config)
    engine = Engine(config, device)
    with torch.no_grad():
        for tensor in engine.master.tensors.values():
            tensor.normal_(0.0, 0.02)
            moments = {
                part: torch.empty_like(tensor).uniform_(0.0, 1e-3)
                for part in ("exp_avg", "exp_avg_sq")
            }
            engine.optimizer.state[tensor] = {"step": torch.tensor(10.0), **moments}
    return engine


def stall(engine: Any, folder: Path, passes: int) -> tuple[float, float, float]:
    """Seconds that the training thread waits for a save to begin and, before the update, for
    memory; and of the passes between.
    """
    import torch

    from common.checkpoint.state import TrainState
    from common.checkpoint.writer import CheckpointWriter

    ids = torch.zeros(
        1, engine.config.model.seq_length, dtype=torch.long, device=engine.device.torch_device
    )
    with CheckpointWriter(folder) as writer, torch.no_grad():
        start = time.perf_counter()
        snapshot = engine.snapshot(TrainState(step=10))
        writer.save(snapshot)
        saved = time.perf_counter()
        for _ in range(passes):
            engine.model(ids)
        engine.device.synchronize()
        passed = time.perf_counter()
        snapshot.detach()
        return saved - start, time.perf_counter() - passed, passed - saved


def write(engine, folder: Path) -> float:  # type: ignore[no-untyped-def]
    from common.checkpoint.state import TrainState
    from common.checkpoint.writer import CheckpointWriter

    start = time.perf_counter()
    CheckpointWriter(folder, asynchronous=False).save(engine.snapshot(TrainState(step=20)))
    return time.perf_counter() - start


def copy(folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(
        ["cp", "-r", "--reflink=never", str(folder / "step_00000020"), str(folder / "copy")],
        check=True,
    )
    subprocess.run(["sync", "-f", str(folder / "copy")], check=True)
    return time.perf_counter() - start


@dataclass(kw_only=True)
class Request:
    config: str = flag("YAML of the model", required=True)
    folder: Path = flag(
        "folder on the disk to measure; a folder inside is made and removed", required=True
    )
    passes: int = flag("forward passes between a save and the update", default=4)
    repeats: int = flag("N: pairs of writing and copying", default=1, choices=range(1, 100))
    overrides: tuple[str, ...] = flag(
        "keys of the configuration to set", positional=True, nargs="*", metavar="section.key=value"
    )


def rows(arguments: Request) -> Iterator[Row]:
    engine = make_engine(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="checkpoint-") as name:
        folder = Path(name)
        begin, update, between = stall(engine, folder, arguments.passes)
        shutil.rmtree(folder / "step_00000010")
        written, copied = [], []
        for _ in range(arguments.repeats):
            written.append(write(engine, folder))
            size = sum(path.stat().st_size for path in (folder / "step_00000020").iterdir()) / 1e9
            copied.append(copy(folder))
            shutil.rmtree(folder / "copy")
            shutil.rmtree(folder / "step_00000020")
    wait = (
        f"training waits {begin:.3f} s, and {update:.3f} s before the update {between:.1f} s later"
    )
    yield f"asynchronous save of {size:.2f} GB", wait, "", "", ""
    yield (
        f"checkpoint of {size:.2f} GB",
        f"written at {size / statistics.median(written):.2f} GB/s",
        f"cp and sync {size / statistics.median(copied):.2f} GB/s",
        compared(written, copied),
        "",
    )


def main() -> None:
    print(table(list(rows(parse(Request, None, __doc__)))))


if __name__ == "__main__":
    main()

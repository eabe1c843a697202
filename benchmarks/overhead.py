"""Measure the cost of the loop and the engine beside a hand-written loop over the same model.

    python benchmarks/overhead.py --config configs/gpt2/run_gpt2_tiny.yaml [--ranks 2] \\
        [--steps 4] [--repeats 9] [section.key=value ...]

Here: the training loop with its log and metrics, without checkpoints and validation, over the
native engine. Peer: a bare loop, on several ranks over torch's DistributedDataParallel. Of
neighbouring turns of --steps steps each; the weights must agree afterwards.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.interleaved import median_ratio, take_turns
from benchmarks.table import report
from common.flags import flag, parse

SYSTEMS = ("native", "bare")


def random_batches(config: Any) -> Iterator[Any]:
    """Yield global batches of random tokens, without an end."""
    random = np.random.default_rng(0)
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    while True:
        yield random.integers(0, config.model.vocab_size, shape).astype(np.int32)


class Turns:
    """Batches, as many as a turn has steps. Asking for one more ends the turn, and waits for the
    next.
    """

    def __init__(
        self, config: Any, steps: int, others: list[subprocess.Popen[str]], answers: IO[str]
    ) -> None:
        self.weights: list[Any] = []
        self._batches, self._steps, self._others, self._answers = (
            random_batches(config),
            steps,
            others,
            answers,
        )

    def __iter__(self) -> Iterator[Any]:
        for line in sys.stdin:
            for other in self._others:
                assert other.stdin is not None
                other.stdin.write(line)
                other.stdin.flush()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(self._steps):
                yield next(self._batches)
            seconds, used = time.perf_counter() - start, time.process_time() - used
            norm = (
                sum(float(tensor.detach().double().square().sum()) for tensor in self.weights)
                ** 0.5
            )
            print(
                json.dumps({"seconds": seconds, "processor": used, "norm": norm}),
                file=self._answers,
                flush=True,
            )
        sys.exit()


def work(arguments: Request) -> None:
    others = start_others(arguments.ranks) if "RANK" not in os.environ else []
    from common.cluster.environment import find_process
    from common.log import start_log
    from common.resolve.derive import resolve_config
    from common.run_config import load_config
    from torch_gpt2.device import open_device
    from torch_gpt2.parallel.world import open_world

    process = find_process(os.environ)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        answers, sys.stdout = sys.stdout if process.rank == 0 else log, log
        start_log(rank=process.rank)
        off = (
            "checkpoint.interval=0",
            "validation.interval=0",
            "logging.plot=false",
            "model.dropout=0.0",
            "train.max_steps=1000000",
        )
        words = [*arguments.overrides, "backend=torch", f"output_dir={folder}", *off]
        config = resolve_config(
            load_config(arguments.config, words), world_size=arguments.ranks, samples_per_epoch=1
        )
        device = open_device(config, process)
        turns = Turns(config, arguments.steps, others, answers)
        with open_world(config, process, device) as world:
            (native if arguments.worker == "native" else bare)(config, device, world, turns)


def start_others(ranks: int) -> list[subprocess.Popen[str]]:
    """The ranks beside this one, which becomes rank 0 where there are several; one thread each."""
    if ranks == 1:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    environments = [
        {name: str(value) for name, value in ({"RANK": rank, "LOCAL_RANK": rank} | common).items()}
        for rank in range(ranks)
    ]
    os.environ.update(environments[0])
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            text=True,
        )
        for environment in environments[1:]
    ]


def native(config: Any, device: Any, world: Any, turns: Turns) -> None:
    """Train as torch_gpt2/train.py does, over other batches."""
    from common.checkpoint.state import TrainState
    from common.checkpoint.writer import CheckpointWriter
    from common.dataset import Batch
    from common.training.loop import train
    from common.training.metrics import MetricsWriter
    from common.training.start import Start
    from common.training.steps import TrainingParts
    from torch_gpt2.engine import Engine

    engine = Engine(config, device, world=world)
    engine.begin(Start())
    turns.weights = list(engine.master.tensors.values())
    folder, writes = Path(config.output_dir), world.rank == 0
    with (
        CheckpointWriter(folder / "checkpoints", active=writes) as checkpoints,
        MetricsWriter(folder, tensorboard=config.logging.tensorboard, active=writes) as metrics,
    ):
        run = TrainingParts(
            config=config,
            engine=engine,
            batches=(
                Batch(
                    tokens=local_shard(tokens, world),
                    samples=len(tokens),
                    consumed_samples=0,
                    sample_hash="",
                )
                for tokens in turns
            ),
            validation={},
            checkpoints=checkpoints,
            metrics=metrics,
            peak_flops=0.0,
            peak_memory=device.peak_memory,
            max_over_ranks=world.all_reduce_max,
            start_max=world.start_max,
        )
        train(run, TrainState())


def bare(config: Any, device: Any, world: Any, turns: Turns) -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from common.parallel.learning_rate import learning_rate
    from torch_gpt2.model import build_model, initialise
    from torch_gpt2.optimizer import build_optimizer

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(config, device)

        def forward(self, ids: Any, targets: Any) -> Any:
            return self.model.loss_sum(ids, targets) / targets.numel()

    loss_of: nn.Module = Loss()
    parameters = dict(loss_of.model.named_parameters())
    initialise(parameters, config)
    turns.weights = list(parameters.values())
    optimizer = build_optimizer(parameters, config.optimizer, fused=device.fused_optimizer)
    if world.size > 1:
        loss_of = DistributedDataParallel(loss_of)
    micro = config.train.micro_batch_size
    for step, tokens in enumerate(turns, 1):
        part = torch.from_numpy(local_shard(tokens, world)).long().to(device.torch_device)
        batches = part.split(micro)
        for number, batch in enumerate(batches, 1):
            with loss_of.no_sync() if world.size > 1 and number < len(batches) else nullcontext():
                loss = loss_of(batch[:, :-1], batch[:, 1:]) / len(batches)
                loss.backward()
            loss.item()
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step - 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def local_shard(tokens: Any, world: Any) -> Any:
    """The windows of a global batch that a data-parallel rank takes."""
    return tokens.reshape(world.size, -1, tokens.shape[1])[world.rank]


def compare(arguments: Request) -> None:
    options = [
        "--config",
        arguments.config,
        "--ranks",
        str(arguments.ranks),
        "--steps",
        str(arguments.steps),
        *arguments.overrides,
    ]
    first, later = take_turns(
        {name: [__file__, "--worker", name, *options] for name in SYSTEMS}, arguments.repeats
    )
    for turns in zip(*([first[name], *later[name]] for name in SYSTEMS), strict=True):
        norms = [turn["norm"] for turn in turns]
        if abs(norms[0] - norms[1]) > arguments.tolerance * norms[1]:
            sys.exit(
                f"the weights of {' and '.join(SYSTEMS)} differ in their norms, {norms}; speeds"
                " then mean nothing"
            )
    seconds = [[turn["seconds"] / arguments.steps for turn in later[name]] for name in SYSTEMS]
    used = [
        statistics.median(turn["processor"] / arguments.steps for turn in later[name])
        for name in SYSTEMS
    ]
    ratio, least, greatest = median_ratio(*seconds)
    here, peer = (
        f"{1e3 * statistics.median(times):.1f} ms a step, {1e3 * own:.1f} of a processor"
        for times, own in zip(seconds, used, strict=True)
    )
    peer = f"{'DistributedDataParallel' if arguments.ranks > 1 else 'bare loop'} {peer}"
    what = (
        f"loop and engine, {Path(arguments.config).stem}, {arguments.ranks}"
        f" rank{'s' * (arguments.ranks > 1)}"
    )
    report(
        [
            (
                what,
                here,
                peer,
                f"{ratio:.3f} ({least:.3f} to {greatest:.3f} in {arguments.repeats})",
                "",
            )
        ]
    )


@dataclass(kw_only=True)
class Request:
    config: str = flag("YAML of the model", required=True)
    ranks: int = flag("N: data-parallel processes on this machine", default=1, choices=range(1, 65))
    steps: int = flag("N: steps of a turn", default=4, choices=range(1, 1000))
    repeats: int = flag("N: pairs of turns", default=9, choices=range(1, 1000))
    tolerance: float = flag(
        "relative difference allowed between norms of the weights (default: 1e-4)", default=1e-4
    )
    worker: str | None = flag(SUPPRESS, choices=SYSTEMS)
    overrides: tuple[str, ...] = flag(
        "keys of the configuration to set", positional=True, nargs="*", metavar="section.key=value"
    )


def main() -> None:
    arguments = parse(Request, None, __doc__)
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

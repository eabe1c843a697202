"""A training step of this toolkit beside transformers, from the same weights, over the same tokens.

    python benchmarks/training.py --config configs/gpt2/run_gpt2_124m.yaml \\
        [--systems torch,transformers] [--repeats 9] [section.key=value ...]

Systems: torch, torch-compiled, mindspore, transformers, transformers-compiled. The last one named
is what the others are compared with: the median of the ratios of neighbouring steps. transformers
holds float32 weights and, below float32, works under autocast; fused AdamW, clip and schedule are
the config's. On a CPU all torch systems keep freed memory (common/device.py). Losses must agree.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.interleaved import Answer, answer_turns, median_ratio, take_turns
from benchmarks.table import report

SYSTEMS = ("torch", "torch-compiled", "mindspore", "transformers", "transformers-compiled")
PACKAGES = {"torch": "torch_gpt2", "mindspore": "mindformers_gpt2"}


def work(arguments: argparse.Namespace) -> None:
    """Answer each turn with the seconds and the loss of a step, the most memory so far, and the
    device's peak FLOP/s.
    """
    import os

    os.environ.setdefault("GLOG_v", "3")
    from common.config.load import load_config
    from common.resolve.derive import resolve_config, resolve_length

    system, _, compiled = arguments.worker.partition("-")
    backend = "mindspore" if system == "mindspore" else "torch"
    words = [
        *arguments.overrides,
        f"backend={backend}",
        "output_dir=unused",
        "model.dropout=0.0",
        f"train.compile={bool(compiled)}",
    ]
    config = resolve_length(resolve_config(load_config(arguments.config, words)), 1)
    package = PACKAGES[backend]
    device = importlib.import_module(f"{package}.device").open_device(config)
    step = (
        transformers_step(config, device)
        if system == "transformers"
        else our_step(package, config, device)
    )
    batches = random_batches(config)

    def turn() -> Answer:
        tokens = next(batches)
        start = time.perf_counter()
        loss = step(tokens)
        device.synchronize()
        seconds = time.perf_counter() - start
        peak = device.peak_flops(config.precision.compute)
        return {
            "seconds": seconds,
            "loss": loss,
            "memory": device.peak_memory(),
            "tokens": tokens[:, 1:].size,
            "peak_flops": peak,
        }

    answer_turns(turn)


def random_batches(config: Any) -> Iterator[Any]:
    random = np.random.default_rng(0)
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    while True:
        yield random.integers(0, config.model.vocab_size, shape).astype(np.int32)


def our_step(package: str, config: Any, device: Any) -> Any:
    from common.dataset import Batch
    from common.training.start import Start

    engine = importlib.import_module(f"{package}.engine").Engine(config, device)
    engine.begin(Start())
    return lambda tokens: (
        engine.run(iter([Batch(tokens=tokens, consumed_samples=0, sample_hash="")]), 1)[0].loss
    )


def transformers_step(config: Any, device: Any) -> Any:
    """A step as a user of transformers writes it: autocast, fused AdamW, gradient clip,
    accumulation.
    """
    import torch

    from common.training.schedule import learning_rate
    from tests.reference import hugging_face_model
    from torch_gpt2.model import build_model, initialise
    from torch_gpt2.optimizer import build_optimizer

    ours = build_model(config, device)
    initialise(dict(ours.named_parameters()), config)
    model = (
        hugging_face_model(config.model, dict(ours.named_parameters()))
        .to(device.torch_device)
        .train()
    )
    del ours
    forward = torch.compile(model) if config.train.compile else model
    optimizer = build_optimizer(
        dict(model.named_parameters()), config.optimizer, fused=device.fused_optimizer
    )
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.precision.compute]
    micro, steps = config.train.micro_batch_size, iter(range(1, 2**40))

    def step(tokens: Any) -> float:
        total = 0.0
        optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(tokens), micro):
            part = torch.from_numpy(tokens[start : start + micro]).long().to(device.torch_device)
            with torch.autocast(device.torch_device.type, dtype, enabled=dtype != torch.float32):
                loss = forward(
                    part[:, :-1], labels=part[:, 1:], shift_labels=part[:, 1:].contiguous()
                ).loss * (len(part) / len(tokens))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, next(steps))
        optimizer.step()
        return total

    return step


def compare(arguments: argparse.Namespace) -> None:
    from common.config.load import load_config
    from common.resolve.derive import resolve_config
    from common.training.metrics import flops_per_token
    from common.weights.names import count_parameters

    systems = arguments.systems.split(",")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        sys.exit(f"--systems {','.join(unknown)}: expected some of {', '.join(SYSTEMS)}")
    config = resolve_config(
        load_config(arguments.config, [*arguments.overrides, "output_dir=unused"])
    )
    options = ["--config", arguments.config, *arguments.overrides]
    first, later = take_turns(
        {name: [__file__, "--worker", name, *options] for name in systems}, arguments.repeats
    )
    reference = systems[-1]
    for name in systems:
        for own, other in zip(
            (first[name], *later[name]), (first[reference], *later[reference]), strict=True
        ):
            if abs(own["loss"] - other["loss"]) > arguments.tolerance * other["loss"]:
                sys.exit(
                    f"the losses of {name} and {reference} differ: {own['loss']}, {other['loss']};"
                    " speeds then mean nothing"
                )
    size = f"{count_parameters(config.model) / 1e6:.0f}M, {config.precision.compute}"

    def describe(name: str) -> str:
        speed = later[name][-1]["tokens"] / statistics.median(
            answer["seconds"] for answer in later[name]
        )
        peak = later[name][-1]["peak_flops"]
        mfu = f", MFU {flops_per_token(config.model) * speed / peak:.1%}" if peak else ""
        return f"{name} {speed:,.0f} tokens/s{mfu}, first step {first[name]['seconds']:.1f} s"

    rows = []
    for name in systems[:-1]:
        ratio, least, greatest = median_ratio(
            *([answer["seconds"] for answer in later[one]] for one in (name, reference))
        )
        memory = " and ".join(
            f"{later[one][-1]['memory'] / 2**30:.2f} GiB" for one in (name, reference)
        )
        compared = f"{ratio:.2f} ({least:.2f} to {greatest:.2f} in {arguments.repeats})"
        rows.append(
            (f"training step, {size}", describe(name), describe(reference), compared, memory)
        )
    report(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--systems", default="torch,transformers", metavar="A,B,...")
    parser.add_argument("--repeats", type=int, default=9, choices=range(1, 1000), metavar="N")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=2e-3,
        help="relative difference allowed between losses (2e-3; bf16 needs it)",
    )
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

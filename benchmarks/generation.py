"""Measure generation beside transformers' generate, with GPT-2 124M of random weights.

    python benchmarks/generation.py [--device cpu] [--precision float32] [--batches 1,8] \\
        [--strategies greedy,sampling] [--repeats 5] [--prompt-tokens 32] [--new-tokens 64] \\
        [--threads N]

Both keep keys and values and ask for logits of the last position only; sampling is from the 40 most
probable. transformers holds its weights in the type of the computation. The systems take turns;
greedy tokens in float32 must be equal. A warmed-up turn is a whole call, the prompt's pass
included; reported are medians and the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.interleaved import Answer, answer_turns, median_ratio, take_turns
from benchmarks.table import report
from common.flags import flag, parse

SYSTEMS = ("torch", "transformers")
TOP_K = 40
Turn = Callable[[], Any]


def work(arguments: Request) -> None:
    """Answer each turn with the seconds of a call, its tokens (B, new tokens) and the most memory
    so far.
    """
    from common.resolve.derive import resolve_config
    from common.run_config import load_config
    from torch_gpt2.device import open_device
    from torch_gpt2.model import build_model, initialise

    words = [f"device={arguments.device}", f"precision={arguments.precision}", "output_dir=unused"]
    words += [f"runtime.threads={arguments.threads}"] if arguments.threads else []
    config = resolve_config(load_config(ROOT / "configs" / "gpt2" / "run_gpt2_124m.yaml", words))
    device = open_device(config)
    model = build_model(config, device)
    initialise(dict(model.named_parameters()), config)
    rows, strategy = int(arguments.batches), arguments.strategies
    prompts = np.random.default_rng(0).integers(0, 50257, (rows, arguments.prompt_tokens))
    make = ours if arguments.worker == "torch" else transformers
    call = make(model, device, prompts, arguments.new_tokens, strategy)

    def turn() -> Answer:
        start = time.perf_counter()
        tokens = call()
        device.synchronize()
        return {
            "seconds": time.perf_counter() - start,
            "tokens": tokens,
            "memory": device.peak_memory(),
        }

    answer_turns(turn)


def ours(model: Any, device: Any, prompts: Any, new_tokens: int, strategy: str) -> Turn:
    from torch_gpt2.predict import Decoder

    return generated(Decoder(model, device, len(prompts)), prompts, new_tokens, strategy)


def generated(decoder: Any, prompts: Any, new_tokens: int, strategy: str) -> Turn:
    """The loop of this toolkit over any decoder."""
    from common.config.schema import PredictConfig
    from common.generation.generate import generate
    from common.generation.prompts import Prompt

    settings = PredictConfig.model_validate(
        {"strategy": strategy, "top_k": TOP_K, "stop_at_end_of_text": False}
    )
    rows = [Prompt(text="", ids=ids.tolist(), new_tokens=new_tokens) for ids in prompts]
    return lambda: [
        each.tokens for each in generate(decoder, rows, settings, seed=0, ends=(50256,))
    ]


def transformers(model: Any, device: Any, prompts: Any, new_tokens: int, strategy: str) -> Turn:
    import torch

    from tests.reference import hugging_face_model

    peer = hugging_face_model(
        model.config, {name: values.cpu() for name, values in model.named_parameters()}
    )
    peer = peer.to(device.torch_device, model.compute_dtype)
    ids = torch.from_numpy(prompts).to(device.torch_device)
    words: dict[str, Any] = (
        {"do_sample": True, "top_k": TOP_K} if strategy == "sampling" else {"do_sample": False}
    )
    words |= {
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    return lambda: peer.generate(ids, **words)[:, ids.shape[1] :].tolist()


def compare(arguments: Request) -> None:
    table = []
    for batch in arguments.batches.split(","):
        for strategy in arguments.strategies.split(","):
            same = [
                f"--batches={batch}",
                f"--strategies={strategy}",
                f"--device={arguments.device}",
                f"--precision={arguments.precision}",
            ]
            same += [
                f"--prompt-tokens={arguments.prompt_tokens}",
                f"--new-tokens={arguments.new_tokens}",
            ]
            same += [f"--threads={arguments.threads}"] if arguments.threads else []
            first, later = take_turns(
                {name: [__file__, f"--worker={name}", *same] for name in SYSTEMS}, arguments.repeats
            )
            if (strategy, arguments.precision) == ("greedy", "float32") and first["torch"][
                "tokens"
            ] != first["transformers"]["tokens"]:
                sys.exit(f"batch {batch}: the tokens differ; a comparison of speeds means nothing")
            seconds = {name: [turn["seconds"] for turn in turns] for name, turns in later.items()}
            ratio = median_ratio(seconds["torch"], seconds["transformers"])
            memory = {
                name: max(turn["memory"] for turn in turns) / 2**30 for name, turns in later.items()
            }
            tokens = int(batch) * arguments.new_tokens
            rates = [
                f"{tokens / statistics.median(seconds[name]):.1f} tokens/s" for name in SYSTEMS
            ]
            table.append(
                (
                    f"generate, {arguments.precision}, {strategy}, batch {batch}",
                    *rates,
                    f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
                    f"{memory['torch']:.2f}, {memory['transformers']:.2f} GiB",
                )
            )
    report(table)


@dataclass(kw_only=True)
class Request:
    device: str = flag("kind of device", default="cpu")
    precision: Literal["float32", "bf16", "fp16"] = flag(
        "type of the computation", default="float32"
    )
    batches: str = flag("B,...: numbers of sequences, divided by commas", default="1,8")
    strategies: str = flag(
        "S,...: strategies of generation, divided by commas", default="greedy,sampling"
    )
    prompt_tokens: int = flag("N: tokens of a prompt", default=32)
    new_tokens: int = flag("N: tokens to generate", default=64)
    repeats: int = flag("N: number of repeats", default=5, choices=range(1, 1000))
    threads: int | None = flag("N: threads of a system (default: the library's)")
    worker: str | None = flag(SUPPRESS, choices=SYSTEMS)


def main() -> None:
    arguments = parse(Request, None, __doc__, dashes=True)
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

"""Compare all ways to decode GPT-2 124M on a CPU.

The systems take turns: this toolkit's types, its ONNX files in onnxruntime, transformers, and
llama.cpp where llama-cpp-python is installed.

    python benchmarks/decoding.py [--systems float32,int8,...] [--batches 1,8] [--repeats 7] \\
        [--prompt-tokens 32] [--new-tokens 32] [--threads 1]

Five minutes. All have the same random weights and prompts, choose greedily, and keep keys and
values. A turn is a whole call, the prompt's pass included, after two turns to warm up. Reported is
processor time of the process, so that one thread is measured fairly on a machine that does other
work: medians, least and greatest. The tokens of systems in float32 must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.generation import Turn, generated, ours, transformers
from benchmarks.interleaved import Answer, answer_turns, median_ratio, take_turns
from benchmarks.table import print_table
from common.flags import flag, parse

CONFIG = ROOT / "configs" / "gpt2" / "run_gpt2_124m.yaml"
BARS = (
    ("float32", "onnx float32", 1, 1.0),
    ("int8", "float32", 1, 3.0),
    ("float32", "transformers", 8, 2.0),
)
"""System, the one it is held against, rows, and how many times as fast it should be."""


def resolve(arguments: Request, precision: str = "float32") -> Any:
    from common.resolve.derive import resolve_config
    from common.run_config import load_config

    words = ["device=cpu", "output_dir=unused", f"precision={precision}"]
    return resolve_config(load_config(CONFIG, [*words, f"runtime.threads={arguments.threads}"]))


def torch_model(arguments: Request, precision: str) -> tuple[Any, Any]:
    from torch_gpt2.device import open_device
    from torch_gpt2.model import build_model, initialise

    config = resolve(arguments, precision)
    device = open_device(config)
    model = build_model(config, device)
    initialise(dict(model.named_parameters()), config)
    return model, device


def from_torch(precision: str, make: Callable[..., Turn]) -> Callable[..., Turn]:
    def prepare(arguments: Request, prompts: Any) -> Turn:
        model, device = torch_model(arguments, precision)
        return make(model, device, prompts, arguments.new_tokens, "greedy")

    return prepare


def int8(arguments: Request, prompts: Any) -> Turn:
    from common.training.opened_checkpoint import Checkpoint
    from torch_gpt2.device import open_device
    from torch_gpt2.int8 import load_model

    config = resolve(arguments)
    device = open_device(config)
    model = load_model(config, device, Checkpoint(arguments.folder / "torch_gpt2-int8"))
    return ours(model, device, prompts, arguments.new_tokens, "greedy")


def onnx(dtype: str) -> Callable[..., Turn]:
    def prepare(arguments: Request, prompts: Any) -> Turn:
        from common.generation.exported import ExportedDecoder
        from common.systems.onnx.session import OnnxModel
        from common.systems.onnx.write import GRAPH_FILE

        model = OnnxModel(arguments.folder / f"onnx-{dtype}" / GRAPH_FILE, arguments.threads)
        decoder = ExportedDecoder(model, resolve(arguments).model.max_positions, len(prompts))
        return generated(decoder, prompts, arguments.new_tokens, "greedy")

    return prepare


def llama_cpp(dtype: str) -> Callable[..., Turn]:
    def prepare(arguments: Request, prompts: Any) -> Turn:
        from llama_cpp import Llama

        threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
        file = arguments.folder / f"gguf-{dtype}" / "model.gguf"
        room = arguments.prompt_tokens + arguments.new_tokens
        model = Llama(str(file), n_ctx=room, verbose=False, **threads)

        def turn() -> list[list[int]]:
            model.reset()
            chosen = model.generate(prompts[0].tolist(), temp=0.0, repeat_penalty=1.0)
            return [[next(chosen) for _ in range(arguments.new_tokens)]]

        return turn

    return prepare


SYSTEMS: dict[str, Callable[..., Turn]] = {
    "float32": from_torch("float32", ours),
    "bf16": from_torch("bf16", ours),
    "int8": int8,
    "onnx float32": onnx("float32"),
    "onnx int8": onnx("int8"),
    "onnx int4": onnx("int4"),
    "transformers": from_torch("float32", transformers),
    **{f"llama.cpp {dtype}": llama_cpp(dtype) for dtype in ("float32", "int8", "int4")},
}

FILES = {
    "int8": ("torch_gpt2", "int8"),
    **{f"onnx {dtype}": ("onnx", dtype) for dtype in ("float32", "int8", "int4")},
    **{f"llama.cpp {dtype}": ("gguf", dtype) for dtype in ("float32", "int8", "int4")},
}
"""System -> the format and the type of the file that it reads."""
EXACT = ("float32", "onnx float32", "transformers")
"""Systems whose tokens are equal."""
ALONE = tuple(system for system in SYSTEMS if system.startswith("llama.cpp"))
"""Systems that are measured with one sequence: their Python package decodes no more at once."""
LENGTHS = ("prompt", "new")


def write_files(folder: Path, arguments: Request) -> None:
    """Write a folder FORMAT-DTYPE for each system that reads one, of the weights that the others
    begin with.
    """
    from common.parallel.sharding import padded_shapes
    from common.systems.table import FORMATS
    from common.systems.weights import Weight, Weights
    from common.weights.initial import initial_rows
    from common.weights.names import parameter_shapes

    config = resolve(arguments)
    padded = padded_shapes(config)

    def weight(name: str, shape: tuple[int, ...]) -> Weight:
        def load() -> Any:
            return initial_rows(config.model, config.seed, name, padded[name], 0, shape[0])

        return Weight(dtype="float32", shape=shape, load=load)

    tensors = {name: weight(name, shape) for name, shape in parameter_shapes(config.model).items()}
    weights = Weights(path=folder, format="random", model=config.model, tensors=tensors)
    for system in arguments.systems:
        if system in FILES:
            name, dtype = FILES[system]
            own = folder / f"{name}-{dtype}"
            own.mkdir()
            if name == "gguf":
                write_vocabulary(own)
            write = FORMATS[name].write
            assert write is not None
            write(own, weights, dtype)


def write_vocabulary(folder: Path) -> None:
    """Without as many tokens as the table has rows, llama.cpp opens no file."""
    from common.tokenizer.bpe_files import END_OF_TEXT, byte_alphabet

    letters = list(byte_alphabet())
    merges = [(left, right) for left in letters for right in letters][:50_000]
    tokens = [*letters, *(left + right for left, right in merges), END_OF_TEXT]
    ids = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    (folder / "merges.txt").write_text(lines, encoding="utf-8")


def work(arguments: Request) -> None:
    """Answer each turn with the processor time of a call and its tokens."""
    rows = int(arguments.batches)
    prompts = np.random.default_rng(0).integers(0, 50257, (rows, arguments.prompt_tokens))
    call = SYSTEMS[arguments.worker](arguments, prompts)

    def turn() -> Answer:
        start = time.process_time()
        tokens = call()
        return {"seconds": time.process_time() - start, "tokens": tokens}

    answer_turns(turn)


def compare(arguments: Request) -> None:
    table = {system: [system] for system in arguments.systems}
    bars = []
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), arguments)
        for batch in map(int, arguments.batches.split(",")):
            same = [f"--batches={batch}", f"--folder={name}", f"--threads={arguments.threads}"]
            same += [f"--{word}-tokens={getattr(arguments, word + '_tokens')}" for word in LENGTHS]
            systems = [system for system in arguments.systems if batch == 1 or system not in ALONE]
            first, later = take_turns(
                {system: [__file__, f"--worker={system}", *same] for system in systems},
                arguments.repeats,
            )
            exact = [first[system]["tokens"] for system in systems if system in EXACT]
            if any(tokens != exact[0] for tokens in exact):
                sys.exit(f"batch {batch}: tokens of float32 differ; speeds mean nothing then")
            seconds = {name: [turn["seconds"] for turn in turns] for name, turns in later.items()}
            for system, row in table.items():
                row.append(rates(seconds.get(system), batch * arguments.new_tokens))
            for system, peer, rows, wanted in BARS:
                if rows == batch and {system, peer} <= set(systems):
                    ratio = median_ratio(seconds[system], seconds[peer])
                    bars.append(
                        f"{system}, {rows} at once: {ratio[0]:.2f} ({ratio[1]:.2f} to"
                        f" {ratio[2]:.2f}) times {peer}; the aim is {wanted}"
                    )
    print_table(
        ("tokens/s", *(f"{rows} at once" for rows in arguments.batches.split(","))),
        list(table.values()),
    )
    print("", *bars, sep="\n")


def rates(seconds: list[float] | None, tokens: int) -> str:
    if seconds is None:
        return ""
    middle, least, most = (
        tokens / each for each in (statistics.median(seconds), max(seconds), min(seconds))
    )
    return f"{middle:.1f} ({least:.1f} to {most:.1f})"


def _systems(text: str) -> list[str]:
    """Return the systems in a list with commas. Raises ArgumentTypeError."""
    if unknown := set(text.split(",")) - SYSTEMS.keys():
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}; expected of {', '.join(SYSTEMS)}"
        )
    return text.split(",")


@dataclass(kw_only=True)
class Request:
    systems: tuple[str, ...] = flag(
        "S,...: systems to compare, divided by commas (default: all that are installed)",
        default=tuple(
            name for name in SYSTEMS if not name.startswith("llama") or find_spec("llama_cpp")
        ),
        type=_systems,
        action="store",
    )
    batches: str = flag("B,...: numbers of sequences, divided by commas", default="1,8")
    prompt_tokens: int = flag("N: tokens of a prompt", default=32)
    new_tokens: int = flag("N: tokens to generate", default=32)
    repeats: int = flag("N: number of repeats", default=7, choices=range(1, 1000))
    threads: int = flag("N: threads of a system", default=1)
    folder: Path | None = flag(argparse.SUPPRESS)
    worker: str | None = flag(argparse.SUPPRESS, choices=SYSTEMS)


def main() -> None:
    arguments = parse(Request, None, __doc__, dashes=True)
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

"""All ways to decode GPT-2 124M: this toolkit's types and devices, its ONNX files in onnxruntime,
transformers, and llama.cpp where llama-cpp-python is installed.

All have the same random weights and prompts, and keep keys and values. A turn is a whole call, the
prompt's pass included, after turns to warm up. Greedy tokens in float32 must be equal.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Answer, Row, answer_turns, compared, initial_weights, table, take_turns
from common.device import peak_resident_bytes
from common.errors import RunError
from common.paths import ROOT

CONFIG = ROOT / "configs" / "gpt2" / "run_gpt2_124m.yaml"
PROMPT_TOKENS = 32
TOP_K = 40
BARS = (("float32", "onnx float32", 1, 1.0), ("int8", "float32", 1, 3.0), ("float32", "transformers", 8, 2.0))
"""System, the one it is held against, rows, and how many times as fast it should be."""
Turn = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The measurement of one child. threads: None is the library's choice."""

    system: str
    rows: int
    strategy: str = "greedy"
    device: str = "cpu"
    new_tokens: int = 64
    threads: int | None = None
    folder: str = ""


def resolve(task: Task | None = None, precision: str = "float32") -> Any:
    from common.resolve.derive import resolve_config
    from common.run_config import load_config

    words = [f"device={task.device if task else 'cpu'}", f"precision={precision}"]
    words += [f"runtime.threads={task.threads}"] if task and task.threads else []
    return resolve_config(load_config(CONFIG, ["output_dir=unused", *words]))


def from_torch(precision: str, make: Callable[..., Turn]) -> Callable[..., Turn]:
    def prepare(task: Task, prompts: Any) -> Turn:
        from common.parallel.sharding import initial_values
        from torch_gpt2.checkpoint import fill_weights
        from torch_gpt2.device import open_device
        from torch_gpt2.model import build_model

        config = resolve(task, precision)
        device = open_device(config)
        model = build_model(config, device)
        fill_weights(dict(model.named_parameters()), initial_values(config))
        return make(model, device, prompts, task)

    return prepare


def int8(task: Task, prompts: Any) -> Turn:
    from common.training.opened_checkpoint import Checkpoint
    from torch_gpt2.device import open_device
    from torch_gpt2.int8 import load_model

    config = resolve(task)
    device = open_device(config)
    return ours(load_model(config, device, Checkpoint(Path(task.folder) / task.system)), device, prompts, task)


def onnx(task: Task, prompts: Any) -> Turn:
    from common.generation.generate import ExportedDecoder
    from common.systems.onnx.folder import GRAPH_FILE, OnnxModel

    file, positions = Path(task.folder) / task.system / GRAPH_FILE, resolve(task).model.max_positions
    return generated(ExportedDecoder(OnnxModel(file, positions, task.threads or 1), len(prompts)), prompts, task)


def llama_cpp(task: Task, prompts: Any) -> Turn:
    from llama_cpp import Llama

    threads = {"n_threads": task.threads, "n_threads_batch": task.threads}
    file = Path(task.folder) / task.system / "model.gguf"
    model = Llama(str(file), n_ctx=PROMPT_TOKENS + task.new_tokens, verbose=False, **threads)

    def turn() -> list[list[int]]:
        model.reset()
        chosen = model.generate(prompts[0].tolist(), temp=0.0, repeat_penalty=1.0)
        return [[next(chosen) for _ in range(task.new_tokens)]]

    return turn


def ours(model: Any, device: Any, prompts: Any, task: Task) -> Turn:
    from torch_gpt2.predict import Decoder

    return generated(Decoder(model, device, len(prompts)), prompts, task)


def generated(decoder: Any, prompts: Any, task: Task) -> Turn:
    """The loop of this toolkit over any decoder."""
    from common.config.schema import PredictConfig
    from common.generation.generate import generate
    from common.generation.logit_rules import LogitRules
    from common.generation.prompts import Prompt

    settings = PredictConfig.model_validate({"strategy": task.strategy, "top_k": TOP_K, "stop_at_end_of_text": False})
    rules = LogitRules(settings, ends=(50256,))
    rows = [Prompt(text="", ids=ids.tolist(), new_tokens=task.new_tokens) for ids in prompts]
    return lambda: [each.tokens for each in generate(decoder, rows, rules, seed=0)]


def transformers(model: Any, device: Any, prompts: Any, task: Task) -> Turn:
    import torch

    from tests.reference import hugging_face_model

    peer = hugging_face_model(model.config, {name: values.cpu() for name, values in model.named_parameters()})
    peer = peer.to(device.torch_device, model.compute_dtype)
    ids = torch.from_numpy(prompts).to(device.torch_device)
    words: dict[str, Any] = {"do_sample": True, "top_k": TOP_K} if task.strategy == "sampling" else {"do_sample": False}
    words |= {
        "max_new_tokens": task.new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    return lambda: peer.generate(ids, **words)[:, ids.shape[1] :].tolist()


FILES = {
    "int8": ("torch_gpt2", "int8"),
    **{f"onnx {dtype}": ("onnx", dtype) for dtype in ("float32", "int8", "int4")},
    **{f"llama.cpp {dtype}": ("gguf", dtype) for dtype in ("float32", "int8", "int4")},
}
"""System -> the format and the type of the file that it reads, in a folder of the system's name."""
SYSTEMS: dict[str, Callable[..., Turn]] = {
    "float32": from_torch("float32", ours),
    "bf16": from_torch("bf16", ours),
    "transformers": from_torch("float32", transformers),
    **{system: {"torch_gpt2": int8, "onnx": onnx, "gguf": llama_cpp}[name] for system, (name, _) in FILES.items()},
}
EXACT = ("float32", "onnx float32", "transformers")
"""Systems whose tokens are equal."""
ALONE = tuple(system for system in SYSTEMS if system.startswith("llama.cpp"))
"""Systems that are measured with one sequence: their Python package decodes no more at once."""


def write_files(folder: Path, systems: Sequence[str]) -> None:
    """Write the folder of each system that reads one, of the weights that the others begin with."""
    from common.systems.table import FORMATS

    weights = initial_weights(resolve())
    for system in systems:
        if system in FILES:
            name, dtype = FILES[system]
            own = folder / system
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


def work(task: Task) -> None:
    """Answer turns: seconds and processor time of a call, its tokens (B, new), peak memory in bytes of this process."""
    prompts = np.random.default_rng(0).integers(0, 50257, (task.rows, PROMPT_TOKENS))
    call = SYSTEMS[task.system](task, prompts)

    def turn() -> Answer:
        start, used = time.perf_counter(), time.process_time()
        tokens = call()
        found = {"seconds": time.perf_counter() - start, "processor": time.process_time() - used, "tokens": tokens}
        if task.device == "cpu":
            return found | {"memory": peak_resident_bytes()}
        import torch

        return found | {"memory": torch.cuda.max_memory_allocated()}

    answer_turns(turn)


def turns_of(tasks: Sequence[Task], repeats: int) -> dict[str, list[Answer]]:
    """Return each system's turns. Raises RunError where tokens differ that must be equal."""
    first, later = take_turns({task.system: ["-m", __name__, json.dumps(asdict(task))] for task in tasks}, repeats)
    exact = [first[task.system]["tokens"] for task in tasks if task.system in EXACT and task.strategy == "greedy"]
    if any(tokens != exact[0] for tokens in exact):
        raise RunError(f"batch {tasks[0].rows}: tokens of float32 differ; speeds mean nothing")
    return later


def generation_rows(device: str, repeats: int) -> Iterator[Row]:
    """Beside transformers' generate; sampling is from the 40 most probable."""
    for rows in (1, 8):
        for strategy in ("greedy", "sampling"):
            tasks = [
                Task(system=system, rows=rows, strategy=strategy, device=device)
                for system in ("float32", "transformers")
            ]
            later = turns_of(tasks, repeats)
            seconds = [[turn["seconds"] for turn in turns] for turns in later.values()]
            tokens = rows * tasks[0].new_tokens
            peaks = [max(turn["memory"] for turn in turns) / 2**30 for turns in later.values()]
            yield (
                f"generate, float32, {strategy}, batch {rows}",
                *(f"{tokens / statistics.median(each):.1f} tokens/s" for each in seconds),
                compared(seconds[0], seconds[1]),
                f"{peaks[0]:.2f}, {peaks[1]:.2f} GiB",
            )


def decoding_rows(repeats: int) -> Iterator[Row]:
    """All systems on one thread, by processor time: fair on a machine that does other work."""
    systems = [name for name in SYSTEMS if name not in ALONE or find_spec("llama_cpp")]
    shown = {system: [system] for system in systems}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), systems)
        for rows in (1, 8):
            tasks = [
                Task(system=system, rows=rows, new_tokens=32, threads=1, folder=folder)
                for system in systems
                if rows == 1 or system not in ALONE
            ]
            later = turns_of(tasks, repeats)
            used = {name: [turn["processor"] for turn in turns] for name, turns in later.items()}
            for system, row in shown.items():
                speeds = [rows * 32 / seconds for seconds in used.get(system, ())]
                spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})" if speeds else ""
                row.append(spread)
            for system, peer, at_once, wanted in BARS:
                if at_once == rows:
                    ratio = compared(used[system], used[peer])
                    yield f"decoding, {rows} at once", system, peer, f"{ratio}; aim {wanted}", ""
    print(table(list(shown.values()), ("tokens/s of one thread", "1 at once", "8 at once")))


if __name__ == "__main__":  # a child that takes turns
    work(Task(**json.loads(sys.argv[1])))

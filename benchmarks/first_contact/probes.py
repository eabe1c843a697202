"""Questions that tools/first_contact.py has no command for; one a call.

    python benchmarks/first_contact/probes.py facts npu

Answers are lines ``NAME: VALUE``. On a CPU only device, saves, texts and requests answer.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.program import command

SIDE, COPIED, REPEATS = 8192, 2**30, 20
_START_SECONDS = 120


def say(name: str, value: object) -> None:
    print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)


def device(kind: str, backend: str) -> None:
    """Answer with one JSON object. Raises DeviceError where the device is not there."""
    if backend == "torch":
        from torch_gpt2.device import select_device

        found: Any = select_device(kind)
        count = 1 if kind == "cpu" else int(found.module.device_count())
    else:
        from common.cluster.hccn import npu_numbers
        from mindformers_gpt2.device import select_device as select_mindspore_device

        found, count = select_mindspore_device(kind), len(npu_numbers()) or 1
    name = found.name or kind
    print(json.dumps({"name": name, "count": count, "memory": found.total_memory() or 0}))


def rates(kind: str) -> None:
    """Measure the product and the copy whose peaks MFU and the plan take from a table."""
    import torch

    from common.accelerators import require_accelerator
    from torch_gpt2.device import DTYPES, select_device

    here = select_device(kind)
    peak = require_accelerator(here.name)
    dtype = DTYPES["bfloat16" if here.supports("bfloat16") else "float16"]

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        here.synchronize()
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        here.synchronize()
        return (time.perf_counter() - start) / REPEATS

    one, other = (torch.randn(SIDE, SIDE, device=here.torch_device).to(dtype) for _ in range(2))
    say("part of the product's peak", 2 * SIDE**3 / seconds(lambda: one @ other) / peak.half_flops)
    source = torch.ones(COPIED, dtype=torch.int8, device=here.torch_device)
    target = torch.empty_like(source)
    took = seconds(lambda: target.copy_(source))
    say("part of the bandwidth", 2 * COPIED / took / peak.bandwidth)


def facts(kind: str) -> None:
    """Ask what sources of libraries leave open."""
    import torch

    from common.parallel.kernels import has_attention_kernel
    from torch_gpt2.device import select_device

    here = select_device(kind)
    place = here.torch_device
    say("memory before the first operator", here.total_memory() or 0)
    x = torch.full((), 1 / 3, device=place)
    say("type of double()", x.double().dtype)
    # 1 + 2^-13 is 1 in float16, bfloat16 and TF32
    product = torch.full((16, 16), 1 + 2**-13, device=place) @ torch.eye(16, device=place)
    say("error of a float32 product", abs(product[0, 0].item() - 1 - 2**-13) * 2**13)
    q = torch.randn(1, 8, 4096, 64, device=place).half()
    causal = torch.ones(4096, 4096, dtype=torch.bool, device=place).tril()
    numbers = torch.zeros(4096, 4096, dtype=q.dtype, device=place).masked_fill(~causal, -1e4)
    kinds = {}
    for name, mask in (("no mask", None), ("bool", causal), ("numbers", numbers)):
        here.release_memory()
        before = here.peak_memory()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None)
        here.synchronize()
        scores = 2 * 8 * 4096**2  # bytes
        kinds[name] = here.peak_memory() - before < scores
        say(f"attention, {name}", "fused" if kinds[name] else "written out")
    planned = kind != "npu" or has_attention_kernel(kind, here.name)
    say("as planned", kinds["no mask"] == kinds["bool"] == planned)
    # last, since some Ascends may refuse it
    stacked = torch.stack([x, torch.full((), 1 / 3, dtype=torch.float64, device=place)])
    say("type of a stack of float32 and float64", stacked.dtype)


def mindspore_facts(kind: str) -> None:
    """Ask whether several ranks can start, and when MindSpore knows the memory."""
    import importlib.util

    import mindspore as ms

    from mindformers_gpt2.device import select_device

    here = select_device(kind)
    say("package hccl", "found" if importlib.util.find_spec("hccl") else "not found")
    for moment in ("before", "after"):
        size = getattr(ms.hal.get_device_properties(here.index), "total_memory", 0)
        say(f"memory {moment} the first operator", int(size))
        ms.ops.ones((2, 2), ms.float32).asnumpy()


def saves(folder: str, kind: str) -> None:
    """Ask how long training of 124M waits for a save to begin, and how fast it is written."""
    from common.checkpoint.snapshot import TrainState
    from common.checkpoint.writer import CheckpointWriter
    from common.resolve.derive import resolve_config
    from common.run_config import load_config
    from torch_gpt2.device import open_device
    from torch_gpt2.engine import Engine

    words = [f"device={kind}", f"output_dir={folder}", "precision=float32", "train.max_steps=10"]
    config = load_config(ROOT / "configs" / "gpt2" / "run_gpt2_124m.yaml", words)
    run = resolve_config(config, samples_per_epoch=1)
    engine = Engine(run, open_device(run))
    for tensor in engine.master.tensors.values():
        moments = {part: tensor.detach().clone() for part in ("exp_avg", "exp_avg_sq")}
        engine.optimizer.state[tensor] = {"step": 10.0 * tensor.new_ones(()), **moments}
    for asynchronous, step in ((True, 1), (False, 2)):
        with CheckpointWriter(Path(folder), asynchronous=asynchronous) as writer:
            start = time.perf_counter()
            snapshot = engine.snapshot(TrainState(step=step))
            assert snapshot is not None
            writer.save(snapshot)
            took = time.perf_counter() - start
        if asynchronous:
            say("training waits s", took)
    files = (Path(folder) / "step_00000002").iterdir()
    say("written GB/s", sum(path.stat().st_size for path in files) / 1e9 / took)


def texts(folder: str, kind: Any, new_tokens: str, *words: str) -> None:
    """Write two texts of one and of eight sequences. ``cudnn``: with its attention."""
    from gpt2_toolkit import load_model

    model = load_model(folder, device=kind)
    if words == ("cudnn",):
        import torch

        torch.backends.cuda.enable_cudnn_sdp(True)
        say("version of cuDNN", torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    for rows in (1, 8):
        took = []
        for _ in range(2):
            start = time.perf_counter()
            made = model.generate(
                ["The configuration"] * rows, max_new_tokens=int(new_tokens), stop_at_end_of_text=False
            )
            took.append(time.perf_counter() - start)
        say(f"tokens/s of {rows}", sum(len(each.tokens) for each in made) / took[1])
        say(f"first beside second text of {rows}", took[0] / took[1])


def requests(folder: str, kind: str, backend: str, new_tokens: str) -> None:
    """Start the server, and send it eight prompts of different length at once."""
    words = ["--run_mode", "serve", "--config", f"{folder}/config.yaml", "serve.port=0"]
    command = [sys.executable, str(ROOT / "run_gpt2.py"), *words, f"device={kind}", f"backend={backend}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def ask(prompt: str) -> tuple[int, float]:
        start = time.perf_counter()
        line = http.client.HTTPConnection(address, timeout=_START_SECONDS)
        body = {"prompt": prompt, "max_tokens": int(new_tokens)}
        line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        usage = json.load(line.getresponse())["usage"]
        return usage["completion_tokens"], time.perf_counter() - start

    with subprocess.Popen(command, cwd=ROOT, **pipes) as server:
        try:
            for line in server.stdout or ():
                print(line, end="")
                if found := re.search(r"served at http://([^/]+)", line):
                    address = found[1]
                    break
            else:
                sys.exit("error: the server ended before it named its address")
            prompts = ["a word " * number for number in range(1, 9)]
            took = []
            with ThreadPoolExecutor(8) as pool:
                for _ in range(2):
                    start = time.perf_counter()
                    answers = list(pool.map(ask, prompts))
                    took.append(time.perf_counter() - start)
        finally:
            server.terminate()
    say("tokens/s", sum(tokens for tokens, _ in answers) / took[1])
    say("slowest request s", max(seconds for _, seconds in answers))
    say("first beside second requests", took[0] / took[1])


PROBES = (device, rates, facts, mindspore_facts, saves, texts, requests)


@command()
def main(words: list[str]) -> None:
    next(probe for probe in PROBES if probe.__name__ == words[0])(*words[1:])


if __name__ == "__main__":
    sys.exit(main())

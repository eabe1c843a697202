"""Runs started through scripts/run_distribute.sh, and what they leave behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
OF_LAUNCHERS = re.compile(
    r"RANK|WORLD|MASTER|DEVICE_ID|MS_|HCCL|OMP|GLOO|NCCL|GPT2|SLURM|DRY_RUN|DETACH|ASCEND|MA_|VC_"
    r"|HOROVOD|ONEFLOW|^DEVICES$|^VARIANT$"
)

TINY = (
    "device=cpu", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2",
    "model.seq_length=16", "model.vocab_size=101", "train.micro_batch_size=2",
    "train.global_batch_size=8", "optimizer.name=sgd", "optimizer.learning_rate=0.1",
    "optimizer.warmup_steps=0", "optimizer.decay_steps=1000", "data.split=90,10,0",
    "data.tokenizer=null", "validation.max_samples=4", "logging.tensorboard=false",
    "logging.plot=false",
)  # fmt: skip
"""Overrides of the tiny preset for the fixture ``corpus_prefix``; a step takes milliseconds."""


def clean_environment(**variables: str) -> dict[str, str]:
    """The tests' own, without what launchers set, one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.search(name)}
    return {**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}


def run_words(output: Path, corpus: Path, **keys: object) -> list[str]:
    """The overrides of a tiny run; keys are written section__key=value."""
    changes = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return [*TINY, f"output_dir={output}", f"data.train={corpus}", *changes]


def start_program(*words: str, **variables: str) -> subprocess.Popen[str]:
    """``run_gpt2.py words``, with pipes for its output and its errors."""
    command = [sys.executable, str(ROOT / "run_gpt2.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def run_program(*words: str) -> tuple[int, str, str]:
    """Return its exit code, its output and its errors."""
    with start_program(*words) as child:
        out, error = child.communicate(timeout=120)
    return child.returncode, out, error


def start_script(*words: str, before: tuple[str, ...] = (), log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """``run_distribute.sh words`` in the background, its output in ``log``. before: such as ("ip",
    "netns", "exec", NAME).
    """
    with log.open("ab") as file:
        return subprocess.Popen(
            [*before, "bash", str(ROOT / "scripts" / "run_distribute.sh"), *words], cwd=ROOT,
            env=clean_environment(**variables), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def pids_with(text: str) -> list[int]:
    """Living processes whose command line holds ``text``, this one not."""
    dead = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    living = [each for each in psutil.process_iter(["cmdline", "status"]) if each.info["status"] not in dead]
    found = [each.pid for each in living if text in " ".join(each.info["cmdline"] or ())]
    return sorted({*found} - {os.getpid()})


def process_of_rank(text: str, rank: int) -> int:
    """Process of this rank, among those whose command line holds ``text``, by its variables."""
    [found] = [pid for pid in pids_with(text) if psutil.Process(pid).environ().get("RANK") == str(rank)]
    return found


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Addresses that these processes listen on: 127.0.0.1, ::, or one of this machine."""
    sockets = [socket for pid in pids for socket in psutil.Process(pid).net_connections("tcp")]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def wait_until(condition: Callable[[], object], what: str, *, seconds: float = 180.0, every: float = 0.05) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain: {what}"
        time.sleep(every)

"""Random faults in training, saving, starting and restarting: each run ends as one without faults.

    pytest -m campaign -s tests/system/test_fault_campaign.py

GPT2_FAULTS sets the number of faults (200), GPT2_FAULT_SEED the seed (1). A short campaign has all
layouts too, with fewer faults in each run.
"""

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.network_hosts import ADDRESSES
from tests.run_scripts import pids_with, run_words, start_script
from tests.system.test_restarts import CONFIG, FAULTS, attempts_of, hosts, rows_of, run_alone

pytestmark = pytest.mark.campaign

__all__ = ["hosts"]

STEPS, MOST_OF_A_RUN = 60, 10
"""Steps and faults of a run."""
MOMENTS = ("reading data", "computing", "saving", "validating", "start")
KINDS = ("SIGKILL", "SIGABRT", "SIGSEGV", "SIGSTOP", "exception", "launcher")
LAYOUTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "dp2": (1, 2, {}),
    "zero2": (1, 2, {"parallel__zero_stage": 2}),
    "tp2": (1, 2, {"parallel__model_parallel": 2}),
    "pp2": (1, 2, {"parallel__pipeline_stage": 2}),
    "dp4": (1, 4, {}),
    "tp2 pp2": (1, 4, {"parallel__model_parallel": 2, "parallel__pipeline_stage": 2}),
    "dp2, two hosts": (2, 2, {}),
    "tp2 dp2, two hosts": (2, 4, {"parallel__model_parallel": 2}),
    "dp2, mindspore": (1, 2, {"backend": "mindspore"}),
    "dp2, mindspore, two hosts": (2, 2, {"backend": "mindspore"}),
}
"""Hosts, ranks and settings."""
LIMIT = 1800.0
"""Seconds for a run with its faults; more would be a hang."""


KEYS: dict[str, object] = {"train__max_steps": STEPS, "checkpoint__interval": 4, "validation__interval": 6}
KEYS["model__dropout"] = 0


def plan(chance: random.Random, ranks: int, faults: int) -> list[dict[str, Any]]:
    """Return faults at growing steps, since one step that fails twice ends a run on purpose."""
    steps = sorted(chance.sample(range(2, STEPS - 8), faults))
    return [
        {
            "step": step,
            "rank": chance.randrange(ranks),
            "moment": chance.choices(MOMENTS, (3, 6, 3, 1, 1))[0],
            "kind": chance.choices(KINDS, (6, 2, 2, 1, 3, 2))[0],
        }
        for step in steps
    ]


def run_until_the_end(folder: Path, words: list[str], ranks: int, hosts: Sequence[str]) -> tuple[int, list[int | None]]:
    """Start the launcher of each host as a scheduler does, again and again. Returns the number of
    starts, and the last exit codes.
    """
    end, starts = time.monotonic() + LIMIT, 0
    options = ["--node_ips", ",".join(ADDRESSES)] if hosts else []
    size = ranks // max(1, len(hosts))

    def start(host: str | None) -> subprocess.Popen[bytes]:
        nonlocal starts
        starts += 1
        return start_script(
            "--program", str(folder / "program.py"), "--max_restarts", "50", "--quiet", *options,
            "none", CONFIG, f"[0,{size})", "train", *words,
            before=() if host is None else ("ip", "netns", "exec", host),
            log=folder / "log.txt", FAULTS=str(folder / "faults.json"),
        )  # fmt: skip

    launchers = {host: start(host) for host in hosts or (None,)}
    while True:
        codes = [launcher.poll() for launcher in launchers.values()]
        if time.monotonic() > end:
            for launcher in launchers.values():
                launcher.kill()
            pytest.fail(f"hangs: {(folder / 'log.txt').read_text()[-3000:]}")
        if None not in codes:
            gone = time.monotonic() + 20
            while pids_with(str(folder)) and time.monotonic() < gone:
                time.sleep(0.2)
            assert pids_with(str(folder)) == [], "a process is left"
            if not any(codes) or starts > 2 * (MOST_OF_A_RUN + 2):
                return starts, codes
        for host, launcher in launchers.items():
            if launcher.poll():
                launchers[host] = start(host)
        time.sleep(0.1)


def test_every_run_ends_as_one_without_faults(hosts: tuple[str, str], tmp_path: Path, corpus_prefix: Path) -> None:
    wanted = int(os.environ.get("GPT2_FAULTS", "200"))
    faults_of_a_run = max(1, min(MOST_OF_A_RUN, wanted // len(LAYOUTS)))
    chance = random.Random(int(os.environ.get("GPT2_FAULT_SEED", "1")))
    expected = {
        backend: run_alone(tmp_path / backend, corpus_prefix, **KEYS, backend=backend)
        for backend in ("torch", "mindspore")
    }
    met: Counter[tuple[str, str]] = Counter()
    layouts: Counter[str] = Counter()
    layouts_left: list[str] = []
    worst = 0.0
    began = time.monotonic()
    while met.total() < wanted:
        if not layouts_left:
            layouts_left = chance.sample(list(LAYOUTS), len(LAYOUTS))
        name = layouts_left.pop()
        count, ranks, keys = LAYOUTS[name]
        folder = tmp_path / f"run {sum(layouts.values())}"
        folder.mkdir()
        (folder / "program.py").write_text(FAULTS)
        faults = plan(chance, ranks, faults_of_a_run)
        (folder / "faults.json").write_text(json.dumps(faults))
        run = folder / "run"
        words = run_words(run, corpus_prefix, **KEYS, runtime__stall_limit=40 * ranks, **keys)
        starts, codes = run_until_the_end(folder, words, ranks, hosts if count > 1 else ())
        text = (folder / "log.txt").read_text()
        assert not any(codes), f"{name}, {faults}: {text[-3000:]}"
        left = json.loads((folder / "faults.json").read_text())
        for fault in faults[: len(faults) - len(left)]:
            met[fault["moment"], fault["kind"]] += 1
        layouts[name] += 1
        found, wanted_rows = rows_of(run), expected[str(keys.get("backend", "torch"))]
        assert [(row[0], row[3]) for row in found] == [(row[0], row[3]) for row in wanted_rows]
        differences = [abs(row[1] - other[1]) / other[1] for row, other in zip(found, wanted_rows, strict=True)]
        worst = max(worst, *differences)
        assert worst < 1e-6, (name, faults)
        print(
            f"\n{met.total()} faults, {time.monotonic() - began:.0f} s: {name}, {starts} starts,"
            f" {len(attempts_of(run))} attempts written, largest difference {worst:.1e}\n{dict(layouts)}\n{dict(met)}",
            flush=True,
        )

"""What a launched run does when a rank is killed, stopped or cannot start: exit code, blame, and no process left."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from common.training.checkpoint import find_checkpoint, read_manifest
from common.training.metrics import read_metrics
from tests.launching import pids_with, run_words, start_script, wait_until

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"


def steps(run: Path) -> int:
    return len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def pid_of_rank(run: Path, rank: int) -> int:
    """Found by its environment, as one would with ps."""
    for pid in pids_with(str(run)):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and b"run_gpt2.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"rank {rank} of {run} is not running")


def launched(run: Path, corpus: Path, ranks: int, **keys: object) -> subprocess.Popen[bytes]:
    words = run_words(run, corpus, **{"train__max_steps": 100000, "checkpoint__interval": 10, **keys})
    return start_script("none", CONFIG, f"[0,{ranks})", "train", *words, log=run.with_suffix(".log"))


def test_a_killed_rank_ends_the_run_and_the_next_start_goes_on(tmp_path: Path, corpus_prefix: Path) -> None:
    """Under ZeRO, where each rank writes its part of a checkpoint."""
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2, parallel__zero_stage=2)
    wait_until(lambda: steps(run) > 15, "steps")
    os.kill(pid_of_rank(run, 1), signal.SIGKILL)
    killed = time.monotonic()
    assert launcher.wait(timeout=30) == 128 + signal.SIGKILL
    assert time.monotonic() - killed < 15
    text = run.with_suffix(".log").read_text()
    assert "rank 1" in text and "SIGKILL" in text and "mf_parallel1" in text
    assert pids_with(str(run)) == []
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    saved = read_manifest(checkpoint)["state"]["step"]
    assert saved % 10 == 0, "nobody saves after a failure"
    again = launched(run, corpus_prefix, 2, parallel__zero_stage=2, train__max_steps=saved + 20)
    assert again.wait(timeout=60) == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(range(1, saved + 21))
    assert not list((run / "checkpoints").glob(".*")), "what the kill left of a save is gone"


def test_a_stopped_rank_is_found_and_blamed(tmp_path: Path, corpus_prefix: Path) -> None:
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2, runtime__stall_limit=12)
    wait_until(lambda: steps(run) > 5, "steps")
    os.kill(pid_of_rank(run, 1), signal.SIGSTOP)
    assert launcher.wait(timeout=60) == 1
    text = run.with_suffix(".log").read_text()
    assert "rank 1" in text and "stopped" in text
    assert pids_with(str(run)) == []


def test_an_interrupt_saves_and_a_second_one_kills(tmp_path: Path, corpus_prefix: Path) -> None:
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2)
    wait_until(lambda: steps(run) > 15, "steps")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    assert read_manifest(checkpoint)["state"]["step"] == steps(run), "saved where it stopped"
    assert pids_with(str(run)) == []


def test_a_rank_that_fails_alone_at_its_start(tmp_path: Path, corpus_prefix: Path) -> None:
    """Rank 3 of 4 finds a torch that cannot be imported: a folder of that name comes first on its path alone."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '3':\n    sys.modules['torch'] = None  # import torch fails\n"
    )
    run = tmp_path / "run"
    words = run_words(run, corpus_prefix, train__max_steps=50)
    launcher = start_script("none", CONFIG, "[0,4)", "train", *words, log=tmp_path / "log", PYTHONPATH=str(broken))
    assert launcher.wait(timeout=60) == 2
    text = (tmp_path / "log").read_text()
    assert "rank 3" in text and "it cannot be imported" in text
    assert not (run / "metrics.jsonl").exists() or steps(run) == 0
    assert pids_with(str(run)) == []


def test_a_rank_whose_disk_is_full_while_all_save_their_parts(tmp_path: Path, corpus_prefix: Path) -> None:
    """Rank 1 may write no file above 20 kB, under ZeRO, where each rank writes its own: as a full disk, in the middle of a file."""
    limited = tmp_path / "limited"
    limited.mkdir()
    (limited / "sitecustomize.py").write_text(
        "import os, resource\nif os.environ.get('RANK') == '1':\n    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    )
    run = tmp_path / "run"
    words = run_words(run, corpus_prefix, checkpoint__interval=5, train__max_steps=15, parallel__zero_stage=2)
    launcher = start_script("none", CONFIG, "[0,2)", "train", *words, log=tmp_path / "log", PYTHONPATH=str(limited))
    assert launcher.wait(timeout=60) == 1
    text = (tmp_path / "log").read_text()
    assert "rank 1 (device 1) ended with exit code 1" in text
    assert "step_00000005: the checkpoint could not be written: File too large; earlier checkpoints are whole" in text
    assert pids_with(str(run)) == [] and find_checkpoint(run) is None
    assert (run / "checkpoints" / ".step_00000005.tmp").is_dir()


@pytest.mark.campaign
def test_fifty_random_kills(tmp_path: Path, corpus_prefix: Path) -> None:
    """At a random moment, a random signal to a random process of the run; no hang, no orphan, and ``latest`` always loads."""
    dice = random.Random(20261121)
    run, seen, slowest = tmp_path / "run", Counter[str](), 0.0
    for number in range(50):
        launcher = launched(run, corpus_prefix, 2, runtime__stall_limit=25, checkpoint__interval=3)
        began, delay = time.monotonic(), dice.uniform(0.0, 9.0)
        time.sleep(delay)
        victims = pids_with(str(run))
        victim = dice.choice(victims) if victims else launcher.pid
        what = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP])
        if what == signal.SIGSTOP and victim == launcher.pid:
            what = signal.SIGKILL  # nobody watches over a stopped launcher
        os.kill(victim, what)
        struck = time.monotonic()
        code = launcher.wait(timeout=90)
        wait_until(lambda: not pids_with(str(run)), f"orphans after kill {number}: {what.name} to {victim}", seconds=15)
        slowest = max(slowest, time.monotonic() - struck)
        assert code != 0
        seen[f"{what.name} {'launcher' if victim == launcher.pid else 'rank'} -> {code}"] += 1
        checkpoint = find_checkpoint(run)
        if checkpoint is not None:
            read_manifest(checkpoint)
        assert time.monotonic() - began < 120
    print(f"\n50 kills: {dict(sorted(seen.items()))}; slowest end {slowest:.1f} s; {steps(run)} rows in metrics.jsonl")
    last = find_checkpoint(run)
    assert last is not None
    words = {"train__max_steps": read_manifest(last)["state"]["step"] + 5}
    assert launched(run, corpus_prefix, 2, **words).wait(timeout=60) == 0
    rows = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, words["train__max_steps"] + 1)), "every step is there once"

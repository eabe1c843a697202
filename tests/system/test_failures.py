"""A launched run of which a rank is killed, stopped or cannot start: exit code, blame, and no
process left.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest
from common.config.schema import RunConfig
from common.training.metrics import read_metrics
from common.training.opened_checkpoint import Checkpoint
from tests.cluster_tables import write_tutorial_table
from tests.run_scripts import listening_addresses, pids_with, run_words, start_script, wait_until

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"


def steps(run: Path) -> int:
    return len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def pids_of_rank(run: Path, rank: int) -> list[int]:
    """Found by its environment, as one would with ps."""
    found = []
    for pid in pids_with(str(run)):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and b"run_gpt2.py" in command:
            found.append(pid)
    return found


def pid_of_rank(run: Path, rank: int) -> int:
    assert pids_of_rank(run, rank), f"rank {rank} of {run} is not running"
    return pids_of_rank(run, rank)[0]


def launched(run: Path, corpus: Path, ranks: int, **keys: object) -> subprocess.Popen[bytes]:
    words = run_words(
        run, corpus, **{"train__max_steps": 100000, "checkpoint__interval": 10, **keys}
    )
    return start_script(
        "none", CONFIG, f"[0,{ranks})", "train", *words, log=run.with_suffix(".log")
    )


def test_a_killed_rank_ends_the_run_and_the_next_start_resumes(
    tmp_path: Path, corpus_prefix: Path
) -> None:
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
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(
        range(1, saved + 21)
    )
    assert not list((run / "checkpoints").glob(".*")), "what the kill left of a save is gone"


@pytest.mark.long
def test_a_stopped_rank_is_found_and_blamed(tmp_path: Path, corpus_prefix: Path) -> None:
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2, runtime__stall_limit=30)  # a busy machine's start
    wait_until(lambda: steps(run) > 5, "steps")
    os.kill(pid_of_rank(run, 1), signal.SIGSTOP)
    assert launcher.wait(timeout=120) == 1
    text = run.with_suffix(".log").read_text()
    assert "rank 1" in text and "stopped" in text
    assert pids_with(str(run)) == []


def test_an_interrupt_saves_and_a_second_one_kills(tmp_path: Path, corpus_prefix: Path) -> None:
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2)
    wait_until(lambda: steps(run) > 15, "steps")
    assert listening_addresses(pids_with(str(run))) == {"127.0.0.1"}, (
        "a run on one host is closed to others"
    )
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    assert read_manifest(checkpoint)["state"]["step"] == steps(run), "saved where it stopped"
    assert pids_with(str(run)) == []


def test_only_one_rank_fails_at_its_start(tmp_path: Path, corpus_prefix: Path) -> None:
    """Rank 3 of 4 finds a torch that cannot be imported: a folder of that name comes first on its
    path only.
    """
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '3':\n    sys.modules['torch'] = None  #"
        " import torch fails\n"
    )
    run = tmp_path / "run"
    words = run_words(run, corpus_prefix, train__max_steps=50)
    launcher = start_script(
        "none", CONFIG, "[0,4)", "train", *words, log=tmp_path / "log", PYTHONPATH=str(broken)
    )
    assert launcher.wait(timeout=60) == 2
    text = (tmp_path / "log").read_text()
    assert "rank 3" in text and "it cannot be imported" in text
    assert not (run / "metrics.jsonl").exists() or steps(run) == 0
    assert pids_with(str(run)) == []


def test_a_rank_whose_disk_is_full_while_all_save_their_parts(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """Rank 1 may write no file above 20 kB, under ZeRO, where each rank writes its own: as a full
    disk, in the middle of a file.
    """
    limited = tmp_path / "limited"
    limited.mkdir()
    (limited / "sitecustomize.py").write_text(
        "import os, resource\nif os.environ.get('RANK') == '1':\n   "
        " resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    )
    run = tmp_path / "run"
    words = run_words(
        run, corpus_prefix, checkpoint__interval=5, train__max_steps=15, parallel__zero_stage=2
    )
    launcher = start_script(
        "none", CONFIG, "[0,2)", "train", *words, log=tmp_path / "log", PYTHONPATH=str(limited)
    )
    assert launcher.wait(timeout=60) == 1
    text = (tmp_path / "log").read_text()
    assert "rank 1 (device 1) ended with exit code 1" in text
    assert (
        "step_00000005: the checkpoint could not be written: File too large; earlier checkpoints"
        " are whole" in text
    )
    assert pids_with(str(run)) == [] and find_checkpoint(run) is None
    assert (run / "checkpoints" / ".step_00000005.tmp").is_dir()


@pytest.mark.long
def test_a_killed_rank_of_mindspore_ends_its_run(tmp_path: Path, corpus_prefix: Path) -> None:
    """With a rank table, which Ascends read: on CPUs the ranks meet through MindSpore's scheduler
    all the same.
    """
    pytest.importorskip(
        "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
    )
    run, table = (
        tmp_path / "run",
        write_tutorial_table(tmp_path / "table.json", servers=1, devices=2),
    )
    settings = {
        "backend": "mindspore",
        "model__num_layers": 1,
        "train__max_steps": 100000,
        "checkpoint__interval": 2,
    }
    words = run_words(run, corpus_prefix, **settings)
    launcher = start_script(
        str(table), CONFIG, "[0,2]", "train", *words, log=run.with_suffix(".log")
    )
    wait_until(lambda: steps(run) > 5, "steps", seconds=240)
    # the scheduler too
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 4 and listening_addresses(map(int, children)) == {"127.0.0.1"}
    os.kill(pid_of_rank(run, 1), signal.SIGKILL)
    killed = time.monotonic()
    assert launcher.wait(timeout=60) == 128 + signal.SIGKILL
    assert time.monotonic() - killed < 30
    text = run.with_suffix(".log").read_text()
    assert "rank 1" in text and "SIGKILL" in text and "mf_parallel1" in text
    assert pids_with(str(run)) == []
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None and read_manifest(checkpoint)["state"]["step"] % 2 == 0, (
        "nobody saves after a failure"
    )


def struck(
    run: Path, launcher: subprocess.Popen[bytes], victim: int, what: signal.Signals
) -> tuple[int, float]:
    """Send a signal: the run ends, nothing of it is left, and ``latest`` loads. Exit code, and
    seconds that it took.
    """
    os.kill(victim, what)
    began = time.monotonic()
    code = launcher.wait(timeout=90)
    wait_until(
        lambda: not pids_with(str(run)), f"orphans after {what.name} to {victim}", seconds=15
    )
    seconds = time.monotonic() - began
    assert code != 0
    checkpoint = find_checkpoint(run)
    if checkpoint is not None:
        model = RunConfig.model_validate(read_manifest(checkpoint)["config"]).model
        assert all(np.isfinite(values).all() for _, values in Checkpoint(checkpoint).weights(model))
    return code, seconds


@pytest.mark.campaign
def test_fifty_random_kills(tmp_path: Path, corpus_prefix: Path) -> None:
    """At a random moment, a random signal to a random process of the run; no hang, no orphan, and
    ``latest`` always loads.
    """
    dice = random.Random(20261121)
    run, seen, slowest = tmp_path / "run", Counter[str](), 0.0
    for _ in range(50):
        launcher = launched(run, corpus_prefix, 2, runtime__stall_limit=25, checkpoint__interval=3)
        time.sleep(dice.uniform(0.0, 9.0))
        victims = pids_with(str(run))
        victim = dice.choice(victims) if victims else launcher.pid
        what = dice.choice(
            [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP]
        )
        ranks = {pid for rank in range(2) for pid in pids_of_rank(run, rank)}
        if what == signal.SIGSTOP and victim not in ranks:
            # nobody watches over a stopped launcher, or over the shell that starts it
            what = signal.SIGKILL
        code, seconds = struck(run, launcher, victim, what)
        slowest = max(slowest, seconds)
        seen[f"{what.name} {'launcher' if victim == launcher.pid else 'rank'} -> {code}"] += 1
    print(
        f"\n50 kills: {dict(sorted(seen.items()))}; slowest end {slowest:.1f} s; {steps(run)} rows"
        " in metrics.jsonl"
    )
    last = find_checkpoint(run)
    assert last is not None
    words = {"train__max_steps": read_manifest(last)["state"]["step"] + 5}
    assert launched(run, corpus_prefix, 2, **words).wait(timeout=60) == 0
    rows = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, words["train__max_steps"] + 1)), "every step is there once"


TENSOR: dict[str, Any] = {"parallel__model_parallel": 2}
PIPELINE: dict[str, Any] = {"parallel__pipeline_stage": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 tp2": (4, TENSOR),
    "tp2 pp2": (4, TENSOR | PIPELINE),
    "zero3 on 2": (2, {"parallel__zero_stage": 3}),
    "zero1 pp2": (4, PIPELINE | {"parallel__zero_stage": 1}),
    "interleaved": (2, PIPELINE | {"parallel__pipeline_schedule": "interleaved_1f1b"}),
}
# A step takes some ten milliseconds or more, as does a save. Losses of 190 steps under changing
# layouts differed by up to 1.7e-7 from those of one process. The preset's weight decay would shrink
# the weights under so high a rate, and rounding would grow with every step.
SLOWER: dict[str, Any] = {
    "model__num_layers": 4,
    "model__hidden_size": 64,
    "model__num_heads": 4,
    "model__seq_length": 64,
    "model__initializer_range": 0.1,
    "train__global_batch_size": 16,
    "optimizer__learning_rate": 0.05,
    "optimizer__momentum": 0.9,
    "optimizer__weight_decay": 0.0,
    "optimizer__schedule": "constant",
    "optimizer__warmup_steps": 0,
    "validation__interval": 0,
}


STEPS_A_KILL = 6
"""The steps of the run for each kill. The test waits for one to three saves, and a few more steps
may pass until it has noticed and the process is dead. Between 30 kills 50 steps passed on two busy
cores.
"""


MOMENTS = ("start", *3 * ("step",), *3 * ("save",))
"""Moments of seven kills in a row. Six of them hold at least two in a save."""


def last_save(run: Path) -> int:
    """The step of the newest whole checkpoint by its name, 0 if there is none."""
    names = [path.name for path in (run / "checkpoints").glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("names", "kills"),
    [(tuple(LAYOUTS), 30), (("tp2 pp2",), 6)],
    ids=["layouts that change", "one layout"],
)
def test_random_kills_of_ranks_that_save_parts(
    tmp_path: Path, corpus_prefix: Path, names: tuple[str, ...], kills: int
) -> None:
    """kill -9 of any rank or the launcher, in the start, a step or a save; the next start may be
    under another layout. All losses are those of one process that nobody killed, or, where the
    layout stays, bit for bit those of a run of that layout. The moments of the kills are counted in
    steps, so that the run outlasts them on a machine of any speed.
    """
    dice = random.Random(20261121)
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = SLOWER | {"train__max_steps": STEPS_A_KILL * kills + 10}
    ranks, layout = (1, {}) if len(names) > 1 else LAYOUTS[names[0]]
    assert launched(whole, corpus_prefix, ranks, **settings, **layout).wait(timeout=600) == 0
    seen, ends, saves = Counter[str](), list[float](), 0
    moments = [
        moment
        for _ in range(0, kills, len(MOMENTS))
        for moment in dice.sample(MOMENTS, len(MOMENTS))
    ]
    for moment in moments[:kills]:
        name = dice.choice(names)
        ranks, layout = LAYOUTS[name]
        before, saved = find_checkpoint(run), last_save(run)
        launcher = launched(
            run,
            corpus_prefix,
            ranks,
            **settings,
            **layout,
            runtime__stall_limit=60,
            checkpoint__interval=1,
        )
        if moment == "start":
            end = time.monotonic() + dice.uniform(0.0, 6.0)
            while time.monotonic() < end and last_save(run) == saved:
                time.sleep(0.01)
        else:
            wanted = saved + dice.randint(1, 3)
            wait_until(
                lambda least=wanted: last_save(run) >= least, "a save", seconds=120, every=0.01
            )
            time.sleep(dice.uniform(0.0, 0.05))
        victims = [launcher.pid, *(pid for rank in range(ranks) for pid in pids_of_rank(run, rank))]
        victim = dice.choice(victims)
        end = time.monotonic() + 60
        while (
            moment == "save"
            and not list((run / "checkpoints").glob(".step_*.tmp"))
            and time.monotonic() < end
        ):
            time.sleep(0.001)  # a save takes some ten milliseconds
        time.sleep(dice.choice([0.0, dice.uniform(0.0, 0.02)]))
        assert launcher.poll() is None, run.with_suffix(".log").read_text()[-2000:]
        _, seconds = struck(run, launcher, victim, signal.SIGKILL)
        ends.append(seconds)
        left = list((run / "checkpoints").glob(".step_*.tmp"))
        saves += bool(left)
        after = find_checkpoint(run)
        assert before is None or (after is not None and after.name >= before.name), (
            "what was whole is still there"
        )
        who = "launcher" if victim == launcher.pid else "rank"
        seen[f"{name}: {who}{' in a save' if left else ''}"] += 1
    print(
        f"\n{kills} kills: {dict(sorted(seen.items()))}; {saves} in a save; slowest end"
        f" {max(ends):.1f} s; {steps(run)} steps"
    )
    ranks, layout = LAYOUTS[dice.choice(names)]
    assert launched(run, corpus_prefix, ranks, **settings, **layout).wait(timeout=600) == 0, (
        run.with_suffix(".log").read_text()[-2000:]
    )
    assert not list((run / "checkpoints").glob(".*"))
    found, expected = (
        [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
        for folder in (run, whole)
    )
    assert [row["step"] for row in found] == list(range(1, settings["train__max_steps"] + 1)), (
        "every step is there once"
    )
    assert [row["sample_hash"] for row in found] == [row["sample_hash"] for row in expected]
    pairs = [(row["loss"], wanted["loss"]) for row, wanted in zip(found, expected, strict=True)]
    furthest = max(abs(loss / wanted - 1) for loss, wanted in pairs)
    print(
        f"losses {pairs[0][0]:.6f} to {pairs[-1][0]:.6f}; furthest from the run that nobody killed"
        f" {furthest:.1e}"
    )
    assert furthest <= (1e-6 if len(names) > 1 else 0.0)

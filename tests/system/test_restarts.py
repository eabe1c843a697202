"""Runs that are started again after failures, on one host and on two."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.network_hosts import ADDRESSES, two_hosts
from tests.run_scripts import ROOT, clean_environment, pids_with, run_words, start_script, wait_until

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
TWELVE: dict[str, object] = {"train__max_steps": 12, "checkpoint__interval": 5, "checkpoint__asynchronous": False}
"""A rank is killed three steps after a save, which a thread may not have ended by then."""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    yield from two_hosts()


FAULTS = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})

def take(moment, step):
    path = Path(os.environ["FAULTS"])
    left = json.loads(path.read_text())
    if not left or left[0]["rank"] != int(os.environ["RANK"]) or left[0].get("moment", "computing") != moment:
        return
    if moment != "start" and step < left[0]["step"]:
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(left[1:]))
    part.rename(path)
    kind = left[0].get("kind", "SIGKILL")
    if kind == "launcher":
        os.kill(int(os.environ["GPT2_LAUNCHER_PID"]), signal.SIGKILL)
        if moment != "start":  # there the rank has yet to find that its launcher is gone
            time.sleep(60)
    elif kind == "exception":
        raise RuntimeError("a planted fault")
    else:
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(60)

take("start", 0)
import common.training.loop as loop
import common.training.saving as saving
import common.training.steps as steps
import run_gpt2
beat = steps.beat
def with_fault(step, doing):
    beat(step, doing)
    take(doing, step)
steps.beat = loop.beat = saving.beat = with_fault
sys.exit(run_gpt2.main(sys.argv[1:]))
"""
"""Program of a rank that takes the next fault of the file $FAULTS at its step: a rank, a moment, a kind."""


def rows_of(run: Path) -> list[tuple[Any, ...]]:
    rows = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    return [(row["step"], row["loss"], row["grad_norm"], row["sample_hash"]) for row in rows if "loss" in row]


def require_equal(run: Path, alone: Path) -> None:
    """Steps and sample hashes are equal; losses and gradient norms to 1e-6, as sums differ."""
    for row, other in zip(rows_of(run), rows_of(alone), strict=True):
        assert (row[0], row[3]) == (other[0], other[3])
        assert row[1:3] == pytest.approx(other[1:3], rel=1e-6)


def attempts_of(run: Path) -> list[dict[str, Any]]:
    path = run / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_alone(run: Path, corpus: Path, **keys: object) -> list[tuple[Any, ...]]:
    """Train in one process without a fault. Return its rows."""
    words, log = run_words(run, corpus, **keys), run.with_suffix(".log")
    assert start_script("none", CONFIG, "[0,1)", "train", *words, log=log).wait(timeout=200) == 0, log.read_text()
    return rows_of(run)


def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(tmp_path: Path, corpus_prefix: Path) -> None:
    """Its losses are those of one process that nobody kills."""
    program, left, log, run = (tmp_path / name for name in ("program.py", "faults.json", "log.txt", "run"))
    program.write_text(FAULTS)
    left.write_text(json.dumps([{"rank": 1, "step": 8}]))
    keys = {**TWELVE, "model__dropout": 0}
    options = ["--program", str(program), "--max_restarts", "1", "none", CONFIG, "[0,2)", "train"]
    launcher = start_script(*options, *run_words(run, corpus_prefix, **keys), log=log, FAULTS=str(left))
    assert launcher.wait(timeout=120) == 0, log.read_text()
    assert pids_with(str(run)) == []
    first, second = attempts_of(run)
    assert (first["exit_code"], first["last_step"], first["then"]) == (137, 8, "restarted")
    assert "rank 1" in first["failure"] and "SIGKILL" in first["failure"]
    assert (second["exit_code"], second["first_step"], second["then"]) == (0, 6, "ended")
    assert "restart 1 of 1 in 1 s" in log.read_text()
    rank_0 = (run / "mf_parallel0" / "mindformer.log").read_text()
    assert "resuming" in rank_0 and (run / "mf_parallel0" / "mindformer.log.1").exists()
    run_alone(tmp_path / "alone", corpus_prefix, **keys)
    require_equal(run, tmp_path / "alone")


def start_torchrun(
    run: Path,
    corpus: Path,
    faults: Path,
    *options: str,
    before: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    **keys: object,
) -> subprocess.Popen[str]:
    """Start the rank program FAULTS under ``torchrun options``."""
    program = faults.with_name("program.py")
    program.write_text(FAULTS)
    words = ["--config", CONFIG, "--run_mode", "train", *run_words(run, corpus, **keys)]
    return subprocess.Popen(
        [*before, sys.executable, "-m", "torch.distributed.run", *options, str(program), *words],
        cwd=ROOT,
        env=clean_environment(FAULTS=str(faults), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def nodes_of_torchrun(address: str, number: int, nodes: str, *, restarts: int) -> tuple[str, ...]:
    return (
        f"--nnodes={nodes}", "--nproc_per_node=1", f"--max-restarts={restarts}", "--rdzv_id=gpt2",
        "--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:29411",
        f"--local_addr={address}",
        f"--rdzv_conf=is_host={number == 0},keep_alive_interval=2,last_call_timeout=3",
    )  # fmt: skip


def outputs_of(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Return what they say, once all have ended well."""
    try:
        texts = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    return texts


@pytest.mark.long
def test_torchrun_on_one_node_starts_the_ranks_again(tmp_path: Path, corpus_prefix: Path) -> None:
    """Losses and hashes are bit for bit those of a run that nobody kills. One host, two ranks."""
    found, options = [], ("--nproc_per_node=2", "--max-restarts=1")
    for name, faults in (("whole", []), ("faulty", [{"rank": 1, "step": 8}])):
        folder = tmp_path / name
        folder.mkdir()
        left = folder / "faults.json"
        left.write_text(json.dumps(faults))
        run = folder / "run"
        outputs_of([start_torchrun(run, corpus_prefix, left, *options, model__dropout=0.1, **TWELVE)])
        assert json.loads(left.read_text()) == [] and pids_with(str(run)) == []
        found.append(rows_of(run))
    assert len(found[0]) == 12 and found[1] == found[0]
    assert [(line["attempt"], line["first_step"]) for line in attempts_of(run)] == [(1, 1), (2, 6)]


STEPS_OF_ELASTIC = 400


@pytest.mark.campaign
def test_torchrun_continues_without_a_lost_node_and_takes_it_back(hosts, tmp_path, corpus_prefix) -> None:
    """The command of docs/restarts.md. Global batch and order of samples are those of one
    process, on any number of nodes.
    """
    keys: dict[str, object] = {"train__max_steps": STEPS_OF_ELASTIC, "checkpoint__interval": 20}
    # steps that take long enough for a node to come back
    keys |= {"validation__interval": 0, "model__num_layers": 4, "model__hidden_size": 128}
    keys |= {"model__seq_length": 64, "model__dropout": 0}
    left, run = tmp_path / "faults.json", tmp_path / "run"
    left.write_text("[]")

    def start(number: int) -> subprocess.Popen[str]:
        options = nodes_of_torchrun(ADDRESSES[number], number, "1:2", restarts=3)
        before = ("ip", "netns", "exec", hosts[number])
        variables = {"GLOO_SOCKET_IFNAME": "cable", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return start_torchrun(run, corpus_prefix, left, *options, before=before, variables=variables, **keys)

    nodes = [start(0), start(1)]
    try:
        wait_until(lambda: len(rows_of(run)) > 45, f"steps of {run}")
        lost_at = len(rows_of(run))
        inside = subprocess.run(["ip", "netns", "pids", hosts[1]], capture_output=True, text=True, check=True)
        for pid in map(int, inside.stdout.split()):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(attempts_of(run)) == 2, "an attempt on one node")
        wait_until(lambda: len(rows_of(run)) > lost_at + 40, "steps on one node")
        nodes[1].wait(timeout=10)
        nodes[1] = start(1)
        wait_until(lambda: len(attempts_of(run)) == 3, "an attempt on both nodes")
    except BaseException:
        for node in nodes:
            node.kill()
        raise
    outputs_of(nodes)
    assert [line["attempt"] for line in attempts_of(run)] == [1, 2, 3]
    assert pids_with(str(run)) == []

    found, expected = rows_of(run), run_alone(tmp_path / "alone", corpus_prefix, **keys)
    assert [(row[0], row[3]) for row in found] == [(row[0], row[3]) for row in expected]
    assert len(found) == STEPS_OF_ELASTIC
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], rel=1e-5)

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
EVERY_FIVE: dict[str, object] = {"checkpoint__interval": 5, "checkpoint__asynchronous": False}
"""A rank is killed three steps after a save, which a thread may not have ended by then."""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    yield from two_hosts()


FAULTS = f"""
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import common.training.steps as steps, common.training.loop as loop
import run_gpt2
beat = steps.beat
def with_fault(step, doing):
    beat(step, doing)
    faults = Path(os.environ["FAULTS"])
    left = json.loads(faults.read_text())
    if left and left[0]["rank"] == int(os.environ["RANK"]) and step >= left[0]["step"]:
        faults.write_text(json.dumps(left[1:]))
        os.kill(os.getpid(), left[0]["signal"])
steps.beat = loop.beat = with_fault
sys.exit(run_gpt2.main(sys.argv[1:]))
"""
"""Program of a rank that sends itself the next signal of the file $FAULTS at a step."""


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


def run_with_faults(
    folder: Path, corpus: Path, faults: list[dict[str, int]], *options: str, **keys: object
) -> tuple[Path, int, str]:
    """Run folder, exit code and messages of two ranks with these faults and 25 steps."""
    folder.mkdir()
    program, left, log = folder / "program.py", folder / "faults.json", folder / "log.txt"
    program.write_text(FAULTS)
    left.write_text(json.dumps(faults))
    run = folder / "run"
    keys = {"train__max_steps": 25, "model__dropout": 0.1, **EVERY_FIVE, **keys}
    words = run_words(run, corpus, **keys)
    launcher = start_script(
        "--program", str(program), *options, "none", CONFIG, "[0,2)", "train", *words,
        log=log, FAULTS=str(left),
    )  # fmt: skip
    code = launcher.wait(timeout=120)
    assert pids_with(str(run)) == []
    return run, code, log.read_text()


def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(tmp_path: Path, corpus_prefix: Path) -> None:
    """Its losses are those of one process that nobody kills."""
    fault = {"rank": 1, "step": 8, "signal": int(signal.SIGKILL)}
    run, code, text = run_with_faults(
        tmp_path / "faulty", corpus_prefix, [fault], "--max_restarts", "1", train__max_steps=12, model__dropout=0
    )
    assert code == 0, text
    first, second = attempts_of(run)
    assert (first["exit_code"], first["last_step"], first["then"]) == (137, 8, "restarted")
    assert "rank 1" in first["failure"] and "SIGKILL" in first["failure"]
    assert (second["exit_code"], second["first_step"], second["then"]) == (0, 6, "ended")
    assert "restart 1 of 1 in 1 s" in text
    log = (run / "mf_parallel0" / "mindformer.log").read_text()
    assert "resuming" in log and (run / "mf_parallel0" / "mindformer.log.1").exists()

    alone = tmp_path / "alone"
    words = run_words(alone, corpus_prefix, train__max_steps=12, model__dropout=0)
    single = start_script("none", CONFIG, "[0,1)", "train", *words, log=tmp_path / "alone.log")
    assert single.wait(timeout=120) == 0
    require_equal(run, alone)


@pytest.mark.campaign
def test_two_faults_leave_the_losses_as_they_were_bit_for_bit(tmp_path: Path, corpus_prefix: Path) -> None:
    faults = [
        {"rank": 1, "step": 8, "signal": int(signal.SIGKILL)},
        {"rank": 0, "step": 17, "signal": int(signal.SIGABRT)},
    ]
    whole, code, _ = run_with_faults(tmp_path / "whole", corpus_prefix, [])
    assert code == 0 and not attempts_of(whole)
    run, code, text = run_with_faults(tmp_path / "faulty", corpus_prefix, faults, "--max_restarts", "2")
    assert code == 0, text
    assert rows_of(run) == rows_of(whole)
    assert [attempt["first_step"] for attempt in attempts_of(run)] == [1, 6, 16]


@pytest.mark.campaign
def test_faults_that_a_restart_repeats_end_the_run(tmp_path: Path, corpus_prefix: Path) -> None:
    at_8 = {"rank": 1, "step": 8, "signal": int(signal.SIGKILL)}
    run, code, text = run_with_faults(tmp_path / "twice", corpus_prefix, [at_8] * 9, "--max_restarts", "9")
    assert code == 137
    assert [attempt["last_step"] for attempt in attempts_of(run)] == [8, 8]
    assert "not restarted: step 8 failed twice" in text
    run, code, text = run_with_faults(tmp_path / "start", corpus_prefix, [{**at_8, "step": 0}], runtime__max_restarts=9)
    assert code == 137 and len(attempts_of(run)) == 1
    assert "not restarted: it failed before it had finished a step" in text
    run, code, text = run_with_faults(
        tmp_path / "refused", corpus_prefix, [], "--max_restarts", "9", checkpoint__resume="nowhere"
    )
    assert code == 2 and len(attempts_of(run)) <= 1, text


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


TWELVE = {"train__max_steps": 12, **EVERY_FIVE}


@pytest.mark.long
def test_torchrun_on_one_node_starts_the_ranks_again(tmp_path: Path, corpus_prefix: Path) -> None:
    """Losses and hashes are bit for bit those of a run that nobody kills. One host, two ranks."""
    found, options = [], ("--nproc_per_node=2", "--max-restarts=1")
    for name, faults in (("whole", []), ("faulty", [{"rank": 1, "step": 8, "signal": 9}])):
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


@pytest.mark.campaign
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_on_two_nodes_starts_the_ranks_again(
    hosts: tuple[str, str], tmp_path: Path, corpus_prefix: Path, killed: int
) -> None:
    """By its own --max-restarts; one node loses a rank at step 8."""
    left, run = tmp_path / "faults.json", tmp_path / "run"
    left.write_text(json.dumps([{"rank": killed, "step": 8, "signal": int(signal.SIGKILL)}]))
    keys = {**TWELVE, "model__dropout": 0}
    nodes = [
        start_torchrun(
            *(run, corpus_prefix, left, *nodes_of_torchrun(address, number, "2", restarts=2)),
            before=("ip", "netns", "exec", host),
            variables={"GLOO_SOCKET_IFNAME": "cable"},
            **keys,
        )
        for number, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True))
    ]
    texts = outputs_of(nodes)
    assert json.loads(left.read_text()) == [] and "resuming" in "".join(texts)
    assert pids_with(str(run)) == []
    lines = [(line["attempt"], line["first_step"]) for line in attempts_of(run)]
    assert lines == [(1, 1), (2, 6)]

    alone = tmp_path / "alone"
    single = run_words(alone, corpus_prefix, **keys)
    launcher = start_script("none", CONFIG, "[0,1)", "train", *single, log=tmp_path / "alone.log")
    assert launcher.wait(timeout=120) == 0
    require_equal(run, alone)


STEPS_OF_ELASTIC = 400


@pytest.mark.campaign
def test_torchrun_continues_without_a_lost_node_and_takes_it_back(
    hosts: tuple[str, str], tmp_path: Path, corpus_prefix: Path
) -> None:
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

    alone = tmp_path / "alone"
    words = run_words(alone, corpus_prefix, **keys)
    single = start_script("none", CONFIG, "[0,1)", "train", *words, log=tmp_path / "alone.log")
    assert single.wait(timeout=120) == 0
    found, expected = rows_of(run), rows_of(alone)
    assert [(row[0], row[3]) for row in found] == [(row[0], row[3]) for row in expected]
    assert len(found) == STEPS_OF_ELASTIC
    for row, other in zip(found, expected, strict=True):
        assert row[1] == pytest.approx(other[1], rel=1e-5)

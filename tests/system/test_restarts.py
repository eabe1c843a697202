"""Runs that are started again after failures, on one host and on two."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.network_hosts import ADDRESSES, two_hosts
from tests.run_scripts import (
    ROOT,
    clean_environment,
    pids_with,
    run_words,
    start_script,
    wait_until,
)

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"


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
    return [
        (row["step"], row["loss"], row["grad_norm"], row["sample_hash"])
        for row in rows
        if "loss" in row
    ]


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
    keys = {"train__max_steps": 25, "checkpoint__interval": 5, "model__dropout": 0.1, **keys}
    words = run_words(run, corpus, **keys)
    launcher = start_script(
        "--program", str(program), *options, "none", CONFIG, "[0,2)", "train", *words,
        log=log, FAULTS=str(left),
    )  # fmt: skip
    code = launcher.wait(timeout=120)
    assert pids_with(str(run)) == []
    return run, code, log.read_text()


def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """Its losses are those of one process that nobody kills."""
    fault = {"rank": 1, "step": 8, "signal": int(signal.SIGKILL)}
    run, code, text = run_with_faults(
        tmp_path / "faulty",
        corpus_prefix,
        [fault],
        "--max_restarts",
        "1",
        train__max_steps=12,
        model__dropout=0,
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
def test_two_faults_leave_the_losses_as_they_were_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    faults = [
        {"rank": 1, "step": 8, "signal": int(signal.SIGKILL)},
        {"rank": 0, "step": 17, "signal": int(signal.SIGABRT)},
    ]
    whole, code, _ = run_with_faults(tmp_path / "whole", corpus_prefix, [])
    assert code == 0 and not attempts_of(whole)
    run, code, text = run_with_faults(
        tmp_path / "faulty", corpus_prefix, faults, "--max_restarts", "2"
    )
    assert code == 0, text
    assert rows_of(run) == rows_of(whole)
    assert [attempt["first_step"] for attempt in attempts_of(run)] == [1, 6, 16]


@pytest.mark.campaign
def test_faults_that_a_restart_repeats_end_the_run(tmp_path: Path, corpus_prefix: Path) -> None:
    at_8 = {"rank": 1, "step": 8, "signal": int(signal.SIGKILL)}
    run, code, text = run_with_faults(
        tmp_path / "twice", corpus_prefix, [at_8] * 9, "--max_restarts", "9"
    )
    assert code == 137
    assert [attempt["last_step"] for attempt in attempts_of(run)] == [8, 8]
    assert "not restarted: step 8 failed twice" in text
    run, code, text = run_with_faults(
        tmp_path / "start",
        corpus_prefix,
        [{**at_8, "step": 0}],
        runtime__max_restarts=9,
    )
    assert code == 137 and len(attempts_of(run)) == 1
    assert "not restarted: it failed before it had finished a step" in text
    run, code, text = run_with_faults(
        tmp_path / "refused", corpus_prefix, [], "--max_restarts", "9", data__eod_id=10**6
    )
    assert code == 2 and len(attempts_of(run)) <= 1, text


def start_on(
    host: str, number: int, run: Path, corpus: Path, log: Path, *options: str, **keys: object
) -> subprocess.Popen[bytes]:
    return start_script(
        *options, "--node_ips", ",".join(ADDRESSES), "none", CONFIG, "[0,2)", "train",
        *run_words(run, corpus, **keys),
        before=("ip", "netns", "exec", host), log=log.with_suffix(f".{number}"),
    )  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_on_two_nodes_starts_the_ranks_again(
    hosts: tuple[str, str], tmp_path: Path, corpus_prefix: Path, killed: int
) -> None:
    """By its own --max-restarts; one node loses a rank at step 8."""
    program, left, run = tmp_path / "program.py", tmp_path / "faults.json", tmp_path / "run"
    program.write_text(FAULTS)
    left.write_text(json.dumps([{"rank": killed, "step": 8, "signal": int(signal.SIGKILL)}]))
    keys = {"train__max_steps": 12, "checkpoint__interval": 5, "model__dropout": 0}
    words = ["--config", CONFIG, "--run_mode", "train", *run_words(run, corpus_prefix, **keys)]
    nodes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv_id=gpt2"),
                *("--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:29411"),
                *(f"--local_addr={address}", f"--rdzv_conf=is_host={number == 0}"),
                *(str(program), *words),
            ],
            cwd=ROOT,
            env=clean_environment(FAULTS=str(left), GLOO_SOCKET_IFNAME="cable"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True))
    ]
    try:
        texts = [node.communicate(timeout=180)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert json.loads(left.read_text()) == [] and "resuming" in "".join(texts)
    assert pids_with(str(run)) == []
    lines = [(line["attempt"], line["first_step"]) for line in attempts_of(run)]
    assert lines == [(1, 1), (2, 6)]

    alone = tmp_path / "alone"
    single = run_words(alone, corpus_prefix, **keys)
    launcher = start_script("none", CONFIG, "[0,1)", "train", *single, log=tmp_path / "alone.log")
    assert launcher.wait(timeout=120) == 0
    require_equal(run, alone)


@pytest.mark.campaign
def test_a_host_that_is_lost_and_started_again_takes_part_again(
    hosts: tuple[str, str], tmp_path: Path, corpus_prefix: Path
) -> None:
    """First all hosts are needed; then the run continues without the lost one until it is back."""
    keys = {"train__max_steps": 600, "checkpoint__interval": 20, "validation__interval": 0}
    run, log = tmp_path / "run", tmp_path / "log"
    options = ("--max_restarts", "3")
    keys |= {"runtime__min_nodes": 1, "runtime__return_limit": 6}
    processes = [
        start_on(host, number, run, corpus_prefix, log, *options, **keys)
        for number, host in enumerate(hosts)
    ]
    try:
        wait_until(lambda: len(rows_of(run)) > 45, f"steps of {run}")
        processes[1].kill()
        wait_until(lambda: len(attempts_of(run)) == 1, "the end of the first attempt")
        lost_at = len(rows_of(run))
        wait_until(lambda: len(rows_of(run)) > lost_at + 40, "steps on one host")
        processes[1] = start_on(hosts[1], 1, run, corpus_prefix, log, *options, **keys)
        assert [process.wait(timeout=180) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    first, second, third = attempts_of(run)
    assert len(first["hosts"]) == 2 and "node 1 (ranks 2-3)" in first["failure"]
    assert len(second["hosts"]) == 1 and second["then"] == "takes hosts back"
    assert len(third["hosts"]) == 2 and third["exit_code"] == 0
    assert pids_with(str(run)) == []

    alone = tmp_path / "alone"
    words = run_words(alone, corpus_prefix, **keys)
    single = start_script("none", CONFIG, "[0,1)", "train", *words, log=tmp_path / "alone.log")
    assert single.wait(timeout=120) == 0
    found, expected = rows_of(run), rows_of(alone)
    assert [row[0] for row in found] == [row[0] for row in expected] == list(range(1, 601))
    assert [row[3] for row in found] == [row[3] for row in expected], "samples"
    for row, other in zip(found, expected, strict=True):
        assert row[1] == pytest.approx(other[1], rel=1e-5)

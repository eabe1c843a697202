"""Launched runs of which a rank is killed, and that are started again: on one host, on two and by Slurm."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.cluster_tables import devices, table_1, write_tutorial_table
from tests.network_hosts import ADDRESSES, ip, two_hosts
from tests.run_scripts import (
    ROOT,
    clean_environment,
    listening_addresses,
    pids_with,
    process_of_rank,
    run_words,
    start_script,
    wait_until,
)
from tests.tiny import manifest_of

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


ENDLESS = {"train__max_steps": 100000, "checkpoint__interval": 10}


def launched(run: Path, corpus: Path, ranks: int, *, table: str = "none", **keys: object) -> subprocess.Popen[bytes]:
    words = run_words(run, corpus, **{**ENDLESS, **keys})
    return start_script(table, CONFIG, f"[0,{ranks})", "train", *words, log=run.with_suffix(".log"))


def kill_rank_1(run: Path, launcher: subprocess.Popen[bytes], *, seconds: float) -> None:
    """The run ends with its code and names it, nothing is left, and nobody saves after it."""
    os.kill(process_of_rank(str(run), 1), signal.SIGKILL)
    assert launcher.wait(timeout=seconds) == 128 + signal.SIGKILL
    text = run.with_suffix(".log").read_text()
    assert "rank 1" in text and "SIGKILL" in text and "mf_parallel1" in text
    assert pids_with(str(run)) == []


def test_a_killed_rank_ends_the_run_and_the_next_one_saves_when_it_is_told_to_stop(tmp_path, corpus_prefix) -> None:
    """Under ZeRO, where each rank writes its part of a checkpoint."""
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2, parallel__zero_stage=2)
    wait_until(lambda: len(rows_of(run)) > 15, "steps")
    kill_rank_1(run, launcher, seconds=15)
    assert manifest_of(run)["state"]["step"] % 10 == 0, "nobody saves after a failure"

    before = rows_of(run)[-1][0]
    launcher = launched(run, corpus_prefix, 2, parallel__zero_stage=2)
    wait_until(lambda: rows_of(run)[-1][0] > before, "new steps")
    assert listening_addresses(pids_with(str(run))) == {"127.0.0.1"}, "a run on one host is closed to others"
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    steps = [row[0] for row in rows_of(run)]
    assert steps == list(range(1, len(steps) + 1)), "every step is there once"
    assert manifest_of(run)["state"]["step"] == len(steps), "saved where it stopped"
    assert not list((run / "checkpoints").glob(".*")), "what the kill left of a save is gone"
    assert pids_with(str(run)) == []


@pytest.mark.long
def test_a_killed_rank_of_mindspore_ends_its_run(tmp_path: Path, corpus_prefix: Path) -> None:
    """With a rank table, which Ascends read: on CPUs the ranks meet through MindSpore's scheduler all the same."""
    pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
    run = tmp_path / "run"
    table = write_tutorial_table(tmp_path / "table.json", servers=1, devices=2)
    changes: dict[str, Any] = {"backend": "mindspore", "checkpoint__interval": 2}
    changes["model__num_layers"] = 1
    launcher = launched(run, corpus_prefix, 2, table=str(table), **changes)
    wait_until(lambda: len(rows_of(run)) > 5, "steps", seconds=240)
    # the scheduler too
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 4 and listening_addresses(map(int, children)) == {"127.0.0.1"}
    kill_rank_1(run, launcher, seconds=30)
    assert manifest_of(run)["state"]["step"] % 2 == 0, "nobody saves after a failure"


def start_torchrun(
    run: Path,
    corpus: Path,
    faults: Path,
    *options: str,
    before: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
    **keys: object,
) -> subprocess.Popen[str]:
    """Start the rank program FAULTS under ``torchrun options``."""
    program = faults.with_name("program.py")
    program.write_text(FAULTS)
    words = ["--config", CONFIG, "--run_mode", "train", *run_words(run, corpus, **keys)]
    return subprocess.Popen(
        [*before, sys.executable, "-m", "torch.distributed.run", *options, str(program), *words],
        cwd=ROOT,
        env=clean_environment(FAULTS=str(faults), **(variables or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def node_of_torchrun(address: str, number: int) -> tuple[str, ...]:
    return (
        "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_id=gpt2", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={ADDRESSES[0]}:29411", f"--local_addr={address}",
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


@pytest.mark.campaign
def test_torchrun_continues_without_a_lost_node_and_takes_it_back(hosts, tmp_path, corpus_prefix) -> None:
    """The command of docs/restarts.md. Global batch and order of samples are those of one
    process, on any number of nodes.
    """
    keys: dict[str, object] = {"train__max_steps": 400, "checkpoint__interval": 20}
    # steps that take long enough for a node to come back
    keys |= {"validation__interval": 0, "model__num_layers": 4, "model__hidden_size": 128}
    keys |= {"model__seq_length": 64, "model__dropout": 0}
    left, run = tmp_path / "faults.json", tmp_path / "run"
    left.write_text("[]")

    def start(number: int) -> subprocess.Popen[str]:
        options = node_of_torchrun(ADDRESSES[number], number)
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
    assert len(found) == 400
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], rel=1e-5)


# ---- a cable that is pulled ----


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Table as tools/merge_hccl.py writes it. Device addresses stand for the network of Ascend
    devices, which CPUs have none of.
    """
    single = []
    for host, address in enumerate(ADDRESSES):
        own = devices([f"10.78.{host}.{n + 1}" for n in range(2)], first_rank=0)
        single.append(tmp_path / f"host{host}.json")
        single[-1].write_text(json.dumps(table_1((address, own))))
    command = [sys.executable, str(ROOT / "tools" / "merge_hccl.py"), *map(str, single)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    return tmp_path / "hccl_2s_4p.json"


@pytest.mark.campaign
def test_a_host_that_is_cut_off_ends_the_run_on_both_with_the_right_blame_and_the_run_resumes(
    hosts: tuple[str, str], table: Path, tmp_path: Path, corpus_prefix: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    keys = {"train__max_steps": 120, "checkpoint__interval": 20, "validation__interval": 0, "model__dropout": 0.1}

    def start(run: Path, words: tuple[str, ...]) -> list[subprocess.Popen[bytes]]:
        return [
            start_script(*(str(table), CONFIG, numbers, "train", "4",
            *run_words(run, corpus_prefix, **keys), *words),
                         before=("ip", "netns", "exec", host),
                         log=tmp_path / f"{run.name}-{number}.log")
            for number, (host, numbers) in enumerate(zip(hosts, ("[0,2)", "[2,4)"), strict=True))
        ]  # fmt: skip

    processes = start(cut, ())
    try:
        wait_until(lambda: len(rows_of(cut)) > 45, f"steps of {cut}")
        ip("-n", hosts[1], "link", "set", "cable", "down")
        codes = [process.wait(timeout=60) for process in processes]
        assert codes == [1, 1]
        told = [(tmp_path / f"cut-{number}.log").read_text() for number in range(2)]
        for text, other, ranks in zip(told, reversed(ADDRESSES), ("2-3", "0-1"), strict=True):
            assert f"host {other} (ranks {ranks}) has not been heard from" in text, text
        assert pids_with(str(cut)) == []
        stopped = len(rows_of(cut))
        assert 45 < stopped < 120

        ip("-n", hosts[1], "link", "set", "cable", "up")
        processes = start(cut, ())
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
        words = run_words(whole, corpus_prefix, **keys)
        processes = [start_script("none", CONFIG, "[0,4)", "train", *words, log=tmp_path / "whole.log")]
        assert processes[0].wait(timeout=120) == 0
    finally:
        for process in processes:
            process.kill()
    assert rows_of(cut) == rows_of(whole)


# ---- pods, which are network namespaces: their mounted rank table is filled while they wait ----


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
THREE: dict[str, object] = {"train__max_steps": 3, "validation__interval": 0, "model__dropout": 0.0}
NODES, PODS = ("10.9.0.1", "10.9.0.2"), ("10.79.0.1", "10.79.0.2")


@pytest.fixture
def pods() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by a cable."""
    yield from two_hosts(PODS, "eth0")


def mount(folder: Path, content: object) -> None:
    """Put a ConfigMap's file there as kubelet does: a new folder, then a link that is renamed."""
    number = len(list(folder.glob("..20*")))
    data = folder / f"..20{number:02}"
    data.mkdir(parents=True)
    (data / "hccl.json").write_text(json.dumps(content))
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").rename(folder / "..data")
    if not (folder / "hccl.json").is_symlink():
        (folder / "hccl.json").symlink_to("..data/hccl.json")


@pytest.mark.long
def test_two_pods_with_a_mounted_rank_table(pods: tuple[str, str], corpus_prefix: Path, tmp_path: Path) -> None:
    """The range counts devices as a container sees them; the table has the node's numbers."""
    servers = [
        {
            "device": [{"device_id": "5", "device_ip": f"10.78.{host}.1", "rank_id": str(host)}],
            "server_id": NODES[host],
            "container_ip": PODS[host],
        }
        for host in range(2)
    ]
    table = {"status": "completed", "version": "1.0", "server_count": "2", "server_list": servers}
    logs = [tmp_path / f"pod-{number}.log" for number in range(2)]
    mounts = [tmp_path / f"pod-{number}" / "config" for number in range(2)]
    for folder in mounts:
        mount(folder, {"status": "initializing"})
    words = [CONFIG, "[0,1)", "train", *run_words(tmp_path / "run", corpus_prefix, **THREE)]
    processes = [
        start_script(
            str(mounts[number] / "hccl.json"), *words, log=logs[number], **POD,
            before=("ip", "netns", "exec", pod), HOSTNAME=f"gpt2-worker-{number}",
            XDL_IP=NODES[number], POD_IP=PODS[number],
        )
        for number, pod in enumerate(pods)
    ]  # fmt: skip
    try:
        for log in logs:
            wait_until(lambda log=log: "status is 'initializing'" in log.read_text(), str(log))
        for folder in reversed(mounts):
            mount(folder, table)
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = [log.read_text() for log in logs]
    assert codes == [0, 0], told
    for number, text in enumerate(told):
        assert "waiting up to 1800 s" in text
        assert f"ranks of {PODS[number]}: {number} on device 0; of 2 in all" in text
        assert "is not an address of this machine" not in text
    assert len(run_alone(tmp_path / "one", corpus_prefix, **THREE)) == 3
    require_equal(tmp_path / "run", tmp_path / "one")


# ---- Slurm ----


SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
nodes=(localhost localhost2)
export SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=1
export SLURM_STEP_NUM_NODES=$SLURM_NNODES SLURM_STEP_NUM_TASKS=$SLURM_NNODES
((SLURM_NNODES == 1)) || export SLURM_STEP_NODELIST=localhost,localhost2 SLURM_STEP_TASKS_PER_NODE="1(x2)"
export SLURM_JOB_NODELIST=$SLURM_STEP_NODELIST
for ((task = 0; task < SLURM_NNODES; task++)); do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURMD_NODENAME=${nodes[task]} "$@" &
done
for ((task = 0; task < SLURM_NNODES; task++)); do
    wait -n || { code=$?; kill -KILL $(jobs -p) 2>/dev/null; exit $code; }
done
"""
"""What srun(1) documents, a task a node: the variables of a step, and the first task that fails ends the others."""


def submit(folder: Path, *words: str, tasks: int = 2, **variables: str) -> tuple[int, str]:
    """Run the batch script as sbatch does, on as many nodes as tasks: exit code and messages."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(SRUN)
    srun.chmod(0o755)
    job = {
        "SLURM_JOB_ID": str(10000 + os.getpid() % 10000),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(tasks),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_SUBMIT_DIR": str(folder),
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "run_slurm.sh"), *words], cwd=ROOT, text=True, timeout=120,
        env=clean_environment(**job | variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("restarts", [(), ("--max_restarts", "2")], ids=["requeue", "launcher"])
def test_a_job_resumes_from_the_newest_checkpoint(tmp_path, corpus_prefix, restarts) -> None:
    """Two nodes of one task each; the rank of the second is killed at step 8. Slurm queues the job again, or a launcher
    on each node starts the ranks again. Losses are those of one process that nobody kills.
    """
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program, launcher = tmp_path / "run_gpt2.py", tmp_path / "scripts" / "run_distribute.sh"
    rank = "RANK" if restarts else "SLURM_PROCID"
    program.write_text(FAULTS.replace('environ["RANK"]', f'environ["{rank}"]'))
    launcher.write_text(f'exec bash {ROOT}/scripts/run_distribute.sh --program {program} "$@"\n')
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps([{"rank": 1, "step": 8}]))
    keys = {"train__max_steps": 12, "checkpoint__interval": 5, "model__dropout": 0}
    run, alone = tmp_path / "run", tmp_path / "alone"
    words = [*restarts, CONFIG, "train", *run_words(run, corpus_prefix, **keys)]
    code, text = submit(tmp_path, *words, FAULTS=str(faults))
    assert json.loads(faults.read_text()) == [] and pids_with(str(run)) == [], text
    if restarts:
        assert "hosts by the step of Slurm: 2, this is number 1, rank 0 is on localhost" in text
        assert (run / "mf_parallel1" / "mindformer.log.1").exists()
    else:
        assert code == 137, text
        assert (run / "checkpoints" / "latest").read_text() == "step_00000005\n"
        assert rows_of(run)[-1][0] in (7, 8)
        code, text = submit(tmp_path, *words, FAULTS=str(faults), SLURM_RESTART_COUNT="1")
        assert "resuming" in text, text
    assert code == 0 and pids_with(str(run)) == [], text
    assert [(line["attempt"], line["first_step"]) for line in attempts_of(run)] == [(1, 1), (2, 6)]
    words = [CONFIG, "train", *run_words(alone, corpus_prefix, **keys)]
    code, text = submit(tmp_path, *words, tasks=1, FAULTS=str(faults))
    assert code == 0, text
    require_equal(run, alone)


def test_restarts_without_a_number_are_refused(tmp_path: Path) -> None:
    for words in (("--max_restarts",), ("--max_restarts", "x", CONFIG, "train")):
        code, text = submit(tmp_path, *words)
        assert (code, text.startswith("Usage Help: ")) == (2, True)
